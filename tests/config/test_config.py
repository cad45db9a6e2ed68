"""Composition (defaults, groups, overrides, interpolation), and what is said of keys and values that do not fit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr.config import difference, dump, read, validate
from rlvr.config.compose import CLI, load
from rlvr.config.schema import RunConfig


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory whose `configs` folder holds one main config and a few groups."""
    files = {
        "main": "defaults:\n  - _self_\n  - model: tiny\n  - training@rlvr_training: small\n"
        "seed: 1\nmodel:\n  width: 8\nrun_name: run_${seed}\n",
        "own_last": "defaults:\n  - model: tiny\nmodel:\n  width: 8\n",
        "model/tiny": "width: 64\nlayers: 2\n",
        "model/big": "defaults:\n  - tiny\n  - /optimizer@optim: adam\nlayers: 12\n",
        "optimizer/adam": "rate: 1e-3\n",
        "training/small": "epochs: 1\nrate: 1e-5\n",
        "training/large": "epochs: 10\nrate: 1e-5\n",
        "loop_a": "defaults: [loop_b]\n",
        "loop_b": "defaults: [loop_a]\n",
        "timed": "seed: 3\nname: ${now:%Y-%m-%d_%H-%M-%S}_${seed}\nfolder: runs/${name}\n"
        "nested: {deep: ['${folder}']}\n",
        "secret": "key: ${oc.env:RLVR_TEST_KEY}\nheader: Bearer ${key}\n"
        "other: ${oc.env:RLVR_NOT_SET,plain}\nlist: ['${key}']\n",
    }
    for name, text in files.items():
        path = tmp_path / "configs" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "configs"


def message(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


# --- composition -------------------------------------------------------------------------------------------------


def test_groups_land_under_their_package_and_self_first_lets_them_win(configs: Path):
    loaded = load("main", None, [])
    assert loaded.values == {
        "seed": 1,
        "model": {"width": 64, "layers": 2},
        "run_name": "run_1",
        "rlvr_training": {"epochs": 1, "rate": 1e-5},
    }
    assert loaded.name == "main"


def test_without_self_a_file_has_the_last_word_over_its_defaults(configs: Path):
    assert load("own_last").values["model"] == {"width": 8, "layers": 2}


def test_choices_are_switched_on_the_command_line_with_and_without_package(configs: Path):
    values = load("main", None, ["model=big", "training@rlvr_training=large"]).values
    assert values["model"] == {"width": 64, "layers": 12, "optim": {"rate": 1e-3}}
    assert values["rlvr_training"]["epochs"] == 10


def test_a_choice_of_null_leaves_the_group_out(configs: Path):
    assert "rlvr_training" not in load("main", None, ["training@rlvr_training=null"]).values


def test_a_group_that_the_defaults_do_not_mention_can_be_added(configs: Path):
    assert load("main", None, ["optimizer=adam"]).values["optimizer"] == {"rate": 1e-3}
    assert load("main", None, ["optimizer@opt=adam"]).values["opt"] == {"rate": 1e-3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1e-5", 1e-5), ("true", True), ("null", None), ("", ""), ("[1, 3]", [1, 3]), ("{a: 1}", {"a": 1}),
        ("'3'", "3"), ("a: b", "a: b"), ("#1", "#1"), ("x #1", "x #1"), ("- a", "- a"), ("a=b", "a=b"), ("%d", "%d"),
        ("12:30", "12:30"), ("@x", "@x"), ("org/model-0.5B", "org/model-0.5B"), ("${seed}", 1), ("~", None),
    ],
)  # fmt: skip
def test_override_values_are_typed_as_yaml_and_odd_text_stays_text(configs: Path, text: str, value: Any):
    got = load("main", None, [f"extra.key={text}"]).values["extra"]["key"]
    assert got == value and type(got) is type(value)


