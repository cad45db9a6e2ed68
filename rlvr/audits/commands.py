"""Run `rlvr audit`; parse reward options for it and for `rlvr verify`."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr.core.files import write_atomic
from rlvr.core.registry import did_you_mean, find_own
from rlvr.core.types import Outcome, Score
from rlvr.reward import resolve_reward

if TYPE_CHECKING:
    from rlvr.audits.verifier_errors import VerifierMeasurement

Rows = Sequence[dict[str, Any]]
SECONDS = 3.0  # time limit of an attack; programs that wait for it take nearly all of the suite's time


def reward_options(given: Sequence[str]) -> dict[str, Any]:
    return parse_options("--reward-option", given)


def parse_options(what: str, given: Sequence[str]) -> dict[str, Any]:
    """Parse `key=value` texts; a value is JSON (true, 3, [1]) if it parses as such, else text. `what` is for errors."""
    options: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(f"{what} {text!r}: expected key=value")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return options


def parse_range(command: str, text: str | None) -> tuple[float, float] | None:
    """`0,1` as two numbers; ValueError for anything else."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(f"{command}: --reward-range {text!r}, expected two numbers, such as 0,1") from None
    return low, high


def check_shares(command: str, **options: float) -> None:
    """ValueError for an option, by its name in Python, that is no share."""
    for name, share in options.items():
        if not isinstance(share, (int, float)) or not 0 <= share <= 1:
            shown = f"{share:g}" if isinstance(share, float) else repr(share)
            option = f"--{name.replace('_', '-')} {shown}"
            raise ValueError(f"{command}: {option}, expected a share from 0 to 1, such as 0.05")


def list_rates_above(most: Mapping[str, tuple[float, float]]) -> list[str]:
    """A sentence for each option that is exceeded; `most` has the share of the rows and the share that is allowed."""
    return [
        f"above {option}: {100 * share:.2f}% of the rows, at most {100 * allowed:g}% are allowed"
        for option, (share, allowed) in most.items()
        if share > allowed
    ]


@dataclass(frozen=True)
class AuditResult:
    """The text to print, the report for a JSON file, and whether the audit failed."""

    text: str
    report: Any
    failed: bool = False


@dataclass(frozen=True)
class AuditLimits:
    """The shares of the rows up to which an audit of labelled rows does not fail."""

    false_accepts: float = 0.0
    false_rejects: float = 0.05
    errors: float = 0.0


