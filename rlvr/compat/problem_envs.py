"""Questions with one answer, by the cookbook's reward 1[correct] + 0.1 (1[format] - 1): sums, GSM8K, your own.

    builder = Gsm8kDatasetBuilder(batch_size=128, group_size=16, renderer_name=..., model_name_for_tokenizer=model)
    train, test = asyncio.run(builder())

`format` asks for more than a box: the answer must have reached the renderer's stop sequence. Left out on purpose:
verifiers (`rlvr.reward` judges answers of any other environment).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rlvr.compat.model_info import get_recommended_renderer_name, get_tokenizer
from rlvr.compat.renderers import Message, get_renderer, get_text_content
from rlvr.core import rng
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import Env, StepResult
from rlvr.envs.groups import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from rlvr.envs.gsm8k import gsm8k
from rlvr.reward.reward_options import check_integer
from rlvr.reward.text.final_answer import MAX_DIGITS, final_answer, find_answer, parse_number

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
STANDARD_PREFIX: tuple[Message, ...] = (
    {"role": "user", "content": "How many e's are in the word cheese?" + SUFFIX},
    {"role": "assistant", "content": "The letters are c, h, e, e, s, e; three of them are e. \\boxed{3}"},
)


class ProblemEnv(ABC):
    """One question, one answer. A class of its own says what is asked and which answer is right."""

    def __init__(
        self,
        renderer: Any,
        convo_prefix: Sequence[Message] | None = None,
        format_coef: float = 0.1,
        require_stop_sequence_for_format: bool = True,
    ) -> None:
        self.renderer = renderer
        self.convo_prefix = list(convo_prefix or ())
        self.format_coef = format_coef
        self.require_stop_sequence_for_format = require_stop_sequence_for_format

    @abstractmethod
    def get_question(self) -> str: ...

    @abstractmethod
    def check_answer(self, sample_str: str) -> bool: ...

    @abstractmethod
    def check_format(self, sample_str: str) -> bool: ...

    @abstractmethod
    def get_reference_answer(self) -> str: ...

    async def initial_observation(self) -> tuple[ModelInput, Any]:
        convo = [*self.convo_prefix, {"role": "user", "content": self.get_question()}]
        return self.renderer.build_generation_prompt(convo), self.renderer.get_stop_sequences()

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        message, ended = self.renderer.parse_response(action)
        content = get_text_content(message)
        whole = ended.is_stop_sequence if self.require_stop_sequence_for_format else ended.is_clean
        format, correct = float(whole and self.check_format(content)), float(self.check_answer(content))
        return StepResult(
            reward=correct + self.format_coef * (format - 1),
            episode_done=True,
            metrics={"format": format, "correct": correct},
            logs={"answer": content, "reference": self.get_reference_answer()},
        )


@dataclass(frozen=True)
class ProblemGroupBuilder(EnvGroupBuilder):
    """Makes a group: `num_envs` episodes of one question; `env_thunk` opens one."""

    env_thunk: Callable[[], ProblemEnv]
    num_envs: int
    dataset_name: str = "problems"

    async def make_envs(self) -> Sequence[Env]:
        return [self.env_thunk() for _ in range(self.num_envs)]

    def logging_tags(self) -> list[str]:
        return [self.dataset_name]


class Gsm8kEnv(ProblemEnv):
    """A problem of GSM8K. An answer is right if the number in its last box equals the last number of the solution."""

    def __init__(self, question: str, solution: str, renderer: Any, convo_prefix: Sequence[Message] | None = None):
        super().__init__(renderer, convo_prefix)
        self.question, self.solution = question, solution
        self.answer = final_answer(solution)
        if self.answer is None:
            raise ValueError(f"gsm8k: the solution {solution[-60:]!r} ends on no number (#### 42); mend the row")

    def get_question(self) -> str:
        return self.question + SUFFIX

    def check_answer(self, sample_str: str) -> bool:
        return parse_number(find_answer(sample_str, ["boxed"]).text) == self.answer

    def check_format(self, sample_str: str) -> bool:
        return not find_answer(sample_str, ["boxed"]).problem

    def get_reference_answer(self) -> str:
        return str(self.answer)


class ProblemDataset(RLDataset):
    """Batches of `batch_size` questions, each a group of `group_size`; the last batch may be smaller."""

    def __init__(self, thunks: Sequence[Callable[[], ProblemEnv]], batch_size: int, group_size: int, name: str) -> None:
        check_positive(name, batch_size=batch_size, group_size=group_size)
        self._thunks, self._batch_size, self._group_size, self._name = thunks, batch_size, group_size, name

    def get_batch(self, index: int) -> Sequence[ProblemGroupBuilder]:
        if not 0 <= index < len(self):
            raise ValueError(f"{self._name}: batch {index}, expected 0 to {len(self) - 1}")
        chosen = self._thunks[index * self._batch_size :][: self._batch_size]
        return [ProblemGroupBuilder(thunk, self._group_size, self._name) for thunk in chosen]

    def __len__(self) -> int:
        return math.ceil(len(self._thunks) / self._batch_size)


@dataclass(frozen=True)
class Gsm8kDatasetBuilder(RLDatasetBuilder):
    """GSM8K from the hub, or from the folder `data` with its `train.jsonl` and `test.jsonl`.

    The training questions are shuffled by `seed`. `convo_prefix` is a conversation to go before each: "standard" for
    one question with its boxed answer, None for none. `renderer_name` None is the one recommended for the model.
    """

    batch_size: int
    group_size: int
    renderer_name: str | None
    model_name_for_tokenizer: str
    convo_prefix: Sequence[Message] | str | None = "standard"
    seed: int = 0
    data: str | None = None

    async def __call__(self) -> tuple[ProblemDataset, ProblemDataset]:
        source = gsm8k(self.data, template="{question}")
        renderer = renderer_of(self.model_name_for_tokenizer, self.renderer_name)
        if isinstance(self.convo_prefix, str) and self.convo_prefix != "standard":
            raise ValueError(f"convo_prefix={self.convo_prefix!r}: expected 'standard', a list of messages or None")
        prefix = STANDARD_PREFIX if self.convo_prefix == "standard" else self.convo_prefix
        train = [source.train(self.seed, i, "") for i in range(source.size(""))]

        def thunk(task: Any) -> Callable[[], ProblemEnv]:
            return partial(Gsm8kEnv, task.prompt, task.meta["answer"], renderer, prefix)

        return (
            ProblemDataset([thunk(task) for task in train], self.batch_size, self.group_size, "gsm8k"),
            ProblemDataset([thunk(task) for task in source.heldout(None)], self.batch_size, 1, "gsm8k"),
        )


class ArithmeticEnv(ProblemEnv):
    """A sum of two numbers. Right is the last whole number of the answer; any form is good."""

    def __init__(self, x: int, y: int, renderer: Any, convo_prefix: Sequence[Message] | None = None) -> None:
        super().__init__(renderer, convo_prefix)
        self.x, self.y = x, y

    def get_question(self) -> str:
        return f"What is {self.x} + {self.y}?"

    def check_answer(self, sample_str: str) -> bool:
        numbers = re.findall(r"-?[0-9]+", sample_str)
        return bool(numbers) and len(numbers[-1]) <= MAX_DIGITS and int(numbers[-1]) == self.x + self.y

    def check_format(self, sample_str: str) -> bool:
        return True

    def get_reference_answer(self) -> str:
        return str(self.x + self.y)


@dataclass(frozen=True)
class ArithmeticDatasetBuilder(RLDatasetBuilder):
    """Builds a dataset: `n_batches` of sums of numbers from 0 to `largest`, drawn by `seed`; one example goes before
    each."""

    batch_size: int
    group_size: int
    renderer_name: str | None
    model_name_for_tokenizer: str
    n_batches: int = 100
    include_fewshot: bool = True
    largest: int = 100
    seed: int = 0

    async def __call__(self) -> tuple[ProblemDataset, None]:
        sizes = {"batch_size": self.batch_size, "group_size": self.group_size, "n_batches": self.n_batches}
        check_positive("arithmetic", **sizes, largest=self.largest)
        renderer = renderer_of(self.model_name_for_tokenizer, self.renderer_name)
        prefix = [{"role": "user", "content": "What is 4 + 5?"}, {"role": "assistant", "content": "9"}]
        key = rng.key("arithmetic", self.seed)

        def number(i: int) -> int:
            return rng.integer(self.largest + 1, key, i)

        thunks = [
            partial(ArithmeticEnv, number(2 * i), number(2 * i + 1), renderer, prefix if self.include_fewshot else None)
            for i in range(self.n_batches * self.batch_size)
        ]
        return ProblemDataset(thunks, self.batch_size, self.group_size, "arithmetic"), None


def renderer_of(model_name: str, renderer_name: str | None) -> Any:
    return get_renderer(renderer_name or get_recommended_renderer_name(model_name), get_tokenizer(model_name))


def check_positive(name: str, **numbers: Any) -> None:
    """ValueError for a number, from a config as it was typed, that is not a whole one of at least 1."""
    for option, value in numbers.items():
        check_integer(f"{name}: {option}", value, 1)
