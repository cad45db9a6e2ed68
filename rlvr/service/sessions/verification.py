"""Turn a request into a `Task` and the `Blend` of verifiers that judges it.

| the request has | what judges | what only watches |
|---|---|---|
| `grader` | this configuration, with `item` as its item | |
| `verifiers` | these, by their weights | |
| `tests`, or examples in its prompt | `code`, in the sandbox | `draft`, and `judge` if one is set up |
| `answer` | `math` | the same |
| a prompt that the generator's environment recognizes | the environment's reward | `judge` if one is set up |
| nothing of these | `draft` by .3 and `judge` by .7 if one is set up | |
| nothing of these, and no other model as a judge | nothing: `draft` objects to form, and the confidence is None | |

An answer that only `draft`, or the model that generates, has judged is unverified, unless the request names these
verifiers and no other. It is so too where the verifier that knows the truth, or the judge, failed.

A request names verifiers by their registered names and sets only the options of
`rlvr.service.sessions.verifier_options`: no path to code, no URL and no key comes from outside, and the judge is always
the one of the service's settings. Watching verifiers do not count for the confidence: they are there to measure how
well verifiers without the truth agree with those that know it (`verifier_accuracy`).
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Task
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.blend import Blend
from rlvr.reward.code import CodeProblem
from rlvr.reward.code.derived_tests import derive_tests
from rlvr.reward.code.formats import Test
from rlvr.reward.code.task_faults import find_test_fault
from rlvr.reward.feedback import Feedback
from rlvr.reward.judge import judge_with
from rlvr.reward.registry import known_rewards
from rlvr.service.models.local_judge import LocalJudge
from rlvr.service.service_options import SessionRequest
from rlvr.service.sessions.verifier_options import OPTIONS
from rlvr.service.settings import TextEndpoint

RULES_WEIGHT, JUDGE_WEIGHT = 0.3, 0.7  # without tests or an answer: rules on form, and an opinion
NO_TRUTH = "no verifier of this session knows the right answer"
NESTED = ("composite",)  # names other rewards in its options; a request gives these as `verifiers` with weights
NEED_MORE = (
    "classifier",
    "environment",
    "first_attempt",
    "grader",
)  # need a run's episode or a configuration, which no session has
MODULAR = ("boxed", "combined", "correct")  # need the modulus that the generator's arithmetic environment sets

Judge = TextEndpoint | LocalJudge  # a model behind a URL, or one in this process


class FieldError(ValueError):
    """A mistake in one field of a request."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class EnvironmentTask:
    """A prompt as a task of the model's own environment, and the name of the reward that judges it."""

    task: Task
    reward: str


@dataclass(frozen=True)
class VerifiableTask:
    """What a session works on. `self_judging` is true if the judge is the model that generates; `derived_tests` are the
    tests that examples in the prompt gave; `warnings` say what a confidence does not mean."""

    task: Task
    blend: Blend
    self_judging: bool = False
    derived_tests: tuple[Test, ...] = ()
    warnings: tuple[str, ...] = ()

    def describe(self, feedbacks: Sequence[Feedback] = ()) -> dict[str, Any]:
        """How the answers are judged, or were, for the session's row."""
        warnings, verified_by = list(self.warnings), list_verifiers(self.blend, feedbacks)
        if self.blend.can_verify and feedbacks and all(feedback.is_unverified for feedback in feedbacks):
            failures = feedbacks[-1].failures
            warnings = [warning for warning in warnings if not warning.startswith(NO_TRUTH)]
            warnings.append(f"unverified: what can tell whether an answer is right failed: {failures}")
        else:
            knowing = [name for name in self.blend.names if name not in self.blend.opinions]
            failed = [f for f in feedbacks if any(f.scores[name].value is None for name in knowing if name in f.scores)]
            if failed:
                many = f"{len(failed)} of {len(feedbacks)} answers"
                warnings.append(f"a verifier that knows the right answer could not judge {many}: {failed[-1].failures}")
        return {
            "verified_by": verified_by,
            "self_judging": self.self_judging,
            "warnings": warnings,
            "derived_tests": list(self.derived_tests),
            "expected_answer": self.task.meta.get("answer"),
        }