@dataclass(frozen=True)
class Audit:
    """One call of `rlvr audit`."""

    reward: str
    options: dict[str, Any]
    tiers: Sequence[str]
    against: Sequence[str]
    workers: int | None
    show: int
    categories: Sequence[str] = ()
    environment: str | None = None
    families: Sequence[str] = ()
    samples: int | None = None
    limits: AuditLimits = AuditLimits()
    allow: Sequence[str] = ()  # faults that are intended

    def run(
        self, attack: bool, labelled: str | Rows | None, json_file: Path | None, log: Callable[[str], None]
    ) -> AuditResult:
        if attack + (labelled is not None) + (self.environment is not None) != 1:
            raise ValueError("audit: give one of --attack or --labelled FILE (or --labelled builtin) or --env NAME")
        if labelled is not None and (self.tiers or self.workers or self.categories):
            raise ValueError("audit: --tier, --workers and --category go with --attack: no effect with --labelled")
        if attack and self.against:
            raise ValueError("audit: --against goes with --labelled; run --attack once for each verifier")
        if labelled is None and self.allow:
            raise ValueError("audit: --allow goes with --labelled: no effect without it")
        if self.environment is None and (self.families or self.samples is not None):
            raise ValueError("audit: --family and --samples go with --env: no effect without it")
        if self.environment is None and not self.reward:
            raise ValueError("audit: --reward is missing; name the verifier to audit, such as --reward math")
        if self.environment is not None:
            result = self._audit_environment(log)
        else:
            result = self._attack(log) if attack else self._measure(labelled or "", log)
        if json_file is not None:
            write_atomic(json_file, json.dumps(result.report, indent=2))
        return result

    def _audit_environment(self, log: Callable[[str], None]) -> AuditResult:
        from rlvr.audits.gym_audit import SAMPLES, FamilyAudit, audit_families, make_report, summarize
        from rlvr.reward.reasoning_gym.library_workers import describe_families

        if self.environment != "reasoning_gym":
            raise ValueError(f"audit: --env {self.environment!r}, expected reasoning_gym; audit a verifier by --reward")
        if self.reward or self.tiers or self.against or self.categories:
            raise ValueError(
                "audit: --reward, --tier, --against and --category have no effect with --env; leave them out"
            )
        samples = SAMPLES if self.samples is None else self.samples
        if samples < 2:
            raise ValueError(f"audit: --samples {samples}, expected at least 2: a task is given another one's answer")
        known = describe_families()
        if unknown := [family for family in self.families if family not in known]:
            raise ValueError(
                f"audit: --family {unknown[0]!r}{did_you_mean(unknown[0], known)}; known: {', '.join(known)}"
            )
        families = list(self.families) or list(known)
        reward = resolve_reward("reasoning_gym", **{"timeout_s": 1.0, **self.options})
        log(f"answering {samples} tasks of each of {len(families)} families")
        start, shown = time.monotonic(), time.monotonic()
        done = 0

        def progress(audit: FamilyAudit) -> None:
            nonlocal shown, done
            done += 1
            if audit.is_broken or time.monotonic() - shown > 10:
                shown = time.monotonic()
                log(f"{done} of {len(families)} families: {audit.family}{' is broken' * audit.is_broken}")

        audits = audit_families(families, reward, samples, self.workers, progress)
        seconds = time.monotonic() - start
        report = {
            "environment": self.environment,
            "library": version("reasoning_gym"),
            "samples": samples,
            "seconds": round(seconds, 1),
            "rates": summarize(audits),
            "families": [audit.as_json() for audit in audits],
        }
        text = f"{make_report(audits, self.show)}\n\nreasoning_gym {report['library']}, {seconds:.0f} s"
        return AuditResult(text, report, any(audit.is_broken for audit in audits))

    def _measure(self, labelled: str | Rows, log: Callable[[str], None]) -> AuditResult:
        from rlvr.audits.verifier_errors import list_data_warnings, measure, read_labelled, refuse_bad_tests, report
        from rlvr.audits.verifier_faults import TrialProcess, check_allowed, find_faults, show_faults

        check_allowed(self.allow)
        check_shares("audit", **{f"max_{name}": share for name, share in vars(self.limits).items()})
        rewards = [resolve_reward(self.reward, **self.options), *(resolve_reward(name) for name in self.against)]
        rows = read_labelled(labelled)
        source = labelled if isinstance(labelled, str) else "labelled"
        if rewards[0].name in ("code", "code_strict"):
            refuse_bad_tests(rows, f"audit: {source}")
        measured: list[VerifierMeasurement] = []
        for reward in rewards:
            shown = time.monotonic()

            def progress(done: int, name: str = reward.name) -> None:
                nonlocal shown
                if time.monotonic() - shown > 5:
                    shown = time.monotonic()
                    log(f"{name}: {done:,} of {len(rows):,} rows")

            measured.append(one := measure(rows, reward, progress))
            if one.rates()["unjudged"] == len(rows):
                raise ValueError(_explain_unjudged(reward.name, source, one.judged[0].score if rows else None))
        log("judging every row again in other orders and company, and trying probes")
        own = find_own([self.reward, self.options])  # a function of the program, which has no other process
        scores = [one.score for one in measured[0].judged]
        with closing(TrialProcess(self.reward, self.options)) as trial:
            search = find_faults(rows, rewards[0], measured=scores, trial=None if own else trial, heavy=not own)
        above = self._list_rates_above(measured[0])
        warnings = list_data_warnings(rows)
        if own:
            warnings.append(
                f"{own} is of this program alone, so no other process tried the probes that may hang it (slow); put it "
                "into a module to have them tried"
            )
        notes = [f"warning: {warning}" for warning in warnings]
        text = "\n".join([report(measured, self.show), "", show_faults(search, self.allow), *notes, *above])
        found = [one.as_json() for one in measured]
        found[0] |= {"faults": search.evidence, "not_tried": search.untried_faults, "allowed": sorted(self.allow)}
        found[0] |= {"warnings": warnings, "above_threshold": above}
        return AuditResult(text, found, bool(search.evidence.keys() - set(self.allow) or above))

    def _list_rates_above(self, one: VerifierMeasurement) -> list[str]:
        rates, most = one.rates(), self.limits
        accepted, rejected = (rates[name] or {"value": 0.0} for name in ("false_positive", "false_negative"))
        return list_rates_above(
            {
                "--max-false-accepts": (accepted["value"], most.false_accepts),
                "--max-false-rejects": (rejected["value"], most.false_rejects),
                "--max-errors": (rates["unjudged"] / rates["rows"], most.errors),
            }
        )

    def _attack(self, log: Callable[[str], None]) -> AuditResult:
        from rlvr.audits.attack_runner import Survivors
        from rlvr.sandbox.supervisor import TIERS, NoTier, Sandbox
        from rlvr.sandbox.verdict import Limits

        has_tiers = self.reward == "code" and "sandbox" not in self.options
        if self.tiers and not has_tiers:
            raise ValueError("audit: --tier works with the reward 'code' only, and not with its option sandbox")
        if unknown := [tier for tier in self.tiers if tier not in TIERS]:
            raise ValueError(f"audit: tier {unknown[0]!r}, expected some of {', '.join(TIERS)}")
        if not has_tiers:
            text, found = self._try_suite("", self.options, log)
            return AuditResult(text, [found], any(program["fault"] for program in found["programs"]))
        texts: list[str] = []
        tried: list[dict[str, Any]] = []
        for tier in self.tiers or TIERS:
            with Survivors() as survivors:
                try:
                    sandbox = Sandbox((tier,), self.workers, Limits(timeout_s=SECONDS))
                except NoTier as refusal:
                    if tier in self.tiers:
                        raise ValueError(f"audit: {refusal}") from None
                    texts.append(f"tier {tier} does not work on this machine and was not tried: {refusal}")
                    continue
                with sandbox:
                    text, found = self._try_suite(tier, self.options | {"sandbox": sandbox}, log)
                found["survivors"] = [f"{pid} {name}" for pid, name in survivors.list_alive().items()]
            if found["survivors"]:
                text += f"\nescape: alive after the sandbox was closed: {', '.join(found['survivors'])}"
            texts.append(text)
            tried.append(found)
        if not tried:
            raise ValueError(f"audit: {'; '.join(texts)}")
        failed = any(one["survivors"] or any(program["fault"] for program in one["programs"]) for one in tried)
        return AuditResult("\n\n".join(texts), tried, failed)

    def _try_suite(self, tier: str, options: dict[str, Any], log: Callable[[str], None]) -> tuple[str, dict[str, Any]]:
        """Run the suite on one verifier: (the table as text, the report as JSON)."""
        from rlvr.audits.attack_runner import AttackResult, format_table, list_rows, run_suite, summarize_categories
        from rlvr.audits.attacks import HONEST, HOSTILE

        left_out = [attack.name for attack in HONEST if tier == "landlock" and attack.needs == "scratch"]
        categories = dict.fromkeys(attack.category for attack in [*HOSTILE, *HONEST])
        if unknown := [name for name in self.categories if name not in categories]:
            raise ValueError(f"audit: category {unknown[0]!r}, expected some of {', '.join(categories)}")
        programs = [
            attack
            for attack in [*HOSTILE, *HONEST]
            if attack.name not in left_out and attack.category in (self.categories or categories)
        ]
        at = f" at tier {tier}" if tier else ""
        log(f"trying {len(programs)} programs{at}")
        waiting = Counter(attack.category for attack in programs)
        faults: Counter[str] = Counter()

        def progress(result: AttackResult) -> None:
            category = result.attack.category
            waiting[category] -= 1
            faults[category] += bool(result.fault)
            if not waiting[category]:
                log(f"  {category}: {faults[category] or 'no'} fault{'s' * (faults[category] != 1)}")

        results = run_suite(resolve_reward(self.reward, **options), programs, self.workers, progress)
        text = format_table(results, tier)
        if left_out:
            text += f"\nnot tried at this tier, which has no folder to write in: {', '.join(left_out)}"
        return text, {
            "reward": self.reward,
            "tier": tier,
            "summary": summarize_categories(results),
            "programs": list_rows(results),
        }


def _explain_unjudged(reward: str, labelled: str, first: Score | None) -> str:
    if first is None:
        return f"audit: {labelled} has no rows"
    why = f"{first.outcome.value}: {first.reason} {first.detail}".strip()
    cure = "give rows with the fields that this reward needs"
    if (first.outcome, first.reason) == (Outcome.ERROR, "exception"):
        cure = "correct the reward; for an answer that it cannot read it returns 0 and does not raise"
    if labelled.startswith("builtin"):
        cure = "the built-in pairs are of mathematics, for math and gsm8k; give --labelled FILE with pairs of its kind"
    return f"audit: {reward} could judge none of the rows of {labelled} (the first: {why}); {cure}"
