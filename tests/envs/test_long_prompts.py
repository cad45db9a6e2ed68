"""Prompts that are too long: left out and counted, cut from the left, refused; demonstrations that do not fit."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.messages import ModelInput, SamplingParams
from rlvr.core.protocols import StepResult, TaskSource
from rlvr.core.types import Task
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import PromptEnv
from rlvr.envs.long_prompts import TruncatedEnv, find_long, leave_out_long_demonstrations, limit_prompts
from rlvr.envs.prompt import PromptOptions, encode_prompt
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.row_source import RowSource
from rlvr.rollout import open_groups, rollout
from rlvr.runs.run_tasks import fit_prompts
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.sft import SftOptions, sft_step
from tests.kit.code_rows import chat_tokenizer
from tests.kit.tiny_run import attempt

WORDS = build_tokenizer("words", ["a", "b", "yes"], end="<end>", pad="<pad>")


def of_length(kind: str, *lengths: int) -> list[Task]:
    """Tasks whose prompts have these numbers of words, so of tokens."""
    return [Task(f"{kind}{i}", " ".join(["a"] * (n - 1) + ["b"]), {"answer": "yes"}) for i, n in enumerate(lengths)]


def rows(train: list[Task], heldout: list[Task] | None = None) -> RowSource:
    return RowSource("own", train, heldout or [Task("held", "b b", {"answer": "yes"})], "exact_match", "answer", " ")


def list_prompts(source: TaskSource) -> list[str]:
    assert source.size is not None
    return [source.train(0, i, level).id for level in source.levels for i in range(source.size(level))]


def limit(source: TaskSource, most: int, how: str = "filter", log: Callable[[str], None] = lambda text: None) -> Any:
    return limit_prompts(source, WORDS, most, how, log, "training.max_prompt_tokens")


def test_long_prompts_are_left_out_and_counted_apart_for_training_and_evaluation() -> None:
    said: list[str] = []
    source = rows(of_length("t", 3, 4, 5, 6, 40), of_length("h", 2, 9))
    fitted = limit(source, 5, log=said.append)
    assert sorted(list_prompts(fitted)) == ["t0", "t1", "t2"] and [t.id for t in fitted.heldout(None)] == ["h0"]
    assert said == [
        "left out 2 of 5 prompts longer than 5 tokens (training.max_prompt_tokens)",
        "left out 1 of 2 held-out prompts longer than 5 tokens (training.max_prompt_tokens)",
    ]


def test_a_source_without_long_prompts_stays_as_it_is_in_silence() -> None:
    source, said = rows(of_length("t", 3, 4)), list[str]()
    before = list_prompts(source)
    assert limit(source, 5, log=said.append) is source
    assert (list_prompts(source), said) == (before, [])


def test_an_error_names_the_first_long_prompt_and_the_remedies() -> None:
    with pytest.raises(ValueError, match=r"task 't1': its prompt has 6 tokens, more than 5 .*long_prompts=filter or"):
        limit(rows(of_length("t", 3, 6)), 5, "error")
    with pytest.raises(ValueError, match=r"all 2 prompts are longer than 2 tokens .*raise the limit"):
        limit(rows(of_length("t", 3, 6)), 2)
    with pytest.raises(ValueError, match="all 1 held-out prompts are longer"):
        limit(rows(of_length("t", 3), of_length("h", 9)), 5)


def test_lengths_are_those_of_what_the_model_reads() -> None:
    """Text in batches and chats through the template: the same numbers as one `encode_prompt` each."""
    tokenizer = chat_tokenizer()
    source = rows([Task(f"t{i}", "Is it seven? " * i, {"answer": "yes"}) for i in range(1, 9)])
    for shown in (source, apply_prompt_options(source, tokenizer, PromptOptions("on"))):
        tasks = [shown.train(0, i, "") for i in range(8)]
        lengths = {task.id: len(encode_prompt(task, tokenizer)) for task in tasks}
        for most in sorted(lengths.values()):
            assert find_long(tasks, tokenizer, most) == {id: n for id, n in lengths.items() if n > most}
    assert len(encode_prompt(tasks[0], tokenizer)) > len(encode_prompt(source.train(0, 0, ""), tokenizer))


class Id(str):
    """An id that counts how often it is compared with another one."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Id.compared += 1
        return str.__eq__(self, other)


