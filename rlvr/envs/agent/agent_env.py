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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlvr.chat.conversation import ChatTemplate, Conversation, TemplateError
from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, DialectError
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.messages import ModelInput, SampledSequence
from rlvr.core.protocols import ChatTurn, ExternalEnv, InitialObservationOverflow, StepResult
from rlvr.core.turn_tree import find_parent, find_unused
from rlvr.core.types import Task
from rlvr.envs.agent.agent_run import AgentRun, Assignment, Result
from rlvr.recorder.local_server import LocalRecorder
from rlvr.recorder.open_rollouts import OpenRollout, PendingCall, ReportedReward
from rlvr.reward.reward_options import check_flag, check_integer, check_number

STOPS = ("finished", "failed", "calls", "sampled_tokens", "tool_calls", "seconds", "call_seconds")
DELIVERY_SECONDS = 10.0  # within which the server hands an answer on, or sees that no one waits for it
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
    With `parallel`, for agents whose calls come at the same time, random draws follow from what a call reads. With
    `judges_failures`, an agent that fails is judged by what it did. `needs_reward`: the agent's own reward is the only
    one."""

    budget: AgentBudget = AgentBudget()
    fields: Sequence[str] = ()
    branches: str = "all"
    keep_retried: bool = False
    judges_failures: bool = False
    parallel: bool = False
    max_concurrent: int = 16
    needs_reward: bool = False

    def __post_init__(self) -> None:
        if self.branches not in ("all", "last"):
            raise ValueError(f"agent: rules.branches={self.branches!r}, expected all or last")
        for name in ("keep_retried", "judges_failures", "parallel"):
            check_flag(f"agent: rules.{name}", getattr(self, name))
        if isinstance(self.fields, str) or not all(isinstance(name, str) for name in self.fields):
            raise ValueError(f"agent: rules.fields={self.fields!r:.80}, expected a list of names, such as [difficulty]")
        check_integer("agent: rules.max_concurrent", self.max_concurrent, 1)


class AgentEnv(ExternalEnv):
    """One episode of one task."""

    def __init__(
        self,
        task: Task,
        template: ChatTemplate,
        recorder: LocalRecorder,
        agent: AgentRun,
        rules: AgentRules,
        slots: EpisodeSlots | None = None,
    ) -> None:
        self.task, self.slots = task, slots
        self._template, self._recorder, self._agent, self._rules = template, recorder, agent, rules
        self._conversation, self.is_parallel = Conversation(template, rules.parallel), rules.parallel
        self._rollout: OpenRollout | None = None
        self._events: asyncio.Queue[tuple[float, PendingCall | Result]] = asyncio.Queue()  # with when they came
        self._call: PendingCall | None = None
        self._answers: list[ChatAnswer] = []  # of the call, as far as they are sampled
        self._said: dict[str, Any] = {}  # the policy's last turn
        self._prompt: list[int] = []
        self._turns: list[tuple[int, list[int], list[int]]] = []  # (call, prompt, tokens)
        self._left: set[int] = set()  # turns that no agent got
        self._ids: list[str] = []  # of each turn's answer, as the agent knows it
        self._rewards: dict[str, float] = {}  # that the agent posted or returned, by the id of an answer; "": the whole
        self._counts = Counter[str]()
        self._seconds_left = rules.budget.seconds
        self._began = time.monotonic()  # the agent's own time
        self.ended = ""

    async def initial_observation(self) -> tuple[ModelInput, Sequence[Any] | None] | InitialObservationOverflow:
        loop = asyncio.get_running_loop()

        def put(event: PendingCall | Result) -> None:
            try:
                loop.call_soon_threadsafe(self._events.put_nowait, (time.monotonic(), event))
            except RuntimeError:  # the loop is closed: the rollout ended with an error
                if isinstance(event, PendingCall):
                    event.refuse(DialectError("the rollout is over", status=410))

        def keep_reward(given: ReportedReward) -> None:
            self._rewards[given.call] = given.reward

        self._rollout = self._recorder.rollouts.open(put, keep_reward)
        address = self._recorder.address(self._rollout)
        self._began = time.monotonic()
        self._agent.start(Assignment.of(self.task, address, "policy", self._rules.fields), put)
        ending = await self._next_call()
        if ending is not None:
            return InitialObservationOverflow(ending.reward, ending.metrics, answer=ending.answer, error=ending.error)
        assert self._call is not None
        return ModelInput(self._prompt), self._template.list_stops(self._call.call)

    async def take(self, answer: SampledSequence) -> StepResult:
        assert self._call is not None
        call = self._call.call
        result = await self._take(call, answer)
        return replace(result, chat=ChatTurn(call.messages, self._said))

    async def _take(self, call: ChatRequest, answer: SampledSequence) -> StepResult:
        assert self._call is not None
        self._turns.append((self._counts["calls"], self._prompt, answer.tokens))
        self._ids.append(self._call.id)
        self._counts["sampled_tokens"] += len(answer.tokens)
        written = self._conversation.read(call, self._prompt, answer)
        self._answers.append(written)
        self._said = written.message
        self._counts["tool_calls"] += len(written.message.get("tool_calls") or ())
        if not self._call.has_left and len(self._answers) < call.count:  # another choice of the same call
            return StepResult(0.0, False, ModelInput(self._prompt), self._template.list_stops(call))
        if await self._deliver():
            for one in self._answers:
                self._conversation.record(call, one)
        else:
            self._left.update(range(len(self._turns) - len(self._answers), len(self._turns)))
        if over := self._find_used_up():
            return self._end(over)
        ending = await self._next_call()
        if ending is not None:
            return ending
        return StepResult(0.0, False, ModelInput(self._prompt), self._template.list_stops(self._call.call))

    async def _deliver(self) -> bool:
        """Give the answers to the agent; whether it was still there."""
        assert self._call is not None
        self._began = time.monotonic()
        self._call.answer(self._answers)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._call.delivered), DELIVERY_SECONDS)
        except TimeoutError:
            return False

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
            most = self._seconds_left if budget.call_seconds is None else min(self._seconds_left, budget.call_seconds)
            event = await self._wait(self._began + most)
            if event is None:
                why = "seconds" if most == self._seconds_left else "call_seconds"
                self._seconds_left -= most
                return self._end(why)
            if isinstance(event, Result):
                return self._end("failed" if event.error else "finished", event)
            if event.has_left:
                event.refuse(DialectError("the client closed the connection", status=499))
                continue
            if self._counts["calls"] >= budget.calls:
                event.refuse(DialectError(f"the budget of {budget.calls} calls is used up", status=429))
                return self._end("calls")
            if (left := budget.calls - self._counts["calls"]) < event.call.count:
                event.refuse(DialectError(f"n={event.call.count}: each choice counts as a call, and {left} are left"))
                continue
            try:
                self._check_size(event.call)
                self._prompt = self._conversation.encode(event.call)
                self._check_room(len(self._prompt))
            except (TemplateError, ValueError) as error:
                self._counts["refused_calls"] += 1
                event.refuse(DialectError(str(error)))
                continue
            self._counts["calls"] += event.call.count
            self._counts["other_settings"] += any(getattr(event.call, name) is not None for name in _OWN_SETTINGS)
            self._call, self._answers, self.turn_limit = event, [], event.call.max_tokens
            return None

    async def _wait(self, deadline: float) -> PendingCall | Result | None:
        """The next that comes from the agent before a deadline (of the monotonic clock), and how much time it took. It
        counts when it came, not when the event loop, which samples meanwhile, got to it."""
        try:
            came, event = await asyncio.wait_for(self._events.get(), max(deadline - time.monotonic(), 0.001))
        except TimeoutError:
            if self._events.empty():
                return None
            came, event = self._events.get_nowait()
        if came > deadline:
            return None
        self._seconds_left -= max(0.0, came - self._began)
        self._began = max(came, self._began)
        return event

    def _check_size(self, call: ChatRequest) -> None:
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
        if self.prompt_limit is not None and length > self.prompt_limit:
            raise ValueError(
                f"messages: they have {length} tokens, more than training.max_prompt_tokens={self.prompt_limit}; "
                "shorten them (context_length_exceeded)"
            )
        context = getattr(self._template.tokenizer, "model_max_length", None)
        if context and length >= context:
            raise ValueError(
                f"messages: they have {length} tokens and the model's context is {context}, which leaves no room for "
                "an answer; shorten them (context_length_exceeded)"
            )

    def _end(self, why: str, result: Result = Result()) -> StepResult:
        self.ended = why
        self._stop()
        if unknown := set(result.branches) - set(self._ids):
            result = replace(
                result, error=f"the agent's result names branches by {min(unknown)!r:.80}, the id of no answer"
            )
        self._rewards |= result.branches if not result.error else {}
        if result.reward is None:
            result = replace(result, reward=self._rewards.get(""))
        is_error = bool(result.error) and not self._rules.judges_failures
        counts = {
            name: float(self._counts[name]) for name in ("calls", "tool_calls", "refused_calls", "other_settings")
        }
        counts["branches"] = float(sum(parent is None for parent in self._list_parents()))
        stops = {f"stop/{name}": float(name == why) for name in STOPS}
        metrics = {**counts, **stops, "agent_seconds": self._rules.budget.seconds - self._seconds_left}
        if why == "finished" and self._rules.needs_reward and result.reward is None:
            result, is_error = replace(result, error="the agent ended without a reward (result=reward)"), True
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

    def _list_parents(self) -> list[int | None]:
        known = [(number, prompt, tokens) for number, (_, prompt, tokens) in enumerate(self._turns)]
        return [find_parent(prompt, known[:number]) for number, prompt, _ in known]

    def dropped_turns(self) -> Collection[int]:
        """The turns that the agent did not get, and those that it did not use (`find_unused`)."""
        final = self.final_turn()
        if self._rules.branches == "last":
            return set(range(len(self._turns))) - {final}
        if self._rules.keep_retried:
            return self._left
        calls, prompts = [call for call, _, _ in self._turns], [prompt for _, prompt, _ in self._turns]
        return (self._left | find_unused(calls, prompts, self._list_parents())) - {final}

    def final_turn(self) -> int | None:
        """The first choice of the last call whose answer the agent got."""
        got = [number for number in range(len(self._turns)) if number not in self._left]
        return next((number for number in got if self._turns[number][0] == self._turns[got[-1]][0]), None)

    def turn_ids(self) -> Sequence[str]:
        return self._ids

    def branch_rewards(self) -> Mapping[int, float]:
        return {turn: self._rewards[id] for turn, id in enumerate(self._ids) if id in self._rewards}

    async def close(self) -> None:
        if not self.ended:
            self.ended = "failed"
            self._stop()
