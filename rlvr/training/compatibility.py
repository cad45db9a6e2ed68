"""Which combinations of algorithm, sampling and sizes contradict each other, train nothing or mislead.

`check_compatibility` refuses them before anything is built; `list_advice` speaks of those that run and are known to
disappoint.
"""

from __future__ import annotations

from rlvr.algorithms import Algorithm
from rlvr.algorithms.advantages import ADVANTAGES
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import ClientCapabilities, TaskSource
from rlvr.training.schedules import SCHEDULES
from rlvr.training.training_options import TrainingOptions

_IN_TURNS = " or ".join(f"schedule={one.name}" for one in SCHEDULES.classes() if not one.samples_ahead)


def check_compatibility(algorithm: Algorithm, params: SamplingParams, options: TrainingOptions) -> None:
    """Raise ValueError if algorithm, sampling and sizes contradict each other or nothing could be learned."""
    updates = options.ppo_epochs * options.num_substeps
    if updates > 1 and algorithm.loss.later_updates_are_stale(algorithm):
        raise ValueError(
            f"algorithm.loss={algorithm.loss.name} does not clip, and {updates} updates a step make "
            "the later ones stale; use a loss that clips (algorithm.name=ppo), or one substep and one epoch"
        )
    if options.completions == "given":
        _check_given(algorithm, options)
    if options.dynamic_sampling and not (algorithm.has_group_baseline and algorithm.drop_equal_groups):
        raise ValueError(
            f"training.dynamic_sampling={options.dynamic_sampling} has no effect: it replaces groups without "
            f"signal, and {algorithm.name!r} with {algorithm.advantage.name} keeps every group; leave it out"
        )
    if algorithm.loss.is_paired and options.group_size == 1:
        raise ValueError(
            f"training.group_size=1 has no signal with algorithm.loss={algorithm.loss.name}, which compares the "
            "completions of a group in pairs; use group_size >= 2"
        )
    if algorithm.has_group_baseline and options.group_size == 1:
        raise ValueError(
            f"training.group_size=1 has no signal under the group baseline {algorithm.advantage.name!r}: a group of "
            "one always equals its own mean; use group_size >= 2, or algorithm.name=reinforce"
        )
    if options.is_control:
        _check_control(algorithm, options)
    if options.noise_correction:
        _check_correction(algorithm)
    if algorithm.advantage.takes_critic and 0 < options.steps <= options.critic.warmup_steps:
        raise ValueError(
            f"training.critic.warmup_steps={options.critic.warmup_steps} of training.steps={options.steps}: the critic "
            "would learn alone in every step, and the policy in none; give fewer"
        )
    named = {f"algorithm.advantage={algorithm.advantage.name}": algorithm.advantage.least_group}
    named |= {f"{term.key(term.switch)}={term.strength:g}": term.least_group for term in algorithm.terms}
    for given, least in named.items():
        if least > options.group_size:
            raise ValueError(
                f"training.group_size={options.group_size} has no signal with {given}, which compares {least} "
                f"completions of a prompt; use group_size >= {least}"
            )
    if options.temperature_end is not None:
        _check_temperatures(params, options)
    if params.temperature == 0:
        raise ValueError(
            "rollout.temperature=0 samples the same completion every time: all rewards of a group are equal and "
            "nothing is learned; use a temperature above 0 (1.0 is the default)"
        )
    if not params.max_tokens:
        raise ValueError("rollout.max_tokens is missing: training needs a token budget per completion")
    for term in algorithm.terms:
        term.check_budget(params.max_tokens)
    _check_sizes(options)
    _check_staleness(algorithm, options)
    if options.order.minibatches > 1:
        _check_streaming(algorithm, options)


def _check_control(algorithm: Algorithm, options: TrainingOptions) -> None:
    """Refuse a control run, or a noisy verifier, that would change nothing, or where verdicts are learned beside it."""
    noise = [name for name in ("false_positives", "false_negatives") if getattr(options, name)]
    given = f"training.{noise[0] if noise else 'control'}"
    if algorithm.advantage.reads_no_reward and not any(term.reads_reward for term in algorithm.terms):
        raise ValueError(
            f"{given} has no effect with algorithm.advantage={algorithm.advantage.name}, which reads no reward; leave "
            "it out"
        )
    for term in algorithm.terms:
        if term.shows_verdict:
            raise ValueError(
                f"{given} with {term.key(term.switch)}={term.strength:g}: the policy would learn what the verifier "
                "says, beside the reward that is changed; leave one of them out"
            )


