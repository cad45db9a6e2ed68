"""A judge in this process: the model that JUDGE_MODEL names where no JUDGE_ENDPOINT does.

    judge = LocalJudge("Qwen/Qwen3-4B-Instruct-2507", lambda: open_judge(name, folder))
    judge.start()                                        # loaded on its own thread; `health` says how far it is
    reward = judged_by(judge)                            # rlvr.reward.judge: the same form, the same rules

Its weights never change: a judge that is the model that learns stays as it was when it was loaded. One thread owns it,
and answers that wait for a verdict are judged together. Until it is loaded, and where it could not be, its verdict is
an error and never a zero. What an answer quotes is text: neither it nor a rubric can become one of the tokens by which
the model's template says who speaks.

Left out on purpose: the model graders of `/grade`, which ask endpoints alone, and an end to a verdict that takes long
but for its budget of tokens. Exercised by tests/test_service_judge.py.
"""

from __future__ import annotations

import asyncio
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlvr.http_line import Cost, NoReply, Reply
from rlvr.messages import ModelInput, SampledSequence, SamplingParams
from rlvr.protocols import SamplingClient
from rlvr.service.loop.models import open_model
from rlvr.types import StopReason

GATHER_S = 0.01  # how long the first of several answers waits for those that came at the same moment
MOST = 16  # answers that are judged together: each is a long prompt
STOP_S = 30.0  # that a stop waits for what is under way: a download, a long verdict


def open_judge(given: str, folder: Path) -> SamplingClient:
    """The weights that `given` names, to sample from; ValueError where they are not to be had."""
    return open_model(given, folder, variable="JUDGE_MODEL").client.save_weights_and_get_sampling_client()


class Form:
    """Conversations as tokens by the tokenizer's chat template, and what was sampled as a reply."""

    def __init__(self, tokenizer: Any) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise ValueError("its tokenizer has no chat template, so it cannot be asked; give an instruction-tuned one")
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        longest_first = sorted(filter(str.strip, special), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> ModelInput:
        said = [{**one, "content": self._control.sub(_escaped, one["content"])} for one in messages]
        try:
            text = self._rendered(said)
        except Exception:  # each template has its own error for a role that its model does not know
            text = self._rendered([{"role": "user", "content": "\n\n".join(one["content"] for one in said)}])
        return ModelInput(self._tokenizer.encode(text, add_special_tokens=False))

    def reply(self, prompt: ModelInput, sampled: SampledSequence, budget: int) -> Reply | NoReply:
        count = len(sampled.tokens)
        cut = sampled.stop_reason is StopReason.LENGTH
        if cut and count < budget:
            told = f"the prompt of {prompt.length} tokens left room for {count} more, and a verdict may take {budget}"
            return NoReply("rejected", told, of_text=True, too_long=True)
        text = self._tokenizer.decode(sampled.tokens, skip_special_tokens=True)
        if text.strip():
            return Reply(text, prompt.length, count, sampled.stop_reason.value, counted=True)
        return NoReply("unfinished" if cut else "empty", "the judge said nothing", of_text=True)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> str:
        # A model that thinks first would spend the budget of a verdict on it; templates of others ignore the word.
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, enable_thinking=False
        )


def _escaped(found: re.Match[str]) -> str:
    """The same text inside JSON, which is what answers are quoted in; its first character as `\\uXXXX`."""
    return re.sub("(....)", r"\\u\1", found[0][0].encode("utf-16-be").hex()) + found[0][1:]


@dataclass(eq=False)
class _Waiting:
    messages: Sequence[Mapping[str, str]]
    params: SamplingParams
    reply: Future[Reply | NoReply] = field(default_factory=Future[Reply | NoReply])


