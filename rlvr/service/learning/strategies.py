"""Prompting strategies for a model whose weights cannot be trained: ways to write a prompt, each with a temperature.

One of `FIRST` writes the first prompt of an episode, one of `NEXT` every later one; a policy that learns draws them
(`rlvr.service.learning.strategy_policy`). The task always comes first, verbatim, so an endpoint with prefix caching
computes it once. Left out on purpose: strategies from a request or a file; the learned policy refers to strategies by
name, so they are part of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlvr.core.types import Task

MAX_QUOTED = 12_000  # characters of an earlier answer in a prompt; the middle of a longer one is left out

Words = Callable[[Sequence[str], str], str]
"""(the answers so far, the feedback on the last one) -> the text after the task in the prompt."""


@dataclass(frozen=True)
class Strategy:
    """One way to prompt. What was learned is stored under `name`, so a changed strategy needs a new name."""

    name: str
    words: Words
    temperature: float

    def prompt(self, task: Task, answers: Sequence[str], feedback: str) -> str | list[dict[str, str]]:
        """The whole prompt; a conversation gets one more message."""
        words = self.words([_shorten(answer) for answer in answers], feedback)
        if isinstance(task.prompt, str):
            return f"{task.prompt}\n\n{words}" if words else task.prompt
        return [*task.prompt, {"role": "user", "content": words}] if words else list(task.prompt)


def _shorten(answer: str) -> str:
    half = MAX_QUOTED // 2
    return answer if len(answer) <= MAX_QUOTED else f"{answer[:half]}\n[...]\n{answer[-half:]}"


def _always(words: str) -> Words:
    return lambda answers, feedback: words


def _about_last(request: str) -> Words:
    """The last answer, its review, and a request."""
    return lambda answers, feedback: f"An earlier answer:\n\n{answers[-1]}\n\nA review of it:\n{feedback}\n\n{request}"


def _anew(answers: Sequence[str], feedback: str) -> str:
    return (
        f"An earlier answer to this was not good enough. A review of it:\n{feedback}\n\n"
        "Answer the task anew, by another way. Reply with the answer alone."
    )


def _both(answers: Sequence[str], feedback: str) -> str:
    """The last two answers, if there are two."""
    earlier = "\n\n".join(f"Earlier answer {i}:\n\n{answer}" for i, answer in enumerate(answers[-2:], 1))
    return (
        f"{earlier}\n\nA review of the last one:\n{feedback}\n\n"
        "Keep what is best in what was tried and put right what the review says. Reply with the new answer alone."
    )


FIRST = (
    Strategy("direct", _always(""), 0.0),
    Strategy("direct_warm", _always(""), 0.7),
    Strategy("stepwise", _always("Think it through step by step first, and end with the complete answer."), 0.3),
    Strategy(
        "thorough",
        _always("See to every requirement above and to the cases at the edges. Reply with the complete answer alone."),
        0.3,
    ),
)
NEXT = (
    Strategy(
        "revise",
        _about_last("Keep what is right, put right what the review says. Reply with the whole improved answer alone."),
        0.3,
    ),
    Strategy(
        "minimal_fix",
        _about_last("Put right what the review says and change nothing else. Reply with the whole answer alone."),
        0.0,
    ),
    Strategy("fresh", _anew, 0.9),
    Strategy(
        "explain_first",
        _about_last("Say in a sentence or two what went wrong and why, step by step, then write the complete answer."),
        0.3,
    ),
    Strategy(
        "checklist",
        _about_last("List what the task requires, check each point against the answer, then write the corrected one."),
        0.2,
    ),
    Strategy("best_of_both", _both, 0.5),
)


@dataclass(frozen=True)
class StrategyChoice:
    """A drawn strategy and its log-probability."""

    strategy: Strategy
    logprob: float
