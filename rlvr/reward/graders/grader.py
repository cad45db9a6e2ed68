"""`Grader`: a configuration in the OpenAI graders' schema, checked whole, and what it says of answers.

    grader = Grader.of({"type": "string_check", "name": "same", "operation": "eq",
                        "input": "{{ sample.output_text }}", "reference": "{{ item.answer }}"})
    grader.grade({"answer": "7"}, {"output_text": "7"})        # Score(1.0, passed)

Nothing is fetched, run or asked when a grader is made. `tests/test_graders.py` exercises it.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.http_line import Endpoint
from rlvr.reward.coroutines import run_to_end
from rlvr.reward.graders.desk import SHARED_SECONDS, Desk
from rlvr.reward.graders.fields import choice, graded, path, taken, threshold, with_json
from rlvr.reward.graders.formula import FUNCTIONS, NAME, Formula, NoValue
from rlvr.reward.graders.models import LabelModel, ScoreModel
from rlvr.reward.graders.program import Program
from rlvr.reward.graders.templates import Values
from rlvr.reward.graders.texts import StringCheck, TextSimilarity
from rlvr.reward.signatures import LARGEST
from rlvr.sandbox import Sandbox
from rlvr.types import Outcome, Score

TYPES = ("string_check", "text_similarity", "score_model", "label_model", "python", "multi")
MAX_GRADERS = 20  # of a multi
_COST = ("requests", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True)
class Multi:
    """Several graders, and a formula over their values. Where one could not grade, nothing is graded."""

    graders: Mapping[str, Kind]
    formula: Formula
    passed_at: float

    @classmethod
    def of(cls, config: Any, where: str, models: Mapping[str, Endpoint]) -> Multi:
        given = taken(config, where, ("graders", "calculate_output"), ("name", "pass_threshold"))
        parts, here = given["graders"], path(where, "graders")
        if not isinstance(parts, Mapping) or not 0 < len(parts) <= MAX_GRADERS:
            raise ValueError(f"{here}={parts!r:.80}, expected an object of 1 to {MAX_GRADERS} graders by name")
        graders: dict[str, Kind] = {}
        for name, part in parts.items():
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in FUNCTIONS:
                raise ValueError(
                    f"{here} has the name {name!r:.80}, expected letters, digits and _, and no function's name: a "
                    "formula names it"
                )
            graders[name] = kind(part, path(here, name), models, nested=True)
        formula = Formula.of(given["calculate_output"], graders, path(where, "calculate_output"))
        return cls(graders, formula, threshold(given, where))

    async def grade(self, values: Values, desk: Desk) -> Score:
        scores = await asyncio.gather(*(grader.grade(values, desk) for grader in self.graders.values()))
        cost = {key: sum(score.parts.get(key, 0.0) for score in scores) for key in _COST}
        parts = {key: spent for key, spent in cost.items() if spent}
        by_name = dict(zip(self.graders, scores, strict=True))
        for name, score in by_name.items():
            if score.value is None:
                return Score(None, score.outcome, score.reason, parts, f"{name}: {score.detail}")
        known = {name: score.value for name, score in by_name.items() if score.value is not None}
        said = "; ".join(f"{name}: {s.reason} {s.detail}".strip() for name, s in by_name.items() if s.reason)[:2000]
        try:
            value = self.formula.value(known)
        except NoValue as error:
            return Score(None, Outcome.ERROR, "no_value", {**known, **parts}, f"calculate_output: {error}")
        if abs(value) > LARGEST:
            return Score(None, Outcome.ERROR, "no_value", {**known, **parts}, f"calculate_output is {value:g}")
        return graded(value, self.passed_at, "low_score", {**known, **parts}, said)


Kind = StringCheck | TextSimilarity | ScoreModel | LabelModel | Program | Multi


def kind(config: Any, where: str, models: Mapping[str, Endpoint], nested: bool = False) -> Kind:
    """The grader of a configuration; ValueError naming the field."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where or 'grader'}={config!r:.80}, expected an object with a type: {', '.join(TYPES)}")
    match choice(config.get("type"), path(where, "type"), TYPES):
        case "string_check":
            return StringCheck.of(config, where)
        case "text_similarity":
            return TextSimilarity.of(config, where)
        case "score_model":
            return ScoreModel.of(config, where, models)
        case "label_model":
            return LabelModel.of(config, where, models)
        case "python":
            return Program.of(config, where)
        case _:
            if nested:
                raise ValueError(f"{path(where, 'type')}='multi': a multi grader holds no other; use one formula")
            return Multi.of(config, where, models)


@dataclass(frozen=True)
class Grader:
    """Made by `of`; used from any thread, but for the one of an async reward."""

    kind: Kind
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
        """ValueError, naming the field, for what is no such configuration.

        `models` are what model graders may name; `sandbox` (as the reward `code` takes it) and `timeout_s` are for
        python graders. What is not graded `batch_s` seconds after a batch began is an error (`no_time`).
        """
        return cls(kind(config, "", models or {}), sandbox, timeout_s, batch_s)

    def grade(self, item: Mapping[str, Any], sample: Mapping[str, Any]) -> Score:
        """What it says of one sample: `output_text`, and where they are known `output_json` and `output_tools`."""
        return self.grade_many([(item, sample)])[0]

    def grade_many(self, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Score]:
        """One score per (item, sample), in order, all at once; never raises for what an answer or a model did."""
        return run_to_end(self.agrade_many(cases))

    async def agrade_many(self, cases: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> list[Score]:
        async with Desk(self.sandbox, self.timeout_s) as desk:
            end = None if self.batch_s is None else asyncio.get_running_loop().time() + self.batch_s
            return list(await asyncio.gather(*(self._guarded(*case, desk, end) for case in cases)))

    async def _guarded(
        self, item: Mapping[str, Any], sample: Mapping[str, Any], desk: Desk, end: float | None
    ) -> Score:
        try:
            async with asyncio.timeout_at(end):
                return await self.kind.grade({"item": item, "sample": with_json(sample)}, desk)
        except TimeoutError:
            return Score(None, Outcome.ERROR, "no_time", detail=f"the batch took more than {self.batch_s:g} s")
        except Exception:  # one case must not take the others along
            return Score(None, Outcome.ERROR, "exception", detail=traceback.format_exc()[-8000:])
