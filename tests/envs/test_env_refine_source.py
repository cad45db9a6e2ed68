"""The environment `refine`: tasks of another one, attempts after feedback, and demonstrations of both."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.protocols import StepResult
from rlvr.core.types import Outcome, Task, Trajectory
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs import resolve_environment
from rlvr.envs.refine import RefineEnv, RefineSource
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from tests.kit.code_rows import chat_tokenizer, mbpp_file

TEXT = chat_tokenizer()
WORDS: Any = {"inner": "rpn_arithmetic", "verifiers": ["correct"], "feedback": "<wrong> {prompt}"}


def arithmetic(flaw: float = 0.5, **options: Any) -> RefineSource:
    return RefineSource(**{**WORDS, "inner_kwargs": {"complexity": [1, 2], "flaw": flaw}, **options})


def rows(path: Path, *more: dict[str, Any]) -> str:
    given = [{"prompt": f"How much is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*given, *more)))
    return str(path)


def step_env(env: RefineEnv, tokens: list[int], stop_reason: str = "stop") -> tuple[list[int], StepResult]:
    async def two() -> tuple[list[int], StepResult]:
        first, _ = await env.initial_observation()
        return first.to_ints(), await env.step(tokens, extra={"stop_reason": stop_reason})

    return asyncio.run(two())


def test_the_tasks_are_those_of_the_inner_environment() -> None:
    source, inner = arithmetic(), resolve_environment("rpn_arithmetic", complexity=[1, 2], flaw=0.5)
    assert (source.levels, source.reward, source.max_turns) == (inner.levels, "combined", 2)
    assert source.heldout(7) == inner.heldout(7) and source.train(3, 4, "2") == inner.train(3, 4, "2")
    assert (source.end_word, source.pad_word, source.size) == ("<eoe>", "<pad>", None)
    assert source.vocabulary == [*inner.vocabulary, "<wrong>"]
    task = source.train(3, 4, "2")
    assert source.describe_task(task) == inner.describe_task(task) != {}


def test_a_wrong_attempt_gets_feedback_in_the_vocabulary_and_another_turn() -> None:
    source = arithmetic()
    tokens = build_tokenizer("words", source.vocabulary, end="<eoe>", pad="<pad>")
    task = Task("t", "<boe> 3 5 +", {"answer": "8", "modulus": 13}, "1")
    for answer, stop_reason, more in (
        ("= 7 <eoe>", "stop", True),
        ("= 8 <eoe>", "stop", False),
        ("= 8", "length", True),
    ):
        said = tokens.encode(answer)
        first, result = step_env(source.env(task, tokens), said, stop_reason)
        assert result.episode_done != more
        if more:
            again = tokens.encode("<wrong> <boe> 3 5 +")
            assert result.next_observation is not None
            assert result.next_observation.to_ints() == [*first, *said, *again]


def test_a_demonstration_with_a_wrong_first_attempt_includes_the_second() -> None:
    """Token for token the episode that the policy will see; a right one ends at once."""
    source = arithmetic()
    tokens = build_tokenizer("words", source.vocabulary, end="<eoe>", pad="<pad>")
    seen, mended = {True: 0, False: 0}, 0
    for index in range(40):
        task = source.train(0, index, "2")
        shown = source.demonstration(task, index)
        assert shown is not None
        first, *wrong = [shown] if isinstance(shown, str) else shown
        right = resolve_reward("correct").judge(Case(task.prompt_text, f"{first} <eoe>", task.meta)).value == 1
        assert right != bool(wrong) and first == source.inner.demonstration(task, index)
        seen[right] += 1
        if wrong:
            said_again, second = wrong
            assert said_again == f"<wrong> {task.prompt}"
            mended += resolve_reward("correct").judge(Case(task.prompt_text, f"{second} <eoe>", task.meta)).value == 1
            said = tokens.encode(f"{first} <eoe>")
            prompt, result = step_env(source.env(task, tokens), said)
            assert result.next_observation is not None
            seen_again = result.next_observation.to_ints()
            assert [*prompt, *said, *tokens.encode(said_again)] == seen_again
    assert seen[True] > 5 and seen[False] > mended > 3  # the teacher errs anew
    alone = arithmetic(history="rewrite")  # there an attempt has no second one behind it
    assert "<wrong>" not in "".join(str(alone.demonstration(alone.train(0, i, "2"), i)) for i in range(40))
    assert "<wrong>" not in "".join(str(arithmetic(flaw=0.0).demonstration(task, i)) for i in range(9))


def test_rows_of_a_file_are_refined_in_a_chat_by_default_words(tmp_path: Path) -> None:
    chat = {"prompt": [{"role": "user", "content": "Capital of France?"}], "answer": "Paris"}
    source = RefineSource("jsonl", {"path": rows(tmp_path / "rows.jsonl", chat), "heldout_fraction": 0.1})
    task = Task("t", chat["prompt"], {"answer": "Paris"})
    _, result = step_env(source.env(task, TEXT), TEXT.encode("Rome"))
    assert result.next_observation is not None
    shown = TEXT.decode(result.next_observation.to_ints(), skip_special_tokens=False)
    told = "exact_match: wrong value\nCheck every step: the final answer is wrong.\nPlease try again."
    assert f"<|im_start|>user\n{told}<|im_end|>" in shown and "Paris" not in shown
    assert source.vocabulary is None and source.extra_heldout(4) == {}


@pytest.mark.parametrize("chat", [False, True])
def test_a_rewritten_history_holds_the_task_the_answer_and_the_feedback(chat: bool, tmp_path: Path) -> None:
    source = RefineSource("jsonl", {"path": rows(tmp_path / "rows.jsonl")}, history="rewrite")
    asked = "How much is {answer} + 1?"  # a place in a text is no place of ours
    prompt: Any = [{"role": "system", "content": "Count."}, {"role": "user", "content": asked}] if chat else asked
    _, result = step_env(source.env(Task("t", prompt, {"answer": "3"}), TEXT), TEXT.encode("{feedback}"))
    assert result.next_observation is not None
    shown = TEXT.decode(result.next_observation.to_ints(), skip_special_tokens=False)
    words = (
        f"{asked}\n\nA previous answer:\n{{feedback}}\n\nWhat is wrong with it:\nexact_match: wrong value\n"
        "Check every step: the final answer is wrong.\n\nGive a better one."
    )
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": words}]
    template = TEXT.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert shown == (template if chat else words)


def test_the_first_attempt_is_a_verdict_of_its_own() -> None:
    reward = resolve_reward("first_attempt")
    known = Trajectory("p", [], "a", [], metadata={"first_attempt": 1.0, "last_attempt": 0.0})
    lost = Trajectory("p", [], "a", [], metadata={"first_attempt": 0.0, "last_attempt": 1.0})
    none = Trajectory("p", [], "a", [])
    told = [(s.value, s.outcome, s.reason) for s in reward.score([known, lost, none])]
    assert told == [
        (1.0, Outcome.PASSED, ""),
        (0.0, Outcome.FAILED, "wrong_value"),
        (None, Outcome.INVALID, "no_attempts"),
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_turns": 1}, "max_turns=1, expected at least 2 attempts; for one use env.name=rpn_arithmetic"),
        ({"attempt_cost": -1}, "attempt_cost=-1, expected from 0 to 1"),
        ({"history": "rewritten"}, "history='rewritten' .did you mean 'rewrite'"),
        ({"feedback": "{promt}"}, "feedback: a place='promt' .did you mean 'prompt'"),
        ({"verifiers": ["corect"]}, "did you mean 'correct'"),
        ({"inner": "rpn"}, "unknown environment 'rpn'"),
        ({"min_confidence": 2}, "min_confidence=2"),
        ({"inner_kwargs": {"q": 1}}, "does not take 'q'"),
    ],
)
def test_mistakes_are_named(options: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RefineSource(**{**WORDS, **options})


def test_an_environment_with_turns_of_its_own_is_refused(tmp_path: Path) -> None:
    source = RefineSource("mbpp", {"path": str(mbpp_file(tmp_path)), "few_shot": 0})
    with pytest.raises(ValueError, match=r"'mbpp' has episodes of its own.*max_turns"):
        source.env(source.heldout(1)[0], TEXT)


def test_feedback_that_the_vocabulary_cannot_say_is_named() -> None:
    source = arithmetic(feedback="{feedback}")
    tokens = build_tokenizer("words", source.vocabulary, end="<eoe>", pad="<pad>")
    with pytest.raises(ValueError, match=r"cannot encode .*correct: no answer"):
        step_env(source.env(source.train(0, 0, "1"), tokens), tokens.encode("= = <eoe>"))


def test_the_shipped_config_has_room_for_both_attempts() -> None:
    """Prompt, attempt, feedback and the prompt again, and another attempt of the most tokens there may be."""
    config = build_config(load("refine"), warn=pytest.fail)
    assembly = assemble(config)
    source: Any = assembly.source
    assert "in 2 turns" in plan(assembly)["training"]
    prompt, most = 2 * int(source.levels[-1]) + 2, config.rollout.max_tokens or 0
    assert source.inner.longest - prompt <= most  # the longest right answer
    assert prompt + most + 1 + prompt + most <= config.model.config["n_positions"]
    assert config.reward.watch == ["first_attempt"]