def test_overrides_win_in_the_order_typed_and_reach_into_groups(configs: Path):
    values = load("main", None, ["model.width=1", "model.width=2", "run_name=x"]).values
    assert values["model"] == {"width": 2, "layers": 2} and values["run_name"] == "x"


def test_a_file_given_by_path_finds_groups_beside_it_and_in_configs(configs: Path, tmp_path: Path):
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "mine.yaml").write_text("defaults: [{model: tiny}]\nseed: 5\n")
    loaded = load(None, str(other / "mine.yaml"), [])
    assert loaded.values == {"model": {"width": 64, "layers": 2}, "seed": 5} and loaded.name == "mine"
    assert load("mine", str(other)).values == loaded.values


def test_package_directive_and_packages_named_global_or_here(configs: Path):
    (configs / "training" / "flat.yaml").write_text("# @package _global_\nflat: 1\n")
    (configs / "training" / "nested.yaml").write_text(
        "defaults: ['/optimizer@_here_: adam', '/optimizer@_global_: adam']"
    )
    (configs / "p.yaml").write_text("defaults:\n  - training: flat\n")
    (configs / "q.yaml").write_text(
        "defaults:\n  - optimizer@_global_: adam\n  - model@a.b: tiny\n  - optional model@c: no\n"
    )
    assert load("p").values == {"flat": 1}
    assert load("q").values == {"rate": 1e-3, "a": {"b": {"width": 64, "layers": 2}}}


def test_origin_names_the_file_or_the_command_line(configs: Path):
    origin = load("main", None, ["seed=2", "model=big", "new={a: {b: 1}}"]).origin
    assert origin["seed"] == "cli" and origin["new.a.b"] == "cli"
    assert origin["model.layers"] == "configs/model/big.yaml" and origin["model.width"] == "configs/model/tiny.yaml"
    assert origin["run_name"] == "configs/main.yaml"


def test_overrides_alone_make_a_config():
    loaded = load(None, None, ["a.b=1"])
    assert loaded.values == {"a": {"b": 1}} and loaded.name == ""


# --- interpolation -----------------------------------------------------------------------------------------------


def test_now_is_one_instant_and_its_dependents_are_known(configs: Path):
    loaded = load("timed")
    assert loaded.timed == ("name", "folder", "nested.deep[0]")
    assert loaded.values["folder"] == "runs/" + loaded.values["name"] == loaded.raw["folder"]
    assert loaded.values["name"].endswith("_3") and len(loaded.values["name"]) == 21


def test_secrets_reach_values_and_never_raw(configs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLVR_TEST_KEY", "hunter2")
    loaded = load("secret", None, ["copy=${header}"])
    assert loaded.values["header"] == loaded.values["copy"] == "Bearer hunter2" and loaded.values["other"] == "plain"
    assert "hunter2" not in dump(loaded.raw)
    assert loaded.raw["key"] == "${oc.env:RLVR_TEST_KEY}" and loaded.raw["list"] == ["${key}"]


def test_a_dumped_config_composes_to_the_same_values(configs: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("RLVR_TEST_KEY", "hunter2")
    first = load("secret", None, ["text=\\${kept}", "number_like='1e-5'"])
    (tmp_path / "resolved.yaml").write_text(dump(first.raw))
    again = load(None, "resolved.yaml")
    assert again.values == first.values and again.raw == first.raw
    assert again.values["text"] == "${kept}" and again.values["number_like"] == "1e-5"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["a=${b}", "b=${a}"], ["a", "circular interpolation", "command line"]),
        (["a.b=${a}"], ["circular interpolation"]),
        (["a=${nothing}"], ["a '${nothing}'", "nothing", "not found"]),
        (["a=${oc.env:RLVR_NOT_SET}"], ["environment variable 'RLVR_NOT_SET' is not set"]),
        (["a=???"], ["a", "has to be given"]),
        (["a=${nope:1}"], ["nope"]),
    ],
)
def test_interpolation_mistakes_name_the_key_and_the_cause(configs: Path, overrides: list[str], words: list[str]):
    text = message("main", None, overrides)
    assert all(word in text for word in words), text


