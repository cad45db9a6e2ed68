"""Choices with options of their own in a config, and flat keys, which are other keys of the same options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.losses.clipped import Cispo, Ppo
from rlvr.algorithms.optimizers import AdamW, CriticOptimizerSection, Muon
from rlvr.algorithms.terms.entropy import Entropy
from rlvr.algorithms.terms.kl import Kl
from rlvr.clients.client_options import TinkerOptions
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.config import dump, load
from rlvr.config.build_config import add_defaults, build_config, resolved_values
from rlvr.config.choices import FLAT, SHORTHANDS, full_key, get_at, move_flat
from rlvr.config.schema import RunConfig
from rlvr.config.validate import list_keys
from rlvr.runs.run_folder import open_run
from rlvr.tracking.mlflow_store import MlflowOptions
from rlvr.tracking.tensorboard_files import TensorBoardOptions
from rlvr.tracking.tracker import TrackerOptions
from rlvr.tracking.wandb_run import WandbOptions
from rlvr.training import journal
from rlvr.training.schedules.schedule_options import (
    CompletionOrderOptions,
    FixedLagOptions,
    ScheduleOptions,
    SyncOptions,
)
from tests.kit.composing import compose_base


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


BASE = "env: {name: toy}\nclient: mock\nrollout: {max_tokens: 4}\n"


def compose(text: str, *words: str) -> Any:
    Path("mine.yaml").write_text(text)
    return load(None, "mine.yaml", words)


def algorithm(text: str, *words: str) -> Any:
    return build_config(compose(BASE + text, *words)).algorithm.resolve()


def test_flat_keys_and_shorthands_stand_for_keys_that_exist() -> None:
    known = set(list_keys(RunConfig))
    assert {full_key(key) for key in (*FLAT, *SHORTHANDS)} <= known
    assert not set(FLAT) & known, "a flat key is no key of the schema"
    assert len(set(FLAT.values())) == len(FLAT)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("reward: exact_match\nalgorithm: dapo\n", ["model=m", "curriculum=uniform"]),
        ("", ["reward=exact_match", "algorithm=dapo", "model=m", "curriculum=uniform"]),
        ("reward: {type: exact_match}\n", ["algorithm={name: dapo}", "model={name: m}", "curriculum.by=uniform"]),
    ],
)
def test_a_bare_word_is_the_choice_of_its_section(text: str, words: list[str]) -> None:
    config = build_config(compose("env: toy\nrollout: {max_tokens: 4}\n" + text, *words))
    assert (config.env.name, config.model.name, config.reward.type) == ("toy", "m", "exact_match")
    assert config.algorithm.name == "dapo" and config.curriculum.by == "uniform"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithm: {loss: cispo, clip_high: 3.0}\n", []),
        ("algorithm: {loss: {name: cispo, clip_high: 3.0}}\n", []),
        ("algorithm: {loss: {clip_high: 3.0}}\n", ["algorithm.loss=cispo"]),
        ("algorithm: {loss: ppo}\n", ["algorithm={loss: cispo, clip_high: 3.0}"]),
        ("", ["algorithm.loss={name: cispo, clip_high: 3}"]),
        ("", ["algorithm.loss.name=cispo", "algorithm.clip_high=3"]),
        ("rlvr: {algorithm_config: {loss: cispo, clip_high: 3.0}}\n", []),
    ],
)
def test_a_loss_is_chosen_with_its_options(text: str, words: list[str]) -> None:
    """grpo's lower bound stays: cispo bounds the same ratio."""
    assert algorithm(text, *words).loss == Cispo(0.2, 3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("algorithm: {kl_coef: 0.1, kl_in: loss, entropy_coef: 0.2}\n", []),
        ("algorithm: {terms: {kl: {coef: 0.1, where: loss}, entropy: {coef: 0.2}}}\n", []),
        ("algorithm: {terms: {kl: {coef: 0.5, where: loss}}, entropy_coef: 0.2}\n", ["algorithm.kl_coef=0.1"]),
        ("algorithm: {kl_coef: 0.5, kl_in: loss, entropy_coef: 0.2}\n", ["algorithm.terms.kl.coef=0.1"]),
    ],
)
def test_a_term_is_given_by_either_key_and_the_last_one_counts(text: str, words: list[str]) -> None:
    assert algorithm(text, *words).terms == (Kl(0.1, "k1", "loss"), Entropy(0.2))


