"""A judge model in this process: the model of JUDGE_MODEL when JUDGE_ENDPOINT is not set.

    judge = LocalJudge("Qwen/Qwen3-4B-Instruct-2507", lambda: open_judge(name, folder))
    judge.start()                                        # loads on its own thread; `health` reports progress
    reward = judge_with(judge)                            # rlvr.reward.judge: the same prompts and rules as an endpoint

Its weights never change, even if the model that learns has the same name. One thread owns it, and verdicts that are
requested together are computed together. Until it is loaded, or if it cannot be loaded, its verdict is an error and
never a zero. Neither an answer nor a rubric can contain a control token of the model's chat template: both stay text.

Left out on purpose: the model graders of `/grade`, which use endpoints only, and a time limit for a verdict beside its
token budget.
"""

from __future__ import annotations

import asyncio
import queue
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.chat.chat_template import no_thinking_arguments, render_chat
from rlvr.core.chat_client import ChatError, ChatReply, Cost
from rlvr.core.messages import ModelInput, SampledSequence, SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import StopReason
from rlvr.service.models.served_models import open_model, take_batch

MOST = 16  # answers judged together: each is a long prompt
STOP_S = 30.0  # how long a stop waits for a download or a long verdict


def open_judge(given: str, folder: Path) -> SamplingClient:
    """Open the model that `given` names, to sample from it; ValueError if it cannot be opened."""
    return open_model(given, folder, variable="JUDGE_MODEL").trainer.save_weights_and_get_sampling_client()