def check_roles(algorithm: Algorithm, source: TaskSource) -> None:
    """Raise ValueError for an advantage that needs roles where there are none, or that cannot read their rewards."""
    advantage, roles = algorithm.advantage, tuple(source.roles)
    if advantage.needs_roles and not roles:
        raise ValueError(
            f"algorithm.advantage={advantage.name} has a baseline for each role, and the episodes of this environment "
            "have one; use an environment with several (env.name=take_away), or another advantage, such as group_mean"
        )
    if roles and not advantage.reads_branches:
        able = sorted(one.name for one in ADVANTAGES.classes() if one.reads_branches and not one.reads_no_reward)
        raise ValueError(
            f"algorithm.advantage={advantage.name} takes one reward of an episode, and here the roles "
            f"{', '.join(roles)} have one each; use {', '.join(able)}"
        )


def _check_correction(algorithm: Algorithm) -> None:
    """Refuse a correction of rewards, which scales and shifts all alike, that leaves every advantage as it is."""
    why = ""
    if algorithm.advantage.is_standardized and not algorithm.has_penalty:
        why = "divides by the deviation of the rewards"
    elif algorithm.advantage.has_threshold:
        why = "asks only whether a reward is above accept_above, and those of 0 and 1 stay below and above"
    if why:
        raise ValueError(
            f"training.noise_correction=true has no effect with algorithm.advantage={algorithm.advantage.name}, which "
            f"{why}; leave it out"
        )


def _check_given(algorithm: Algorithm, options: TrainingOptions) -> None:
    """Refuse what does not learn from judged completions that the policy did not sample."""
    wrong: list[str] = []
    count = 2 if algorithm.loss.is_paired else 1
    if not algorithm.loss.compares_completions:
        wrong.append(
            f"algorithm.name={algorithm.name} learns from completions of the policy's own (use dpo, ipo or kto; to "
            "imitate completions, training.mode=sft)"
        )
    elif options.group_size != count:
        wrong.append(
            f"training.group_size={options.group_size}, and for {algorithm.loss.name} a task brings {count} "
            f"(use group_size={count})"
        )
    rows = options.prompts_per_step // options.num_substeps
    if algorithm.loss.takes_divergence and rows < 2:
        wrong.append(
            f"{algorithm.loss.name} pairs each prompt with another one's completion, and an optimizer step has {rows} "
            f"(prompts_per_step={options.prompts_per_step} / num_substeps={options.num_substeps}; use at least 2)"
        )
    wrong += [
        f"{term.key(term.switch)}={term.strength} {term.why_not_given} (leave it out)"
        for term in algorithm.terms
        if term.why_not_given
    ]
    if options.order.samples_ahead:
        wrong.append(f"training.schedule={options.order.name} samples ahead, and nothing is sampled (use {_IN_TURNS})")
    if options.temperature_end is not None:
        wrong.append("training.temperature_end changes how completions are sampled (leave it out)")
    if wrong:
        raise ValueError(f"training.completions=given: {'; '.join(wrong)}")


def _check_temperatures(params: SamplingParams, options: TrainingOptions) -> None:
    if options.order.samples_ahead:
        raise ValueError(
            f"training.temperature_end={options.temperature_end:g} with schedule={options.order.name}: a batch would "
            f"hold completions of several temperatures; use {_IN_TURNS}, or leave it out"
        )
    if options.temperature_end == params.temperature:
        raise ValueError(
            f"training.temperature_end={options.temperature_end:g} is rollout.temperature too, so nothing changes; "
            "leave it out"
        )


def check_temperatures(
    algorithm: Algorithm, params: SamplingParams, options: TrainingOptions, client: ClientCapabilities
) -> None:
    """ValueError if the client scores at temperature 1 alone, and the temperature is to change, or a term compares the
    sampler's log-probs with the trainer's."""
    for term in (term for one in algorithm.every for term in one.terms if term.needs_prompts):
        if params.temperature != 1 and not client.scores_at_temperature:
            raise ValueError(
                f"rollout.temperature={params.temperature:g} with {term.key(term.switch)}={term.strength:g} is not "
                f"supported by client={client.name}, which scores at temperature 1; use rollout.temperature=1"
            )
    if options.temperature_end is not None and not client.scores_at_temperature:
        raise ValueError(
            f"training.temperature_end={options.temperature_end:g} is not supported by client={client.name}, which "
            "scores at temperature 1; leave it out"
        )


