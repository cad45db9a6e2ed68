"""Checks of the verifier of an environment: references, answers that solve nothing, changed ones, hostile ones.

Most are the faults of `rlvr.audits.verifier_faults` on rows made of the environment's own accepted references.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace

from rlvr.audits.attack_runner import Canaries, run_suite
from rlvr.audits.attacks import HOSTILE as PROGRAMS
from rlvr.audits.environment.answer_texts import CONSTANTS, JUDGE_PHRASES, list_words, write_random
from rlvr.audits.environment.check_report import CheckResult, CheckState, format_share, not_tried, report_share, sound
from rlvr.audits.environment.scripted_play import FORMS, CheckedEnvironment, PlayedEpisode, Turns, as_score
from rlvr.audits.gym_audit import HOSTILE, change_answer
from rlvr.audits.verifier_faults import THOUGHT, FaultSearch, TrialProcess, exclude_each_other, find_faults
from rlvr.core.task_statistics import mean_interval
from rlvr.core.types import Outcome, Task, group_by, mean
from rlvr.reward.code import CodeProblem
from rlvr.reward.references import REFERENCE_FIELDS
from rlvr.reward.signatures import Case

ROWS = 6  # references whose probes are tried
REFUSED = 0.05  # share of references that may be refused before it is a fault
WIDE, NARROW = 0.5, 0.2  # share of the full reward that one answer for all tasks may earn: fault, warning
THREADS = 4
REACHING = 6  # of the hostile texts: those that only touch something and end
QUICK_PROGRAMS = ("ending", "equality")  # categories of hostile programs that take little time
TRIAL_S = 15.0  # that a hostile text may take elsewhere
# The check that each fault of the audit of verifiers belongs to, and whether it may be meant so.
FAULT_CHECKS = {
    **dict.fromkeys(("empty", "junk", "long", "phrase", "shared", "prompt"), "canary_floor"),
    **dict.fromkeys(("word", "begins", "cut", "near", "sign", "other"), "false_accepts"),
    **dict.fromkeys(("separators", "percent", "case"), "false_accepts"),
    "among": "hedged_answers",
    **dict.fromkeys(("unstable", "order", "company"), "verifier_determinism"),
    "refuses_long": "false_refusals",
    "no_verdict": "verifier_failures",
    "slow": "resource_bounds",
    "leak": "no_solution_leakage",
}
INTENDED = {"separators", "percent", "case", "leak"}


def check_references(environment: CheckedEnvironment) -> list[CheckResult]:
    """Whether reference solutions pass, whatever a verifier's failures are, and what happens to a task without one."""
    found = environment.references
    if not found:
        return [
            not_tried(name, "there are no demonstrations and no answers")
            for name in ("oracle_max", "verifier_failures")
        ]
    hits = _find_refused(environment, found.values())
    broken = [f"{one.score.reason}: {one.score.detail.strip()[-90:]} for {one.text[-40:]!r}" for one in found.values()
              if one.value is None]  # fmt: skip
    passes = report_share("oracle_max", hits, len(found), "reference solutions are refused", REFUSED)
    if environment.source.roles and not environment.source.writes_tasks:
        passes = not_tried("oracle_max", "in a game of several roles the best turns may lose")
    held = {} if _shows_mistakes(environment) else environment.heldout_references
    missed = _find_refused(environment, held.values())
    of_heldout = report_share("oracle_max", missed, len(held), "held-out reference solutions are refused", REFUSED)
    return [
        passes,
        *([of_heldout] if held else []),
        report_share("verifier_failures", broken, len(found), "references have no verdict"),
        *_judge_without_answers(environment),
    ]


def _shows_mistakes(environment: CheckedEnvironment) -> bool:
    """Whether demonstrations of training tasks are wrong at times, so that those of a task may all be."""
    shown = [one for one in environment.accepted if environment.source.demonstration(one.task, 0) is not None]
    return any(one.turns != environment.list_references(one.task)[0][: len(one.turns)] for one in shown)


def _find_refused(environment: CheckedEnvironment, references: Iterable[PlayedEpisode]) -> list[str]:
    top = environment.top or 1.0
    return [
        f"{one.task.id!r}: {one.value} {one.score.reason} for {one.text[-60:]!r}"
        for one in references
        if not one.passed or (one.value or 0.0) < 0.9 * top
    ]


