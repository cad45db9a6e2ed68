"""Words of TRL's GRPOConfig and of verl's config: each is translated, or refused with what to do instead."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.terms.entropy import Entropy
from rlvr.algorithms.terms.kl import Kl
from rlvr.config import load
from rlvr.config.aliases import ALIASES_BY_WORD, find_alias, is_ours
from rlvr.config.build_config import build_config
from rlvr.config.choices import full_key
from rlvr.config.foreign_words import FOREIGN, TRL, VERL
from tests.kit.composing import BASE, compose_base, refusal_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with base.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(BASE)
    return tmp_path


def read_words(*words: str) -> dict[str, Any]:
    """What words of the command line make of our keys, those of the base config left out."""
    before, after = compose_base("").values, compose_base("", *words).values
    return dict(changes(before, after))


def changes(before: Any, after: Any, prefix: str = "") -> Any:
    for key, value in after.items():
        old = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict):
            yield from changes(old, value, f"{prefix}{key}.")
        elif value != old:
            yield f"{prefix}{key}", value


def test_the_tables_name_keys_that_exist_and_no_word_twice() -> None:
    assert len(FOREIGN) == len(TRL) + len(VERL) and not set(FOREIGN) & set(ALIASES_BY_WORD)
    assert all(is_ours(full_key(key)) for alias in FOREIGN.values() if alias.targets for key in alias.key.split(", "))
    assert all(alias.meaning for alias in FOREIGN.values()) and not any(map(is_ours, FOREIGN))


@pytest.mark.slow
def test_every_word_of_trl_is_known() -> None:
    pytest.importorskip("trl")
    code = (
        "import dataclasses; from trl import GRPOConfig, ModelConfig; "
        "print(*(f.name for config in (GRPOConfig, ModelConfig) for f in dataclasses.fields(config)))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    fields = told.stdout.split()
    assert len(fields) > 150
    assert [name for name in fields if not is_ours(name) and find_alias(name) is None] == []


POLICY_LOSS = "actor_rollout_ref.actor.policy_loss"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "lr_scheduler_type=cosine warmup_steps=10",
            {"training.optimizer.decay": "cosine", "training.optimizer.warmup_steps": 10},
        ),
        ("warmup_ratio=0.03 max_steps=101", {"training.steps": 101, "training.optimizer.warmup_steps": 0.03}),
        ("warmup_steps=0.1 num_train_epochs=3", {"training.epochs": 3, "training.optimizer.warmup_steps": 0.1}),
        ("max_steps=-1 num_train_epochs=0.5", {"training.epochs": 0.5}),
        ("trainer.total_epochs=15", {"training.epochs": 15}),
        (
            "dataset_name=a/b dataset_config=main dataset_train_split=train_sft dataset_test_split=test_sft",
            {
                "env.kwargs.name": "a/b",
                "env.kwargs.config": "main",
                "env.kwargs.split": "train_sft",
                "env.kwargs.heldout_split": "test_sft",
            },
        ),
        (
            "data.train_files=[a.parquet,b.parquet] data.val_files=c.parquet data.prompt_key=question",
            {
                "env.kwargs.path": ["a.parquet", "b.parquet"],
                "env.kwargs.heldout_path": "c.parquet",
                "env.kwargs.prompt_field": "question",
            },
        ),
        ("data.filter_overlong_prompts=true data.truncation=error", {"training.long_prompts": "filter"}),
        ("data.truncation=error", {"training.long_prompts": "error"}),
        ("data.filter_overlong_prompts=false data.truncation=left", {"training.long_prompts": "truncate_left"}),
        (
            "adam_beta2=0.99 weight_decay=0.1 max_grad_norm=0.2",
            {
                "training.optimizer.beta2": 0.99,
                "training.optimizer.weight_decay": 0.1,
                "training.optimizer.grad_clip": 0.2,
            },
        ),
        ("beta=0.04", {"algorithm.kl_coef": 0.04, "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"}),
        (
            "beta=0.04 algorithm.kl_estimator=k1",
            {"algorithm.kl_coef": 0.04, "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k1"},
        ),
        ("beta=0.0", {"algorithm.kl_coef": 0.0}),
        (
            "loss_type=dr_grpo scale_rewards=none",
            {"algorithm.reduction": "constant", "algorithm.advantage": "group_mean"},
        ),
        (
            "loss_type=grpo scale_rewards=true",
            {"algorithm.reduction": "sequence_mean", "algorithm.advantage": "group_normalized"},
        ),
        ("multi_objective_aggregation=normalize_then_sum", {"algorithm.advantage": "reward_normalized"}),
        ("multi_objective_aggregation=sum_then_normalize", {}),
        (
            "vllm_importance_sampling_correction=true",
            {"algorithm.importance_mode": "sequence_mask", "algorithm.importance_cap": 3.0},
        ),
        (
            "vllm_importance_sampling_mode=token_truncate vllm_importance_sampling_clip_min=0.5",
            {
                "algorithm.importance_mode": "token_truncate",
                "algorithm.importance_cap": 3.0,
                "algorithm.importance_floor": 0.5,
            },
        ),
        (
            "vllm_importance_sampling_clip_max=2",
            {"algorithm.importance_mode": "sequence_mask", "algorithm.importance_cap": 2},
        ),
        (
            "vllm_importance_sampling_cap=2 algorithm.importance_mode=token_mask",
            {"algorithm.importance_mode": "token_mask", "algorithm.importance_cap": 2},
        ),
        ("vllm_importance_sampling_correction=false vllm_importance_sampling_cap=2", {}),
        (
            "algorithm.rollout_correction.rollout_is=token",
            {"algorithm.importance_mode": "token_truncate", "algorithm.importance_cap": 2.0},
        ),
        (
            "algorithm.rollout_correction.rollout_is=sequence "
            "algorithm.rollout_correction.rollout_is_threshold=0.5_5.0",
            {
                "algorithm.importance_mode": "sequence_mask",
                "algorithm.importance_cap": 5.0,
                "algorithm.importance_floor": 0.5,
            },
        ),
        (
            "algorithm.rollout_correction.rollout_is=null algorithm.rollout_correction.rollout_is_threshold=2.0 "
            "algorithm.rollout_correction.rollout_rs=null algorithm.rollout_correction.bypass_mode=false",
            {},
        ),
        ("algorithm.adv_estimator=gdpo", {"algorithm.advantage": "reward_normalized"}),
        (
            "loss_type=sapo sapo_temperature_pos=1.5 sapo_temperature_neg=2",
            {
                "algorithm.loss": "sapo",
                "algorithm.reduction": "sequence_mean",
                "algorithm.loss.positive_temperature": 1.5,
                "algorithm.loss.negative_temperature": 2,
            },
        ),
        (
            f"{POLICY_LOSS}.loss_mode=sapo actor_rollout_ref.actor.tau_neg=2.0",
            {
                "algorithm.loss": "sapo",
                "algorithm.reduction": "sequence_mean",
                "algorithm.loss.negative_temperature": 2.0,
            },
        ),
        (
            "per_device_train_batch_size=8 gradient_accumulation_steps=4 num_generations=8",
            {"training.prompts_per_step": 4, "training.group_size": 8},
        ),
        ("bf16=true use_cpu=true", {"model.dtype": "bfloat16", "model.device": "cpu"}),
        ("bf16=false report_to=none use_vllm=false num_train_epochs=null push_to_hub=false", {}),
        ("report_to=[mlflow,tensorboard]", {"tracking.mlflow": True, "tracking.tensorboard": True}),
        ("report_to=wandb project=sums", {"tracking.wandb": True, "tracking.experiment": "sums"}),
        ("report_to=[none]", {}),
        ("lora_r=16 lora_alpha=32", {"model.lora.rank": 16, "model.lora.alpha": 32}),
        ("lora_r=16 lora_target_modules=all-linear lora_dropout=0.0 load_in_4bit=false", {"model.lora.rank": 16}),
        ("lora_target_modules=[q_proj,v_proj]", {"model.lora.targets": ["q_proj", "v_proj"]}),
        ("lora_target_modules=q_proj", {"model.lora.targets": ["q_proj"]}),
        ("dtype=bfloat16 model_revision=main bnb_4bit_quant_type=nf4 fp16=false", {"model.dtype": "bfloat16"}),
        ("reward_model_name_or_path=./rm", {"reward.type": "classifier", "reward.kwargs.model": "./rm"}),
        ("save_steps=50 eval_steps=10 logging_steps=1", {"run.checkpoint_every": 50, "evaluation.every": 10}),
        (
            "data.train_batch_size=64 actor_rollout_ref.rollout.n=5 actor_rollout_ref.actor.ppo_mini_batch_size=32",
            {"training.prompts_per_step": 64, "training.group_size": 5, "training.num_substeps": 2},
        ),
        (
            "load_best_model_at_end=true greater_is_better=true early_stopping_patience=5 eval_steps=10",
            {"evaluation.report": "best", "training.patience": 5, "evaluation.every": 10},
        ),
        ("load_best_model_at_end=false", {}),
        (
            "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.002",
            {"algorithm.kl_coef": 0.002, "algorithm.kl_in": "loss", "algorithm.kl_estimator": "k3"},
        ),
        ("actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.kl_loss_coef=0.002", {}),
        (f"{POLICY_LOSS}.loss_mode=clip_cov", {"algorithm.clip_cov_ratio": 0.0002}),
        (
            f"{POLICY_LOSS}.loss_mode=clip_cov {POLICY_LOSS}.clip_cov_ratio=0.001 {POLICY_LOSS}.clip_cov_lb=0.5 "
            f"{POLICY_LOSS}.clip_cov_ub=9",
            {"algorithm.clip_cov_ratio": 0.001, "algorithm.clip_cov_lb": 0.5, "algorithm.clip_cov_ub": 9},
        ),
        (f"{POLICY_LOSS}.loss_mode=vanilla {POLICY_LOSS}.clip_cov_ratio=0.001", {}),
        (
            "algorithm.adv_estimator=grpo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
            {"algorithm.advantage": "group_normalized", "algorithm.reduction": "sequence_mean"},
        ),
        (
            "algorithm.adv_estimator=reinforce_plus_plus actor_rollout_ref.actor.loss_agg_mode=token-mean",
            {"algorithm.advantage": "token_normalized", "algorithm.reduction": "token_mean"},
        ),
        (
            "algorithm.adv_estimator=reinforce_plus_plus_baseline",
            {"algorithm.advantage": "group_mean_token_normalized"},
        ),
        (
            "actor_rollout_ref.actor.clip_ratio=0.2 actor_rollout_ref.actor.clip_ratio_c=3.0",
            {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.2, "algorithm.dual_clip": 3.0},
        ),
        (
            "epsilon=0.2 epsilon_high=0.28 delta=1.5",
            {"algorithm.clip_low": 0.2, "algorithm.clip_high": 0.28, "algorithm.dual_clip": 1.5},
        ),
        ("advantage_estimator=reinforce", {"algorithm.advantage": "token_normalized"}),
        ("advantage_estimator=reinforce_baseline", {"algorithm.advantage": "group_mean_token_normalized"}),
        (
            "algorithm.adv_estimator=gae algorithm.gamma=0.99 algorithm.lam=1.0 trainer.critic_warmup=3 "
            "critic.optim.lr=1e-5 critic.cliprange_value=0.5",
            {
                "algorithm.advantage": "gae",
                "algorithm.gamma": 0.99,
                "algorithm.gae_lambda": 1.0,
                "training.critic.warmup_steps": 3,
                "training.critic.optimizer.learning_rate": 1e-5,
                "training.critic.value_clip": 0.5,
            },
        ),
        (
            "trainer.test_freq=5 trainer.save_freq=-1 trainer.logger=[console,wandb] trainer.project_name=sums",
            {"evaluation.every": 5, "tracking.wandb": True, "tracking.experiment": "sums"},
        ),
    ],
)
def test_a_word_becomes_our_key(words: str, expected: dict[str, Any]) -> None:
    assert read_words(*words.split()) == {full_key(key): value for key, value in expected.items()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("use_vllm=true", ["use_vllm=true (from the command line): sampling is built in"]),
        ("lora_dropout=0.05", ["log-probs", "leave it out"]),
        ("num_train_epochs=3 max_steps=7", ["max_steps=7", "num_train_epochs=3", "leave one of them out"]),
        ("data.truncation=middle", ["expected left or error"]),
        ("report_to=comet_ml", ["'comet_ml' is not supported", "wandb, mlflow and tensorboard"]),
        ("trainer.logger=[console,swanlab]", ["'swanlab' is not supported"]),
        ("push_to_hub=true", ["rlvr push runs/NAME OWNER/REPO"]),
        ("hub_model_id=me/it", ["rlvr push runs/NAME OWNER/REPO"]),
        ("hub_token=hf_x", ["hf auth login", "HF_TOKEN"]),
        ("load_in_4bit=true", ["kernels for quantized ones yet", "model.lora.rank"]),
        ("dtype=float16", ["float16 needs a scaled loss", "bf16=true"]),
        ("lora_dropout=0.1", ["leave it out"]),
        ("use_rslora=true", ["plain LoRA"]),
        ("reward_funcs=./model", ["reward.type=classifier", "reward.kwargs.model=FOLDER"]),
        ("reward_funcs=mine:close", ["give reward.type=mine:close", "TRL's arguments"]),
        ("reward_funcs=[a:f,b:g]", ["reward.type=composite", "reward.kwargs.rewards=[{name: a:f}, {name: b:g}]"]),
        ("lr=1e-5", ["give training.optimizer.learning_rate, or learning_rate"]),
        ("lora_r=0", ["rank=0", "model.lora=null trains all weights"]),
        ("reward_model_name_or_path=./m reward.type=math", ["disagree"]),
        ("reward_model.model.path=./m", ["reward.type=classifier"]),
        ("loss_type=cispo", ["algorithm.name=cispo"]),
        ("importance_sampling_level=sequence", ["algorithm.name=gspo"]),
        ("warmup_ratio=3", ["expected a share"]),
        ("warmup_ratio=some", ["expected a share"]),
        ("beta=high", ["beta=high", "expected a number"]),
        ("gradient_accumulation_steps=4", ["per_device_train_batch_size"]),
        ("per_device_train_batch_size=9 num_generations=8", ["not a multiple of 8"]),
        ("bf16=yes-please", ["bf16", "expected true or false"]),
        ("fp16=true", ["float16 needs a scaled loss", "model.dtype"]),
        ("lr_scheduler_type=polynomial", ["expected linear, cosine"]),
        ("actor_rollout_ref.actor.kl_loss_coef=0.1", ["use_kl_loss=true"]),
        (f"{POLICY_LOSS}.clip_cov_ratio=0.001", ["loss_mode=clip_cov", "algorithm.clip_cov_ratio"]),
        ("loss_type=dapo sapo_temperature_pos=2", ["sapo_temperature_pos", "no positive_temperature"]),
        ("vllm_importance_sampling_mode=token", ["known: token_truncate, token_mask"]),
        ("vllm_importance_sampling_correction=maybe", ["expected true or false"]),
        (
            "algorithm.rollout_correction.rollout_is=token algorithm.rollout_correction.rollout_is_threshold=low_5",
            ["rollout_is_threshold=low_5", "expected a number, or two as in 0.5_5.0"],
        ),
        ("algorithm.rollout_correction.rollout_rs=seq_mean_k1", ["rollout_is_threshold=LOW_HIGH"]),
        ("algorithm.gdpo_reward_keys=[a,b]", ["reward.type=composite"]),
        ("loss_type=sapo epsilon=0.2", ["epsilon", "the loss sapo has no clip_high"]),
        (
            f"{POLICY_LOSS}.loss_mode=sapo actor_rollout_ref.actor.loss_agg_mode=token-mean",
            ["loss_mode=sapo", "loss_agg_mode=token-mean", "disagree"],
        ),
        (f"{POLICY_LOSS}.loss_mode=kl_cov", ["expected vanilla, clip_cov or sapo", "no gradient in the first update"]),
        ("actor_rollout_ref.rollout.name=vllm", ["sampling is built in"]),
        ("actor_rollout_ref.rollout.m=5", ["a section of verl's", "actor_rollout_ref.rollout.n"]),
        ("data.nothing_like_this_at_all=1", ["a section of verl's"]),
        ("trainer.n_gpus_per_node=8", ["one process trains on one device"]),
        ("critic.optim.lr=1e-5", ["critic.optim.lr", "takes no critic"]),
        ("critic.model.path=./m", ["the critic begins with the policy's weights"]),
        (
            "algorithm.adv_estimator=remax",
            ["expected grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo or gae"],
        ),
        ("data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=48", ["not a multiple of 48"]),
        ("max_steps=7 trainer.total_training_steps=9", ["disagree"]),
    ],
)
def test_a_word_without_a_counterpart_says_what_to_do(words: str, said: list[str]) -> None:
    text = refusal_of("", *words.split())
    assert all(part in text for part in said), text


@pytest.mark.parametrize("word", [alias.word for alias in FOREIGN.values() if not alias.targets])
def test_a_refused_word_gives_its_remedy_and_passes_where_it_is_off(word: str) -> None:
    text = refusal_of("", f"{word}=something-else")
    assert text.startswith(f"{word}=something-else (from the command line)")
    if word != "importance_sampling_level":
        assert FOREIGN[word].meaning in text
        assert read_words(f"{word}=null") == {} == read_words(f"{word}=false")


def test_a_published_verl_command_trains_what_it_says() -> None:
    """The keys of verl's GSM8K LoRA script of `docs/start/pretrained.md`, those of one GPU."""
    words = (
        "algorithm.adv_estimator=grpo data.train_batch_size=64 data.max_prompt_length=512 "
        "data.max_response_length=1024 "
        "actor_rollout_ref.model.path=./m actor_rollout_ref.model.lora_rank=32 actor_rollout_ref.model.lora_alpha=32 "
        "actor_rollout_ref.actor.optim.lr=3e-5 actor_rollout_ref.model.use_remove_padding=true "
        "actor_rollout_ref.actor.ppo_mini_batch_size=64 actor_rollout_ref.actor.use_kl_loss=true "
        "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
        "actor_rollout_ref.actor.entropy_coeff=0.001 actor_rollout_ref.rollout.n=5 algorithm.use_kl_in_reward=false "
        "trainer.critic_warmup=0 trainer.val_before_train=true trainer.n_gpus_per_node=1 trainer.nnodes=1"
    )
    Path("verl.yaml").write_text("env: {name: rpn_arithmetic}\n")
    built = build_config(load(None, "verl.yaml", words.split()), warn=pytest.fail)
    assert (built.training.prompts_per_step, built.training.group_size, built.training.num_substeps) == (64, 5, 1)
    assert built.algorithm.resolve().terms == (Kl(0.001, "k3", "loss"), Entropy(0.001))
    assert built.model.lora is not None and (built.model.lora.rank, built.model.lora.alpha) == (32, 32)
    assert built.training.optimizer.learning_rate == 3e-5 and built.rollout.max_tokens == 1024


def test_the_page_has_every_word() -> None:
    page = (ROOT / "docs" / "reference" / "coming-from.md").read_text(encoding="utf-8")
    words = {f"`{alias.word}`" for alias in FOREIGN.values()}
    assert not [word for word in words if word not in page] and dataclasses.is_dataclass(TRL[0])