def _check_sizes(options: TrainingOptions) -> None:
    """Check that all optimizer steps of a batch, and all minibatches of one, have the same size."""
    completions = options.prompts_per_step * options.group_size
    streams = (minibatches := options.order.minibatches) > 1
    whole, of = (options.prompts_per_step, "groups") if streams else (completions, "completions")
    if whole % options.num_substeps:
        raise ValueError(
            f"training.num_substeps={options.num_substeps} does not divide the batch of {whole} {of} "
            f"({options.prompts_per_step} prompts x {options.group_size} completions); possible: {_divisors(whole)}"
        )
    substep = whole // options.num_substeps
    if streams and substep % minibatches:
        raise ValueError(
            f"training.num_minibatches={minibatches} does not divide the {substep} groups of an optimizer "
            f"step (prompts_per_step={options.prompts_per_step} / num_substeps={options.num_substeps}); "
            f"possible: {_divisors(substep)}"
        )


def _divisors(total: int) -> str:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    shown = divisors if len(divisors) <= 12 else [*divisors[:11], divisors[-1]]
    return ", ".join(map(str, shown))


def _check_staleness(algorithm: Algorithm, options: TrainingOptions) -> None:
    order = options.order
    options.schedule.check()
    if (lag := order.max_lag) and algorithm.loss.has_unbounded_ratio and not _bounds_ratio(algorithm):
        raise ValueError(
            f"training.max_steps_off_policy={lag} with algorithm.loss={algorithm.loss.name}: on stale completions its "
            "importance weights have no bound; use a loss that clips them (algorithm.name=ppo or cispo), or give "
            "algorithm.importance_cap=2"
        )
    if options.dynamic_sampling and order.samples_ahead:
        raise ValueError(
            f"training.dynamic_sampling={options.dynamic_sampling} replaces groups once a whole batch is "
            f"sampled; schedule={order.name} draws the next prompts before that: leave dynamic_sampling out"
        )


def _bounds_ratio(algorithm: Algorithm) -> bool:
    return any(term.bounds_ratio for term in algorithm.terms)


def _check_streaming(algorithm: Algorithm, options: TrainingOptions) -> None:
    """Refuse what needs the whole batch: minibatches are learned from as they arrive."""
    wrong: list[str] = []
    if algorithm.loss.needs_whole_step:
        wrong.append(
            f"algorithm.loss={algorithm.loss.name} gets all rows of an optimizer step in one call (use num_substeps)"
        )
    if algorithm.for_tasks:
        wrong.append("algorithm.for_tasks weighs the completions of a whole step (use num_substeps)")
    if algorithm.reduction == "token_mean":
        wrong.append("algorithm.reduction=token_mean divides by the tokens of the whole batch (use constant)")
    if algorithm.advantage.takes_critic:
        wrong.append(f"the critic of algorithm.advantage={algorithm.advantage.name} learns from the whole batch")
    elif not algorithm.advantage.is_groupwise:
        groupwise = sorted(one.name for one in ADVANTAGES.classes() if one.is_groupwise)
        wrong.append(
            f"algorithm.advantage={algorithm.advantage.name} is computed over the whole batch "
            f"(use {', '.join(groupwise)})"
        )
    wrong += [
        f"{term.key(term.switch)} draws tokens of the whole batch (leave it out)"
        for term in algorithm.terms
        if term.needs_whole_batch
    ]
    if options.ppo_epochs > 1:
        wrong.append(f"training.ppo_epochs={options.ppo_epochs} goes through a whole batch again (use num_substeps)")
    if options.target_kl:
        wrong.append("training.target_kl is checked between whole passes (leave it out)")
    wrong += [
        f"{term.key(term.switch)} compares with the policy before the first of the num_substeps"
        for term in algorithm.terms
        if term.compares_with_start and options.num_substeps > 1
    ]
    if wrong:
        raise ValueError(f"training.num_minibatches={options.order.minibatches}: {'; '.join(wrong)}")


def list_advice(algorithm: Algorithm, params: SamplingParams) -> list[str]:
    """Warnings about settings that run and are known to disappoint."""
    warnings = [text for term in algorithm.terms if (text := term.advice(algorithm))]
    is_judged = any(term.is_known_when_judged for term in algorithm.terms)
    is_left_out = algorithm.drop_equal_groups and (algorithm.equal_by == "reward" or not is_judged)
    if algorithm.has_penalty and algorithm.advantage.divides_by_group_deviation and not is_left_out:
        warnings.append(
            f"algorithm.advantage={algorithm.advantage.name} divides by the deviation of reward less penalty: in a "
            "group of equal rewards the penalty alone is scaled up to 1; use group_mean, or drop_equal_groups=true and "
            "equal_by=reward"
        )
    if params.top_p < 1 or params.top_k != -1 or params.min_p > 0:
        warnings.append(
            "rollout: top_p, top_k or min_p cut the sampling distribution, while the gradient is that of the whole "
            "one: tokens outside are never sampled, and the estimate is biased"
        )
    return warnings