def _judge_without_answers(environment: CheckedEnvironment) -> list[CheckResult]:
    """A task whose answer is missing is invalid: a verifier that swallows its failures calls every answer wrong."""
    if not environment.is_plain:
        return []
    hits: list[str] = []
    rows = environment.accepted[:ROWS]
    for one in rows:
        meta = {key: value for key, value in one.task.meta.items() if key not in (*REFERENCE_FIELDS, "reward_model")}
        if len(meta) == len(one.task.meta):
            continue
        (said,) = environment.reward.judge_all([Case.of_task(replace(one.task, meta=meta), one.turns[-1])])
        if said.outcome is Outcome.FAILED:
            hits.append(f"{said.value} for {one.text[-60:]!r} of a task without {set(one.task.meta) - set(meta)}")
    return [report_share("verifier_failures", hits, len(rows), "tasks without an answer call the right one wrong")]


def check_faults(environment: CheckedEnvironment, thorough: bool) -> list[CheckResult]:
    """The faults of `find_faults` on the environment's own references; heavy probes only if the check is thorough."""
    rows = environment.make_rows(environment.take_few(ROWS))
    names = list(dict.fromkeys(FAULT_CHECKS.values()))
    if not rows:
        return [not_tried(name, "no reference is accepted") for name in names if name not in ("resource_bounds",)]
    measured = [as_score(one) for one in environment.accepted[:ROWS]]
    with _open_trial(environment, thorough) as trial:
        heavy = trial is not None
        search = find_faults(rows, environment.as_reward(), measured=measured, trial=trial, heavy=heavy)
    if _has_programs(environment) or _has_many_answers(environment):
        for fault in ("among", "other"):  # a program may define more than was asked for, another answer be right too
            search.evidence.pop(fault, None)
    return [_read_faults(name, search, len(rows)) for name in names if _count_tried(name, search, len(rows))]


def _has_many_answers(environment: CheckedEnvironment) -> bool:
    """Whether the reference of another task is right here and there, so that a task has more than one answer."""
    rows = environment.accepted[: 2 * ROWS]
    pairs = [(one, rows[(place + 1) % len(rows)]) for place, one in enumerate(rows)]
    asked = [(one.task, other.turns) for one, other in pairs if one.turns[-1] != other.turns[-1]]
    return any(one.passed for one in environment.judge(asked))


@contextmanager
def _open_trial(environment: CheckedEnvironment, thorough: bool) -> Iterator[TrialProcess | None]:
    """A process for texts that may hang the verifier; None if none are to be tried, or it cannot be opened there."""
    if not (thorough and environment.is_plain):
        yield None
        return
    trial = TrialProcess(environment.reward.name, environment.reward.kwargs, TRIAL_S)
    try:
        trial.hangs(Case.of_task(environment.tasks[0], "x"))
    except ValueError:  # a reward that another process does not find
        yield None
        return
    try:
        yield trial
    finally:
        trial.close()


def _count_tried(name: str, search: FaultSearch, rows: int) -> int:
    own = [fault for fault, check in FAULT_CHECKS.items() if check == name and fault in search.tried_faults]
    return sum(search.probes[fault] or rows for fault in own)


def _read_faults(name: str, search: FaultSearch, rows: int) -> CheckResult:
    seen = {
        fault: search.evidence[fault]
        for fault, check in FAULT_CHECKS.items()
        if check == name and fault in search.evidence
    }
    hits = [f"{fault}: {said}" for fault, all_seen in seen.items() for said in all_seen]
    tried = max(_count_tried(name, search, rows), len(hits))
    state = CheckState.WARNING if seen.keys() <= INTENDED else CheckState.FAULT
    return report_share(name, hits, tried, "probes show it", state=state)


