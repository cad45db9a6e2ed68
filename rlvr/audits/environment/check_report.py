"""What a check of an environment found: results by name, a table, JSON, and which of them are faults."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

from rlvr.core.registry import did_you_mean
from rlvr.core.task_statistics import Interval, share_interval, wilson_interval

SHOWN = 160  # characters of an example


class CheckSpec(NamedTuple):
    """A check: its group, what holds in a sound environment, what is tried, and OpenEnv's name for it ("": none)."""

    group: str
    requirement: str
    method: str
    openenv: str = ""


CHECKS = {
    "startup": CheckSpec(
        "contract", "it loads, and its tasks have episodes", "a few turns of the first task", "runtime.startup"
    ),
    "task_ids": CheckSpec("contract", "different tasks have different ids", "up to 400 training tasks, 200 held out"),
    "splits_disjoint": CheckSpec(
        "contract", "no held-out task is trained on", "the same by id, by prompt, and by prompt and row"
    ),
    "seed_control": CheckSpec(
        "contract",
        "a seed and an index give one task",
        "tasks drawn again, backwards, and in another process",
        "runtime.seed_control",
    ),
    "episode_determinism": CheckSpec(
        "contract",
        "the same turns give the same episode",
        "references, random words, and calls of tools, twice and in another process",
        "runtime.episode_determinism",
    ),
    "episode_isolation": CheckSpec(
        "contract",
        "episodes do not change each other",
        "the same in another order, and interleaved with others turn by turn; the working directory and `random`",
        "runtime.episode_isolation",
    ),
    "malformed_turns": CheckSpec(
        "contract",
        "a malformed turn is answered and ends no run",
        "empty turns, brackets, control characters, a call that is cut",
        "runtime.state_contract",
    ),
    "resource_bounds": CheckSpec(
        "contract",
        "episodes and verdicts end, and soon",
        "the time of everything that is played; more turns than `max_turns`; malformed answers",
        "runtime.resource_bounds",
    ),
    "memory_growth": CheckSpec(
        "contract",
        "memory, open files and threads do not grow with the episodes",
        "the same 24 episodes in rounds: at most 1 KiB stays of each",
    ),
    "reward_well_formed": CheckSpec(
        "contract",
        "rewards are finite and in range",
        "everything that was played: `reward_range` or `--reward-range`, and nothing above a reference",
        "runtime.reward_well_formed",
    ),
    "reward_attribution": CheckSpec(
        "contract",
        "a reward is given once",
        "a last reward that is the sum of those before; an environment and a verifier that both pay",
        "runtime.reward_attribution",
    ),
    "oracle_max": CheckSpec(
        "verifier",
        "reference solutions get the full reward",
        "demonstrations, else the row's answer in usual forms; of held-out tasks too",
        "semantic.oracle_max",
    ),
    "canary_floor": CheckSpec(
        "verifier",
        "answers that solve nothing are refused",
        "empty answers, junk, the prompt, phrases for judges, lines that references share",
        "semantic.canary_floor",
    ),
    "floor_gap": CheckSpec(
        "verifier",
        "one answer for all tasks earns little",
        "constants, frequent references, forms without content: the best one on tasks that did not choose it; without "
        "references a warning at most, since the most that a search finds may be far from a right answer",
        "semantic.floor_gap",
    ),
    "false_accepts": CheckSpec(
        "verifier",
        "references that were changed are refused",
        "cut, longer, another digit, sign or order, near numbers, the answers of other tasks",
    ),
    "false_refusals": CheckSpec(
        "verifier", "references written otherwise are accepted", "other white space; after a long text"
    ),
    "hedged_answers": CheckSpec(
        "verifier", "an answer that names several answers is refused", "the reference between and beside others"
    ),
    "adversarial_floor": CheckSpec(
        "verifier",
        "hostile answers earn and reach nothing",
        "code that reaches for canaries; for programs, a part of the attack suite",
        "statistical.adversarial_floor",
    ),
    "verifier_determinism": CheckSpec(
        "verifier",
        "one answer has one verdict",
        "again, in other orders, in one batch with others, from four threads, later",
        "semantic.verifier_determinism",
    ),
    "verifier_failures": CheckSpec(
        "verifier",
        "a failure of the verifier is an error, and only that",
        "references and malformed answers have a verdict; a task without its answer is not judged wrong",
    ),
    "no_solution_leakage": CheckSpec(
        "leaks",
        "the prompt does not tell the answer",
        "after words such as `answer`, at the ends, in other messages, encoded; more often than other tasks' prompts",
        "semantic.no_solution_leakage",
    ),
    "id_leakage": CheckSpec("leaks", "ids do not tell the answer", "as a part of the id, encoded, or as a plain hash"),
    "oracle_containment": CheckSpec(
        "leaks",
        "tools and processes do not tell the answer",
        "schemas of tools, results of calls without arguments, environment variables and files of an episode",
        "runtime.oracle_containment",
    ),
    "choice_bias": CheckSpec(
        "leaks",
        "the right choice has no place and no length of its own",
        "a chi-squared and a binomial test, p < 0.001",
    ),
    "reward_reachability": CheckSpec(
        "signal",
        "some answer earns a reward",
        "references; without any, a search word by word",
        "statistical.reward_reachability",
    ),
    "training_signal": CheckSpec(
        "signal",
        "rewards differ between answers",
        "samples of `--model`, else words at random: tasks solved never, sometimes, always; groups that differ",
        "statistical.training_signal",
    ),
    "near_duplicates": CheckSpec(
        "signal",
        "tasks differ by more than a few words",
        "word sequences of held-out prompts in training prompts; with another answer a warning",
    ),
    "length_bias": CheckSpec(
        "signal", "length alone earns nothing", "random words, 1 to 150: R^2 and effect of length"
    ),
    "gameability_gap": CheckSpec(
        "gameability",
        "a search without answers earns little",
        "with `--attack`: a bandit over forms and contents, and a tiny policy that reads no prompt",
        "statistical.gameability_gap",
    ),
}


