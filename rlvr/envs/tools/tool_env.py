"""An episode with tools: the policy answers or calls tools, their results are appended, and it goes on.

    ToolEnv(task, tokenizer, Toolbox([Tool.of(weather)]), ToolCallFormat.of_template(tokenizer), max_turns=4)

What the policy sampled is never rendered again: only the results, and what the chat template writes around them, are
new tokens, and carry no loss. A call that fails is a result that says why. Calls of one turn run at once, or one after
the other where a `session` keeps a state, and are answered in their order.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from rlvr.chat.call_parts import TemplateCallFormat, ToolCall
from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.tool_calls import WordCallFormat
from rlvr.chat.turns import decode_turn, encode_between, has_room, render_between
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import ChatTurn, InitialObservationOverflow, StepResult
from rlvr.core.types import StopReason, Task
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import append_text, encode_prompt
from rlvr.envs.tools.environment_class import ToolSession
from rlvr.envs.tools.tool import Toolbox
from rlvr.reward.reward_options import check_integer, check_number


@dataclass(frozen=True)
class ToolBudget:
    """An episode's turns of the policy, the seconds that its tools may take together, and the calls of one turn."""

    max_turns: int = 4
    seconds: float = 60.0
    most_calls: int = 8

    def __post_init__(self) -> None:
        check_integer("tools: max_turns (a call and an answer)", self.max_turns, 2)
        check_integer("tools: most_calls", self.most_calls, 1)
        check_number("tools: seconds", self.seconds, 0, above=True)