def check_wrong_answers(environment: CheckedEnvironment) -> list[CheckResult]:
    """References of other tasks and references cut or changed, where both have an answer of their own."""
    asked: list[tuple[Task, Turns]] = []
    rows = environment.accepted[: 2 * ROWS]
    for place, one in enumerate(rows):
        own = environment.find_answer(one.task)
        for other in rows[place + 1 : place + 3]:
            answer = environment.find_answer(other.task)
            if own and answer and exclude_each_other(own, answer):
                asked.append((one.task, other.turns))
        final = one.turns[-1]
        if own and own in final:
            changed = [
                text for text in (change_answer(own), swap_digits(own)) if text and exclude_each_other(own, text)
            ]
            wrong = [final.replace(own, text) for text in changed]
            half = final[: len(final) // 2]
            wrong += [half] if own not in half else []
            asked += [(one.task, (*one.turns[:-1], text)) for text in wrong]
    hits = [
        f"{one.text[-60:]!r} for {environment.find_answer(one.task)!r}"
        for one in environment.judge(asked)
        if one.passed
    ]
    return [report_share("false_accepts", hits, len(asked), "wrong answers pass")]


def swap_digits(number: str) -> str | None:
    """A number with two neighbouring digits exchanged, for verifiers that compare without order; None for another text
    or a number without two different ones."""
    for first in (r"-?", r"-?[1-9]\d*?"):  # no zero comes first
        if found := re.fullmatch(rf"({first})([1-9])(?!\2)([1-9]|(?<=\d\d)0)(\d*(?:\.\d+)?)", number):
            return f"{found[1]}{found[3]}{found[2]}{found[4]}"
    return None


def check_other_spellings(environment: CheckedEnvironment) -> list[CheckResult]:
    """Right answers with other white space; after a sentence or with the number written otherwise, which a verifier
    may refuse."""
    spaces, more = list[tuple[Task, Turns]](), list[tuple[Task, Turns]]()
    for one in environment.accepted[: 2 * ROWS]:
        lead, final = one.turns[:-1], one.turns[-1]
        spaces += [(one.task, (*lead, text)) for text in (f"{final}\n", f"{final}  ", f"\n{final}")]
        more.append((one.task, (*lead, THOUGHT + final)))
        number = environment.find_answer(one.task) or ""
        if re.fullmatch(r"-?\d{1,12}", number) and number in final:
            more += [(one.task, (*lead, final.replace(number, text))) for text in (f"{int(number):,}", f"{number}.0")]
    refused = [f"{one.text[-60:]!r}" for one in environment.judge(spaces) if not one.passed]
    results = [report_share("false_refusals", refused, len(spaces), "right answers are refused for white space")]
    if more:
        accepted = sum(one.passed for one in environment.judge(more))
        said = f"{accepted} of {len(more)} right answers after a sentence or with the number written otherwise pass"
        results.append(sound("false_refusals", said, len(more)))
    return results


def list_constants(environment: CheckedEnvironment) -> list[str]:
    """One answer for every task: texts of `CONSTANTS`, frequent references, and these in the form of a reference."""
    words = list_words(environment)
    finals = Counter(one.turns[-1] for one in environment.accepted)
    common = [text for text, _ in finals.most_common(6)]
    answers = Counter(filter(None, map(environment.find_answer, environment.tasks)))
    contents = [answer for answer, _ in answers.most_common(3)] + ["0", "x", words[0]]
    shells = [form.format(content) for form in FORMS[1:] for content in contents[:1]]
    for one in environment.accepted[:2]:
        answer = environment.find_answer(one.task)
        if answer and answer in one.turns[-1]:
            shells += [one.turns[-1].replace(answer, content) for content in contents]
    singles = words[:8] if environment.source.vocabulary else []
    prompts = [task.prompt_text for task in environment.tasks[:2]]
    return list(dict.fromkeys([*CONSTANTS, *common, *shells, *singles, *prompts, write_random(words, 8, "constant")]))


def check_constants(environment: CheckedEnvironment) -> list[CheckResult]:
    """What the best answer that is the same for every task earns, in shares of a right answer's reward."""
    top = environment.top
    if top is None:
        return [not_tried("floor_gap", "no reference or search earned a reward to compare with")]
    half = environment.take_few(max(3, len(environment.tasks) // 2)) if environment.is_plain else 4
    tasks, fresh = environment.tasks[:half], [*environment.tasks[half:], *environment.heldout]
    played = environment.judge([(task, (text,)) for text in list_constants(environment) for task in tasks])
    by_text = group_by(played, lambda one: one.turns[0])
    best = max(by_text, key=lambda text: mean([one.value or 0.0 for one in by_text[text]]))
    # Measured on tasks that did not choose it: the best of many is always better where it was chosen.
    measured = environment.judge([(task, (best,)) for task in (fresh if environment.is_plain else fresh[: 3 * half])])
    interval = mean_interval([(one.value or 0.0) / top for one in measured or by_text[best]])
    state = CheckState.WARNING if interval.value > NARROW else CheckState.SOUND
    if interval.low > WIDE and environment.accepted:
        state = CheckState.FAULT
    said = f"{format_share(interval)} of {environment.top_name} is earned by one answer for all tasks"
    result = CheckResult("floor_gap", state, said, len(played) + len(measured), (repr(best),), interval)
    return [result, *_check_canaries(environment, tasks)]


def _check_canaries(environment: CheckedEnvironment, tasks: Sequence[Task]) -> list[CheckResult]:
    """Texts that solve no task, in place of an episode's turns."""
    texts = ("", " ", "zzz qqq", *JUDGE_PHRASES)
    asked = [(t, (text,)) for t in tasks for text in texts if not _is_right_by_chance(environment, t, text)]
    asked += [(task, (task.prompt_text,)) for task in tasks if not _echo_is_right(environment, task)]
    hits = [f"{one.text[-60:]!r} earned {one.value}" for one in environment.judge(asked) if one.passed]
    return [report_share("canary_floor", hits, len(asked), "answers that solve nothing pass")]


def _is_right_by_chance(environment: CheckedEnvironment, task: Task, text: str) -> bool:
    """Whether a text that is none on purpose holds the answer all the same, as a number or a word."""
    answer = environment.find_answer(task)
    edge = r"\d" if answer and answer.strip("-").isdigit() else r"\w"
    return answer is not None and re.search(rf"(?<!{edge}){re.escape(answer)}(?!{edge})", text, re.I) is not None


def _echo_is_right(environment: CheckedEnvironment, task: Task) -> bool:
    answer = environment.find_answer(task)
    return not task.prompt_text.strip() or (answer is not None and answer.strip() == task.prompt_text.strip())


def check_hostile(environment: CheckedEnvironment, thorough: bool) -> list[CheckResult]:
    """Texts that reach for canaries; with a thorough check also those that may never end, in a process of their own,
    and the attack suite where answers are programs."""
    tasks = environment.tasks[:2]
    hits: list[str] = []
    tried = 0
    with Canaries() as outside:
        for task in tasks:
            texts = [outside.fill(text) for text in HOSTILE[:REACHING]]
            texts += [shell.format(text) for text in texts[:3] for shell in FORMS[1:4]]
            texts = [text for text in texts if not _is_right_by_chance(environment, task, text)]
            played = environment.judge([(task, (text,)) for text in texts])
            tried += len(played)
            hits += [f"{one.text[:60]!r} passed" for one in played if one.passed]
            hits += [f"{one.text[:60]!r} has no verdict" for one in played if one.value is None]
        if damage := outside.describe_damage():
            hits.append(f"a hostile answer {damage}")
        with _open_trial(environment, thorough and not hits) as trial:
            for text in HOSTILE[REACHING:] if trial else ():
                tried += 1
                if trial and trial.hangs(Case.of_task(tasks[0], outside.fill(text))):
                    hits.append(f"{text!r} hangs the verifier or ends its process")
            if trial and (damage := outside.describe_damage()):
                hits.append(f"a hostile answer {damage}")
    results = [
        report_share("adversarial_floor", hits, tried, "hostile answers pass, reach out or stay without a verdict")
    ]
    return [*results, *_check_programs(environment, thorough)]


def _has_programs(environment: CheckedEnvironment) -> bool:
    """Whether answers are programs, which tests judge."""
    with suppress(ValueError):
        CodeProblem.of(environment.tasks[0].meta)
        return True
    return False


def _check_programs(environment: CheckedEnvironment, thorough: bool) -> list[CheckResult]:
    if not environment.is_plain or not _has_programs(environment):
        return []
    programs = [attack for attack in PROGRAMS if thorough or attack.category in QUICK_PROGRAMS]
    judged = run_suite(environment.reward, programs, 2)
    hits = [f"{one.attack.category}/{one.attack.name}: {one.fault}" for one in judged if one.fault]
    return [report_share("adversarial_floor", hits, len(judged), "hostile programs pass or escape")]


def check_load(environment: CheckedEnvironment) -> list[CheckResult]:
    """Verdicts from several threads at once, and again afterwards, are those from before."""
    asked = [(one.task, one.turns) for one in environment.accepted[:ROWS]]
    asked += [(task, (text,)) for task in environment.tasks[:3] for text in ("0", "zzz qqq")]
    before = [environment.judge([answer])[0] for answer in asked]
    with ThreadPoolExecutor(THREADS) as pool:
        many = list(pool.map(lambda answer: environment.judge([answer])[0], asked * 3))
    after = [environment.judge([answer])[0] for answer in asked]
    hits = [
        f"{a.value} {a.score.outcome.value}, then {b.value} {b.score.outcome.value} for {a.text[-40:]!r}"
        for a, b in zip(before * 4, [*many, *after], strict=True)
        if (a.value, a.score.outcome) != (b.value, b.score.outcome) and b.score.outcome is not Outcome.TIMEOUT
    ]
    return [report_share("verifier_determinism", hits, 4 * len(asked), "verdicts differed under load or later")]
