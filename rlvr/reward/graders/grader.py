"""`Grader`: a configuration in the OpenAI graders' schema, checked as a whole, that scores answers.

    grader = Grader.of({"type": "string_check", "name": "same", "operation": "eq",
                        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"})
    grader.grade({"answer": "7"}, {"output_text": "7"})        # Score(1.0, passed)

Nothing is fetched, run or asked when a grader is made.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlvr.core.chat_client import Endpoint
from rlvr.core.types import Outcome, Score
from rlvr.reward.coroutines import run_coroutine
from rlvr.reward.graders.controls import ALWAYS, HELD, Blame
from rlvr.reward.graders.formula import FUNCTIONS, NAME, Formula, NoFormulaValue
from rlvr.reward.graders.grader_options import (
    check_fields,
    check_word,
    field_path,
    pass_threshold,
    score_of,
    with_json,
)
from rlvr.reward.graders.grader_templates import Values
from rlvr.reward.graders.grading_context import SHARED_SECONDS, GradingContext
from rlvr.reward.graders.model_graders import LabelModel, ScoreModel
from rlvr.reward.graders.python_grader import PythonGrader
from rlvr.reward.graders.text_graders import StringCheck, TextSimilarity
from rlvr.reward.signatures import LARGEST
from rlvr.sandbox import Sandbox

TYPES = ("string_check", "text_similarity", "score_model", "label_model", "python", "multi")
MAX_GRADERS = 20  # of a multi
_COST = ("requests", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class MultiGrader:
    """Several graders and a formula over their values. If one cannot grade, the whole cannot either."""

    graders: Mapping[str, AnyGrader]
    formula: Formula
    passed_at: float
    _blame: Blame = field(default_factory=Blame, repr=False, compare=False)

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> MultiGrader:
        check_fields(config, where, ("graders", "calculate_output"), ("name", "pass_threshold"))
        parts, here = config["graders"], field_path(where, "graders")
        if not isinstance(parts, Mapping) or not 0 < len(parts) <= MAX_GRADERS:
            raise ValueError(f"{here}={parts!r:.80}, expected an object of 1 to {MAX_GRADERS} graders by name")
        graders: dict[str, AnyGrader] = {}
        for name, part in parts.items():
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in FUNCTIONS:
                raise ValueError(
                    f"{here} has the name {name!r:.80}, expected letters, digits and _, and not a function's name, "
                    "because a formula uses it"
                )
            graders[name] = parse_grader(part, field_path(here, name), models, nested=True)
        formula = Formula.of(config["calculate_output"], graders, field_path(where, "calculate_output"))
        return cls(graders, formula, pass_threshold(config, where))

    async def grade(self, values: Values, context: GradingContext) -> Score:
        results = await asyncio.gather(*(grader.grade(values, context) for grader in self.graders.values()))
        scores = dict(zip(self.graders, results, strict=True))
        cost = {key: sum(score.parts.get(key, 0.0) for score in results) for key in _COST}
        cost = {key: spent for key, spent in cost.items() if spent}
        for name, score in scores.items():
            if score.value is None:
                return Score(None, score.outcome, score.reason, cost, f"{name}: {score.detail}")
        parts = {name: score.value for name, score in scores.items() if score.value is not None}
        try:
            value = self._value(parts)
        except NoFormulaValue as error:
            detail = f"calculate_output: {error}"
            why = await self._blame.find(
                values["item"], values["sample"], lambda text: self._try_control(text, values["item"], context)
            )
            if not why:
                return Score(0.0, Outcome.FAILED, "no_value", {**parts, **cost}, detail)
            return Score(None, Outcome.ERROR, "no_value", {**parts, **cost}, f"{detail}; {why}"[:2000])
        reasons = (f"{name}: {s.reason} {s.detail}".strip() for name, s in scores.items() if s.reason)
        return score_of(value, self.passed_at, "low_score", {**parts, **cost}, "; ".join(reasons)[:2000])

    def _value(self, parts: Mapping[str, float]) -> float:
        value = self.formula.value(parts)
        if abs(value) > LARGEST:
            raise NoFormulaValue(f"the value is {value:g}")
        return value

    async def _try_control(self, control: str, item: Mapping[str, Any], context: GradingContext) -> tuple[str, float]:
        """(why the formula has no value for a control, "" if it has one; for how many seconds that holds)."""
        values = {"item": item, "sample": with_json({"output_text": control})}
        results = await asyncio.gather(*(grader.grade(values, context) for grader in self.graders.values()))
        parts = {n: s.value for n, s in zip(self.graders, results, strict=True) if s.value is not None}
        if len(parts) < len(results):
            is_slow = any(score.reason == "grader_failed" for score in results)
            return "a grader gave no value", HELD * context.timeout_s if is_slow else 0.0  # perhaps only now
        try:
            self._value(parts)
        except NoFormulaValue as error:
            return str(error), ALWAYS
        return "", ALWAYS


AnyGrader = StringCheck | TextSimilarity | ScoreModel | LabelModel | PythonGrader | MultiGrader


def parse_grader(config: Any, where: str, models: Mapping[str, Endpoint], nested: bool = False) -> AnyGrader:
    """The grader of a configuration; ValueError with the field."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where or 'grader'}={config!r:.80}, expected an object with a type: {', '.join(TYPES)}")
    match check_word(config.get("type"), field_path(where, "type"), TYPES):
        case "string_check":
            return StringCheck.of(config, where)
        case "text_similarity":
            return TextSimilarity.of(config, where)
        case "score_model":
            return ScoreModel.of(config, where, models)
        case "label_model":
            return LabelModel.of(config, where, models)
        case "python":
            return PythonGrader.of(config, where)
        case _:
            if nested:
                raise ValueError(
                    f"{field_path(where, 'type')}='multi': a multi grader cannot hold another; use one formula"
                )
            return MultiGrader.of(config, where, models)


