"""The settings of `rlvr serve engine`: every one can be set, in words or in a file, and arrives where it is used."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from rlvr.engine.engine_options import EngineLimits
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.server_settings import ONE_REQUEST, ServerSettings, load_settings


def other_value(name: str, default: Any) -> Any:
    """A valid value that is not the default."""
    if isinstance(default, bool):
        return not default
    if default is None:
        return 1_000
    return default / 2 if isinstance(default, float) else default + 1


@pytest.mark.parametrize("section", ["engine", "limits", "wire"])
def test_every_setting_can_be_set_by_a_word(section: str) -> None:
    defaults = getattr(ServerSettings(), section)
    wanted = {f.name: other_value(f.name, getattr(defaults, f.name)) for f in dataclasses.fields(defaults)}
    found = load_settings([f"{section}.{name}={value}" for name, value in wanted.items()])
    assert dataclasses.asdict(getattr(found, section)) == wanted


def test_words_override_a_file(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("engine: {micro_tokens: 8192}\nlimits: {max_rank: 8, owner_disk_bytes: 1_000_000}\n")
    found = load_settings(["limits.max_rank=16"], file)
    assert found.engine == EngineLimits(micro_tokens=8192, one_request=ONE_REQUEST)
    assert found.limits == ServerLimits(max_rank=16, owner_disk_bytes=1_000_000)


def test_earlier_names_of_limits_are_read(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("limits: {max_cells: 7}\n")
    limits = load_settings(["limits.answer_cells=5"], file).limits
    assert (limits.request_logprobs, limits.answer_logprobs) == (7, 5)
    with pytest.raises(ValueError, match=r"limits.max_cells.* limits.request_logprobs alone"):
        load_settings(["limits.request_logprobs=8"], file)
    with pytest.raises(ValueError, match=r"limits.max_cells"):  # the name that was given
        load_settings(["limits.max_cells=-1"])


def test_without_settings_the_defaults_are_those_of_the_parts() -> None:
    assert load_settings([]) == ServerSettings(EngineLimits(one_request=ONE_REQUEST), ServerLimits())
    assert load_settings(["engine.one_request=1.0"]).engine == EngineLimits()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("limits.max_rnak=8", "did you mean limits.max_rank"),
        ("gradient_checkpointing=true", "did you mean engine.gradient_checkpointing"),
        ("limits.max_rank=0", "greater than 0"),
        ("limits.max_rank=1.5", "expected an integer"),
        ("limits.owner_share=1.5", "less than or equal to 1"),
        ("limits.poll_seconds=60", "less than or equal to 40"),
        ("limits.gap_seconds=.inf", "finite"),
        ("limits.owner_disk_bytes=-1", "greater than 0"),
        ("engine.logit_elements=0", "engine.logit_elements=0, expected at least 1"),
        ("engine=fast", "expected a mapping"),
        ("limits", "expected key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(word: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_settings([word])


def test_the_settings_arrive_at_the_engine(tmp_path: Path) -> None:
    """And names of one folder, however it is written, load one engine."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from rlvr.engine.kv_cache import count_cache_tokens
    from rlvr.tinker_server.serve_engine import ServeOptions, load_engines, named_models
    from tests.kit.tinker_model import write_model

    folder = tmp_path / "model"
    write_model(folder)
    (tmp_path / "link").symlink_to(folder)
    write_model(tmp_path / "other", seed=2)
    given = [f"a={folder}", f"b={folder}/", f"c={tmp_path / 'link'}", f"d={folder / '..' / 'model'}", str(folder)]
    named = named_models([*given, f"e={tmp_path / 'other'}"])
    words = ["engine.gradient_checkpointing=true", "engine.micro_tokens=123", "engine.logit_elements=4567"]
    threads, told = torch.get_num_threads(), list[str]()
    options = ServeOptions(given, device="cpu", dtype="float32", settings=load_settings(words))
    engines = load_engines(named, options, told.append)
    assert [text.partition(" is")[0] for text in told] == ["model 1 of 2", "model 2 of 2"]
    first = engines["a"]
    assert [name for name, engine in engines.items() if engine is first] == ["a", "b", "c", "d", str(folder)]
    limits = first.limits
    assert (limits.gradient_checkpointing, limits.micro_tokens, limits.logit_elements) == (True, 123, 4567)
    assert limits.one_request == ONE_REQUEST and limits.cache_tokens >= first.model.context
    assert torch.get_num_threads() == threads
    assert (
        count_cache_tokens(first.model, 0)
        == 0
        < count_cache_tokens(first.model, 0.25)
        <= count_cache_tokens(first.model, 0.5)
    )


def test_a_folder_is_the_same_by_a_relative_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rlvr.tinker_server.serve_engine import resolve_folder

    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    absolute = str(tmp_path.resolve() / "models" / "tiny")
    for written in ("models/tiny", "./models/tiny/", "models/../models/tiny", "~/models/tiny", absolute):
        assert resolve_folder(written) == absolute
    assert resolve_folder("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
