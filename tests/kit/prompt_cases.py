"""What the tests of prompts share: tokenizers with templates of several kinds, tasks, and one played episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.futures import LazyFuture
from rlvr.core.messages import Datum, ForwardBackwardOutput, OptimStepResponse, SamplingParams
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Task, Trajectory
from rlvr.envs import PromptEnv
from rlvr.envs.row_source import RowSource
from rlvr.rollout import open_groups, rollout
from tests.kit.code_rows import chat_tokenizer

# A switch that is on by default and off by an empty thought, as Qwen3's; earlier thoughts are taken out.
ENABLE_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# A switch that is off by default, as DeepSeek-V3.1's, with the tags that transformers adds to Jinja.
THINKING = (
    "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
    "{% for m in messages %}{% if not m['content'] %}{% continue %}{% endif %}"
    "[{{ m['role'] }}]{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    "[assistant]{{ '<think>' if thinking else '</think>' }}"
)
# A budget in tokens, as Seed-OSS's: -1 is no limit.
BUDGET = (
    "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    "{% if thinking_budget >= 0 %}[budget]{{ thinking_budget }}{% endif %}[assistant]"
)
# A level and no switch, as gpt-oss's; the thinking of a message is not a variable of the template.
EFFORT = (
    "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'medium' %}{% endif %}"
    "{% if reasoning_effort not in ['low', 'medium'] %}{{ raise_exception('no such effort') }}{% endif %}"
    "[effort]{{ reasoning_effort }}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m.thinking }}{{ m['content'] }}{% endfor %}[assistant]"
)

CHAT = chat_tokenizer()
PLAIN = chat_tokenizer()
PLAIN.chat_template = None


def with_template(template: str) -> Any:
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def rows(*prompts: Any) -> RowSource:
    """Tasks whose answer is 4."""
    tasks = [Task(f"t{i}", prompt, {"answer": "4"}) for i, prompt in enumerate(prompts or ["2 + 2?"])]
    return RowSource("own", tasks, [Task("held", "1 + 3?", {"answer": "4"})], "exact_match", "answer", lead=" ")


class OwnWords(RowSource):
    """Its episodes encode the prompt themselves."""

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(replace(task, shown_prompt=None), tokenizer)


class Grouped(RowSource):
    def group_builder(self, task: Task, tokenizer: Any, size: int) -> Any:
        raise AssertionError


def first(source: TaskSource) -> Task:
    return source.train(0, 0, source.levels[0])


def read_text(source: TaskSource, tokenizer: Any, task: Task | None = None) -> str:
    """What the model reads before its first token."""
    observation, _ = asyncio.run(source.env(task or first(source), tokenizer).initial_observation())
    return tokenizer.decode(observation.to_ints(), skip_special_tokens=False)


def play(source: TaskSource, tokenizer: Any, *answers: str) -> Trajectory:
    script = iter(answers)
    ids = [[*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id] for answer in answers]
    sampler = ScriptedSamplingClient(tokenizer, lambda i: ids[answers.index(next(script))])
    groups = open_groups(source, [first(source)], 1, tokenizer, "g")
    return rollout(groups, sampler, SamplingParams(max_tokens=400), seed=1)[-1]


class Recorder:
    """A training client that keeps what it is to learn from."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_tokenizer(self) -> Any:
        return self._tokenizer

    def forward_backward(self, data: list[Datum], loss: str) -> Any:
        self.data = data
        return LazyFuture.from_value(ForwardBackwardOutput([], {"loss:sum": 0.0}))

    def optim_step(self, adam: Any) -> Any:
        return LazyFuture.from_value(OptimStepResponse())