def test_the_time_to_leave_prompts_out_grows_with_their_number() -> None:
    """Two dictionaries of ids compare them a few times each; a list would take 400 x 200 comparisons."""
    long = [Task(Id(f"h{n}"), "a b " * (n % 2 + 1)) for n in range(400)]

    class Many(Growing):
        def heldout(self, count: int | None) -> list[Task]:
            return long

    tokenizer, said = with_context(9), list[str]()
    assert len(limit(Many(), 3, log=said.append).heldout(None)) == 200
    answers = [Task(task.id, "a", {"answer": task.prompt_text * 2}) for task in long]
    leave_out_long_demonstrations(rows(answers), tokenizer, 8, said.append)
    assert [text.split(" prompts")[0] for text in said] == ["left out 200 of 400 held-out", "left out 200 of 400"]
    assert Id.compared < 20 * 400


def test_counting_many_texts_says_so() -> None:
    said: list[str] = []
    find_long([Task(str(i), "a b") for i in range(20_001)], WORDS, 2, said.append)
    assert said == ["counting the tokens of 20,001 texts"]
    said.clear()
    find_long([Task(str(i), "a b") for i in range(20_001)], WORDS, 20, said.append)  # fewer bytes than 20
    assert said == []


# --- generated tasks ------------------------------------------------------------------------------------------------


class Growing(TaskSource):
    """A task of `seed + index` words, so that another seed gives another length; held out: one word to `count`."""

    levels, reward = ("",), "exact_match"

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"{seed}-{index}", " ".join(["a"] * (1 + (seed + index) % 20)))

    def heldout(self, count: int | None) -> list[Task]:
        return [Task(f"h{n}", " ".join(["b"] * n)) for n in range(1, (count or 10) + 1)]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | None:
        return "yes"


def test_a_generated_task_that_is_too_long_is_drawn_again_and_always_the_same() -> None:
    said: list[str] = []
    fitted = limit(Growing(), 6, log=said.append)
    first = [fitted.train(5, i, "").prompt for i in range(30)]
    assert all(len(prompt.split()) <= 6 for prompt in first)
    assert [fitted.train(5, i, "").prompt for i in range(30)] == first
    assert first[15:20] == [Growing().train(5, i, "").prompt for i in range(15, 20)]  # those that fit are untouched
    for _ in range(2):
        assert [task.id for task in fitted.heldout(9)] == [f"h{n}" for n in range(1, 7)]
    assert said == ["left out 3 of 9 held-out prompts longer than 6 tokens (training.max_prompt_tokens)"]
    with pytest.raises(ValueError, match="its prompt has 7 tokens, more than 6"):
        limit(Growing(), 6, "error").train(6, 0, "")


def test_generated_tasks_are_measured_one_by_one_only_where_it_matters() -> None:
    """The limit of the model, far above the first tasks, costs a run nothing; a limit that was given always holds."""
    source = Growing()
    for most, is_strict, is_same in ((20, False, False), (50, False, True), (50, True, False)):
        fitted = limit_prompts(source, WORDS, most, "filter", lambda text: None, "key", is_strict=is_strict)
        assert (fitted is source) == is_same


def test_a_level_that_never_fits_is_an_error_with_a_remedy() -> None:
    class Long(Growing):
        def train(self, seed: int, index: int, level: str) -> Task:
            return Task("t", "a a a a a a a a")

    with pytest.raises(ValueError, match=r"1,000 tasks of level '' in a row .*leave the level out"):
        limit(Long(), 6).train(0, 0, "")


# --- cut from the left ----------------------------------------------------------------------------------------------


def test_a_cut_prompt_is_its_end_in_rollouts_and_in_fine_tuning() -> None:
    said: list[str] = []
    source = limit(rows([Task("t0", "a a a b a b", {"answer": "yes"})]), 3, "truncate_left", said.append)
    assert said == ["the model reads the last 3 tokens (training.max_prompt_tokens) of 1 of 2 prompts"]
    sampler = ScriptedSamplingClient(WORDS, lambda i: WORDS.encode("yes <end>"))
    (played,) = rollout(
        open_groups(source, [source.train(0, 0, "")], 1, WORDS, "g"), sampler, SamplingParams(max_tokens=2), seed=1,
        max_prompt_tokens=3,
    )  # fmt: skip
    assert played.prompt_tokens == WORDS.encode("b a b")

    class Recorder:
        """A client that keeps the data it is given."""

        def __init__(self) -> None:
            self.seen: list[list[int]] = []

        def get_tokenizer(self) -> Any:
            return WORDS

        def forward_backward(self, data: list[Any], loss: str) -> Any:
            self.seen += [datum.model_input.to_ints() for datum in data]
            raise StopIteration

    client: Any = Recorder()
    with pytest.raises(StopIteration):
        sft_step(client, source, Curriculum(source, CurriculumOptions(), 1), SftOptions(1, batch_size=1), 0, 1)
    assert client.seen == [WORDS.encode("b a b yes")]