# --- mistakes ----------------------------------------------------------------------------------------------------


def test_an_unknown_config_lists_those_that_exist_and_the_nearest(configs: Path):
    text = message("mian")
    assert "'mian'" in text and "did you mean 'main'?" in text and "own_last" in text


def test_an_unknown_option_lists_the_options_of_its_group(configs: Path):
    assert "unknown option 'tinny' of group 'model' (in 'model=tinny')" in message("main", None, ["model=tinny"])
    assert "there are: big, tiny" in message("main", None, ["model=tinny"])
    (configs / "bad.yaml").write_text("defaults: [{model: no}]")
    assert "in the defaults of configs/bad.yaml" in message("bad")


def test_a_choice_the_config_does_not_make_is_an_error_that_says_how_to_write_it(configs: Path):
    assert "write training@rlvr_training=large" in message("main", None, ["training=large"])
    assert "choices: model, training@rlvr_training" in message("main", None, ["training@other=huge"])


def test_defaults_that_go_in_a_circle_show_the_circle(configs: Path):
    assert "loop_a -> loop_b -> loop_a" in message("loop_a")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\nb: [1\n", "configs/broken.yaml, line 3"),
        ("a: 1\na: 2\n", "configs/broken.yaml, line 2"),
        ("- a\n", "a list; expected"),
        ("defaults: tiny\n", "defaults has to be a list"),
        ("defaults: [[1]]\n", "is not one of"),
        ("defaults: [{model: tiny, optimizer: adam}]\n", "is not one of"),
        ("defaults: [../main]\n", "unknown group '..'"),
        ("defaults: [{model: '???'}]\n", "configs/broken.yaml: "),
        ("defaults: [{model: '${x}'}]\n", "configs/broken.yaml: "),
        ("a: ${b\n", "configs/broken.yaml"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(configs: Path, text: str, words: str):
    (configs / "broken.yaml").write_text(text)
    assert words in message("broken")


def test_files_that_are_not_text_or_not_there(configs: Path):
    (configs / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")
    assert "configs/binary.yaml" in message("binary")
    assert "does not exist" in message(None, "nowhere.yaml")
    assert "drop one" in message("main", "configs/main.yaml")
    assert "no config given" in message(None, "configs")


@pytest.mark.parametrize("override", ["seed", "=1", "--x=1", "a b=1", "seed.=1", "a=[1", "a={b", "a='x", "seed.x=1"])
def test_a_malformed_override_is_quoted_back(configs: Path, override: str):
    assert repr(override) in message("main", None, [override])


# --- the schema --------------------------------------------------------------------------------------------------


class Mode(str, Enum):
    RLVR = "rlvr"
    SFT = "sft"


@dataclass(frozen=True)
class Optim:
    learning_rate: float = 1e-4
    clip: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)

    def __post_init__(self) -> None:
        if self.learning_rate < 0:
            raise ValueError(f"learning_rate={self.learning_rate} must not be negative")


@dataclass
class Reward:
    name: str
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class Schema:
    seed: int = 0
    mode: Mode = Mode.RLVR
    kind: Literal["a", "b"] = "a"
    resume: bool = True
    note: str | None = None
    optim: Optim = field(default_factory=Optim)
    rewards: list[Reward] = field(default_factory=list)
    named: dict[str, Optim] = field(default_factory=dict)
    judge: Reward | None = None
    levels: list[int] = field(default_factory=lambda: [1, 3])


def mistakes(values: dict[str, Any], origin: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(ValueError) as caught:
        validate(values, Schema, origin or {})
    return str(caught.value).splitlines()


def test_nested_values_build_the_dataclasses_and_defaults_come_from_them():
    built = validate(
        {
            "mode": "sft",
            "optim": {"learning_rate": "1e-5", "clip": 1},
            "rewards": [{"name": "x", "kwargs": {"anything": {"goes": "1e-5"}}}],
            "named": {"any": {"betas": [0, 0.5]}},
        },
        Schema,
        {},
    )
    assert built == Schema(
        mode=Mode.SFT,
        optim=Optim(1e-5, 1.0),
        rewards=[Reward("x", kwargs={"anything": {"goes": "1e-5"}})],
        named={"any": Optim(betas=(0.0, 0.5))},
    )
    assert type(built.optim.clip) is float and type(built.named["any"].betas) is tuple


def test_every_unknown_key_is_named_with_its_origin_and_the_nearest_known_one():
    lines = mistakes(
        {"optim": {"learning_rat": 1}, "rewards": [{"name": "x", "wieght": 1}], "learning_rate": 3, "zzz": {"q": 1}},
        {"optim.learning_rat": "cli", "rewards": "configs/x.yaml", "zzz.q": "configs/y.yaml"},
    )
    assert lines[0] == "unknown key learning_rate: did you mean optim.learning_rate?"
    assert lines[1].startswith("unknown key zzz (from configs/y.yaml): known here: judge, kind, levels")
    assert lines[2] == "unknown key optim.learning_rat (from the command line): did you mean optim.learning_rate?"
    assert lines[3] == "unknown key rewards[0].wieght (from configs/x.yaml): did you mean rewards[0].weight?"
    assert len(lines) == 4


@pytest.mark.parametrize(("given", "meant"), [("reward.name", "reward.type"), ("algorithm.type", "algorithm.name")])
def test_the_key_that_names_a_choice_is_found_by_another_sections_word_for_it(given: str, meant: str) -> None:
    section, _, key = given.partition(".")
    with pytest.raises(ValueError, match=rf"unknown key {given}: did you mean {meant}\?"):
        validate({"env": {"name": "toy"}, section: {key: "x"}}, RunConfig)


@pytest.mark.parametrize(
    ("section", "line"),
    [
        (
            {"critic": {"learning_rate": 1}},
            "unknown key training.critic.learning_rate: did you mean training.critic.optimizer.learning_rate?",
        ),
        ({"learning_rate": 1}, "unknown key training.learning_rate: did you mean training.optimizer.learning_rate?"),
        ({"gap_warn": 1}, "training (from the command line): gap_warn=1.0, gap_stop=0.1; expected 0 < warn <= stop"),
    ],
)
def test_a_mistake_is_named_by_its_section_once(section: dict[str, Any], line: str) -> None:
    """The nearest key is looked for in the same section first."""
    with pytest.raises(ValueError) as caught:
        validate({"env": {"name": "toy"}, "training": section}, RunConfig, {"training.gap_warn": CLI})
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"seed": "3"}, 'seed: "3" (text) given, expected an integer'),
        ({"seed": 1.5}, "seed: 1.5 (a number) given, expected an integer"),
        ({"seed": True}, "seed: true (a truth value) given, expected an integer"),
        ({"resume": 1}, "resume: 1 (an integer) given, expected true or false"),
        ({"levels": "3"}, 'levels: "3" (text) given, expected a list of an integer'),
        ({"levels": [1, "x"]}, 'levels[1]: "x" (text) given, expected an integer'),
        ({"mode": "ppo"}, 'mode: "ppo" (text) given, expected one of rlvr, sft'),
        ({"kind": "c"}, 'kind: "c" (text) given, expected one of a, b'),
        ({"optim": 3}, "optim: 3 (an integer) given, expected a mapping"),
        ({"judge": "x"}, 'judge: "x" (text) given, expected a mapping or null; a name is given as judge.name'),
        ({"optim": {"clip": "high"}}, 'optim.clip: "high" (text) given, expected a number or null'),
        ({"optim": {"betas": [1]}}, "optim.betas"),
        ({"optim": {"learning_rate": -1}}, "optim: learning_rate=-1.0 must not be negative"),
        ({"note": 3}, "note: 3 (an integer) given, expected text or null"),
        ({"judge": {"weight": 2}}, "judge.name: has to be given, expected text"),
        ({"judge": {"name": 3}}, "judge.name: 3 (an integer) given, expected text"),
        ({"rewards": [{"name": "a"}, {"name": "b", "weight": "x"}]}, 'rewards[1].weight: "x" (text) given, expected'),
        ({"seed": None}, "seed: null given, expected an integer"),
    ],
)
def test_wrong_types_say_what_was_given_and_what_was_expected(values: dict[str, Any], line: str):
    lines = mistakes(values)
    assert len(lines) == 1 and lines[0].startswith(line), lines