def test_a_term_is_taken_away_by_0_and_by_null() -> None:
    for value in ("0", "null"):
        assert algorithm("algorithm: {terms: {kl: {coef: 0.1}}}\n", f"algorithm.kl_coef={value}").terms == ()


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("algorithm: {kl_coef: 0.1, terms: {kl: {coef: 0.2}}}\n", [], "mine.yaml: algorithm.kl_coef and .* two values"),
        ("algorithm: {terms: 3}\n", ["algorithm.kl_coef=0.1"], "terms is a single value .* by a key of"),
        ("sharding: [1]\n", [], r"mine.yaml: sharding=\[1\], expected a section"),
        ("sharding: {rnks: 1}\n", [], r"unknown key sharding.rnks \(from mine.yaml\): did you mean sharding.ranks"),
        ("algorithm: {kl_coff: 1}\n", [], "did you mean algorithm.kl_coef"),
        ("algorithm: {loss: {clip_lo: 1}}\n", [], "did you mean algorithm.loss.clip_low"),
        ("", ["algorithm.kl_coef={a: 1}"], "a mapping"),
        ("algorithm: {loss: ppo}\n", ["algorithm={loss: [ppo]}"], "a list"),
        (
            "",
            ["algorithm.loss=dro", "algorithm.clip_low=0.1"],
            "the loss dro has no clip_low, an option of cispo, gspo",
        ),
        ("", ["sharding.ranks=3"], "sharding.ranks .client=mock has no ranks, an option of sharded"),
        ("", ["client.kwargs.x=1"], "client=mock has its options beside its name"),
        ("", ["algorithm.overlong_buffer=0"], "algorithm.overlong_buffer=0, expected at least 1 token"),
    ],
)
def test_what_does_not_fit_says_why(text: str, words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        algorithm(text, *words)


def test_an_override_of_a_section_may_set_keys_of_two() -> None:
    loaded = compose("env: {name: toy}\nrollout: {max_tokens: 4}\n", "client=tinker", "model={name: m, base_url: b}")
    assert build_config(loaded).client_options == TinkerOptions("b")
    text = "env: {name: toy}\nrollout: {max_tokens: 4}\nclient: sharded\nmodel: {name: m}\nsharding:\n"
    assert build_config(compose(text, "sharding.ranks=3")).client_options == ShardingOptions(3)


def test_references_follow_what_moved() -> None:
    text = "algorithm: {clip_low: 0.1, clip_high: '${algorithm.clip_low}', kl_coef: 0.3, entropy_coef: '${.kl_coef}'}\n"
    found = algorithm(text)
    assert (found.loss, found.terms) == (Ppo(0.1, 0.1), (Kl(0.3), Entropy(0.3)))
    named = compose(f"{BASE}run: {{name: 'a-${{algorithm.loss}}-${{ client }}'}}\nalgorithm: {{loss: cispo}}\n")
    assert build_config(named).run.name == "a-cispo-mock"
    later = "run: {name: importance_sampling}\nalgorithm: {loss: '${run.name}'}\n"
    assert algorithm(later, "run.name=cross_entropy").loss.name == "cross_entropy"
    plain = compose(f"{BASE}prompt: {{system: 'a \\${{client}} b'}}\n")
    assert build_config(plain).prompt.system == "a ${client} b"


def test_what_comes_from_the_environment_is_written_as_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOSS", "cispo")
    loaded = compose(f"{BASE}algorithm: {{loss: '${{oc.env:LOSS}}', clip_low: 1.0}}\n")
    stored = resolved_values(build_config(loaded), loaded)
    assert stored["algorithm"]["loss"]["name"] == "${oc.env:LOSS}"
    assert add_defaults(stored) == stored, "the run is resumed by the same settings"


def test_settings_that_an_older_version_stored_are_those_of_the_same_config() -> None:
    """`resolved.yaml` with flat keys, all written out, one of them without effect."""
    text = "model: {name: m}\nalgorithm: {loss: cispo, clip_high: 3.0, kl_coef: 0.1, gamma: 0.9}\n"
    loaded = compose(f"{BASE.replace('mock', 'sharded')}sharding: {{ranks: 3}}\n{text}")
    now = resolved_values(build_config(loaded), loaded)
    older = {
        **now,
        "client": "sharded",
        "sharding": {"ranks": 3, "timeout_s": 1800.0, "ray": None},
        "model": {**now["model"], "base_url": None, "api_key": None, "timeout_s": 1800.0},
        "algorithm": {
            "name": "grpo", "loss": "cispo", "advantage": None, "clip_low": None, "clip_high": 3.0, "kl_coef": 0.1,
            "kl_in": None, "gamma": 0.9, "reduction": None,
        },
    }  # fmt: skip
    assert add_defaults(older) == now
    Path("older.yaml").write_text(dump(older))
    again = load(None, "older.yaml")
    assert resolved_values(build_config(again), again) == now


def test_a_key_is_in_no_message_and_in_nothing_written() -> None:
    text = "env: {name: toy}\nrollout: {max_tokens: 4}\nclient: {name: tinker, api_key: sk-one}\nmodel: {name: m}\n"
    loaded = compose(text)
    assert "sk-one" not in dump(resolved_values(build_config(loaded), loaded)) + repr(build_config(loaded))
    with pytest.raises(ValueError, match="api_key") as refused:
        compose(text.replace("{name: m}", "{name: m, api_key: sk-two}"))
    assert "sk-" not in str(refused.value)


def test_a_server_has_no_flat_keys() -> None:
    from rlvr.tinker_server.server_settings import load_settings

    assert load_settings(["sharding.timeout_s=60"]).sharding.timeout_s == 60


def test_values_of_the_environment_are_compared_with_those_of_an_older_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its `environment.json` has flat keys."""
    text = f"run: {{root: runs, name: a}}\n{BASE}algorithm: {{clip_low: '${{oc.env:CLIP}}'}}\n"
    monkeypatch.setenv("CLIP", "0.1")
    loaded = compose(text)
    folder, _ = open_run(loaded, build_config(loaded))
    (value,) = dict(journal.environment_values(loaded.values, loaded.raw)).values()
    journal.store_environment(folder, {"algorithm.clip_low": value})
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert open_run(loaded, build_config(loaded)) == (folder, False)
    monkeypatch.setenv("CLIP", "0.2")
    changed = compose(text)
    with pytest.raises(ValueError, match=r"differs in algorithm.clip_low \(its value from the environment\)"):
        open_run(changed, build_config(changed))


def test_a_file_keeps_what_is_no_flat_key() -> None:
    content = {"env": {"kwargs": {"client": "x", "rows": [{"loss": "ppo"}, "${client}"]}}, "empty": {}}
    assert move_flat(content) == {
        "env": {"kwargs": {"client": "x", "rows": [{"loss": "ppo"}, "${client.name}"]}}, "empty": {},
    }  # fmt: skip
    assert compose_base("", "epsilon=0.1").typed["algorithm.loss.clip_low"] == "epsilon"


@pytest.mark.parametrize(
    ("text", "words", "options"),
    [
        ("", [], SyncOptions()),
        ("training: {schedule: null, max_steps_off_policy: 0, num_minibatches: 1, stale: pace}\n", [], SyncOptions()),
        ("training: {max_steps_off_policy: 2}\n", [], FixedLagOptions(2)),
        ("training: {num_minibatches: 2}\n", [], FixedLagOptions(0, 2)),
        ("training: {schedule: fixed_lag}\n", ["training.max_steps_off_policy=1"], FixedLagOptions(1)),
        ("training: {schedule: {name: fixed_lag, lag: 3}}\n", ["max_steps_off_policy=1"], FixedLagOptions(1)),
        ("training: {schedule: {lag: 3}}\n", ["training.schedule=completion"], CompletionOrderOptions(3)),
        ("", ["training.schedule={name: completion, lag: 1, stale: discard}"], CompletionOrderOptions(1, 1, "discard")),
    ],
)  # fmt: skip
def test_a_schedule_is_chosen_with_its_options(text: str, words: list[str], options: ScheduleOptions) -> None:
    assert build_config(compose(BASE + text, *words)).training.order == options


@pytest.mark.parametrize("section", ["training", "training.critic", "sft"])
def test_an_optimizer_is_chosen_with_its_options(section: str) -> None:
    rate = CriticOptimizerSection().learning_rate if section == "training.critic" else 1e-5
    wanted = Muon(learning_rate=rate, matrix_learning_rate=0.02)
    steps = "algorithm: {name: ppo_critic}\nsft: {steps: 3}\n"
    for words in (
        [f"{section}.optimizer=muon", f"{section}.optimizer.matrix_learning_rate=0.02"],
        [f"{section}.optimizer={{name: muon, matrix_learning_rate: 0.02}}"],
    ):
        config = build_config(compose(BASE + steps, *words))
        assert get_at(config, f"{section}.optimizer").variant == wanted
    assert get_at(build_config(compose(BASE + steps)), f"{section}.optimizer").variant == AdamW(learning_rate=rate)


def test_trackers_are_a_list_and_flat_keys() -> None:
    text = "tracking: {trackers: [tensorboard, {name: mlflow, uri: /a, experiment: b}], wandb: true, experiment: s}\n"
    loaded = compose(BASE + text)
    config = build_config(loaded)
    assert config.tracking.all_trackers == [WandbOptions("s"), TensorBoardOptions(), MlflowOptions("/a", "b")]
    assert add_defaults(resolved_values(config, loaded)) == resolved_values(config, loaded)
    path = f"{__name__}:OwnTracker"
    own = build_config(compose(f"{BASE}tracking: {{trackers: [{{name: '{path}', kwargs: {{place: here}}}}]}}\n"))
    (chosen,) = own.tracking.all_trackers
    assert type(chosen).__name__ == "OwnTracker" and chosen.options == {"place": "here"}


@dataclass(frozen=True)
class OwnTracker(TrackerOptions):
    place: str = "there"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["training.schedule=sinc"], r"training.schedule='sinc' is unknown.*did you mean 'sync'"),
        (["training.schedule={name: fixed_lag, leg: 1}"], "did you mean training.schedule.lag"),
        (["training.schedule={name: fixed_lag, lag: -1}"], "training.max_steps_off_policy=-1, expected at least 0"),
        (["training.schedule={name: fixed_lag, stale: discard}"], "fixed_lag has no stale, an option of completion"),
        (["training.schedule={name: sync, lag: 1}"], "sync has no lag, an option of completion, fixed_lag"),
        (["training.optimizer=mun"], "name='mun' is unknown.*did you mean 'muon'"),
        (["training.optimizer.momentum=0.5"], "training.optimizer=adamw has no momentum, an option of muon"),
        (["curriculum.every=2"], "curriculum.by=uniform has no every, an option of threshold"),
        (["tracking.trackers=[wanb]"], "tracker='wanb' is unknown.*did you mean 'wandb'"),
        (["tracking.trackers=[{name: wandb, uri: x}]"], "the tracker 'wandb' has no uri, an option of mlflow"),
        (["tracking.trackers=[{name: wandb, projct: x}]"], r"did you mean tracking.trackers\[0\].project"),
    ],
)
def test_an_option_of_another_variant_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        build_config(compose(BASE, *words))


def test_a_run_of_before_has_flat_keys_of_its_schedule() -> None:
    """`resolved.yaml` as it was written when `training.schedule` was a word."""
    loaded = compose(BASE, "training.schedule=completion", "training.max_steps_off_policy=2", "training.stale=discard")
    now = resolved_values(build_config(loaded), loaded)
    training = {key: value for key, value in now["training"].items() if key != "schedule"}
    flat = {"schedule": "completion", "max_steps_off_policy": 2, "num_minibatches": 1, "stale": "discard"}
    tracking = {key: value for key, value in now["tracking"].items() if key != "trackers"}
    assert add_defaults({**now, "training": training | flat, "tracking": tracking}) == now
