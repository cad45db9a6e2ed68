"""The samples of one request to the open endpoints: queued together, awaited together, ended when the client leaves."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlvr.core.messages import ModelInput, SampleResponse, SamplingParams
from rlvr.engine.scheduler import SampledToken
from rlvr.tinker_server.backend.request_futures import Pending, RequestFailure, ResultFuture, SampleResult
from rlvr.tinker_server.backend.storage.server_store import Row
from rlvr.tinker_server.http.dependencies import Caller
from rlvr.tinker_server.protocol.errors import Busy, GoneError, ServerError, TinkerServerError, UserError

_LOOK_SECONDS = 0.5  # between looks at whether the client is still there
_ROUND = 64  # results taken, or samples ended, before the event loop turns to others


@dataclass(eq=False)
class OpenSampling:
    """Samples for an open endpoint: `prompts[i]` gets `count` completions."""

    caller: Caller
    row: Row  # the weights, by `SampleRequests.find_model`
    prompts: Sequence[list[int]]
    futures: list[ResultFuture] = field(default_factory=list[ResultFuture])
    _tokens: deque[tuple[int, SampledToken]] = field(default_factory=deque[tuple[int, SampledToken]])
    _news: asyncio.Event = field(default_factory=asyncio.Event)  # tokens wait in `_tokens`, or no more come

    @property
    def end_tokens(self) -> frozenset[int]:
        return self.caller.backend.engines[self.row["base_model"]].end_tokens

    @property
    def context(self) -> int:
        return self.caller.backend.engines[self.row["base_model"]].model.context

    def check_room(self, limit: tuple[str, int] | None) -> None:
        """UserError if a prompt with the limit that the client set, (field, tokens), exceeds the context."""
        for prompt in self.prompts:
            room = self.context - len(prompt)
            if limit is not None and limit[1] > room > 0:
                raise UserError(
                    f"{limit[0]}={limit[1]} is too large: the prompt has {len(prompt)} tokens and the model's context "
                    f"is {self.context}, which leaves {room}; give at most {room}, or shorten the prompt"
                )

    async def start(
        self, count: int, params: SamplingParams, options: Mapping[str, Any], *, is_streamed: bool = False
    ) -> None:
        """Queue everything; what was queued before an error is ended again."""
        loop, sampling = asyncio.get_running_loop(), self.caller.backend.sampling

        def report(prompt: int, token: SampledToken) -> None:
            self._tokens.append((prompt, token))
            if not self._news.is_set():  # one call for all the tokens that the loop has not taken yet
                with suppress(RuntimeError):  # the loop is closed: the server stops
                    loop.call_soon_threadsafe(self._news.set)

        def queue(owner: str) -> None:
            prompts = [ModelInput(prompt) for prompt in self.prompts]
            sampling.check_answer(self.row, prompts, count, params, options)
            for number, prompt in enumerate(prompts):
                more = {"on_token": partial(report, number)} if is_streamed else {}
                future = sampling.sample_model(owner, self.row, prompt, count, params, {**options, **more})
                self.futures.append(future)

        try:
            await self.caller.call(queue)
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """`cancel` on the event loop: thousands of samples are ended on a thread."""
        if len(self.futures) <= _ROUND:
            self.cancel()
        else:
            with suppress(RuntimeError):  # the server stops, and so do its samples
                asyncio.get_running_loop().run_in_executor(None, self.cancel)

    def cancel(self) -> None:
        for future in self.futures:
            self.caller.backend.sampling.cancel_future(future)

    async def results(self) -> list[SampleResponse]:
        """One response per prompt. Raises the first failure, and `UserError` when the client has left."""
        try:
            return [response async for response in self._take_results()]
        finally:
            self._end()

    async def _take_results(self, *, looks: bool = True) -> AsyncIterator[SampleResponse]:
        for number, future in enumerate(self.futures, 1):
            yield await self._result(future, looks=looks)
            if not number % _ROUND:
                await asyncio.sleep(0)  # a result that is there is no wait

    async def _result(self, future: ResultFuture, *, looks: bool) -> SampleResponse:
        caller = self.caller
        while True:
            try:
                answer = caller.backend.result(caller.owner, future.request_id, _LOOK_SECONDS)
                outcome = await caller.polls.hold(caller.owner, answer)
            except GoneError as error:  # OpenAI's clients repeat a request after a 429, not after a 410
                raise Busy(str(error)) from error
            match outcome:
                case SampleResult(response):
                    return response
                case RequestFailure(error, category):
                    raise UserError(error) if category == "user" else ServerError(error)
                case Pending():
                    if looks and await caller.request.is_disconnected():
                        raise UserError("the client closed the connection")
                case _:
                    raise ServerError("the server is stopping; send the request again")

    async def stream(self) -> AsyncIterator[list[tuple[int, SampledToken]]]:
        """(prompt, token) as they are sampled, to the end: each time all that came since. Closing it ends the samples,
        as does a failure of one."""
        waiting = asyncio.ensure_future(self._finish())
        try:
            while not waiting.done() or self._tokens:
                await self._news.wait()
                self._news.clear()
                if batch := [self._tokens.popleft() for _ in range(len(self._tokens))]:
                    yield batch
            await waiting
        finally:
            waiting.cancel()
            self._end()

    async def _finish(self) -> None:
        try:
            async for _ in self._take_results(looks=False):
                pass
        finally:
            self._news.set()


def error_fields(error: TinkerServerError) -> dict[str, Any]:
    """An error in the form of OpenAI's clients, for a stream that has begun."""
    return {"error": error.content("")["error"]}