def list_verifiers(blend: Blend, feedbacks: Sequence[Feedback] = ()) -> list[str]:
    """The voters that gave a value in an answer with a confidence; before the first answer, those that will vote."""
    if not feedbacks:
        return blend.voters if blend.can_verify else []
    verified = [feedback.scores for feedback in feedbacks if feedback.confidence is not None]
    return [name for name in blend.voters if any(scores[name].value is not None for scores in verified)]


def known_verifiers(judge: Judge | None = None) -> list[str]:
    """The verifiers that a request may name; given the judge of the settings, without `judge` if there is none."""
    has_judge = judge is None or bool(judge and judge.model)
    left_out = (*NESTED, *NEED_MORE, *(() if has_judge else ("judge",)))
    return [verifier for verifier in known_rewards() if verifier not in left_out]


def resolve_verifier(name: str, options: Mapping[str, Any], judge: Judge = TextEndpoint()) -> Reward:
    """Build the verifier that a request names; ValueError for a name or option that a request may not use."""
    available = known_verifiers()
    if name not in available:
        remedy = "; give its parts as verifiers with weights" if name in NESTED else ""
        raise ValueError(
            f"verifier {name!r} is unknown here{did_you_mean(name, available)}{remedy}; "
            f"known: {', '.join(sorted(available))}"
        )
    allowed = OPTIONS.get(name, frozenset())
    if refused := sorted(set(options) - allowed):
        expected = ", ".join(sorted(allowed)) or "no options"
        raise ValueError(f"verifier {name!r}: a request cannot set the option {refused[0]!r}; it takes {expected}")
    return build_judge_reward(judge, options) if name == "judge" else resolve_reward(name, **options)


def build_judge_reward(judge: Judge, options: Mapping[str, Any] | None = None) -> Reward:
    """Build the reward that asks the judge of the settings."""
    if not judge or not judge.model:
        raise ValueError(
            "verifier 'judge': this service has no judge; set JUDGE_MODEL (a model's folder or hub name); for a model "
            "behind an OpenAI-compatible API also set JUDGE_ENDPOINT (such as http://127.0.0.1:8000/v1)"
        )
    if isinstance(judge, LocalJudge):
        return judge_with(judge, **(options or {}))
    return resolve_reward(
        "judge", base_url=judge.base_url, model=judge.model, api_key_env=judge.key_variable, **(options or {})
    )


def grader_models(judge: Judge) -> dict[str, dict[str, str]]:
    """{name: settings} of the models that a grader may use: the judge of the settings, if it is behind a URL."""
    if isinstance(judge, LocalJudge) or not judge:
        return {}
    key = {"api_key_env": judge.key_variable} if judge.key_variable else {}
    return {judge.model: {"base_url": judge.base_url, "model": judge.model, **key}}


