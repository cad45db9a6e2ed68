"""A recorder that stands alone: programs call a model through it, and every call is written to a recording.

    POST /rollouts                  {"group"?}  ->  {"id", "url", "openai_base_url", "anthropic_base_url"}
    POST /r/<token>/v1/...          a call of the model, in one of three dialects
    POST /r/<token>/reward          {"reward", "call"?, "source"?}
    POST /r/<token>/close

A call is on disk before its answer is sent. Sampling settings of the program are followed, and written beside the
log-probs.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request

from rlvr.chat.conversation import ChatTemplate, Conversation
from rlvr.chat.dialects.forms import ChatAnswer, ChatRequest, DialectError
from rlvr.core.futures import Future
from rlvr.core.messages import ModelInput, SampleResponse
from rlvr.core.protocols import SamplingClient
from rlvr.recorder.app import json_route, make_app
from rlvr.recorder.open_rollouts import OpenRollout, OpenRollouts, PendingCall
from rlvr.recorder.recording import RecordingFile, make_call

MAX_ROLLOUTS = 10_000  # that are open at the same time
MAX_CHOICES = 64


@dataclass(eq=False)
class RecordedSession:
    """A rollout that is being recorded."""

    id: str
    group: str
    conversation: Conversation
    rollout: OpenRollout | None = None


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

    def _sample(self, call: ChatRequest, prompt: list[int]) -> Future[SampleResponse]:
        if call.count > MAX_CHOICES:
            raise ValueError(f"n={call.count} is too many; at most {MAX_CHOICES} choices are sampled for a call")
        params = self._template.sampling_params(call)
        return self._sampler.sample(ModelInput(prompt), call.count, params)

    def _answer(
        self, session: RecordedSession, pending: PendingCall, prompt: list[int], response: SampleResponse, began: float
    ) -> None:
        call, answers = pending.call, list[ChatAnswer]()
        for sequence in response.sequences:
            if sequence.logprobs is None:
                raise RuntimeError("the sampler gives no log-probs, so nothing can be recorded to train on")
            answers.append(session.conversation.read(call, prompt, sequence))
            session.conversation.record(call, answers[-1])
        if not (pending.has_left or pending.answers.done()):  # it was refused meanwhile if its rollout was closed
            made = make_call(pending, session.id, session.group, response.fingerprint, answers, began)
            self._file.append(made)
        pending.answer(answers)


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
            session.rollout = self._rollouts.open(
                lambda call: self._policy.submit(session, call),
                lambda given: self._file.append_reward(session.id, given.reward, given.source, given.call),
            )
            self._sessions[session.rollout.token] = session
        return session

    def _add_routes(self, app: Starlette) -> None:
        app.router.routes += [json_route("/rollouts", self._open), json_route("/r/{token}/close", self._close)]

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
            raise DialectError("no open rollout has this address; open one first (POST /rollouts)", status=410)
        return session

    def _close(self, request: Request, body: dict[str, Any]) -> dict[str, Any]:
        session = self._find(request)
        assert session.rollout is not None
        session.rollout.close()
        self._sessions.pop(session.rollout.token, None)
        return {"id": session.id}