def test_later_turns_of_a_cut_episode_go_on_from_the_cut_prompt() -> None:
    class Turns:
        """Repeats the conversation with `b`, then rewrites it."""

        async def initial_observation(self) -> tuple[ModelInput, None]:
            return ModelInput([1, 2, 3, 4, 5]), None

        async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
            following = [1, 2, 3, 4, 5, *action, 8] if action == [7] else [9, 9, 9, 9]
            return StepResult(0.0, False, ModelInput(following))

    async def play() -> list[list[int]]:
        env = TruncatedEnv(Turns(), 3)
        first = await env.initial_observation()
        assert isinstance(first, tuple)
        steps = [await env.step(action) for action in ([7], [6])]
        return [first[0].to_ints(), *(s.next_observation.to_ints() for s in steps if s.next_observation)]

    assert asyncio.run(play()) == [[3, 4, 5], [3, 4, 5, 7, 8], [9, 9, 9]]


# --- a run ----------------------------------------------------------------------------------------------------------

CONFIG = """
client: mock
env: {name: toy}
rollout: {max_tokens: 8}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(CONFIG)
    return build_config(load(None, "c.yaml"))


def with_context(context: int) -> Any:
    tokenizer = build_tokenizer("words", ["a", "b", "yes"], end="<end>", pad="<pad>")
    tokenizer.model_max_length = context
    return tokenizer


def test_without_a_limit_a_prompt_has_to_fit_the_model_with_its_completion(config: Any) -> None:
    said: list[str] = []
    source = fit_prompts(config, rows(of_length("t", 11, 12, 13)), with_context(20), said.append)
    assert sorted(list_prompts(source)) == ["t0", "t1"] and "longer than 12 tokens" in said[0]
    assert "context of 20 less rollout.max_tokens=8" in said[0]
    source = rows(of_length("t", 11, 12, 13))
    assert fit_prompts(config, source, WORDS, said.append) is source and len(said) == 1  # a context without end
    narrow = replace(config, training=replace(config.training, max_prompt_tokens=11))
    assert list_prompts(fit_prompts(narrow, source, with_context(20), said.append)) == ["t0"]
    with pytest.raises(ValueError, match=r"rollout.max_tokens=8 leaves no room .*lower it"):
        fit_prompts(config, source, with_context(8), said.append)


def test_a_demonstration_that_does_not_fit_the_model_is_left_out_before_fine_tuning(config: Any) -> None:
    tasks = [Task(f"t{n}", "a b", {"answer": " ".join(["yes"] * n)}) for n in (1, 16, 17, 18)]
    said: list[str] = []
    tuned = replace(config, sft=SftOptions(steps=1))
    fitted = fit_prompts(tuned, rows(tasks, of_length("h", 3)), with_context(20), said.append)
    assert sorted(list_prompts(fitted)) == ["t1", "t16", "t17"]  # 2 + 17 + the end token are 20
    assert said == ["left out 1 of 4 prompts longer, with their demonstration, than the model's context of 20 tokens"]
    assert len(list_prompts(fit_prompts(config, rows(tasks), with_context(20), said.append))) == 4


@pytest.mark.slow
def test_the_prompts_of_a_run_on_the_engine_are_filtered_and_it_evaluates_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real model of 24 positions: half of the rows are too long for it, and nothing stops in the middle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(
        "from rlvr.envs.dataset import dataset\n"
        "def environment(**options):\n"
        "    source = dataset(**options)\n"
        "    source.vocabulary = ['a', 'b', 'yes', 'no']\n"
        "    return source\n"
    )
    lengths = [3, 30] * 20
    tasks = [{"prompt": " ".join(["a"] * n + ["b"] * (i % 7)), "answer": "yes"} for i, n in enumerate(lengths)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    (tmp_path / "c.yaml").write_text(
        "env: {name: 'own:environment', kwargs: {path: d.jsonl, heldout_fraction: 0.3}}\n"
        "model:\n  tokenizer: words\n  device: cpu\n"
        "  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, head_dim: 8,\n"
        "           num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 24}\n"
        "rollout: {max_tokens: 4}\nsft: {steps: 1, batch_size: 4}\n"
        "training: {epochs: 0.25, prompts_per_step: 4, group_size: 2}\n"
        "evaluation: {tasks: 8, samples: 2}\nengine: {threads: 1}\n"
    )
    summary = attempt("c.yaml")
    said = capsys.readouterr().out
    assert "prompts longer than 20 tokens" in said and "held-out prompts longer than 20 tokens" in said
    assert summary["tasks"] >= 1