@dataclass(frozen=True)
class Grader:
    """Made by `of`; can be used from any thread except that of async rewards."""

    grader: AnyGrader
    sandbox: Sandbox | Mapping[str, Any] | None = None
    timeout_s: float = SHARED_SECONDS
    batch_s: float | None = None

    @classmethod
    def of(
        cls,
        config: Any,
        models: Mapping[str, Endpoint] | None = None,
        *,
        sandbox: Sandbox | Mapping[str, Any] | None = None,
        timeout_s: float = SHARED_SECONDS,
        batch_s: float | None = None,
    ) -> Grader:
        """Read a configuration; ValueError that names the field which is wrong.

        `models` are what model graders may name; `sandbox` (as the reward `code` takes it) and `timeout_s` are for
        python graders. An answer not graded `batch_s` seconds after its batch began is an error (`no_time`).
        """
        return cls(parse_grader(config, "", models or {}), sandbox, timeout_s, batch_s)

    @property
    def members(self) -> list[AnyGrader]:
        """This grader and those inside it."""
        return [self.grader, *(self.grader.graders.values() if isinstance(self.grader, MultiGrader) else ())]

    def grade(self, item: Mapping[str, Any], sample: Mapping[str, Any]) -> Score:
        """The score of one sample: `output_text`, and where they are known `output_json` and `output_tools`."""
        return self.grade_many([(item, sample)])[0]

    def grade_many(self, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Score]:
        """One score per (item, sample), in order, all at once; never raises because of an answer or a model."""
        return run_coroutine(self.agrade_many(cases))

    async def agrade_many(self, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Score]:
        async with GradingContext(self.sandbox, self.timeout_s) as context:
            end = None if self.batch_s is None else asyncio.get_running_loop().time() + self.batch_s
            return list(await asyncio.gather(*(self._grade_one(*case, context, end) for case in cases)))

    async def _grade_one(
        self, item: Mapping[str, Any], sample: Mapping[str, Any], context: GradingContext, end: float | None
    ) -> Score:
        try:
            async with asyncio.timeout_at(end):
                return await self.grader.grade({"item": item, "sample": with_json(sample)}, context)
        except TimeoutError:
            return Score(None, Outcome.ERROR, "no_time", detail=f"the batch took more than {self.batch_s:g} s")
        except Exception:  # one case must not fail the others
            return Score(None, Outcome.ERROR, "exception", detail=traceback.format_exc()[-8000:])