def build_verifiable_task(
    request: SessionRequest,
    *,
    judge: Judge = TextEndpoint(),
    generator: TextEndpoint | str = "",
    environment_task: EnvironmentTask | None = None,
) -> VerifiableTask:
    """Build the task and its verifiers; FieldError if the request's verifiers cannot judge it.

    `generator` is the endpoint that generates, or the name of the model in this process. The reward of an
    `environment_task` judges if the request has neither verifiers nor tests; the request's `answer` replaces the
    task's. Without any of these, examples in the prompt become the tests.
    """
    derived: tuple[Test, ...] = ()
    is_named = request.grader or request.tests or request.verifiers or request.answer is not None
    if not is_named and environment_task is None:
        derived = tuple(derive_tests(request.prompt))
        request = replace(request, tests=derived)
    meta: dict[str, Any] = dict(request.item)
    if request.tests:
        meta |= _read_problem(request).row()
    if request.answer is not None:
        meta["answer"] = request.answer
    task = Task(request.task_id, request.prompt, meta)
    if environment_task is not None:
        task = Task(request.task_id, environment_task.task.prompt, {**environment_task.task.meta, **meta})
    reward_name = environment_task.reward if environment_task is not None and not request.tests else ""
    try:
        verifiers = _select_verifiers(request, judge, reward_name)
    except ValueError as error:
        raise FieldError("verifiers" if request.grader is None else "grader", str(error)) from error
    for reward, _ in verifiers:
        needs = "tests" if reward.name == "code" else reward.spec.gold * reward.spec.verifiable
        if needs and _is_missing(task.meta, needs):
            raise FieldError(
                "verifiers", f"verifier {reward.name!r} compares with `{needs}`, which the request lacks; give it"
            )
        if reward.name in MODULAR and _is_missing(task.meta, "modulus"):
            raise FieldError(
                "verifiers",
                f"verifier {reward.name!r} judges tasks of the arithmetic environment only, and the generator has not "
                "recognized this prompt as one; use `math` with an `answer`",
            )
    _refuse_unread(request, verifiers)
    # A grader's caution says that it asks a model.
    has_judge = any(reward.name == "judge" or (reward.name == "grader" and reward.caution) for reward, _ in verifiers)
    self_judging = has_judge and same_model(judge, generator)
    opinions = {reward.name for reward, _ in verifiers if not reward.spec.verifiable}
    if any(reward.spec.verifiable and weight > 0 for reward, weight in verifiers):
        advisory = opinions
    elif request.verifiers or request.grader:
        advisory = set[str]()
    else:
        advisory = {"draft", "judge"} if self_judging else {"draft"}
    try:
        # The examples stand in the prompt, so nothing is given away by naming the one that fails.
        blend = Blend(verifiers, advisory=advisory, reveal=("code",) if derived else (), decisive=("grader",))
    except ValueError as error:
        raise FieldError("verifiers", str(error)) from error
    return VerifiableTask(task, blend, self_judging, derived, _warnings(blend, self_judging, derived))


def _read_problem(request: SessionRequest) -> CodeProblem:
    row = {"tests": list(request.tests), "statement": request.prompt, "setup": request.setup}
    row["answer_names"] = list(request.answer_names)
    try:
        problem = CodeProblem.of(row | ({"entry_point": request.entry_point} if request.entry_point else {}))
    except ValueError as error:
        raise FieldError("entry_point" if str(error).startswith("entry_point") else "tests", str(error)) from error
    of_asserts = ("setup", "entry_point", "answer_names")
    if problem.is_program and (field := next((name for name in of_asserts if getattr(request, name)), "")):
        raise FieldError(field, f"{field} has no effect with tests of a program (input, output); leave it out")
    if fault := find_test_fault(problem):
        raise FieldError("setup" if "<setup>" in fault else "tests", fault)
    return problem


def _refuse_unread(request: SessionRequest, verifiers: Sequence[tuple[Reward, float]]) -> None:
    """FieldError for a reference that none of the verifiers compares with."""
    if request.grader is not None:
        return
    read = {"tests" if reward.name == "code" else reward.spec.gold for reward, _ in verifiers}
    names = ", ".join(reward.name for reward, _ in verifiers)
    if request.tests and "tests" not in read:
        raise FieldError("tests", f"none of the verifiers ({names}) reads tests; add `code`, or leave tests out")
    if request.answer is not None and "answer" not in read:
        raise FieldError(
            "answer", f"none of the verifiers ({names}) compares with an answer; add `math`, or leave answer out"
        )


