"""Which combinations of algorithm, sampling and sizes train nothing, mislead or contradict each other.

`check_recipe` refuses them before anything is built; `advice` speaks of those that run and are known to disappoint.
Exercised by `python -m pytest tests/test_training_recipes.py tests/test_pipelined_recipes.py`.
"""

from __future__ import annotations

from rlvr.algorithms import Algorithm
from rlvr.messages import SamplingParams
from rlvr.training.options import TrainingOptions

# Advantages that are known as soon as a group is: what streams cannot wait for the rest of the batch.
GROUPWISE = frozenset({"group_mean", "group_normalized", "leave_one_out", "raw"})


def check_recipe(algorithm: Algorithm, params: SamplingParams, options: TrainingOptions) -> None:
    """ValueError where algorithm, sampling and sizes contradict each other or could teach nothing."""
    updates = options.ppo_epochs * options.num_substeps
    if algorithm.loss == "importance_sampling" and updates > 1:
        raise ValueError(
            f"algorithm.loss=importance_sampling does not clip, and {updates} updates a step make "
            "the later ones stale; use a loss that clips (algorithm.name=ppo), or one substep and one epoch"
        )
    if options.refill and not (algorithm.uses_groups and algorithm.drop_equal_groups):
        raise ValueError(
            f"training.refill={options.refill} has no effect: it replaces groups that teach nothing, and "
            f"{algorithm.name!r} with {algorithm.advantage} keeps every group; leave it out"
        )
    if algorithm.uses_groups and options.group_size == 1:
        raise ValueError(
            f"training.group_size=1 teaches nothing under the group baseline {algorithm.advantage!r}: a group of "
            "one always equals its own mean; use group_size >= 2, or algorithm.name=reinforce"
        )
    if params.temperature == 0:
        raise ValueError(
            "rollout.temperature=0 samples the same answer every time: all rewards of a group are equal and "
            "nothing is learned; use a temperature above 0 (1.0 is the default)"
        )
    if not params.max_tokens:
        raise ValueError("rollout.max_tokens is missing: training needs a budget of tokens per answer")
    if algorithm.overlong_buffer is not None and algorithm.overlong_buffer > params.max_tokens:
        raise ValueError(
            f"algorithm.overlong_buffer={algorithm.overlong_buffer} is longer than the budget rollout.max_tokens="
            f"{params.max_tokens}: every answer would be penalised; use a fifth of the budget, say"
        )
    _check_sizes(options)
    _check_staleness(algorithm, options)
    if options.num_minibatches > 1:
        _check_streaming(algorithm, options)


def _check_sizes(options: TrainingOptions) -> None:
    """Every optimizer step of a batch, and every minibatch of one, has to have as many answers as the others."""
    answers = options.prompts_per_step * options.group_size
    streams = options.num_minibatches > 1
    whole, of = (options.prompts_per_step, "groups") if streams else (answers, "answers")
    if whole % options.num_substeps:
        raise ValueError(
            f"training.num_substeps={options.num_substeps} does not divide the batch of {whole} {of} "
            f"({options.prompts_per_step} prompts x {options.group_size} answers); {_would_do(whole)} would do"
        )
    substep = whole // options.num_substeps
    if streams and substep % options.num_minibatches:
        raise ValueError(
            f"training.num_minibatches={options.num_minibatches} does not divide the {substep} groups of an optimizer "
            f"step (prompts_per_step={options.prompts_per_step} / num_substeps={options.num_substeps}); "
            f"{_would_do(substep)} would do"
        )


def _would_do(total: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    shown = divisors if len(divisors) <= 12 else [*divisors[:11], divisors[-1]]
    return ", ".join(map(str, shown))


def _check_staleness(algorithm: Algorithm, options: TrainingOptions) -> None:
    lag, order = options.max_steps_off_policy, options.order
    if order == "sync" and (lag or options.num_minibatches > 1):
        raise ValueError(
            f"training.schedule=sync samples a batch and then learns from it; max_steps_off_policy={lag} and "
            f"num_minibatches={options.num_minibatches} need fixed_lag or completion: leave schedule out, or choose one"
        )
    if lag and algorithm.loss == "importance_sampling" and algorithm.importance_cap is None:
        raise ValueError(
            f"training.max_steps_off_policy={lag} with algorithm.loss=importance_sampling: on stale answers its "
            "importance weights have no bound; use a loss that clips them (algorithm.name=ppo or cispo), or give "
            "algorithm.importance_cap=2"
        )
    if options.refill and order != "sync":
        raise ValueError(
            f"training.refill={options.refill} replaces groups once a whole batch is known; under schedule={order} the "
            "next prompts are drawn before that: leave refill out"
        )


def _check_streaming(algorithm: Algorithm, options: TrainingOptions) -> None:
    """What needs the whole batch cannot be had from minibatches that are learned from as they arrive."""
    wrong: list[str] = []
    if algorithm.reduction == "token_mean":
        wrong.append("algorithm.reduction=token_mean divides by the tokens of the whole batch (use constant)")
    if algorithm.advantage not in GROUPWISE:
        wrong.append(
            f"algorithm.advantage={algorithm.advantage} is worked out over the whole batch "
            f"(use {', '.join(sorted(GROUPWISE))})"
        )
    if options.ppo_epochs > 1:
        wrong.append(f"training.ppo_epochs={options.ppo_epochs} goes through a whole batch again (use num_substeps)")
    if options.target_kl:
        wrong.append("training.target_kl is looked at between whole passes (leave it out)")
    if algorithm.importance_cap is not None and options.num_substeps > 1:
        wrong.append("algorithm.importance_cap compares with the policy before the first of the num_substeps")
    if wrong:
        raise ValueError(f"training.num_minibatches={options.num_minibatches}: {'; '.join(wrong)}")


def advice(algorithm: Algorithm, params: SamplingParams) -> list[str]:
    """Recipes that run and are known to disappoint."""
    told: list[str] = []
    if algorithm.kl_coef and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        told.append(
            "algorithm.kl_in=loss with kl_estimator=k1: its gradient is 0 on average, so nothing holds the policy near "
            "the reference; use k2 in the loss, or k1 in the reward"
        )
    if algorithm.penalizes and algorithm.advantage == "group_normalized" and not algorithm.drop_equal_groups:
        told.append(
            "algorithm.advantage=group_normalized divides by the deviation of reward less penalty: in a group of equal "
            "rewards the penalty alone is blown up to size 1; use group_mean, or drop_equal_groups=true"
        )
    if params.top_p < 1 or params.top_k != -1 or params.min_p > 0:
        told.append(
            "rollout: top_p, top_k or min_p cut the distribution that answers are drawn from, while the gradient is "
            "that of the whole one: tokens outside are never tried, and the estimate is biased"
        )
    return told