def test_all_wrong_values_are_listed_at_once_with_their_origin():
    lines = mistakes({"seed": "3", "optim": {"clip": "x"}}, {"seed": "cli", "optim.clip": "a.yaml"})
    assert lines == [
        'seed: "3" (text) given (from the command line), expected an integer',
        'optim.clip: "x" (text) given (from a.yaml), expected a number or null',
    ]


def test_values_that_are_no_plain_data_are_refused():
    assert "is not text, number" in mistakes({"judge": {"name": b"x"}})[0]


def test_infinity_and_nan_are_numbers():
    built = validate({"optim": {"learning_rate": math.inf, "clip": ".nan"}}, Schema, {})
    assert math.isinf(built.optim.learning_rate) and built.optim.clip is not None and math.isnan(built.optim.clip)


# --- difference and dump -----------------------------------------------------------------------------------------


def test_difference_names_changed_missing_and_added_keys_and_skips_ignored_ones():
    a = {"seed": 1, "optim": {"rate": 1.0, "betas": [1, 2]}, "gone": None, "name": {"x": 1}}
    b = {"seed": True, "optim": {"rate": 1, "betas": [1, 3]}, "new": {}, "name": {"x": 2}}
    assert difference(a, b) == ["seed", "optim.betas", "gone", "name.x", "new"]
    assert difference(a, b, ignore=["name", "new", "gone"]) == ["seed", "optim.betas"]
    assert difference({"a": math.nan}, {"a": math.nan}) == []


