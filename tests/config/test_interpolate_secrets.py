"""What the environment gives to a config is neither written nor told; and no config is too deep or too large to refuse.

Configs go through the same road as a user's: a file, the command line, `load`, `build_config`, `resolved_values`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.config import dump, load, read, validate
from rlvr.config.build_config import build_config, resolved_values
from rlvr.config.compose import load as composed
from rlvr.config.document_limits import with_text_keys
from rlvr.config.interpolate import mask_secrets
from rlvr.config.schema import EnvOptions, RunConfig
from rlvr.tracking.tracker import without_passwords
from rlvr.tracking.trackers import Trackers, TrackingOptions

SECRET = "hunter2-s3cret"
TOY = "env: {name: toy}\nclient: mock\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("S3CRET", SECRET)
    (tmp_path / "toy.yaml").write_text(TOY)
    return tmp_path


def refusal_of(text: str, *words: str) -> str:
    Path("bad.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        composed(None, "bad.yaml", words)
    assert len(str(caught.value)) < 1200
    return str(caught.value)


def stored_kwargs(kwargs: str, *words: str) -> str:
    """What would be in resolved.yaml."""
    Path("run.yaml").write_text(f"env: {{name: toy, kwargs: {kwargs}}}\nclient: mock\n")
    loaded = load(None, "run.yaml", words)
    return dump(resolved_values(build_config(loaded), loaded))


# --- keys that YAML does not read as text ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "opts",
    ["{1: '${oc.env:S3CRET}'}", "[{2: ['${oc.env:S3CRET}']}]", "{a: {0x10: '${.b}', b: '${oc.env:S3CRET}'}}"],
)
def test_a_secret_under_a_key_that_is_a_number_is_not_written(folder: Path, opts: str):
    kept = stored_kwargs(f"{{opts: {opts}}}")
    assert SECRET not in kept and "${oc.env:S3CRET}" in kept
    typed = stored_kwargs("{}", f"env.kwargs.opts={opts}")
    assert SECRET not in typed and "${oc.env:S3CRET}" in typed


@pytest.mark.parametrize("key", ["true", "1.5", "null", "no"])
def test_a_key_that_could_be_read_in_two_ways_is_refused_with_the_remedy(folder: Path, key: str):
    text = refusal_of(f"a: {{b: [{{{key}: 1}}]}}\n")
    assert text.startswith("bad.yaml: ") and ("in quotes" in text or "NoneType" in text)
    with pytest.raises(ValueError, match=r"override 'a=\[\{.*(quotes|NoneType)"):
        composed(None, None, [f"a=[{{{key}: 1}}]"])


def test_keys_that_are_whole_numbers_are_text_everywhere(folder: Path):
    Path("levels.yaml").write_text("weights: {1: 4, '2': 5}\ncopy: ${weights.1}\n")
    loaded = composed(None, "levels.yaml", ["weights.1=7"])
    assert loaded.values == loaded.raw == {"weights": {"1": 7, "2": 5}, "copy": 7}
    assert loaded.origin["weights.1"] == "cli" and read("levels.yaml")["weights"] == {"1": 4, "2": 5}
    assert refusal_of("a: {1: x, '1': y}\n").startswith("bad.yaml: ")
    with pytest.raises(ValueError, match="a: the key 1 is given twice"):
        with_text_keys({"a": {1: "x", "1": "y"}})


@pytest.mark.parametrize(
    "raw", [{1: "${oc.env:S3CRET}"}, ["${oc.env:S3CRET}"], {"other": "${oc.env:S3CRET}"}], ids=["key", "list", "name"]
)
def test_a_value_whose_origin_is_unknown_is_never_written(folder: Path, raw: Any):
    loaded = load(None, "toy.yaml")
    loaded.raw["env"]["kwargs"] = raw
    with pytest.raises(ValueError, match=r"env\.kwargs: .*shape"):
        resolved_values(RunConfig(EnvOptions("toy", {"1": SECRET}), client="mock"), loaded)


# --- resolvers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "${oc.${.x}:S3CRET}", "${${.y}:S3CRET}", "${oc.create:'{a: 1}'}", "${oc.decode:'1'}", "${oc.dict.keys:a}",
        "${oc.deprecated:x}", "${now:'${oc.${.x}:S3CRET}'}", "${oc.env:A,${oc.select:x}}",
    ],
)  # fmt: skip
def test_only_now_and_env_resolve_and_only_under_their_plain_names(folder: Path, value: str):
    text = refusal_of(f'k: {{x: env, y: oc.env, z: "{value}"}}\n')
    assert "k.z" in text and "(from bad.yaml)" in text and "${oc.env:NAME,default}" in text and SECRET not in text


@pytest.mark.parametrize(
    "value",
    ["${ oc.env:S3CRET}", "${oc.env :S3CRET}", "x ${now:'${oc.env:S3CRET}'}", "${oc.env:A,${oc.env:S3CRET}}"],
)
def test_every_way_to_write_a_reference_to_the_environment_stays_unresolved(folder: Path, value: str):
    loaded = composed(None, None, [f'a="{value}"', "b=${a}"])
    assert SECRET in loaded.values["a"] and SECRET not in dump(loaded.raw)


def test_text_that_is_escaped_is_no_reference(folder: Path):
    loaded = composed(None, None, [r"a=\${oc.env:S3CRET}"])
    assert loaded.values["a"] == "${oc.env:S3CRET}" and loaded.raw["a"] == r"\${oc.env:S3CRET}"


# --- messages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    [
        "reward.type=${oc.env:S3CRET}", "seed=${oc.env:S3CRET}", "env.name=x-${oc.env:S3CRET}", "a=${${oc.env:S3CRET}}",
        "training.steps=[1, '${oc.env:S3CRET}']", "client=${oc.env:S3CRET}",
    ],
)  # fmt: skip
def test_no_message_shows_environment_values(folder: Path, capfd: Any, word: str):
    assert run(["train", "--config=toy.yaml", word]) == 2
    said = capfd.readouterr().err
    assert "${oc.env:S3CRET}" in said and "hunter2" not in said


def test_a_value_that_is_cut_short_or_escaped_is_known_too(folder: Path, monkeypatch: pytest.MonkeyPatch):
    long, odd = "s" * 60 + "t" * 60, 'quo"te\\\u00e9\n!'
    monkeypatch.setenv("LONG", long)
    monkeypatch.setenv("ODD", odd)
    values = composed(None, None, ["seed=${oc.env:LONG}", "other=${oc.env:ODD}"]).values
    with pytest.raises(ValueError, match=r"seed: .*oc\.env:LONG") as caught:
        validate({"seed": values["seed"], "env": {"name": "toy"}}, RunConfig)
    assert "sss" not in str(caught.value)
    with pytest.raises(ValueError, match=r"seed: .*oc\.env:ODD"):
        validate({"seed": [odd], "env": {"name": "toy"}}, RunConfig)
    assert mask_secrets(f"a {odd!r} b") == "a '${oc.env:ODD}' b"


def test_a_secret_that_another_one_begins_with_leaves_nothing_of_that(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BEGINNING", SECRET[:7])
    stored_kwargs("{opts: ['${oc.env:BEGINNING}', '${oc.env:S3CRET}']}")
    assert mask_secrets(f"{SECRET[:7]}, {SECRET}") == "${oc.env:BEGINNING}, ${oc.env:S3CRET}"


def test_the_key_of_a_server_is_not_written_where_it_is_typed(folder: Path):
    loaded = load(None, "toy.yaml", ["client=tinker", "model.name=base", f"client.api_key={SECRET}"])
    config = build_config(loaded)
    assert config.client.api_key == SECRET and SECRET not in dump(resolved_values(config, loaded))


def test_unusable_values_on_the_command_line_and_in_defaults_are_not_quoted(folder: Path):
    assert SECRET not in refusal_of("key: ${oc.env:S3CRET}\n", "key.a=1")
    text = refusal_of("defaults: [{model: '${oc.env:S3CRET}'}]\n")
    assert SECRET not in text and "name each choice as it is" in text


@pytest.mark.slow
def test_a_tracker_shows_no_password_of_its_address(folder: Path):
    assert without_passwords("at http://me:p@ss@host:1/x, http://h/a@b") == "at http://***@host:1/x, http://h/a@b"
    said: list[str] = []
    options = TrackingOptions(mlflow=True, mlflow_uri="http://me:hunter2@127.0.0.1:9")
    with Trackers(options, folder, "mine", {}, said.append).running([]) as trackers:
        trackers.log("rl", 0, {"reward": 1.0})
    assert "MLflow failed" in said[0] and "hunter2" not in "".join(said)
    with pytest.raises(ValueError, match="MLflow cannot use it") as caught:
        Trackers(TrackingOptions(mlflow=True, mlflow_uri="gopher://me:hunter2@x"), folder, "mine", {}, said.append)
    assert "hunter2" not in str(caught.value)


# --- depth and size ----------------------------------------------------------------------------------------------

DEEP = ["[" * 60 + "]" * 60, "{a: " * 60 + "1" + "}" * 60, "[" * 20_000, "{a: " * 5_000]


@pytest.mark.parametrize("value", DEEP, ids=["list", "mapping", "unclosed", "unclosed mapping"])
def test_a_document_nested_too_deep_is_refused(folder: Path, value: str):
    assert "nested more than 50 levels deep" in refusal_of(f"a: {value}\n")
    with pytest.raises(ValueError, match=r"override 'a=.*nested more than 50 levels deep") as caught:
        composed(None, None, [f"a={value}"])
    assert len(str(caught.value)) < 400
    Path("resolved.yaml").write_text(f"a: {value}\n")
    with pytest.raises(ValueError, match=r"resolved\.yaml: nested more than 50"):
        read("resolved.yaml")


def test_a_key_of_thousands_of_parts_and_depth_by_packages_are_refused(folder: Path):
    with pytest.raises(ValueError, match="nested more than 50 levels deep"):
        composed(None, None, ["env" + ".x" * 3000 + "=1"])
    with pytest.raises(ValueError, match="nested more than 50 levels deep"):
        composed(None, None, ["a" + ".x" * 40 + "={b: " + "[" * 30 + "]" * 30 + "}"])


def test_forty_honest_levels_are_fine(folder: Path):
    assert composed(None, None, ["a=" + "[" * 40 + "]" * 40]).values["a"] != []


@pytest.mark.slow
def test_brackets_within_references_do_not_end_in_a_traceback(folder: Path):
    refusal_of("a: '" + "${" * 1200 + "a" + "}" * 1200 + "'\n")
    refusal_of("".join(f"a{i}: ${{a{i + 1}}}\n" for i in range(400)) + "a400: 1\n")


def growing_document(line: Callable[[int], str], last: str) -> str:
    """Nine lines of which each stands for ten of the one before, the largest first."""
    return "".join(f"{line(n)}\n" for n in range(9, 0, -1)) + last


BOMBS = {
    "lists": growing_document(lambda n: f"a{n}: [" + ", ".join([f"'${{a{n - 1}}}'"] * 10) + "]", "a0: [x, x]\n"),
    "mappings": growing_document(
        lambda n: f"a{n}:" + "".join(f"\n  k{i}: ${{a{n - 1}}}" for i in range(10)), "a0: {x: y}\n"
    ),
    "texts": growing_document(lambda n: f"a{n}: " + f"${{a{n - 1}}}" * 10, "a0: boom\n"),
    "texts within": growing_document(
        lambda n: f"b{n}: {{v: '{f'${{m{n - 1}.v}}' * 10}'}}\nm{n}: ${{b{n}}}", "m0: {v: boom}\n"
    ),
    "aliases": "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)),
    "characters": f"a0: {'y' * 500_000}\na1: {'${a0}' * 30}\n",
}


SLOW_BOMBS = ("lists", "mappings")  # seconds each


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, id=name, marks=[pytest.mark.slow] * (name in SLOW_BOMBS)) for name, text in BOMBS.items()],
)
def test_a_config_that_grows_without_end_is_refused_in_time(folder: Path, text: str):
    began = time.monotonic()
    assert "more than 100,000 values" in refusal_of(text)
    assert time.monotonic() - began < 30


def test_an_alias_within_itself_and_numbers_without_end_are_refused(folder: Path):
    assert "inside its own anchor" in refusal_of("a: &a [*a]\n")
    assert refusal_of(f"seed: {'9' * 5000}\n").startswith("bad.yaml: ")
    for seed in ("9" * 400, "-1", str(2**63)):
        with pytest.raises(ValueError, match=r"^seed=.*from 0 to 2\*\*63 - 1$"):
            build_config(load(None, "toy.yaml", [f"seed={seed}"]))


# --- names -------------------------------------------------------------------------------------------------------

LONG = "n" * 5000


@pytest.mark.parametrize(
    "words",
    [
        ["train", f"--config-name={LONG}"], ["train", f"--config={LONG}"], ["evaluate", LONG], ["doctor", LONG],
        ["config", "--config=choice.yaml", f"model={LONG}"],
        ["train", "--config-name=x", f"--config-path={LONG}"],
    ],
    ids=lambda words: " ".join(words)[:40],
)  # fmt: skip
def test_a_name_that_the_system_cannot_take_is_a_mistake(folder: Path, capfd: Any, words: list[str]):
    (folder / "choice.yaml").write_text("defaults: [{model: tiny}]\n")
    assert run(words) == 2
    said = capfd.readouterr().err
    assert said.startswith("rlvr: ") and "give a shorter one" in said and len(said) < 400 and "write" not in said


def test_no_message_lists_files_outside_the_folders_of_configs(folder: Path):
    (folder / "private.yaml").write_text("a: 1\n")
    (folder / "configs" / "group").mkdir(parents=True)
    for entry in ("{group/..: etc}", "{../..: etc}", "{..: etc}", "../etc", "{/..: etc}"):
        (folder / "configs" / "main.yaml").write_text(f"defaults: [{entry}]\n")
        with pytest.raises(ValueError) as caught:
            composed("main")
        assert "private" not in str(caught.value) and "toy" not in str(caught.value), entry


def test_the_help_of_evaluate_says_that_it_imports_functions_named_by_the_run(capsys: Any):
    assert run(["evaluate", "--help"]) == 0
    assert "module:function" in capsys.readouterr().out
