"""The words of TRL's `GRPOConfig` (1.16), of its `TrainingArguments`, and the usual ones of its scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr.config.alias import Alias, NotSupportedError, SeveralKeys, to_number
from rlvr.config.word_tables import (
    ADAMW,
    BUILT_IN,
    MEMORY,
    NO_LOADER,
    ONE_PROCESS,
    choose,
    refuse,
    replace_by,
    to_share_of_steps,
    words,
)

_DROPOUT = (
    "dropout would give the trainer other log-probs than the sampler, so the ratio of an unchanged policy would not be "
    "1: leave it out"
)
_EVERY_STEP = "every step is in metrics.jsonl and on the console: leave it out"
_FP16 = "float16 needs a scaled loss, which the engine does not have: give bf16=true, or model.dtype=float32"
_PRECISION = "give model.dtype (auto, float32 or bfloat16)"
_PUSH = "push a run when it is done: rlvr push runs/NAME OWNER/REPO [--private]"
_QUANTIZED = (
    "the sampler and the trainer share one copy of the weights, and neither has kernels for quantized ones yet: to "
    "save memory give model.lora.rank and model.dtype=bfloat16"
)
_REDUCTION = "algorithm.reduction"
_TRACKERS = "the trackers are tracking.wandb, tracking.mlflow and tracking.tensorboard"
SCALES = {"group": "group_normalized", "batch": "group_mean_batch_std", "none": "group_mean"}
_VERIFY = (
    "several weighted rewards are reward.type=composite with reward.kwargs.rewards (docs/train/your-own-reward.md)"
)


def _flag(key: Any) -> Callable[[Any], Any]:
    """True sets `key`; False leaves ours as it is."""

    def convert(value: Any) -> Any:
        if not isinstance(value, bool):
            raise ValueError("true or false")
        return key if value else None

    return convert


def _dtype(value: Any) -> Any:
    if value in ("float16", "fp16", "half"):
        raise NotSupportedError(_FP16)
    return value


def _layers(value: Any) -> Any:
    """The layers of an adapter; None for all of them, which is the default here."""
    return None if value == "all-linear" else [value] if isinstance(value, str) else value


def _at_least_0(value: Any) -> Any:
    return value if to_number(value) > 0 else 0.0


def _name_reward(value: Any) -> str:
    """What to write here for the reward functions of TRL, which may be a list."""
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if all(":" in name for name in names) and names:
        parts = ", ".join(f"{{name: {name}}}" for name in names)
        own = f"type={names[0]}" if len(names) == 1 else f"type=composite 'reward.kwargs.rewards=[{parts}]'"
        return f"give reward.{own}; a function may take TRL's arguments"
    return (
        "a function of your own is reward.type=module:function, which may take TRL's arguments; "
        f"{_VERIFY}; a reward model is reward.type=classifier with reward.kwargs.model=FOLDER"
    )


TRL: tuple[Alias, ...] = (
    *refuse("lr", "give training.optimizer.learning_rate, or learning_rate, which is TRL's word for it"),
    # sizes
    *words("generation_batch_size", "~batch_size", "completions of a step: prompts_per_step = this / group_size"),
    *words("per_device_train_batch_size", "~device_batch", "x gradient_accumulation_steps: completions of a step"),
    *words(
        "gradient_accumulation_steps", "~accumulation", "see per_device_train_batch_size; memory is engine.micro_tokens"
    ),
    *refuse("steps_per_generation", "give batch_size and training.num_substeps"),
    *words("num_train_epochs", "training.epochs", "passes over the training tasks; training.steps follows"),
    *words("num_generations_eval", "evaluation.samples", "completions of a held-out task"),
    *refuse("per_device_eval_batch_size eval_accumulation_steps auto_find_batch_size", MEMORY),
    # sampling
    *words("min_p", "rollout.min_p", "leave out tokens below this share of the most likely one's"),
    *refuse("repetition_penalty", "the policy that is trained has no such penalty: leave it out", 1, 1.0),
    *refuse("generation_kwargs cache_implementation", "the settings of sampling are rollout.*"),
    *refuse("chat_template_kwargs", "give prompt.thinking, or prompt.template_arguments (docs/start/models.md)"),
    *refuse(
        "max_tool_calling_iterations", "turns and tools belong to an environment (docs/train/your-own-environment.md)"
    ),
    *refuse("use_vllm", BUILT_IN),
    *refuse(
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
        "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
        "vllm_max_model_length vllm_tensor_parallel_size use_transformers_continuous_batching "
        "transformers_continuous_batching_config use_transformers_paged ds3_gather_for_generation",
        BUILT_IN,
    ),
    *words(
        "vllm_importance_sampling_correction",
        "~importance",
        "true is TRL's correction, sequence_mask with a cap of 3 where its other words say nothing else; false is none",
    ),
    *words("vllm_importance_sampling_mode", "algorithm.importance_mode", "the same four words"),
    *words(
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        "algorithm.importance_cap",
        "the highest weight, 3 if not given",
    ),
    *words("vllm_importance_sampling_clip_min", "algorithm.importance_floor", "the lowest weight"),
    # the loss
    *words("beta", "~beta", "algorithm.kl_coef, with algorithm.kl_in=loss and kl_estimator=k3 as in TRL"),
    *words(
        "loss_type",
        "algorithm.reduction algorithm.loss",
        "dapo and bnpo are token_mean, grpo sequence_mean, dr_grpo constant; sapo is sequence_mean and the loss sapo",
        choose(
            "expected dapo, bnpo, grpo, dr_grpo or sapo; for cispo and gspo give algorithm.name=cispo or gspo",
            dapo=SeveralKeys({_REDUCTION: "token_mean"}),
            bnpo=SeveralKeys({_REDUCTION: "token_mean"}),
            grpo=SeveralKeys({_REDUCTION: "sequence_mean"}),
            dr_grpo=SeveralKeys({_REDUCTION: "constant"}),
            sapo=SeveralKeys({_REDUCTION: "sequence_mean", "algorithm.loss": "sapo"}),
        ),
    ),
    *words("sapo_temperature_pos", "algorithm.loss.positive_temperature", "of sapo, where the advantage is above 0"),
    *words("sapo_temperature_neg", "algorithm.loss.negative_temperature", "of sapo, at other advantages"),
    *words(
        "scale_rewards",
        "algorithm.advantage",
        "group is group_normalized, batch is group_mean_batch_std, none is group_mean",
        choose(**SCALES, true=SCALES["group"], false=SCALES["none"]),
    ),
    *words(
        "importance_sampling_level",
        "",
        "token; for sequence give algorithm.name=gspo",
        choose("for sequence give algorithm.name=gspo", token=None),
    ),
    *words("delta", "algorithm.dual_clip", "the largest ratio, at least 1 + epsilon_high: dual clip"),
    *refuse(
        "vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg",
        "there is no vespo; a soft clip is algorithm.name=sapo",
    ),
    *replace_by("reward_func reward_funcs", _name_reward),
    *words("reward_model_name_or_path", "~reward_model", "the reward classifier, with this model"),
    *refuse("reward_weights", _VERIFY),
    *words(
        "multi_objective_aggregation",
        "algorithm.advantage",
        "sum_then_normalize changes nothing, normalize_then_sum is reward_normalized (GDPO)",
        choose(sum_then_normalize=None, normalize_then_sum="reward_normalized"),
    ),
    *refuse(
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps", "the reference of a KL stays the first policy"
    ),
    *refuse("top_entropy_quantile off_policy_mask_threshold", "every token of a completion is trained on", 1, 1.0),
    *refuse(
        "use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target",
        "the entropy bonus has one weight: algorithm.entropy_coef",
    ),
    *refuse("use_bias_correction_kl", "give algorithm.kl_estimator and algorithm.kl_in (docs/train/algorithms.md)"),
    *refuse("router_aux_loss_coef", "a mixture of experts is trained without that loss: leave it out"),
    # the optimizer
    *words(
        "lr_scheduler_type",
        f"{ADAMW}.decay",
        "linear, cosine or constant; the last rate is final_rate",
        choose(linear="linear", cosine="cosine", constant="constant", constant_with_warmup="constant"),
    ),
    *words("warmup_steps", f"{ADAMW}.warmup_steps", "steps of linear warm-up; below 1 a share of the steps"),
    *words(
        "warmup_ratio", f"{ADAMW}.warmup_steps", "steps of linear warm-up, as a share of the steps", to_share_of_steps
    ),
    *words("weight_decay", f"{ADAMW}.weight_decay", "AdamW's"),
    *words("adam_beta1", f"{ADAMW}.beta1", "AdamW's"),
    *words("adam_beta2", f"{ADAMW}.beta2", "AdamW's"),
    *words("adam_epsilon", f"{ADAMW}.eps", "AdamW's"),
    *words("max_grad_norm", f"{ADAMW}.grad_clip", "largest norm of the gradient", _at_least_0),
    *refuse(
        "optim",
        "the optimizer is AdamW, or Muon with training.optimizer.name=muon: leave it out",
        "adamw_torch",
        "adamw_torch_fused",
    ),
    *refuse("lr_scheduler_kwargs", "give training.optimizer.final_rate"),
    *refuse("optim_args optim_target_modules", "give training.optimizer.*"),
    *refuse("label_smoothing_factor neftune_noise_alpha", "there is no such change of the loss: leave it out"),
    # the model
    *words("model_name_or_path", "model.name", "a model's folder or hub name"),
    *words("torch_dtype dtype", "model.dtype", "auto, float32 or bfloat16", _dtype),
    *words("bf16", "model.dtype", "true is bfloat16", _flag("bfloat16")),
    *words("use_cpu", "model.device", "true is cpu", _flag("cpu")),
    *words("gradient_checkpointing", "engine.gradient_checkpointing", "less memory, more time"),
    *refuse(
        "gradient_checkpointing_kwargs activation_checkpointing activation_checkpointing_kwargs",
        "give engine.gradient_checkpointing=true or false",
    ),
    *words("lora_r", "model.lora.rank", "train an adapter of this rank"),
    *words("lora_alpha", "model.lora.alpha", "the adapter's alpha"),
    *words("lora_target_modules", "model.lora.targets", "the layers it adapts, by name", _layers),
    *refuse("lora_dropout", _DROPOUT, 0.0),
    *refuse("disable_dropout", "dropout is never used in training: leave it out", True),
    *refuse("use_rslora use_dora", "an adapter is plain LoRA, scaled by alpha / rank: leave it out"),
    *refuse(
        "lora_modules_to_save lora_target_parameters lora_task_type",
        "an adapter is of linear layers: give model.lora.targets",
        "CAUSAL_LM",
    ),
    *refuse(
        "load_in_4bit load_in_8bit bnb_4bit_quant_type bnb_4bit_quant_storage use_bnb_nested_quant", _QUANTIZED, "nf4"
    ),
    *refuse("fp16 fp16_full_eval", _FP16),
    *refuse("tf32 bf16_full_eval cast_lm_head_to_fp32", _PRECISION),
    *refuse("model_revision", "download that revision, and give its folder as model.name", "main"),
    *refuse("use_peft", "give model.lora.rank", True),
    *refuse("model_init_kwargs", "the settings of a model are model.*"),
    *refuse("trust_remote_code", "the code of a model's folder is never run: leave it out"),
    *refuse("attn_implementation", "the engine chooses attention by a probe when it loads a model: leave it out"),
    *refuse(
        "use_liger_kernel liger_kernel_config torch_compile torch_compile_backend torch_compile_mode use_cache",
        "the engine has paths of its own, and no such switch: leave it out",
    ),
    # data
    *words("dataset_name", "env.kwargs.name", "a data set of the hub, with --config-name=dataset"),
    *words("dataset_config", "env.kwargs.config", "its configuration"),
    *words("dataset_train_split", "env.kwargs.split", "the split that is trained on"),
    *words("dataset_test_split", "env.kwargs.heldout_split", "the split that is evaluated on"),
    *words("dataset_streaming", "env.kwargs.streaming", "fetch no more rows than env.kwargs.max_rows"),
    *refuse(
        "shuffle_dataset train_sampling_strategy", "tasks are drawn at random by the seed: leave it out", True, "random"
    ),
    *refuse(
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns "
        "label_names length_column_name ignore_data_skip pad_to_multiple_of data_seed",
        NO_LOADER,
        True,
        "auto",
        "length",
    ),
    # evaluation, checkpoints, logs
    *words("eval_steps", "evaluation.every", "steps between interim evaluations"),
    *refuse("eval_strategy", "give evaluation.every (steps between interim evaluations)", "steps"),
    *refuse("eval_on_start do_train do_eval", "a run evaluates before and after training: leave it out", True),
    *refuse(
        "eval_delay do_predict prediction_loss_only include_for_metrics batch_eval_metrics "
        "eval_do_concat_batches eval_use_gather_object",
        "the settings of evaluation are evaluation.*: leave it out",
        True,
    ),
    *words("save_steps", "run.checkpoint_every", "steps between checkpoints"),
    *words("save_total_limit", "run.keep_checkpoints", "checkpoints that are kept"),
    *refuse("save_strategy", "give run.checkpoint_every (steps between checkpoints)", "steps"),
    *refuse(
        "save_only_model enable_jit_checkpoint save_on_each_node",
        "a checkpoint has all that a resume needs: leave it out",
    ),
    *words("load_best_model_at_end", "evaluation.report", "true is best: report the best checkpoint", _flag("best")),
    *refuse(
        "metric_for_best_model greater_is_better", "the best has the highest held-out pass rate: leave it out", True
    ),
    *words("early_stopping_patience", "training.patience", "interim evaluations without a new best beyond noise"),
    *refuse("early_stopping_threshold", "a new best is one standard error above the last: leave it out", 0.0),
    *refuse("output_dir", "give run.root (the folder of all runs) and run.name"),
    *refuse(
        "resume_from_checkpoint restore_callback_states_from_checkpoint",
        "the same command resumes; to start from other weights give model.start_from",
        True,
    ),
    *refuse("push_to_hub hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision", _PUSH, "every_save"),
    *refuse("hub_token", "`rlvr push` reads the token of `hf auth login`, or HF_TOKEN: leave it out"),
    *words("report_to", "~report_to", "wandb, mlflow or tensorboard, or a list of them"),
    *words("project", "tracking.experiment", "the project in Weights & Biases, the experiment in MLflow"),
    *refuse("trackio_space_id trackio_bucket_id trackio_static_space_id", _TRACKERS),
    *refuse(
        "logging_strategy logging_steps logging_first_step logging_nan_inf_filter log_on_each_node disable_tqdm "
        "include_num_input_tokens_seen skip_memory_metrics",
        _EVERY_STEP,
        1,
        True,
        "steps",
    ),
    *refuse("log_level log_level_replica debug", "leave it out: warnings are printed", "passive", "warning"),
    *refuse(
        "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo",
        "completions are in rollouts/ (run.rollouts_per_step), and `rlvr view` shows them: leave it out",
    ),
    # where it runs
    *refuse("full_determinism", "a run repeats to the bit on the same machine: leave it out", True),
    *refuse(
        "accelerator_config parallelism_config ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers "
        "ddp_static_graph ddp_backend ddp_timeout fsdp fsdp_config deepspeed local_rank average_tokens_across_devices "
        "torch_empty_cache_steps",
        ONE_PROCESS,
        -1,
        True,
    ),
)