class CheckState(str, Enum):
    SOUND = "sound"
    FAULT = "FAULT"
    WARNING = "warning"
    NOT_TRIED = "not tried"


@dataclass(frozen=True)
class CheckResult:
    """What a check tried and found. `interval` is that of the share that `text` begins with, where it is one."""

    name: str
    state: CheckState
    text: str
    trials: int = 0
    examples: tuple[str, ...] = ()
    interval: Interval | None = None
    hits: int | None = None  # of what was tried, where the result is such a share
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.name in CHECKS, self.name
        object.__setattr__(self, "examples", tuple(one[:SHOWN] for one in self.examples))

    def with_seconds(self, seconds: float) -> CheckResult:
        return replace(self, seconds=seconds)

    @property
    def bound(self) -> str:
        """How sure a sound result is: the most that the share may be, or what was measured."""
        if self.hits is None or not self.trials:
            return f": {self.text}"
        return f" (faults below {100 * wilson_interval(0.0, self.trials).high:.1f}%)"

    def as_json(self) -> dict[str, Any]:
        spec = CHECKS[self.name]
        return {
            "check": self.name,
            "group": spec.group,
            "openenv": spec.openenv,
            "tries": spec.method,
            "state": self.state.value.lower(),
            "tried": self.trials,
            "hits": self.hits,
            "text": self.text,
            "interval": None if self.interval is None else self.interval.to_json(),
            "examples": list(self.examples),
            "seconds": round(self.seconds, 3),
        }


def report_share(
    name: str, hits: Sequence[str], tried: int, text: str, most: float = 0.0, state: CheckState = CheckState.FAULT
) -> CheckResult:
    """A fault if more than the share `most` of what was tried are `hits`, which are the examples; else a warning."""
    if not tried:
        return not_tried(name, "nothing to try it on")
    interval = share_interval([1.0] * len(hits) + [0.0] * (tried - len(hits)))
    share = len(hits) / tried
    found = CheckState.SOUND if not hits else state if share > most else CheckState.WARNING
    said = f"{len(hits)} of {tried} {text}: {format_share(interval)}"
    return CheckResult(name, found, said, tried, tuple(dict.fromkeys(hits)), interval, len(hits))