KEYS = st.text("abcdefgh_", min_size=1, max_size=6)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text("ab1e-5.:# '", max_size=8)
)
TREES = st.dictionaries(
    KEYS, st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x, max_size=3))
)


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_dump_and_read_are_inverse(tmp_path_factory: pytest.TempPathFactory, tree: dict[str, Any]):
    path = tmp_path_factory.getbasetemp() / "tree.yaml"
    path.write_text(dump(tree))
    assert repr(read(path)) == repr(tree)
    assert difference(tree, read(path)) == []


def test_what_a_reader_of_a_file_changes_no_other_reader_sees(tmp_path: Path) -> None:
    (path := tmp_path / "tree.yaml").write_text("a: {b: [1]}\n")
    read(path)["a"]["b"].append(2)
    assert read(path) == {"a": {"b": [1]}}
    path.write_text("a: {b: [3]}\n")
    assert read(path) == {"a": {"b": [3]}}


@settings(deadline=None, max_examples=60)
@given(TREES, KEYS, LEAVES)
def test_a_changed_leaf_is_the_only_difference(tree: dict[str, Any], key: str, leaf: Any):
    first, second = {**tree, key: leaf}, {**tree, key: [leaf, "changed"]}
    assert difference(first, second) == [key]


def test_former_names_of_keys_are_read_from_files(tmp_path: Path) -> None:
    path = tmp_path / "older.yaml"
    path.write_text(
        "training: {refill: 2, steps: 3}\nevaluation: {quick_tasks: 7, quick_samples: null}\nenv: {name: a}\n"
    )
    expected = {
        "training": {"dynamic_sampling": 2, "steps": 3},
        "evaluation": {"interim_tasks": 7, "interim_samples": None},
        "env": {"name": "a"},
    }
    assert read(path) == expected and load(None, str(path)).values == expected