class ChatFormatter:
    """Turns conversations into tokens by the tokenizer's chat template, and sampled tokens into replies."""

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("the tokenizer of this judge has no chat template; use an instruction-tuned model")
        # Thinking would spend the token budget of a verdict.
        self._tokenizer, self._arguments = tokenizer, no_thinking_arguments(tokenizer)
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        longest_first = sorted(filter(str.strip, special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> ModelInput:
        escaped = [{**m, "content": self._control.sub(_escape_control_token, m["content"])} for m in messages]
        try:
            text = self._render(escaped)
        except Exception:  # templates raise errors of their own for a role that the model does not know
            text = self._render([{"role": "user", "content": "\n\n".join(m["content"] for m in escaped)}])
        return ModelInput(self._tokenizer.encode(text, add_special_tokens=False))

    def reply(self, prompt: ModelInput, sampled: SampledSequence, budget: int) -> ChatReply | ChatError:
        count = len(sampled.tokens)
        cut = sampled.stop_reason is StopReason.LENGTH
        if cut and count < budget:
            reason = f"the prompt of {prompt.length} tokens leaves room for {count}, and a verdict may take {budget}"
            return ChatError("rejected", reason, text_at_fault=True, too_long=True)
        text = self._tokenizer.decode(sampled.tokens, skip_special_tokens=True)
        if text.strip():
            return ChatReply(text, prompt.length, count, sampled.stop_reason.value, counted=True)
        return ChatError("unfinished" if cut else "empty", "the judge's reply is empty", text_at_fault=True)

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return render_chat(messages, self._tokenizer, self._arguments)


def _escape_control_token(match: re.Match[str]) -> str:
    """Write the first character as `\\uXXXX`: the same text in JSON, the form in which answers are quoted."""
    return re.sub("(....)", r"\\u\1", match[0][0].encode("utf-16-be").hex()) + match[0][1:]


@dataclass(eq=False)
class _JudgeRequest:
    messages: Sequence[Mapping[str, str]]
    params: SamplingParams
    reply: Future[ChatReply | ChatError] = field(default_factory=Future[ChatReply | ChatError])


class LocalJudge:
    """A judge model in this process. `model` is the value of JUDGE_MODEL; `opener` loads it, on the judge's thread.
    Used like a `ChatClient`."""

    def __init__(
        self, model: str, opener: Callable[[], SamplingClient], *, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.model, self._opener, self._warn = model, opener, warn
        self._state, self._detail = "loading", "the judge is being loaded"
        self._queue: queue.Queue[_JudgeRequest | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="judge", daemon=True)

    @property
    def where(self) -> str:
        return f"the judge {self.model}"

    def start(self) -> None:
        self._thread.start()

    def health(self) -> dict[str, str]:
        return {"kind": "local", "name": self.model, "state": self._state, "detail": self._detail}

    async def ask(self, request: Mapping[str, Any], cost: Cost) -> ChatReply:
        """The model's reply to `messages`; ChatError if it is empty or the judge is not ready."""
        if self._state != "ready":
            raise ChatError("unreachable", f"{self.where} is {self._state}: {self._detail}")
        cost.requests += 1
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=request["temperature"])
        waiting = _JudgeRequest(request["messages"], params)
        self._queue.put(waiting)
        if self._state != "ready":  # it was closed meanwhile, and its thread may have ended
            self._refuse_rest()
        reply = await asyncio.wrap_future(waiting.reply)
        if isinstance(reply, ChatError):
            raise reply
        cost.prompt_tokens += reply.prompt_tokens
        cost.completion_tokens += reply.completion_tokens
        return reply

    async def close(self, patience_s: float = STOP_S) -> None:
        """Finish the current verdicts if that takes no longer than `patience_s`; refuse those that wait."""
        self._state, self._detail = "down", "the service is stopping"
        self._queue.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, patience_s)
        self._refuse_rest()

    # The thread

    def _work(self) -> None:
        try:
            client = self._opener()
            formatter = ChatFormatter(client.get_tokenizer())
        except Exception as error:
            self._settle("down", f"{error}" or type(error).__name__)
            self._warn(f"the judge could not be loaded: {error}")
            return
        self._settle("ready", "")
        while (taken := take_batch(self._queue, MOST)) is not None:
            batch = [one for one in taken if one.reply.set_running_or_notify_cancel()]
            if self._state == "ready":
                self._judge(client, formatter, batch)
            else:
                self._refuse(batch)

    def _settle(self, state: str, detail: str) -> None:
        if self._state == "loading":  # not if it was closed meanwhile
            self._state, self._detail = state, detail

    def _judge(self, client: SamplingClient, formatter: ChatFormatter, batch: Sequence[_JudgeRequest]) -> None:
        """Submit all prompts before waiting for one: the engine then computes them together."""
        submitted: list[tuple[_JudgeRequest, ModelInput, Any]] = []
        for one in batch:
            try:
                prompt = formatter.prompt(one.messages)
                try:
                    submitted.append((one, prompt, client.sample(prompt, 1, one.params)))
                except ValueError as error:  # longer than the model's context
                    reply = ChatError("rejected", f"{self.where}: {error}", text_at_fault=True, too_long=True)
                    one.reply.set_result(reply)
            except Exception as error:
                one.reply.set_result(self._failure(error))
        for one, prompt, future in submitted:
            try:
                (sampled,) = future.result().sequences
                one.reply.set_result(formatter.reply(prompt, sampled, one.params.max_tokens or 0))
            except Exception as error:
                one.reply.set_result(self._failure(error))

    def _failure(self, error: Exception) -> ChatError:
        self._warn(f"the judge failed: {type(error).__name__}: {error}")
        return ChatError("failed", f"{self.where} failed: {type(error).__name__}: {error}"[:1000])

    def _refuse(self, batch: Sequence[_JudgeRequest]) -> None:
        for one in batch:
            one.reply.set_result(ChatError("unreachable", f"{self.where}: {self._detail}"))

    def _refuse_rest(self) -> None:
        left: list[_JudgeRequest | None] = []
        with suppress(queue.Empty):
            while True:
                left.append(self._queue.get_nowait())
        self._refuse([one for one in left if one is not None and one.reply.set_running_or_notify_cancel()])
        if None in left:  # the end mark, which the thread needs
            self._queue.put(None)
