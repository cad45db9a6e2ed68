"""A recorder that stands alone: programs call a model through it, and every call is written to a recording.

    POST /rollouts                  {"group"?}  ->  {"id", "url", "openai_base_url", "anthropic_base_url"}
    POST /r/<token>/v1/...          a call of the model, in one of three dialects
    POST /r/<token>/reward          {"reward", "source"?}
    POST /r/<token>/close

A call is on disk before its answer is sent. Sampling settings of the program are followed, and written beside the
log-probs.
"""

from __future__ import annotations

import math
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from rlvr.chat.conversation import ChatTemplate, Conversation
from rlvr.chat.dialects.forms import ChatAnswer, ChatCall, DialectError
from rlvr.core.futures import Future
from rlvr.core.messages import ModelInput, SampledSequence, SampleResponse, SamplingParams
from rlvr.core.protocols import SamplingClient
from rlvr.core.types import StopReason
from rlvr.recorder.app import make_app, parse_body, read_body
from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts, PendingCall
from rlvr.recorder.recording import SETTINGS, RecordedCall, RecordedChoice, RecordingFile

MAX_ROLLOUTS = 10_000  # that are open at the same time
MAX_CHOICES = 64


@dataclass(eq=False)
class RecordedSession:
    """A rollout that is being recorded."""

    id: str
    group: str
    conversation: Conversation
    rollout: OpenRollout | None = None
    sampled: int = 0