def _warnings(blend: Blend, self_judging: bool, derived: Collection[Test]) -> tuple[str, ...]:
    """What a high confidence does not mean, or why there is none."""
    warnings: list[str] = []
    if derived:
        warnings.append(
            f"{len(derived)} of the examples in the prompt became tests (derived_tests), and nothing else checks the "
            "answer; give `tests` that the prompt does not have to check more"
        )
    if not blend.can_verify:
        warnings.append(
            "unverified: nothing of this session can tell whether an answer is right, so its confidence is null, it "
            "is in no success rate, and nothing is learned from it. Give `tests`, an `answer`, `verifiers`, or "
            'examples with values; to accept rules on form or an opinion, name them: "verifiers": ["draft"]'
        )
    elif not blend.verifiable:
        warnings.append(
            f"{NO_TRUTH} ({', '.join(blend.voters)}): a high confidence does "
            "not mean that the answer is right. Give `tests` or an `answer` to check that"
        )
    if self_judging and "judge" in blend.voters:
        warnings.append("the judge is the model that generates: its opinion of its own answers confirms nothing")
    return tuple(warnings)


def _is_missing(meta: Mapping[str, Any], key: str) -> bool:
    return meta.get(key) is None or not str(meta[key]).strip()


def _select_verifiers(request: SessionRequest, judge: Judge, environment_reward: str) -> list[tuple[Reward, float]]:
    if request.grader is not None:
        return [(resolve_reward("grader", config=request.grader, models=grader_models(judge)), 1.0)]
    if request.verifiers:
        return [(resolve_verifier(name, options, judge), weight) for name, weight, options in request.verifiers]
    truth = ["code"] if request.tests else []
    truth += [environment_reward] if environment_reward else ["math"] if request.answer is not None else []
    opinion = build_judge_reward(judge) if judge and judge.model else None
    if not truth:
        rules = resolve_reward("draft")
        return [(rules, 1.0)] if opinion is None else [(rules, RULES_WEIGHT), (opinion, JUDGE_WEIGHT)]
    # Answers to an environment's tasks are short and no prose: `draft`, rules on form, would only object to that.
    watching = [*([] if environment_reward else [resolve_reward("draft")]), *([] if opinion is None else [opinion])]
    return [*((resolve_reward(name), 1.0) for name in truth), *((reward, 0.0) for reward in watching)]


def same_model(judge: Judge, generator: TextEndpoint | str) -> bool:
    """Whether the two are one model, judged by their addresses or folders."""
    if not judge or not generator:
        return False
    if isinstance(judge, LocalJudge):
        return isinstance(generator, str) and _folder(judge.model) == _folder(generator)
    if isinstance(generator, str):
        return False
    same_name = not judge.model or not generator.model or judge.model == generator.model
    return same_name and _address(judge) == _address(generator)


def _folder(model: str) -> Path:
    """The model as an absolute path. A hub name becomes one too, whether it exists or not."""
    return Path(model).expanduser().resolve()


def _address(endpoint: TextEndpoint) -> tuple[str, int]:
    """The host, with one name for all names of this machine, and the port."""
    url = urlsplit(endpoint.endpoint)
    host = url.hostname or ""
    return "localhost" if _is_here(host) else host, url.port or (443 if url.scheme == "https" else 80)


def _is_here(host: str) -> bool:
    """Whether a host of a URL is this machine, in any spelling: localhost, 127.1, 0.0.0.0, ::1, its own name."""
    try:
        address = ipaddress.ip_address(socket.inet_ntoa(socket.inet_aton(host)))  # takes short forms too
    except OSError:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host in ("localhost", socket.gethostname().lower())
    return address.is_loopback or address.is_unspecified


@dataclass(frozen=True)
class Accuracy:
    """The share of checks in which an opinion agreed with the truth on pass or fail."""

    share: float
    count: int


def measure_accuracy(feedbacks: Iterable[Feedback], opinions: Collection[str]) -> Accuracy | None:
    """How often the verifiers without the truth agree with it; None if no truth is known.

    `opinions` are their labels (`Blend.opinions`); each pair of an opinion and a truth is one check.
    """
    agreed = [
        (score.outcome is Outcome.PASSED) == feedback.truth
        for feedback in feedbacks
        if feedback.truth is not None
        for label, score in feedback.scores.items()
        if label in opinions and score.value is not None
    ]
    return Accuracy(sum(agreed) / len(agreed), len(agreed)) if agreed else None
