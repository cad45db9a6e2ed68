"""Keys that a config sets and that do nothing: an error where typed, one warning where from a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from tests.kit.composing import BASE, compose_base, config, refusal_of, warnings_of


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "word", "why"),
    [
        ("", "ppo_clip_low=0.8 algorithm.name=importance_sampling", "has no clip_low"),
        ("", "target_kl=0.1", "one update a step"),
        ("", "algorithm.kl_in=loss", "kl_coef is not given"),
        ("", "algorithm.kl_estimator=k2", "kl_coef is not given"),
        ("", "algorithm.entropy=exact", "entropy_coef is not given"),
        ("", "algorithm.overlong_penalty=0.5", "overlong_buffer is not given"),
        ("", "baseline_decay=0.9", "the advantage group_mean has no decay, an option of ema"),
        ("", "algorithm.gamma=0.9", "has no gamma, an option of gae"),
        ("", "algorithm.gae_lambda=0.9", "has no gae_lambda, an option of gae"),
        ("", "algorithm.critic_lambda=0.5", "has no critic_lambda, an option of gae"),
        ("", "algorithm.bootstrap_truncated=false", "has no bootstrap_truncated, an option of gae"),
        ("", "training.critic.warmup_steps=2", "takes no critic"),
        ("", "training.critic.optimizer.learning_rate=0.1", "takes no critic"),
        ("", "training.critic.optimizer.momentum=0.9 algorithm.name=ppo_critic", "adamw has no momentum"),
        ("", "experiment_name=x", "neither tracking.mlflow nor tracking.wandb is true"),
        ("", "tracking.wandb_tags=[a]", "tracking.wandb is false"),
        ("", "curriculum.highest=4", "curriculum.by=uniform has no highest, an option of threshold"),
        ("", "tracking.mlflow_uri=x", "tracking.mlflow is false"),
        ("", "algorithm.beta=0.1", "has no beta"),
        ("", "training.dynamic_sampling=1 algorithm.name=reinforce", "keeps every group"),
        ("", "boxed_weight=0.5 reward_type=boxed", "boxed has no such option"),
        ("", "algorithm.accept_above=0.7 algorithm.name=dpo training.completions=given", "the tasks say which"),
        ("", "use_baseline=false normalize_advantages=true", "centres the batch"),
        ("", "env.kwargs.reward=math reward.type=boxed", "reward.type=boxed is given"),
        ("sft: {steps: 3}\n", "learning_rate=0.1 mode=sft", "training.mode is sft"),
    ],
)  # fmt: skip
def test_a_typed_key_without_effect_is_an_error_that_says_why(text: str, word: str, why: str) -> None:
    typed, *rest = word.split()
    said = refusal_of(text, typed, *rest)
    assert said.startswith("no effect in this run: ") and typed.partition("=")[0] in said and why in said, said
    assert said.count(why) == 1


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        ("cliprange: 0.2\nalgorithm: {name: reinforce}\n", "cliprange", "has no clip_low"),
        ("target_kl: 0.1\n", "target_kl", "one update a step"),
        ("reward: {type: boxed, kwargs: {case: ignore}}\n", "reward.kwargs.case", "boxed has no such option"),
        ("reward_type: boxed\nboxed_weight: 0.3\n", "boxed_weight", "boxed has no such option"),
        (
            "training: {dynamic_sampling: 2}\nalgorithm: {name: reinforce}\n",
            "training.dynamic_sampling",
            "keeps every group",
        ),
        ("tracking: {mlflow_uri: x}\n", "tracking.mlflow_uri", "tracking.mlflow is false"),
    ],
)
def test_one_from_a_file_is_one_warning_and_is_left_out(text: str, key: str, why: str) -> None:
    (line,) = warnings_of(text)
    assert line.startswith(f"{key} (from mine.yaml) has no effect in this run: ") and why in line


def test_keys_without_effect_are_removed_from_the_run() -> None:
    got = build_config(
        compose_base("reward_type: boxed\nboxed_weight: 0.3\ntarget_kl: 0.1\n", "algorithm.name=reinforce")
    )
    assert got.reward.kwargs == {} and got.training.target_kl == 0
    assert got.algorithm.resolve().flat.get("clip_low") is None


@pytest.mark.parametrize("key", ["ppo_epochs", "num_substeps"])
def test_a_divergence_limit_stays_where_a_step_has_several_updates(key: str) -> None:
    assert build_config(compose_base("", "target_kl=0.1", f"training.{key}=2")).training.target_kl == 0.1


def test_keys_of_a_shipped_file_are_summed_up_in_one_line() -> None:
    told: list[str] = []
    build_config(load("arithmetic", None, ["mode=sft"]), told.append)
    (line,) = told
    assert line.startswith("of rlvr/configs/arithmetic.yaml, no effect in this run: ") and "training.until" in line
    assert line.count("training.mode is sft") == 1


def test_a_shipped_file_s_reward_is_there_to_be_replaced() -> None:
    warnings: list[str] = []
    build_config(load("dataset", None, ["reward.type=math", "env.kwargs.path=rows.jsonl"]), warnings.append)
    assert warnings == []


def test_options_of_a_shipped_file_s_environment_are_left_out_under_another_one() -> None:
    warnings: list[str] = []
    words = ["env.name=refine", "env.kwargs.inner=small_tasks", "env.kwargs.max_turns=2"]
    got = build_config(load("smollm", None, words), warnings.append)
    assert got.env.kwargs == {"inner": "small_tasks", "max_turns": 2}
    (line,) = warnings
    assert (
        line.startswith("of rlvr/configs/smollm.yaml, no effect in this run: env.kwargs.families (")
        and "refine" in line
    )
    with pytest.raises(ValueError, match=r"env\.kwargs\.families \(.*refine has no such option; it takes: .*inner"):
        build_config(load("smollm", None, [*words, "env.kwargs.families=[sums]"]))
    assert (
        build_config(load("smollm", None, [*words, "env.kwargs.iner=x"])).env.kwargs["iner"] == "x"
    )  # for refine to refuse


def test_an_option_that_no_reward_takes_is_left_for_the_reward_to_refuse() -> None:
    assert config("reward: {type: keyword_contains, kwargs: {keyword: [a]}}\n").reward.kwargs == {"keyword": ["a"]}


def test_a_table_of_logits_needs_no_model_and_says_so_of_one() -> None:
    Path("toy.yaml").write_text("client: mock\nenv: {name: toy}\n")
    assert build_config(load(None, "toy.yaml"), pytest.fail).client.name == "mock"
    with pytest.raises(ValueError, match=r"model\.device \(client=mock"):
        build_config(load(None, "toy.yaml", ["model.device=cpu"]))
    with pytest.raises(ValueError, match="neither name nor config"):
        build_config(load(None, "toy.yaml", ["client=local"]))
    with pytest.raises(ValueError, match="expected local, mock, tinker"):
        build_config(load(None, "toy.yaml", ["client=remote"]))


def test_a_key_typed_at_its_default_turns_off_what_a_file_turned_on() -> None:
    """`training.until=0` without quick looks says what is so anyway; another value would do nothing, and is refused."""
    text = "evaluation: {every: 5}\ntraining: {until: 0.9}\n"
    assert config(text, "training.until=0", "evaluation.every=0").training.until == 0
    assert "training.until (evaluation.every is 0" in refusal_of(text, "training.until=0.8", "evaluation.every=0")


@pytest.mark.parametrize(("algorithm", "cap"), [("grpo", 2.0), ("dpo", None), ("kto", None)])
def test_another_sampler_s_importance_cap_is_not_given_to_a_preference_loss(algorithm: str, cap: float | None) -> None:
    got = config(f"sampler: {{name: vllm, urls: ['http://127.0.0.1:1']}}\nalgorithm: {{name: {algorithm}}}\n")
    assert got.algorithm.resolve().flat.get("importance_cap") == cap
