"""`rlvr env check`: every check of an environment, one after the other, into one report."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from rlvr.audits.environment.answer_texts import list_words
from rlvr.audits.environment.check_report import (
    CHECKS,
    CheckResult,
    CheckState,
    EnvironmentReport,
    check_allowed_checks,
    not_tried,
)
from rlvr.audits.environment.contract_checks import (
    check_episodes,
    check_malformed,
    check_memory,
    check_rewards,
    check_tasks,
    check_time,
    report_startup,
)
from rlvr.audits.environment.fresh_process import check_fresh_process
from rlvr.audits.environment.leak_checks import check_choices, check_containment, check_prompts
from rlvr.audits.environment.scripted_play import CheckedEnvironment, EpisodeHangs
from rlvr.audits.environment.signal_checks import (
    SampledEnvironment,
    check_duplicates,
    check_length,
    check_reach,
    check_signal,
)
from rlvr.audits.environment.surface_search import check_surface
from rlvr.audits.environment.verifier_checks import (
    check_constants,
    check_faults,
    check_hostile,
    check_load,
    check_other_spellings,
    check_references,
    check_wrong_answers,
)

COMPARED = ("canary_floor", "floor_gap", "adversarial_floor", "training_signal", "gameability_gap")
LONG_S = 10.0  # a check that takes longer is told of


@dataclass(frozen=True)
class CheckOptions:
    """How an environment is checked. `allow` are faults that are intended.

    `attack` also searches for surfaces that earn rewards, and tries texts that may hang a verifier; `model` samples
    instead of words at random; without `fresh_process` nothing is compared with another process.
    """

    reward: str | None = None
    reward_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tasks: int = 24
    samples: int = 8
    attack: bool = False
    model: str | None = None
    reward_range: tuple[float, float] | None = None
    hang_s: float = 20.0
    fresh_process: bool = True
    allow: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_allowed_checks(self.allow)
        if self.tasks < 4 or self.samples < 2 or self.hang_s <= 0:
            raise ValueError(
                f"env check: tasks={self.tasks}, samples={self.samples}, hang_s={self.hang_s:g}; expected at least 4 "
                "tasks, 2 samples and more than 0 seconds"
            )


def check_environment(
    name: str, kwargs: Mapping[str, Any], options: CheckOptions, log: Callable[[str], None] = lambda text: None
) -> EnvironmentReport:
    """Check the environment of that name, path or reference. ValueError if it cannot be loaded at all."""
    start = time.perf_counter()

    def load(tokenizer: Any = None) -> CheckedEnvironment:
        return CheckedEnvironment.open(
            name, kwargs, options.reward, options.tasks, tokenizer, options.hang_s, options.reward_kwargs
        )

    try:
        environment = load()
    except ValueError:  # a name, an option or a file that is not there
        raise
    except Exception as error:
        why = f"it cannot be loaded: {type(error).__name__}: {error}"
        failed = [CheckResult("startup", CheckState.FAULT, why, 1, (why,))]
        return EnvironmentReport.of(name, failed, time.perf_counter() - start, {}, options.allow)
    with ExitStack() as stack:
        policy: SampledEnvironment | None = None
        if options.model is not None:
            from rlvr.runs.record_traffic import open_to_sample

            sampler = stack.enter_context(open_to_sample(options.model, [], log))
            policy = SampledEnvironment(load(sampler.get_tokenizer()), sampler)
        results = _run_checks(environment, options, policy, log)
    facts: dict[str, Any] = {
        "reward": environment.reward.formula,
        "tasks": len(environment.tasks),
        "references": sum(one.trials for one in results if one.name == "reward_reachability"),
    }
    if environment.source.writes_tasks:
        facts["training tasks"] = "written by the policy, so the held-out ones are tried"
    return EnvironmentReport.of(name, results, time.perf_counter() - start, facts, options.allow)


def _run_checks(
    environment: CheckedEnvironment,
    options: CheckOptions,
    policy: SampledEnvironment | None,
    log: Callable[[str], None],
) -> list[CheckResult]:
    checks: list[Callable[[], list[CheckResult]]] = [
        lambda: [report_startup(environment)],
        lambda: check_tasks(environment),
        lambda: _prepare(environment),
        lambda: check_episodes(environment),
        *([lambda: check_fresh_process(environment)] if options.fresh_process else []),
        lambda: check_malformed(environment),
        lambda: check_references(environment),
        lambda: check_faults(environment, options.attack),
        lambda: check_wrong_answers(environment),
        lambda: check_other_spellings(environment),
        lambda: check_constants(environment),
        lambda: check_hostile(environment, options.attack),
        lambda: check_load(environment),
        lambda: check_prompts(environment),
        lambda: check_containment(environment),
        lambda: check_choices(environment),
        lambda: check_reach(environment),
        lambda: check_duplicates(environment),
        lambda: check_length(environment),
        lambda: check_signal(environment, options.samples, policy),
        *([lambda: check_surface(environment)] if options.attack else []),
        lambda: check_memory(environment),
        lambda: check_rewards(environment, options.reward_range),
        lambda: check_time(environment),
    ]
    results: list[CheckResult] = []
    for check in checks:
        start = time.perf_counter()
        try:
            found = check()
            is_stuck = len(results) == 0 and found[0].state is CheckState.FAULT
        except EpisodeHangs as late:
            is_stuck = True
            found = [CheckResult("resource_bounds", CheckState.FAULT, str(late), 1, (str(late),))]
        if environment.source.group_builder:
            found = [_soften(one) for one in found]
        took = (time.perf_counter() - start) / max(1, len(found))
        results += [one.with_seconds(took) for one in found]
        if (took := time.perf_counter() - start) > LONG_S and found:
            log(f"{', '.join(dict.fromkeys(one.name for one in found))}: {took:.0f} s")
        if is_stuck:
            known = {"gameability_gap", *(one.name for one in results)}
            why = "an episode hangs" if found[0].name == "resource_bounds" else "no episode can be played"
            return [*results, *(not_tried(name, why) for name in CHECKS if name not in known)]
    return results


def _soften(one: CheckResult) -> CheckResult:
    """A warning where rewards may compare the episodes of a group, which here all say the same."""
    if one.state is not CheckState.FAULT or one.name not in COMPARED:
        return one
    return replace(one, state=CheckState.WARNING, text=f"{one.text} (or rewards compare the episodes of a group)")


def _prepare(environment: CheckedEnvironment) -> list[CheckResult]:
    """Find the references, or turns that earn something where there are none."""
    if not environment.references:
        environment.search_turns(list_words(environment)[:12])
    return []
