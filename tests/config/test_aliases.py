"""Other systems' words for our keys: what each means, and which of two counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlvr.config import dump, load
from rlvr.config.aliases import ALIASES, ALIASES_BY_WORD, PLACES, SECTIONS, is_ours
from rlvr.config.build_config import build_config, resolved_values
from rlvr.config.choices import full_key
from tests.kit.composing import BASE, compose_base, config, refusal_of

# Word: what is typed, and what it makes of our keys. Those with None are worked out from several, and tested as such.
MEANS: dict[str, tuple[str, dict[str, Any]] | None] = {
    **dict.fromkeys(("num_iterations", "max_steps"), ("7", {"training.steps": 7})),
    **dict.fromkeys(("problems_per_iteration", "prompts_per_step"), ("6", {"training.prompts_per_step": 6})),
    **dict.fromkeys(("samples_per_problem", "num_generations", "group_size"), ("4", {"training.group_size": 4})),
    "num_substeps": ("4", {"training.num_substeps": 4}),
    "num_minibatches": ("2", {"training.num_minibatches": 2}),
    "groups_per_batch": ("6", {"training.prompts_per_step": 6}),
    "max_steps_off_policy": ("3", {"training.max_steps_off_policy": 3}),
    "ppo_epochs": ("2", {"training.ppo_epochs": 2}),
    "max_prompt_length": ("9", {"training.max_prompt_tokens": 9}),
    **dict.fromkeys(
        ("max_new_tokens", "max_generation_length", "max_completion_length", "max_tokens"),
        ("12", {"rollout.max_tokens": 12}),
    ),
    "temperature": ("0.7", {"rollout.temperature": 0.7}),
    "top_p": ("0.9", {"rollout.top_p": 0.9}),
    "top_k": ("5", {"rollout.top_k": 5}),
    "learning_rate": ("1e-5", {"training.optimizer.learning_rate": 1e-5}),
    **dict.fromkeys(
        ("clip_range", "cliprange", "epsilon"), ("0.1", {"algorithm.clip_low": 0.1, "algorithm.clip_high": 0.1})
    ),
    "epsilon_high": ("0.28", {"algorithm.clip_high": 0.28}),
    **dict.fromkeys(("ppo_clip_low", "clip_low_threshold"), ("0.8", {"algorithm.clip_low": 0.2})),
    **dict.fromkeys(("ppo_clip_high", "clip_high_threshold"), ("1.28", {"algorithm.clip_high": 0.28})),
    "target_kl": ("0.05", {"training.target_kl": 0.05}),
    "entropy_coef": ("0.02", {"algorithm.entropy_coef": 0.02}),
    "baseline_decay": ("0.9", {"algorithm.baseline_decay": 0.9}),
    "advantage_estimator": ("rloo", {"algorithm.advantage": "leave_one_out"}),
    **dict.fromkeys(("mask_truncated_completions", "mask_truncated"), ("true", {"algorithm.mask_truncated": True})),
    "lora_rank": ("8", {"model.lora.rank": 8}),
    "base_model": ("./m", {"model.name": "./m"}),
    "base_url": ("http://127.0.0.1:8000", {"model.base_url": "http://127.0.0.1:8000"}),
    "api_key": ("tml-a-key", {"model.api_key": "tml-a-key"}),
    "start_from_checkpoint": ("./runs/sft", {"model.start_from": "./runs/sft"}),
    "num_train_problems": ("100", {"env.kwargs.num_train_problems": 100}),
    "complexity_range": ("[1, 2]", {"env.kwargs.complexity": [1, 2]}),
    "reward_type": ("correct", {"reward.type": "correct"}),
    "boxed_weight": ("0.4", {"reward.kwargs.boxed_weight": 0.4}),
    "correct_weight": ("0.6", {"reward.kwargs.correct_weight": 0.6}),
    "seed": ("5", {"seed": 5}),
    "mode": ("sft", {"training.mode": "sft"}),
    "control": ("random_reward", {"training.control": "random_reward"}),
    "experiment_name": ("mine", {"tracking.experiment": "mine"}),
    "run_name": ("first", {"run.name": "first"}),
    **dict.fromkeys(
        ("num_epochs", "samples_per_epoch", "batch_size", "mini_batch_size", "use_baseline", "normalize_advantages")
    ),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def in_place(place: str, word: str, value: str) -> str:
    """A word in a section, as YAML."""
    lines = [*([] if not place else place.split(".")), word]
    return "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(lines))[:-1] + f" {value}\n"


# --- what words mean ---------------------------------------------------------------------------------------------


def test_every_word_of_the_table_is_tried_here_and_sets_keys_that_exist() -> None:
    assert set(MEANS) == set(ALIASES_BY_WORD) and len(ALIASES_BY_WORD) == len(ALIASES)
    assert all(is_ours(full_key(key)) for spelling in ALIASES for key in spelling.key.split(", "))
    assert all(spelling.meaning for spelling in ALIASES)


@pytest.mark.parametrize("word", [word for word, means in MEANS.items() if means])
def test_a_word_sets_our_key_from_a_file_and_from_the_command_line(word: str) -> None:
    """In every section where it is understood, and with its origin kept."""
    value, expected = MEANS[word] or ("", {})
    places = ("",) if ALIASES_BY_WORD[word].only_at_top else PLACES
    for place in places:
        typed = f"{place}.{word}" if place else word
        if is_ours(typed) or full_key(typed) != typed:
            continue
        Path("file.yaml").write_text(in_place(place, word, value))
        by_file, by_hand = load(None, "file.yaml"), compose_base("", f"{typed}={value}")
        for key, ours in expected.items():
            for loaded, origin in ((by_file, "file.yaml"), (by_hand, "cli")):
                key = full_key(key)
                got = at(loaded.values, key)
                assert got == ours and isinstance(got, bool) == isinstance(ours, bool), (typed, got)
                assert at(loaded.raw, key) == ours
                assert loaded.origin[key] == origin
                assert key == typed or loaded.typed[key] == typed
        assert full_key(typed) in map(full_key, expected) or typed not in by_hand.origin


def test_ratios_become_distances_without_the_dust_of_floating_point() -> None:
    """1 - 0.8 is 0.19999999999999996 there; what is written down is 0.2."""
    loaded = compose_base("", "ppo_clip_low=0.8", "ppo_clip_high=1.2")
    assert repr(loaded.values["algorithm"]) == "{'loss': {'clip_low': 0.2, 'clip_high': 0.2}}"
    assert config("", "clip_low_threshold=0.7", "epsilon_high=0.3").algorithm.loss.clip_low == 0.3


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("ppo_clip_low=1.2", "a ratio from 0 to 1"),
        ("ppo_clip_high=0.2", "a ratio of at least 1"),
        ("cliprange=wide", "a number"),
        ("epsilon=true", "a number"),
        ("ppo_clip_low=nan", "a ratio"),
        ("batch_size=many", "an integer of at least 1"),
        ("batch_size=0", "an integer of at least 1"),
        ("use_baseline=1", "true or false"),
    ],
)
def test_a_wrong_value_is_reported_under_the_alias_as_typed(word: str, expected: str) -> None:
    text = refusal_of("", word)
    assert text.startswith(f"{word} (from the command line)") and f"expected {expected}" in text


def test_the_schema_names_the_word_as_typed_too() -> None:
    """For a wrong type and for a value that the part itself refuses."""
    text = refusal_of("rlvr_training: {learning_rate: fast}\n")
    assert text.startswith('training.optimizer.learning_rate: "fast" (text) given')
    assert "(from mine.yaml, as rlvr_training.learning_rate)" in text
    text = refusal_of("", "rlvr_training.learning_rate=-1")
    assert "(from the command line, as rlvr_training.learning_rate)" in text and "above 0" in text


def test_sections_of_other_systems_stand_for_ours() -> None:
    Path("mine.yaml").write_text(
        "training_data_generator: {name: rpn_arithmetic, kwargs: {p: 7}}\n"
        "predictive_model: {tokenizer: words, config: {model_type: gpt2}}\n"
        "logging: {tensorboard: true}\n"
        "rlvr_training: {dynamic_sampling: 1, sft: {steps: 5}, optimizer: {warmup_steps: 3}, evaluation: {tasks: 9}}\n"
        "rlvr: {rollout: {top_k: 4}, reward: {type: boxed}, algorithm_config: {clip_high: 0.3}}\n"
    )
    got = build_config(load(None, "mine.yaml"), pytest.fail)
    assert got.env.kwargs == {"p": 7} and got.model.config == {"model_type": "gpt2"} and got.tracking.tensorboard
    assert (got.training.dynamic_sampling, got.training.optimizer.warmup_steps) == (1, 3)
    assert (got.sft.steps, got.evaluation.tasks) == (5, 9)
    assert (got.rollout.top_k, got.reward.type, got.algorithm.loss.clip_high) == (4, "boxed", 0.3)
    assert set(SECTIONS) >= {"rlvr_training", "training_data_generator", "predictive_model", "logging", "rlvr"}


def test_an_unknown_word_of_such_a_section_is_named_in_full_with_the_nearest() -> None:
    assert refusal_of("rlvr_training: {clip_rang: 0.1}\n") == (
        "unknown key rlvr_training.clip_rang (from mine.yaml): did you mean rlvr_training.clip_range?"
    )
    assert "known there: experiment, mlflow" in refusal_of("logging: {zzz: 1}\n")
    assert "expected a section" in refusal_of("rlvr: ppo\n")
    assert refusal_of("", "sft.cliprange=0.1").startswith("unknown key sft.cliprange (from the command line)")


def test_empty_sections_are_none() -> None:
    assert config("logging: {}\nrlvr_training:\nrlvr: null\n") == config()
    got = config(
        "rlvr_training: {sft: {}, evaluation: null}\nrlvr: {client: local, reward: {kwargs: {}}}\nboxed_weight: 1\n"
    )
    assert got.reward.kwargs == {"boxed_weight": 1} and got.client.name == "local"


def test_a_written_config_composes_to_the_same_and_hides_environment_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RLVR_TEST_STORE", "http://user:hunter2@host")
    text = (
        "logging: {mlflow: true, mlflow_uri: '${oc.env:RLVR_TEST_STORE}'}\nexperiment_name: '${logging.mlflow_uri}'\n"
    )
    loaded = compose_base(text + "run_name: '${now:%H}'\n", "clip_range=0.1")
    assert loaded.timed == ("run.name",)
    stored = dump(resolved_values(build_config(loaded), loaded))
    assert "hunter2" not in stored and "experiment: ${tracking.mlflow_uri}" in stored
    Path("resolved.yaml").write_text(stored)
    again = load(None, "resolved.yaml")
    assert build_config(again) == build_config(loaded) and again.typed == {}
    clash = refusal_of(text + "tracking: {mlflow_uri: elsewhere}\n")
    assert "hunter2" not in clash and "logging.mlflow_uri=${oc.env:RLVR_TEST_STORE} (from mine.yaml)" in clash


# --- which of two counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words", "names"),
    [
        ("max_steps: 3\ntraining: {steps: 4}", [], ["max_steps=3 (from mine.yaml)", "training.steps=4 (from"]),
        ("", ["max_steps=3", "num_iterations=4"], ["max_steps=3 (from the command line)", "num_iterations=4"]),
        ("cliprange: 0.2\nalgorithm: {clip_high: 0.3}\n", [], ["cliprange=0.2", "algorithm.clip_high=0.3"]),
        ("batch_size: 64\nrlvr_training: {batch_size: 32}\n", [], ["batch_size=64", "rlvr_training.batch_size=32"]),
        ("batch_size: 64\nprompts_per_step: 9\n", [], ["batch_size=8", "prompts_per_step=9"]),
        ("training: {seed: 1}\nseed: 2\n", [], ["training.seed=1", "seed=2"]),
        ("mask_truncated: true\nalgorithm: {mask_truncated: false}\n", [], ["mask_truncated=true", "=false"]),
    ],
)  # fmt: skip
def test_two_spellings_that_disagree_are_an_error_that_names_both(
    text: str, words: list[str], names: list[str]
) -> None:
    said = refusal_of(text, *words)
    assert "disagree" in said and all(name in said for name in names), said


def test_two_spellings_that_agree_are_fine() -> None:
    assert config("max_steps: 3\ntraining: {steps: 3}\nepsilon: 0.2\ncliprange: 0.20\n").training.steps == 3


def test_the_command_line_overrides_a_file_whatever_the_spelling() -> None:
    text = "rlvr_training: {max_steps: 3, cliprange: 0.2, num_generations: 4}\n"
    got = config(text, "training.steps=5", "epsilon_high=0.3", "training.group_size=2")
    assert (got.training.steps, got.algorithm.loss.clip_low, got.algorithm.loss.clip_high) == (5, 0.2, 0.3)
    assert got.training.group_size == 2
    assert config("training: {steps: 4}\n", "max_steps=5").training.steps == 5


def test_null_takes_a_word_back() -> None:
    text = "rlvr_training: {cliprange: 0.1, max_steps: 3}\ntraining: {steps: 4}\n"
    got = config(text, "rlvr_training.cliprange=null", "rlvr_training.max_steps=null")
    assert got.algorithm.loss.clip_low is None and got.training.steps == 4
    assert config("rlvr_training: {cliprange: 0.1}\n", "epsilon=null").algorithm.loss.clip_low is None


def test_a_users_file_overrides_a_shipped_one_whatever_the_spelling() -> None:
    Path("mine.yaml").write_text("defaults: [train_rlvr_test]\nmax_steps: 3\nprompts_per_step: 2\n")
    got = build_config(load(None, "mine.yaml")).training
    assert (got.steps, got.prompts_per_step, got.num_substeps) == (3, 2, 1)  # 16 answers make one update


# --- worked out from several -------------------------------------------------------------------------------------


def test_epochs_and_batches_become_steps_prompts_and_minibatches() -> None:
    """2 epochs x 640 samples / 64 answers a step = 20 steps; 64 / 16 answers to a prompt = 4; 64 / 32 = 2 updates."""
    text = "rlvr_training: {num_epochs: 2, samples_per_epoch: 640, batch_size: 64, mini_batch_size: 32}\n"
    got = config(text, "num_generations=16").training
    assert (got.steps, got.prompts_per_step, got.group_size, got.num_substeps) == (20, 4, 16, 2)
    assert config(text).training.prompts_per_step == 8  # 64 / 8, the default group


def test_without_a_batch_size_the_step_keeps_our_setting() -> None:
    """3 x 80 / (5 x 8) = 6 steps; 40 / 20 = 2."""
    got = config(
        "training: {prompts_per_step: 5, num_epochs: 3, samples_per_epoch: 80, mini_batch_size: 20}\n"
    ).training
    assert (got.steps, got.prompts_per_step, got.num_substeps) == (6, 5, 2)


def test_our_own_key_on_the_command_line_wins_over_values_derived_from_files() -> None:
    text = "rlvr_training: {num_epochs: 2, samples_per_epoch: 640, batch_size: 64, mini_batch_size: 32}\n"
    assert config(text, "training.steps=3").training.steps == 3
    assert config(text, "training.num_substeps=1").training.num_substeps == 1
    got = config(text, "prompts_per_step=4").training  # 32 answers a step: 1280 / 32, 32 / 32
    assert (got.steps, got.prompts_per_step, got.num_substeps) == (40, 4, 1)
    assert config(text, "rlvr_training.num_epochs=1").training.steps == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["batch_size=30"],
            ["batch_size=30 (from the", "training.group_size=8", "30 is not a multiple of 8"],
        ),
        (["batch_size=64", "num_epochs=1", "samples_per_epoch=100"], ["num_epochs=1", "100 is not a multiple of 64"]),
        (["batch_size=64", "mini_batch_size=48"], ["mini_batch_size=48", "64 is not a multiple of 48"]),
        (["num_epochs=2"], ["num_epochs=2", "needs samples_per_epoch"]),
        (["samples_per_epoch=2"], ["samples_per_epoch=2", "needs num_epochs"]),
    ],
)
def test_sizes_that_do_not_divide_say_which_numbers(words: list[str], said: list[str]) -> None:
    text = refusal_of("", *words)
    assert all(part in text for part in said), text


@pytest.mark.parametrize(
    ("switches", "advantage"),
    [
        ("normalize_advantages: true", "batch_normalized"),
        ("use_baseline: true\nnormalize_advantages: true", "batch_normalized"),
        ("use_baseline: true", "ema"),
        ("use_baseline: true\nnormalize_advantages: false", "ema"),
        ("use_baseline: false\nnormalize_advantages: false", "raw"),
        ("normalize_advantages: false", "ema"),
    ],
)
def test_two_switches_choose_the_advantage(switches: str, advantage: str) -> None:
    assert config(f"algorithm: {{name: reinforce}}\n{switches}\n").algorithm.advantage.name == advantage


# --- groups and interpolation ------------------------------------------------------------------------------------


def test_a_group_that_does_not_exist_lists_those_that_do() -> None:
    with pytest.raises(ValueError, match="unknown option 'rlvr_tiny' of group 'training'") as caught:
        load("train_rlvr_test", None, ["training@rlvr_training=rlvr_tiny"])
    assert "rlvr_large, rlvr_small, rlvr_test" in str(caught.value)
    with pytest.raises(ValueError, match="there are: console_logger, mlflow_logger, tensorboard_logger"):
        load("train_rlvr_test", None, ["logging=wandb"])


def test_a_circular_interpolation_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"experiment_name.*mine\.yaml.*circular interpolation"):
        compose_base("experiment_name: ${run_name}\nrun_name: ${experiment_name}\n")


def test_epsilon_beside_epsilon_high_is_the_lower_side() -> None:
    """The usual asymmetric clip in TRL's words, on the command line, in a file, and in both."""
    for text, words in (
        ("", ("epsilon=0.1", "epsilon_high=0.28")),
        ("epsilon: 0.1\nepsilon_high: 0.28\n", ()),
        ("epsilon_high: 0.28\n", ("epsilon=0.1",)),
    ):
        got = config(text, *words).algorithm
        assert (got.loss.clip_low, got.loss.clip_high) == (0.1, 0.28)
    assert "disagree" in refusal_of("", "cliprange=0.1", "epsilon_high=0.28")
