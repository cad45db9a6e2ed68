"""An episode that an agent plays: each of its calls is a turn of the policy, and its end the end of the episode.

The agent calls the recorder (`rlvr.recorder`), which hands the call in here. Its messages become the tokens that the
policy reads (`rlvr.chat.conversation`), the rollout samples, and the agent gets the answer. What it does in between is
its own affair. Calls that come at the same time are answered one after the other.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.chat.conversation import ChatTemplate, Conversation, TemplateError
from rlvr.chat.dialects.forms import ChatAnswer, ChatCall, DialectError
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import ExternalEnv, InitialObservationOverflow, StepResult
from rlvr.core.turn_tree import find_retried
from rlvr.core.types import StopReason, Task
from rlvr.envs.agent.agent_run import AgentRun, Assignment, Result
from rlvr.recorder.local_server import LocalRecorder
from rlvr.recorder.open_rollouts import OpenRollout, PendingCall
from rlvr.reward.reward_options import check_integer, check_number

STOPS = ("finished", "failed", "calls", "sampled_tokens", "tool_calls", "seconds", "call_seconds")
# Settings of a call that a run has its own values for: another value would change what the policy is trained on.
_OWN_SETTINGS = ("temperature", "top_p", "top_k", "min_p", "seed")

MAX_TOKEN_CHARACTERS = 64  # in a token, on average over a whole prompt


@dataclass(frozen=True)
class AgentBudget:
    """What an episode may use: calls of the policy, tokens that it samples, calls of tools in its answers, and seconds
    of the agent's own time, in all and between an answer and the next call. None: no limit.

    An episode that uses up one of them is over, and is judged as it is.
    """

    calls: int = 32
    sampled_tokens: int | None = None
    tool_calls: int | None = None
    seconds: float = 300.0
    call_seconds: float | None = None

    def __post_init__(self) -> None:
        check_integer("agent: budget.calls", self.calls, 1)
        for name in ("sampled_tokens", "tool_calls"):
            if (value := getattr(self, name)) is not None:
                check_integer(f"agent: budget.{name}", value, 1)
        for name in ("seconds", "call_seconds"):
            if (value := getattr(self, name)) is not None:
                check_number(f"agent: budget.{name}", value, 0, above=True)


@dataclass(frozen=True)
class AgentRules:
    """How an episode is read. `fields` of the task's row are shown to the agent. `branches` that are trained: all, or
    the one of the last call alone. With `keep_retried`, an answer that the agent asked for again is trained as well.
    With `judges_failures`, an agent that fails is judged by what it did."""

    budget: AgentBudget = AgentBudget()
    fields: Sequence[str] = ()
    branches: str = "all"
    keep_retried: bool = False
    judges_failures: bool = False
    most_at_once: int = 16

    def __post_init__(self) -> None:
        if self.branches not in ("all", "last"):
            raise ValueError(f"agent: rules.branches={self.branches!r}, expected all or last")
        check_integer("agent: rules.most_at_once", self.most_at_once, 1)


class AgentEnv(ExternalEnv):
    """One episode of one task."""

    def __init__(
        self, task: Task, template: ChatTemplate, recorder: LocalRecorder, agent: AgentRun, rules: AgentRules
    ) -> None:
        self.task, self.most_at_once = task, rules.most_at_once
        self._template, self._recorder, self._agent, self._rules = template, recorder, agent, rules
        self._conversation = Conversation(template)
        self._rollout: OpenRollout | None = None
        self._events: asyncio.Queue[PendingCall | Result] = asyncio.Queue()
        self._call: PendingCall | None = None
        self._answers: list[ChatAnswer] = []  # of the call, as far as they are sampled
        self._prompt: list[int] = []
        self._prompts: list[list[int]] = []  # of each turn
        self._left: set[int] = set()  # turns that no agent got
        self._counts = Counter[str]()
        self._seconds_left = rules.budget.seconds
        self.ended = ""

    async def initial_observation(self) -> tuple[ModelInput, Sequence[Any] | None] | InitialObservationOverflow:
        loop = asyncio.get_running_loop()

        def put(event: PendingCall | Result) -> None:
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, event)
            except RuntimeError:  # the loop is closed: the rollout ended with an error
                if isinstance(event, PendingCall):
                    event.refuse(DialectError("the rollout is over", status=410))

        self._rollout = self._recorder.rollouts.open(put)
        address = self._recorder.address(self._rollout)
        self._agent.start(Assignment.of(self.task, address, "policy", self._rules.fields), put)
        ending = await self._next_call()
        if ending is not None:
            return InitialObservationOverflow(ending.reward, ending.metrics, answer=ending.answer, error=ending.error)
        assert self._call is not None
        return ModelInput(self._prompt), self._template.list_stops(self._call.call)

    async def take(self, answer: SampledSequence) -> StepResult:
        assert self._call is not None
        call = self._call.call
        turn = len(self._prompts)
        self._prompts.append(self._prompt)
        self._counts["sampled_tokens"] += len(answer.tokens)
        written = self._read(answer)
        self._answers.append(written)
        self._counts["tool_calls"] += len(written.message.get("tool_calls") or ())
        if self._call.has_left:
            self._left.add(turn)
        else:
            self._conversation.record(call, self._prompt, written.message, answer.tokens)
            if len(self._answers) < call.count:  # another choice of the same call
                return StepResult(0.0, False, ModelInput(self._prompt), self._template.list_stops(call))
            self._call.answer(self._answers)
        if over := self._find_used_up():
            return self._end(over)
        ending = await self._next_call()
        if ending is not None:
            return ending
        return StepResult(0.0, False, ModelInput(self._prompt), self._template.list_stops(self._call.call))

    def _read(self, answer: SampledSequence) -> ChatAnswer:
        assert self._call is not None
        message, stop = self._template.read_answer(answer.tokens, self._call.call, self._counts["tool_calls"])
        if message.get("tool_calls"):
            finish = "tool_calls"
        else:
            finish = "length" if answer.stop_reason is StopReason.LENGTH else "stop"
        texts = [self._template.tokenizer.decode([token]) for token in answer.tokens]
        return ChatAnswer(message, finish, self._prompt, answer.tokens, answer.logprobs or (), texts, stop)

    def _find_used_up(self) -> str:
        """The budget that is used up; "" if none is."""
        budget = self._rules.budget
        for name in ("sampled_tokens", "tool_calls"):
            most = getattr(budget, name)
            if most is not None and self._counts[name] >= most:
                return name
        return ""

    async def _next_call(self) -> StepResult | None:
        """Wait for a call that the policy can answer; the end of the episode if there is none."""
        budget = self._rules.budget
        while True:
            began, most = time.monotonic(), self._seconds_left
            most = most if budget.call_seconds is None else min(most, budget.call_seconds)
            try:
                event = await asyncio.wait_for(self._events.get(), max(most, 0.001))
            except TimeoutError:
                return self._end("seconds" if most == self._seconds_left else "call_seconds")
            self._seconds_left -= time.monotonic() - began
            if isinstance(event, Result):
                return self._end("failed" if event.error else "finished", event)
            if event.has_left:
                continue
            if self._counts["calls"] >= budget.calls:
                event.refuse(DialectError(f"the budget of {budget.calls} calls is used up", status=429))
                return self._end("calls")
            if (left := budget.calls - self._counts["calls"]) < event.call.count:
                event.refuse(DialectError(f"n={event.call.count}: each choice counts as a call, and {left} are left"))
                continue
            self._counts["calls"] += event.call.count
            self._counts["other_settings"] += any(getattr(event.call, name) is not None for name in _OWN_SETTINGS)
            try:
                self._check_size(event.call)
                self._prompt = self._conversation.encode(event.call)
                self._check_room(len(self._prompt))
            except (TemplateError, ValueError) as error:
                self._counts["refused_calls"] += 1
                event.refuse(DialectError(str(error)))
                continue
            self._call, self._answers, self.turn_limit = event, [], event.call.max_tokens
            return None

    def _check_size(self, call: ChatCall) -> None:
        """ValueError for messages that cannot fit, found before they are encoded: the loop of all episodes would stand
        still for seconds."""
        context = getattr(self._template.tokenizer, "model_max_length", None)
        size = len(json.dumps([call.messages, call.tools], ensure_ascii=False))
        if context and size > MAX_TOKEN_CHARACTERS * context:
            raise ValueError(
                f"messages: they have {size} characters, which the model's context of {context} tokens cannot hold; "
                "shorten them (context_length_exceeded)"
            )

    def _check_room(self, length: int) -> None:
        context = getattr(self._template.tokenizer, "model_max_length", None)
        if context and length >= context:
            raise ValueError(
                f"messages: they have {length} tokens and the model's context is {context}, which leaves no room for "
                "an answer; shorten them (context_length_exceeded)"
            )

    def _end(self, why: str, result: Result = Result()) -> StepResult:
        self.ended = why
        self._stop()
        is_error = bool(result.error) and not self._rules.judges_failures
        counts = {
            name: float(self._counts[name]) for name in ("calls", "tool_calls", "refused_calls", "other_settings")
        }
        stops = {f"stop/{name}": float(name == why) for name in STOPS}
        metrics = {**counts, **stops, "agent_seconds": self._rules.budget.seconds - self._seconds_left}
        reward = 0.0 if is_error else result.reward or 0.0
        return StepResult(
            reward,
            True,
            metrics={**metrics, **{f"agent/{name}": value for name, value in result.metrics.items()}},
            answer=result.answer,
            error=result.error if is_error else "",
        )

    def _stop(self) -> None:
        if self._rollout is not None:
            self._rollout.close()
        self._agent.stop()

    def dropped_turns(self) -> Collection[int]:
        """Answers that the agent did not wait for, and those that it asked for again: of equal prompts the last one
        counts, and every one that it went on from."""
        if self._rules.branches == "last":
            return range(len(self._prompts))  # but for the last turn, and what it goes on from
        if self._rules.keep_retried:
            return self._left
        return self._left | find_retried(self._prompts)

    async def close(self) -> None:
        if not self.ended:
            self.ended = "failed"
            self._stop()
