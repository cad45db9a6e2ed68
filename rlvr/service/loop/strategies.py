"""How a model whose weights are out of reach is asked: strategies, each a way to write a prompt and a temperature.

    guide = Guide(policy, view, seed)                 # one an episode; `view` is the sampler whose temperature it sets
    env = RefineEnv(task, tokenizer, critic, compose=guide.compose, max_turns=8)
    ...                                               # afterwards `guide.choices[i]` made iteration i + 1

The first prompt of an episode is written by one of `FIRST`, every later one by one of `NEXT`; which, is drawn from a
policy that learns (`rlvr.service.loop.strategy_policy`). The task always stands first, word for word, so that an
endpoint that keeps prefixes computes it once. Left out on purpose: strategies from a request or a file; a prompt is
part of the program here, and its name part of what was learned. `python -m pytest tests/test_strategies.py` exercises
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rlvr import draws
from rlvr.types import Task

MAX_QUOTED = 12_000  # characters of an earlier answer in a prompt; of a longer one its middle is left out

Words = Callable[[Sequence[str], str], str]
"""(the answers so far, what was said of the last one) -> what follows the task in the prompt."""


@dataclass(frozen=True)
class Strategy:
    """One way to ask. `name` is how it is remembered: another way needs another name."""

    name: str
    words: Words
    temperature: float

    def prompt(self, task: Task, answers: Sequence[str], feedback: str) -> str | list[dict[str, str]]:
        """The whole prompt; to a conversation a message is added."""
        words = self.words([_quoted(answer) for answer in answers], feedback)
        if isinstance(task.prompt, str):
            return f"{task.prompt}\n\n{words}" if words else task.prompt
        return [*task.prompt, {"role": "user", "content": words}] if words else list(task.prompt)


def _quoted(answer: str) -> str:
    half = MAX_QUOTED // 2
    return answer if len(answer) <= MAX_QUOTED else f"{answer[:half]}\n[...]\n{answer[-half:]}"


def _always(words: str) -> Words:
    return lambda answers, feedback: words


def _about_last(request: str) -> Words:
    """The last answer, what was said of it, and what to do about it."""
    return lambda answers, feedback: f"An earlier answer:\n\n{answers[-1]}\n\nA review of it:\n{feedback}\n\n{request}"


def _anew(answers: Sequence[str], feedback: str) -> str:
    return (
        f"An earlier answer to this was not good enough. A review of it:\n{feedback}\n\n"
        "Answer the task anew, by another way. Reply with the answer alone."
    )


def _both(answers: Sequence[str], feedback: str) -> str:
    """The last two answers, where there are two."""
    shown = "\n\n".join(f"Earlier answer {i}:\n\n{answer}" for i, answer in enumerate(answers[-2:], 1))
    return (
        f"{shown}\n\nA review of the last one:\n{feedback}\n\n"
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
class Choice:
    """A strategy that was drawn, and the log-probability it had."""

    strategy: Strategy
    logprob: float


class Chooser(Protocol):
    """Draws a strategy, for a first prompt or a later one. The same key draws the same from the same policy."""

    def choose(self, *, first: bool, key: int) -> Choice: ...


class Warm(Protocol):
    """A sampler that can be told how warm to be: `EndpointSamplingClient.view()`."""

    temperature: float | None


class Guide:
    """Writes the prompts of one episode. Its draws are a function of `seed` and the iteration alone."""

    def __init__(self, policy: Chooser, sampler: Warm, seed: int) -> None:
        self._policy, self._sampler, self._seed = policy, sampler, seed
        self.choices: list[Choice] = []

    def compose(self, task: Task, answers: Sequence[str], feedback: str) -> str | list[dict[str, str]]:
        """`rlvr.envs.refine.Compose`: the next prompt. It also sets the sampler's temperature."""
        key = draws.key("strategy", self._seed, len(answers))
        choice = self._policy.choose(first=not answers, key=key)
        self.choices.append(choice)
        self._sampler.temperature = choice.strategy.temperature
        return choice.strategy.prompt(task, answers, feedback)