def format_share(interval: Interval) -> str:
    """`12% [3, 34]`: a share with its 95 % interval."""
    return f"{100 * interval.value:.0f}% [{100 * interval.low:.0f}, {100 * interval.high:.0f}]"


def not_tried(name: str, why: str) -> CheckResult:
    return CheckResult(name, CheckState.NOT_TRIED, why)


def sound(name: str, text: str, tried: int) -> CheckResult:
    return CheckResult(name, CheckState.SOUND, text, tried)


def check_allowed_checks(allowed: Collection[str]) -> None:
    """ValueError for a name that is no check's."""
    for name in allowed:
        if name not in CHECKS:
            raise ValueError(
                f"env check: {name!r} is no check{did_you_mean(name, CHECKS)}; checks: {', '.join(CHECKS)}"
            )


@dataclass(frozen=True)
class EnvironmentReport:
    """All results, in the order of `CHECKS`. `allowed` are names of faults that are intended."""

    environment: str
    results: list[CheckResult]
    seconds: float
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    allowed: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        environment: str,
        found: Sequence[CheckResult],
        seconds: float,
        facts: dict[str, Any],
        allowed: Collection[str],
    ) -> EnvironmentReport:
        """The worst result of each check, with the examples of the others of its state."""
        order = [CheckState.FAULT, CheckState.WARNING, CheckState.SOUND, CheckState.NOT_TRIED]
        results: list[CheckResult] = []
        for name in CHECKS:
            own = sorted((one for one in found if one.name == name), key=lambda one: order.index(one.state))
            if not own:
                continue
            alike = [one for one in own if one.state is own[0].state]
            texts = "; ".join(dict.fromkeys(one.text for one in alike))
            examples = tuple(dict.fromkeys(example for one in alike for example in one.examples))
            took = sum(one.seconds for one in own)
            results.append(
                replace(own[0], text=texts, examples=examples, trials=sum(o.trials for o in own), seconds=took)
            )
        return cls(environment, results, seconds, facts, frozenset(allowed))

    @property
    def faults(self) -> dict[str, CheckResult]:
        """The faults that are not allowed, by name."""
        return {one.name: one for one in self.results if one.state is CheckState.FAULT and one.name not in self.allowed}

    @property
    def warnings(self) -> dict[str, CheckResult]:
        return {one.name: one for one in self.results if one.state is CheckState.WARNING}

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.environment,
            "sound": not self.faults,
            "faults": list(self.faults),
            "warnings": list(self.warnings),
            "allowed": sorted(self.allowed),
            "seconds": round(self.seconds, 2),
            **self.facts,
            "checks": [one.as_json() for one in self.results],
        }

    def table(self, show: int = 2) -> str:
        """A line for each check, with up to `show` examples under those that are not sound."""
        width = max(map(len, CHECKS))
        facts = ", ".join(f"{name} {value}" for name, value in self.facts.items() if value not in (None, ""))
        lines, group = [f"{self.environment}: {facts}"], ""
        for one in self.results:
            spec = CHECKS[one.name]
            if spec.group != group:
                group = spec.group
                lines += ["", group]
            state = "allowed" if one.name in self.allowed and one.state is CheckState.FAULT else one.state.value
            tried = f"{one.trials:,}" if one.trials else ""
            text = f"{spec.requirement}{one.bound}" if one.state is CheckState.SOUND else one.text
            lines.append(f"  {state:<9}  {one.name:<{width}}  {tried:>6}  {text}")
            if one.state in (CheckState.FAULT, CheckState.WARNING):
                lines += [f"  {'':<9}  {'':<{width}}  {'':>6}    e.g. {example}" for example in one.examples[:show]]
        tried = sum(one.trials for one in self.results)
        found = ", ".join(self.faults) or "none"
        lines += ["", f"faults: {found}  ({len(self.warnings)} warnings, {tried:,} trials, {self.seconds:.1f} s)"]
        return "\n".join(lines)