class RecordingPolicy:
    """Answers the calls of all rollouts with one sampler, on a thread of its own, and writes each to a recording."""

    def __init__(self, sampler: SamplingClient, file: RecordingFile, template: ChatTemplate) -> None:
        self._sampler, self._file, self._template = sampler, file, template
        self._calls: queue.SimpleQueue[tuple[RecordedSession, PendingCall] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def submit(self, session: RecordedSession, call: PendingCall) -> None:
        self._calls.put((session, call))

    def stop(self) -> None:
        """Answer what was submitted, and end."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        """Calls that came in meanwhile are sampled together."""
        is_over = False
        while not is_over:
            batch = [self._calls.get()]
            while not self._calls.empty():
                batch.append(self._calls.get())
            is_over = None in batch
            begun = [self._begin(*item) for item in batch if item is not None]
            for finish in begun:
                finish()

    def _begin(self, session: RecordedSession, pending: PendingCall) -> Callable[[], None]:
        """Submit a call to the sampler; what is returned waits for its answer."""
        began = time.time()

        def refuse(error: Exception) -> Callable[[], None]:
            is_ours = not isinstance(error, (ValueError, DialectError))
            pending.refuse(DialectError(str(error), status=500 if is_ours else 400))
            return lambda: None

        if pending.has_left:
            return refuse(ValueError("the client closed the connection"))
        try:
            prompt = session.conversation.encode(pending.call)
            future = self._sample(pending.call, prompt)
        except Exception as error:
            return refuse(error)

        def finish() -> None:
            try:
                self._answer(session, pending, prompt, future.result(), began)
            except Exception as error:
                refuse(error)

        return finish

    def _sample(self, call: ChatCall, prompt: list[int]) -> Future[SampleResponse]:
        if call.count > MAX_CHOICES:
            raise ValueError(f"n={call.count} is too many; at most {MAX_CHOICES} choices are sampled for a call")
        params = SamplingParams(
            max_tokens=call.max_tokens,
            # Samplers count from 0 where none is given: a recorder that is started again would sample the same again.
            seed=secrets.randbits(62) if call.seed is None else call.seed,
            stop=self._template.list_stops(call),
            temperature=1.0 if call.temperature is None else call.temperature,
            top_p=1.0 if call.top_p is None else call.top_p,
            top_k=call.top_k or -1,
            min_p=call.min_p or 0.0,
        )
        return self._sampler.sample(ModelInput(prompt), call.count, params)

    def _answer(
        self, session: RecordedSession, pending: PendingCall, prompt: list[int], response: SampleResponse, began: float
    ) -> None:
        call, answers = pending.call, list[ChatAnswer]()
        for sequence in response.sequences:
            answers.append(self._read(session, call, prompt, sequence))
            session.conversation.record(call, prompt, answers[-1].message, sequence.tokens)
        settings = {name: value for name in SETTINGS if (value := getattr(call, name)) is not None}
        choices = [RecordedChoice(list(a.tokens), list(a.logprobs), a.finish, a.message) for a in answers]
        if not (pending.has_left or pending.answers.done()):  # it was refused meanwhile if its rollout was closed
            self._file.append(
                RecordedCall(
                    pending.id,
                    session.id,
                    session.group,
                    pending.dialect,
                    response.fingerprint,
                    prompt,
                    choices,
                    pending.request,
                    settings,
                    began,
                    time.time(),
                )
            )
        pending.answer(answers)

    def _read(
        self, session: RecordedSession, call: ChatCall, prompt: list[int], sequence: SampledSequence
    ) -> ChatAnswer:
        if sequence.logprobs is None:
            raise RuntimeError("the sampler gives no log-probs, so nothing can be recorded to train on")
        message, stop = self._template.read_answer(sequence.tokens, call, session.sampled)
        calls = message.get("tool_calls") or ()
        session.sampled += len(calls)
        ended = "length" if sequence.stop_reason is StopReason.LENGTH else "stop"
        texts = [self._template.tokenizer.decode([token]) for token in sequence.tokens] if call.with_logprobs else ()
        return ChatAnswer(
            message, "tool_calls" if calls else ended, prompt, sequence.tokens, sequence.logprobs, texts, stop
        )


class RecordingServer:
    """The web application of a recorder that stands alone."""

    def __init__(self, policy: RecordingPolicy, file: RecordingFile, template: ChatTemplate, model: str) -> None:
        self._policy, self._file, self._template = policy, file, template
        self._rollouts = OpenRollouts()
        self._sessions: dict[str, RecordedSession] = {}
        self._lock = threading.Lock()
        self._began = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"  # two servers may start in a second
        self._count = 0
        self.app = make_app(self._rollouts, model)
        self._add_routes(self.app)

    def open(self, group: str = "") -> RecordedSession:
        """A new rollout."""
        with self._lock:
            if len(self._sessions) >= MAX_ROLLOUTS:
                raise DialectError(f"{MAX_ROLLOUTS:,} rollouts are open; close some", status=429)
            session = RecordedSession(f"{self._began}-{self._count:06d}", group, Conversation(self._template))
            self._count += 1
            session.rollout = self._rollouts.open(lambda call: self._policy.submit(session, call))
            self._sessions[session.rollout.token] = session
        return session

    def _add_routes(self, app: Starlette) -> None:
        app.router.routes += [
            Route("/rollouts", self._answer(self._open), methods=["POST"]),
            Route("/r/{token}/reward", self._answer(self._reward), methods=["POST"]),
            Route("/r/{token}/close", self._answer(self._close), methods=["POST"]),
        ]

    def _answer(self, handle: Callable[[Request, dict[str, Any]], dict[str, Any]]) -> Any:
        async def answer(request: Request) -> JSONResponse:
            try:
                raw = await read_body(request)
                return JSONResponse(handle(request, parse_body(raw) if raw.strip() else {}))
            except DialectError as error:
                return JSONResponse({"error": {"message": str(error)}}, status_code=error.status)

        return answer

    def _open(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        group = body.get("group", "")
        if not isinstance(group, str) or len(group) > 500:
            raise DialectError(f"group={group!r:.80}, expected a text of at most 500 characters")
        session = self.open(group)
        return {"id": session.id, **self.addresses(session, str(request.base_url).rstrip("/"))}

    @staticmethod
    def addresses(session: RecordedSession, base: str) -> dict[str, str]:
        """Where a program finds its model."""
        assert session.rollout is not None
        url = f"{base}/r/{session.rollout.token}"
        return {"url": url, "openai_base_url": f"{url}/v1", "anthropic_base_url": url}

    def _find(self, request: Request) -> RecordedSession:
        session = self._sessions.get(request.path_params["token"])
        if session is None:
            raise DialectError("no rollout has this address, or it is over", status=410)
        return session

    def _reward(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        session, reward, source = self._find(request), body.get("reward"), body.get("source", "")
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward) or not isinstance(source, str):
            raise DialectError(f"reward={reward!r:.80}, source={source!r:.80}; expected a finite number and a text")
        self._file.append_reward(session.id, float(reward), source[:500])
        return {"id": session.id, "reward": float(reward)}

    def _close(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        session = self._find(request)
        assert session.rollout is not None
        session.rollout.close()
        self._sessions.pop(session.rollout.token, None)
        return {"id": session.id}
