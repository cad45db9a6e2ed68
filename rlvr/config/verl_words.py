"""The common words of verl's trainer config (0.5)."""

from __future__ import annotations

from rlvr.config.alias import Alias, SeveralKeys, to_number
from rlvr.config.word_tables import (
    ADAMW,
    BUILT_IN,
    MEMORY,
    NO_LOADER,
    ONE_PROCESS,
    choose,
    refuse,
    to_share_of_steps,
    words,
)

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_MICRO = "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu use_dynamic_bsz"


def _under(section: str, aliases: list[Alias]) -> list[Alias]:
    return [Alias(f"{section}.{a.word}", a.targets, a.meaning, a.convert, only_at_top=True) for a in aliases]


VERL: tuple[Alias, ...] = (
    *_under(
        "data",
        [
            *words("train_batch_size gen_batch_size", "training.prompts_per_step", "prompts of a step"),
            *words("max_prompt_length", "training.max_prompt_tokens", "longest prompt, in tokens"),
            *words("max_response_length", "rollout.max_tokens", "longest completion, in tokens"),
            *words("train_files", "env.kwargs.path", "a file, a glob or a list of them, with --config-name=dataset"),
            *words("val_files", "env.kwargs.heldout_path", "the files that are evaluated on"),
            *words("prompt_key", "env.kwargs.prompt_field", "the column of the prompt"),
            *words(
                "filter_overlong_prompts",
                "~filter_long_prompts",
                "true is filter, the default; over data.truncation, as in verl",
                choose(true="filter", false=None),
            ),
            *words(
                "truncation",
                "~truncation",
                "left is truncate_left; error is error",
                choose("expected left or error; give training.long_prompts", left="truncate_left", error="error"),
            ),
            *refuse("shuffle", NO_LOADER, True),
            *refuse("val_batch_size", "give evaluation.tasks"),
        ],
    ),
    *_under(
        "actor_rollout_ref.model",
        [
            *words("path", "model.name", "a model's folder or hub name"),
            *words("lora_rank", "model.lora.rank", "train an adapter of this rank"),
            *words("lora_alpha", "model.lora.alpha", "the adapter's alpha"),
            *refuse("target_modules", "give model.lora.targets", "all-linear"),
            *words("enable_gradient_checkpointing", "engine.gradient_checkpointing", "less memory, more time"),
            *refuse("use_remove_padding", "nothing is padded: leave it out", True),
            *refuse("trust_remote_code", "the code of a model's folder is never run: leave it out"),
        ],
    ),
    *_under(
        _ACTOR,
        [
            *words("optim.lr", f"{ADAMW}.learning_rate", "AdamW's rate"),
            *words(
                "optim.lr_warmup_steps",
                f"{ADAMW}.warmup_steps",
                "steps of linear warm-up",
                lambda value: None if value == -1 else value,
            ),
            *words(
                "optim.lr_warmup_steps_ratio",
                f"{ADAMW}.warmup_steps",
                "warm-up as a share of the steps",
                to_share_of_steps,
            ),
            *words("optim.weight_decay", f"{ADAMW}.weight_decay", "AdamW's"),
            *words("grad_clip", f"{ADAMW}.grad_clip", "largest norm of the gradient"),
            *words(
                "ppo_mini_batch_size",
                "~mini_batch_prompts",
                "prompts of an update: num_substeps is prompts_per_step over it",
            ),
            *words("ppo_epochs", "training.ppo_epochs", "how often a batch is used"),
            *words("clip_ratio", "algorithm.clip_low algorithm.clip_high", "epsilon around 1, both sides", to_number),
            *words("clip_ratio_low", "algorithm.clip_low", "epsilon below 1", to_number),
            *words("clip_ratio_high", "algorithm.clip_high", "epsilon above 1", to_number),
            *words("clip_ratio_c", "algorithm.dual_clip", "dual clip; none if not given (verl: 3)", to_number),
            *words(
                "policy_loss.loss_mode",
                "~loss_mode algorithm.loss algorithm.reduction",
                "vanilla changes nothing, clip_cov is covariance clipping, sapo the loss sapo with sequence_mean",
                choose(
                    "expected vanilla, clip_cov or sapo; instead of gspo and cispo give algorithm.name, instead of "
                    "kl_cov, which has no gradient in the first update with a batch, clip_cov",
                    vanilla=SeveralKeys({"~loss_mode": False}),
                    clip_cov=SeveralKeys({"~loss_mode": True}),
                    sapo=SeveralKeys(
                        {"~loss_mode": False, "algorithm.loss": "sapo", "algorithm.reduction": "sequence_mean"}
                    ),
                ),
            ),
            *words(
                "tau_pos", "algorithm.loss.positive_temperature", "of sapo, where the advantage is above 0", to_number
            ),
            *words("tau_neg", "algorithm.loss.negative_temperature", "of sapo, at other advantages", to_number),
            *words(
                "policy_loss.clip_cov_ratio",
                "~clip_cov_ratio",
                "share of the tokens that are clipped, where loss_mode is clip_cov",
                to_number,
            ),
            *words("policy_loss.clip_cov_lb", "algorithm.clip_cov_lb", "lowest covariance that is clipped", to_number),
            *words("policy_loss.clip_cov_ub", "algorithm.clip_cov_ub", "highest covariance that is clipped", to_number),
            *refuse(
                "policy_loss.kl_cov_ratio policy_loss.ppo_kl_coef",
                "KL-Cov has no gradient in the first update with a batch: give policy_loss.loss_mode=clip_cov",
                0.0002,
                0.1,
            ),
            *words("entropy_coeff", "algorithm.entropy_coef", "weight of the entropy bonus"),
            *words(
                "loss_agg_mode",
                "algorithm.reduction",
                "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum sequence_sum",
                choose(
                    **{
                        "token-mean": "token_mean",
                        "seq-mean-token-mean": "sequence_mean",
                        "seq-mean-token-sum": "sequence_sum",
                        "seq-mean-token-sum-norm": "constant",
                    }
                ),
            ),
            *words(
                "kl_loss_coef",
                "~kl_loss_coef",
                "algorithm.kl_coef with algorithm.kl_in=loss, where use_kl_loss is true",
            ),
            *words("use_kl_loss", "~use_kl_loss", "whether kl_loss_coef counts"),
            *words(
                "kl_loss_type",
                "algorithm.kl_estimator",
                "kl is k1, mse k2, low_var_kl k3",
                choose(kl="k1", k1="k1", mse="k2", k2="k2", low_var_kl="k3", k3="k3"),
            ),
            *refuse(_MICRO, MEMORY, True),
            *refuse(
                "fsdp_config.param_offload fsdp_config.optimizer_offload ulysses_sequence_parallel_size strategy",
                ONE_PROCESS,
                1,
                "fsdp",
                "fsdp2",
            ),
        ],
    ),
    *_under(
        _ROLLOUT,
        [
            *words("n", "training.group_size", "completions of a prompt"),
            *words("temperature", "rollout.temperature", "sampling temperature"),
            *words("top_p", "rollout.top_p", "nucleus sampling"),
            *words(
                "top_k",
                "rollout.top_k",
                "sampling from the k most likely tokens",
                lambda value: None if value == -1 else value,
            ),
            *words("val_kwargs.n", "evaluation.samples", "completions of a held-out task"),
            *words("val_kwargs.temperature", "evaluation.temperature", "temperature of evaluations"),
            *refuse(
                "name mode gpu_memory_utilization tensor_model_parallel_size enforce_eager free_cache_engine "
                "max_num_batched_tokens max_num_seqs load_format layered_summon dtype enable_chunked_prefill "
                "max_model_len",
                BUILT_IN,
                True,
            ),
            *refuse(
                "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu "
                "log_prob_use_dynamic_bsz",
                MEMORY,
                True,
            ),
            *refuse("multi_turn.enable", "turns belong to an environment (docs/train/your-own-environment.md)"),
        ],
    ),
    *_under(
        "actor_rollout_ref.ref",
        [
            *refuse(
                "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu fsdp_config.param_offload", MEMORY, True
            ),
        ],
    ),
    *_under(
        "algorithm",
        [
            *words(
                "adv_estimator",
                "algorithm.advantage",
                "grpo is group_normalized, rloo leave_one_out, reinforce_plus_plus token_normalized, "
                "reinforce_plus_plus_baseline group_mean_token_normalized, gae gae, gdpo reward_normalized "
                "(the last mean and deviation are over completions, as in the paper; verl's over tokens)",
                choose(
                    "expected grpo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, gdpo or gae",
                    gae="gae",
                    gdpo="reward_normalized",
                    grpo="group_normalized",
                    rloo="leave_one_out",
                    reinforce_plus_plus="token_normalized",
                    reinforce_plus_plus_baseline="group_mean_token_normalized",
                ),
            ),
            *refuse(
                "gdpo_reward_keys gdpo_reward_weights",
                "the rewards and their weights are those of reward.type=composite, in reward.kwargs.rewards",
            ),
            *refuse("norm_adv_by_std_in_grpo", "for Dr. GRPO give algorithm.advantage=group_mean", True),
            *refuse(
                "use_kl_in_reward kl_penalty kl_ctrl.kl_coef kl_ctrl.type",
                "give algorithm.kl_coef with algorithm.kl_in=reward",
                "fixed",
                "kl",
                0.001,
            ),
            *words(
                "rollout_correction.rollout_is",
                "~rollout_is",
                "importance weights of each token, or of the completion (sequence)",
                choose("expected token, sequence or null", token="token", sequence="sequence", none=None),
            ),
            *words(
                "rollout_correction.rollout_is_threshold",
                "~rollout_is_threshold",
                "a number truncates the weights there, 0.5_5.0 masks those outside (IcePop); 2 if not given",
            ),
            *refuse(
                "rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold "
                "rollout_correction.rollout_is_batch_normalize",
                "a mask is one of the weights': give rollout_correction.rollout_is_threshold=LOW_HIGH",
            ),
            *refuse(
                "rollout_correction.bypass_mode rollout_correction.loss_type",
                "without importance weights the sampler's log-probs are trusted already: leave it out",
                "ppo_clip",
            ),
            *words("lam", "algorithm.gae_lambda", "lambda of the advantage gae, 0.95 if not given (verl: 1)"),
        ],
    ),
    *_under(
        "trainer",
        [
            *words("total_training_steps", "training.steps", "training steps"),
            *words("total_epochs", "training.epochs", "passes over the training tasks; training.steps follows"),
            *words(
                "save_freq",
                "run.checkpoint_every",
                "steps between checkpoints",
                lambda value: None if value == -1 else value,
            ),
            *words(
                "test_freq",
                "evaluation.every",
                "steps between interim evaluations",
                lambda value: 0 if value == -1 else value,
            ),
            *words("max_actor_ckpt_to_keep", "run.keep_checkpoints", "checkpoints that are kept"),
            *words("project_name", "tracking.experiment", "the project in Weights & Biases, the experiment in MLflow"),
            *words("experiment_name", "run.name", "the run's name, and its folder's"),
            *words("logger", "~report_to", "wandb, mlflow or tensorboard, or a list of them"),
            *refuse(
                "n_gpus_per_node nnodes device use_legacy_worker_impl balance_batch ray_wait_register_center_timeout",
                ONE_PROCESS,
                1,
                True,
                "cuda",
                "cpu",
            ),
            *refuse("val_before_train val_only", "a run evaluates before and after training: leave it out", True),
            *refuse("default_local_dir", "give run.root (the folder of all runs) and run.name"),
            *refuse(
                "resume_mode resume_from_path",
                "the same command resumes; model.start_from starts from other weights",
                "auto",
            ),
            *words("critic_warmup", "training.critic.warmup_steps", "steps in which the critic learns alone"),
            *refuse(
                "log_val_generations rollout_data_dir",
                "completions are in rollouts/ (run.rollouts_per_step): leave it out",
            ),
        ],
    ),
    *_under(
        "custom_reward_function",
        [*refuse("path name", "give reward.type=module:function (docs/verify/verify-and-audit.md)")],
    ),
    *_under(
        "reward_model",
        [
            *refuse("reward_manager", "give reward.type (docs/train/your-own-reward.md)", "naive"),
            *refuse(
                "enable model.path",
                "a reward model is reward.type=classifier with reward.kwargs.model=FOLDER, a judge reward.type=judge",
            ),
            *refuse(
                "overlong_buffer.enable overlong_buffer.len overlong_buffer.penalty_factor",
                "give algorithm.overlong_buffer and algorithm.overlong_penalty",
            ),
        ],
    ),
    *_under(
        "critic",
        [
            *words("optim.lr", "training.critic.optimizer.learning_rate", "the critic's learning rate"),
            *words("cliprange_value", "training.critic.value_clip", "how far a value may move in an update"),
            *refuse("model.path", "the critic begins with the policy's weights: leave it out"),
            *refuse(
                "ppo_mini_batch_size ppo_epochs", "the critic learns in the policy's optimizer steps: leave it out"
            ),
            *refuse("ppo_micro_batch_size_per_gpu", MEMORY),
            *refuse("enable", "algorithm.adv_estimator=gae has a critic: leave it out", True),
            *refuse("strategy", ONE_PROCESS),
        ],
    ),
)