class ToolEnv:
    """One episode. `ended` says why it is over: `answered`, `max_turns`, `no_room` (in the context), `no_time` (of the
    tools) or `truncated` (a completion that used up its tokens)."""

    def __init__(
        self,
        task: Task,
        tokenizer: Any,
        toolbox: Toolbox,
        calls: TemplateCallFormat | WordCallFormat,
        budget: ToolBudget = ToolBudget(),
        session: ToolSession | None = None,
    ) -> None:
        self.task = task if isinstance(task.model_prompt, str) else toolbox.add_to(task)
        self._tokenizer, self._toolbox, self._format = tokenizer, toolbox, calls
        self.slots = session.slots if session else None
        self._budget, self._session, self._special = budget, session, special_token_texts(tokenizer)
        self._schemas = [tool.schema for tool in toolbox.tools]
        self._seen: list[int] = []
        self._messages: list[dict[str, Any]] = []
        self._seconds_left, self._written = budget.seconds, 0  # results
        self._counts = Counter[str]()
        self.ended = ""

    async def initial_observation(self) -> tuple[ModelInput, None] | InitialObservationOverflow:
        if self._session:
            try:
                said = await self._session.reset(self.task)
            except EpisodeError as failure:
                await self.close()
                return InitialObservationOverflow(0.0, error=str(failure))
            self.task = append_text(self.task, strip_special(said, self._special))
            own = {tool.name: tool for tool in self._session.list_tools()}
            tools = [own.get(tool.name, tool) for tool in self._toolbox.tools]
            self._toolbox = replace(self._toolbox, tools=tools)
        given = self.task.model_prompt
        self._messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        self._seen = encode_prompt(self.task, self._tokenizer)
        return ModelInput(self._seen), None

    async def step(self, action: list[int], *, extra: dict[str, Any] | None = None) -> StepResult:
        assert not self.ended, f"the episode of task {self.task.id!r} is over; open a new one"
        self._counts["turns"] += 1
        text = decode_turn(action, self._tokenizer)
        rest, calls = self._format.split(text, self._schemas)
        if self._session:
            self._session.note_turn(rest)
        malformed = self._format.find_malformed(rest, [tool.name for tool in self._toolbox.tools])
        called = [{"function": {"name": call.name, "arguments": call.arguments}} for call in calls]
        chat = ChatTurn(list(self._messages), {"role": "assistant", "content": rest, "tool_calls": called})
        is_cut = (extra or {}).get("stop_reason") == StopReason.LENGTH.value
        return replace(await self._go_on(action, calls, malformed, is_cut, chat), chat=chat)

    async def _go_on(
        self, action: list[int], calls: list[ToolCall], malformed: str, is_cut: bool, chat: ChatTurn
    ) -> StepResult:
        if is_cut:
            return await self._end("truncated")
        if not calls and not malformed:
            return await self._end("answered")
        if self._counts["turns"] == self._budget.max_turns:
            return await self._end("max_turns")
        if self._seconds_left <= 0:
            return await self._end("no_time")
        results = await self._answer_calls(calls)
        if malformed:
            results.append(self._fail(malformed))
        names = [call.name for call in calls] + [""] * len(results)  # what could not be read has none
        told = [{"role": "tool", "name": n, "content": text} for n, text in zip(names, results, strict=False)]
        self._messages += [chat.said, *told]
        self._seen += [*action, *encode_between(self.task, self._tokenizer, self._write(results, calls, action))]
        if not has_room(self._tokenizer, self._seen, action):
            return await self._end("no_room")
        return StepResult(0.0, False, ModelInput(self._seen))

    async def _answer_calls(self, calls: list[ToolCall]) -> list[str]:
        most = self._budget.most_calls
        if self._session:  # its state depends on the order of the calls
            given = [await self._answer(call) for call in calls[:most]]
        else:
            given = await asyncio.gather(*(self._answer(call) for call in calls[:most]))
        self._counts["tool_calls"] += len(given)
        results = [text if is_good else self._fail(text) for text, is_good in given]
        if len(calls) > most:
            results.append(self._fail(f"at most {most} calls are answered in a turn"))
        return results

    async def _answer(self, call: ToolCall) -> tuple[str, bool]:
        began = time.monotonic()
        answer = await self._toolbox.call(call.name, call.arguments, max(self._seconds_left, 0.001))
        if call.name not in self._toolbox.own_limits:
            self._seconds_left -= time.monotonic() - began
        return answer

    def _fail(self, reason: str) -> str:
        """The result of a call that has none."""
        self._counts["tool_errors"] += 1
        word = self._format.failure if isinstance(self._format, WordCallFormat) else None
        return word or (reason if reason.startswith("error: ") else f"error: {reason}")

    def _write(self, results: list[str], calls: list[ToolCall], action: list[int]) -> str:
        """The results as the policy reads them. What a tool says is data: none of it becomes a special token."""
        results = [strip_special(result, self._special) for result in results]
        if isinstance(self._format, WordCallFormat):
            return self._format.write_results(results)
        known = {tool.name for tool in self._toolbox.tools}  # what else a model calls a tool may be anything
        names = [call.name if call.name in known else "unknown" for call in calls] + ["unknown"] * len(results)
        messages = [
            {
                "role": "tool",
                "name": name,
                "tool_call_id": self._format.write_id(name, self._written + place),
                "content": result,
            }
            for place, (name, result) in enumerate(zip(names, results, strict=False))
        ]
        self._written += len(messages)
        return render_between(self.task, self._tokenizer, action, messages, names[0])

    async def _end(self, why: str) -> StepResult:
        self.ended, reward, error = why, 0.0, ""
        try:
            reward = await self._session.get_reward() if self._session else 0.0
        except EpisodeError as failure:
            error = str(failure)
        await self.close()
        counts = {name: float(self._counts[name]) for name in ("turns", "tool_calls", "tool_errors")}
        seconds = self._budget.seconds - self._seconds_left
        return StepResult(
            reward, True, metrics={**counts, "tool_seconds": seconds, "answered": float(why == "answered")}, error=error
        )

    async def close(self) -> None:
        if self._session:
            with suppress(EpisodeError):  # the episode is over, and its reward stands
                await self._session.close()
            self._session = None