class LocalJudge:
    """`model` is what JUDGE_MODEL says; `opener` loads it, on the judge's thread. Asked like an endpoint's `Line`."""

    def __init__(
        self, model: str, opener: Callable[[], SamplingClient], *, warn: Callable[[str], None] = lambda text: None
    ) -> None:
        self.model, self._opener, self._warn = model, opener, warn
        self._state, self._detail = "loading", "the judge is being loaded"
        self._line: queue.Queue[_Waiting | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="judge", daemon=True)

    @property
    def where(self) -> str:
        return f"the judge {self.model}"

    def start(self) -> None:
        self._thread.start()

    def health(self) -> dict[str, str]:
        return {"kind": "local", "name": self.model, "state": self._state, "detail": self._detail}

    async def ask(self, request: Mapping[str, Any], cost: Cost) -> Reply:
        """What the model says to `messages`, never empty; NoReply where it says nothing or is not there."""
        if self._state != "ready":
            raise NoReply("unreachable", f"{self.where} is {self._state}: {self._detail}")
        cost.requests += 1
        params = SamplingParams(max_tokens=request["max_tokens"], temperature=request["temperature"])
        waiting = _Waiting(request["messages"], params)
        self._line.put(waiting)
        if self._state != "ready":  # closed meanwhile, and perhaps nobody looks there any more
            self._refuse_rest()
        reply = await asyncio.wrap_future(waiting.reply)
        if isinstance(reply, NoReply):
            raise reply
        cost.prompt_tokens += reply.prompt_tokens
        cost.completion_tokens += reply.completion_tokens
        return reply

    async def close(self, patience_s: float = STOP_S) -> None:
        """What is being judged comes to its end, where that is soon; what waits gets no verdict."""
        self._state, self._detail = "down", "the service is stopping"
        self._line.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, patience_s)
        self._refuse_rest()

    # The thread

    def _work(self) -> None:
        try:
            client = self._opener()
            form = Form(client.get_tokenizer())
        except Exception as error:
            self._settle("down", f"{error}" or type(error).__name__)
            self._warn(f"the judge could not be loaded: {error}")
            return
        self._settle("ready", "")
        while (batch := self._take()) is not None:
            if self._state == "ready":
                self._judge(client, form, batch)
            else:
                self._refuse(batch)

    def _settle(self, state: str, detail: str) -> None:
        if self._state == "loading":  # else it was closed meanwhile
            self._state, self._detail = state, detail

    def _take(self) -> list[_Waiting] | None:
        """Those that wait, `MOST` at a time; None once the judge is closed and nobody does."""
        first = self._line.get()
        if first is None:
            return None
        time.sleep(GATHER_S)
        taken = [first]
        with suppress(queue.Empty):
            while len(taken) < MOST:
                if (more := self._line.get_nowait()) is None:
                    self._line.put(None)
                    break
                taken.append(more)
        return [one for one in taken if one.reply.set_running_or_notify_cancel()]

    def _judge(self, client: SamplingClient, form: Form, batch: Sequence[_Waiting]) -> None:
        """All are submitted before one is waited for: then the engine computes them together."""
        begun: list[tuple[_Waiting, ModelInput, Any]] = []
        for one in batch:
            try:
                prompt = form.prompt(one.messages)
                try:
                    begun.append((one, prompt, client.sample(prompt, 1, one.params)))
                except ValueError as error:  # longer than the model's context
                    told = NoReply("rejected", f"{self.where}: {error}", of_text=True, too_long=True)
                    one.reply.set_result(told)
            except Exception as error:
                one.reply.set_result(self._failed(error))
        for one, prompt, future in begun:
            try:
                (sampled,) = future.result().sequences
                one.reply.set_result(form.reply(prompt, sampled, one.params.max_tokens or 0))
            except Exception as error:
                one.reply.set_result(self._failed(error))

    def _failed(self, error: Exception) -> NoReply:
        self._warn(f"the judge failed: {type(error).__name__}: {error}")
        return NoReply("failed", f"{self.where} failed: {type(error).__name__}: {error}"[:1000])

    def _refuse(self, batch: Sequence[_Waiting]) -> None:
        for one in batch:
            one.reply.set_result(NoReply("unreachable", f"{self.where}: {self._detail}"))

    def _refuse_rest(self) -> None:
        left: list[_Waiting | None] = []
        with suppress(queue.Empty):
            while True:
                left.append(self._line.get_nowait())
        self._refuse([one for one in left if one is not None and one.reply.set_running_or_notify_cancel()])
        if None in left:  # the thread's, by which it ends
            self._line.put(None)
