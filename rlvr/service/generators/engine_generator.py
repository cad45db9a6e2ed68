"""A generator whose weights are trained: a model in this process, or at a Tinker server.

One thread owns the client. It loads the model after the service is up, plays all waiting sessions together (each a
group of `samples` episodes, in one lockstep rollout), and lets `SessionLearner` make its steps in between. So the
weights that learn are those that sampled, and no two threads compute at once. If replicas of the service share the
policy (`SharedLearner`), this thread only samples, from the weights published last.

A conversation is refined turn by turn in one context. A model that cannot read feedback (its tokenizer has a vocabulary
of words, as the demo's) gets the same prompt again. `rlvr.service.sessions.session_rewards` has the rewards.
A session in a batch waits for the others' turns, and a
session that arrives later for the batch.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, Trajectory, group_by
from rlvr.envs.prompt import UnwritableText, encode_prompt
from rlvr.envs.refine import RefineEnv
from rlvr.envs.reviewers import JudgedAttempt, RecordAttempts
from rlvr.reward.blend import session_reward
from rlvr.rollout import Group, rollout
from rlvr.service.learning.session_learner import LearnerOptions, SessionLearner
from rlvr.service.learning.shared_learner import SharedLearner
from rlvr.service.models.served_models import Say, ServedModel, take_batch
from rlvr.service.sessions.jobs import (
    NOTHING_LEARNED,
    AnswerKey,
    SessionFailure,
    SessionJob,
    SessionOutcome,
    build_experience,
)
from rlvr.service.sessions.session_rewards import RecordingSampler, assign_rewards, session_advantages
from rlvr.service.sessions.verification import EnvironmentTask
from rlvr.store.records import Experience

MOST = 64  # sessions of one rollout


@dataclass(frozen=True)
class EngineOptions:
    """The options of the generator. `samples` is the default number of episodes of a session; `max_tokens` is lowered
    to that of the model's run."""

    samples: int = 4
    max_tokens: int = 512
    temperature: float = 1.0
    seed: int = 0


@dataclass(eq=False)
class _EngineRequest:
    """A job for the thread."""

    job: SessionJob
    future: concurrent.futures.Future[SessionOutcome]
    rewards: dict[AnswerKey, float | None] = field(default_factory=dict[AnswerKey, float | None])
    envs: list[RefineEnv] = field(default_factory=list[RefineEnv])
    group: list[Trajectory] = field(default_factory=list[Trajectory])
    failure: Exception | None = None

    def settle(self, result: SessionOutcome | Exception) -> None:
        with suppress(concurrent.futures.InvalidStateError):  # the session was cancelled meanwhile
            self.future.set_exception(result) if isinstance(result, Exception) else self.future.set_result(result)


class EngineGenerator:
    """A generator with a model in this process. `opener(folder, say)` loads the model, whose client saves in `folder`.
    It runs in the generator's thread and reports its progress by `say`."""

    def __init__(
        self,
        opener: Callable[[Path, Say], ServedModel],
        folder: Path,
        options: EngineOptions = EngineOptions(),
        learner: LearnerOptions = LearnerOptions(),
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.kind, self.name = "local", ""
        self._opener, self._folder, self.options, self._warn = opener, folder, options, warn
        self._learner_options = learner
        self._model: ServedModel | None = None
        self.learner: SessionLearner | SharedLearner | None = None
        self._state, self._detail = "loading", "the model is being loaded"
        self._queue: queue.Queue[_EngineRequest | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._closing = False
        self._sampler: RecordingSampler | None = None

    # Called on the event loop

    def start(self) -> None:
        self._thread.start()

    def health(self) -> dict[str, Any]:
        state = {"state": self._state, "detail": self._detail}
        if self._state == "ready" and self.learner is not None:
            state["detail"] = self.learner.detail
        return {"kind": self.kind, "name": self.name, **state, "learns": "weights"}

    async def check(self) -> None:
        """Nothing: its state is known in this process."""

    def refresh(self) -> None:
        if self.learner is not None:
            self.learner.refresh()

    def learning(self) -> dict[str, Any]:
        return dict(NOTHING_LEARNED) if self.learner is None else self.learner.describe()

    def task_from_prompt(self, text: str) -> EnvironmentTask | None:
        source = self._model.source if self._model else None
        task = source.parse_task(text) if source else None
        return EnvironmentTask(task, source.reward) if source and task else None

    def decode(self, tokens: Sequence[int]) -> str | None:
        if (model := self._model) is None:
            return None
        return model.client.get_tokenizer().decode(list(tokens), skip_special_tokens=False)

    async def run(self, job: SessionJob) -> SessionOutcome:
        if self._state == "down" or self._closing:
            raise SessionFailure("generator_down", self._detail if self._state == "down" else "the service is stopping")
        waiting = _EngineRequest(job, concurrent.futures.Future())
        self._queue.put(waiting)
        return await asyncio.wrap_future(waiting.future)

    def learn(self, answers: Sequence[Experience]) -> None:
        """Nothing: the thread learns between two batches."""

    async def close(self) -> None:
        """Let current sessions finish their turn, then learn from the episodes gathered so far."""
        self._closing = True
        self._queue.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The thread

    def _work(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._state, self._detail = "down", f"{error}" or type(error).__name__
            self._warn(f"the model could not be loaded: {self._detail}")
        while (batch := take_batch(self._queue, MOST)) is not None:
            if self.learner is None:
                self._fail(batch, SessionFailure("generator_down", self._detail))
            else:
                self._play_safely(batch)
        if self.learner is not None:
            self.learner.close()

    def _play_safely(self, batch: list[_EngineRequest]) -> None:
        """Play a batch; if that fails, fail its jobs and keep the thread alive."""
        try:
            self._play(batch)
        except Exception as error:
            self._warn(f"a batch of sessions failed: {type(error).__name__}: {error}")
            self._fail(batch, _as_session_failure(error))

    def _load(self) -> None:
        def say(text: str) -> None:
            if self._closing:
                raise SessionFailure("generator_down", "the service stopped while it loaded its model")
            self._detail = text

        self._folder.mkdir(parents=True, exist_ok=True)
        model = self._opener(self._folder, say)
        for note in model.notes:
            self._warn(note)
        most = min(filter(None, (model.max_tokens, self.options.max_tokens)))
        self.options = replace(self.options, max_tokens=most)
        options = replace(self._learner_options, max_tokens=most, temperature=self.options.temperature)
        if (learner := model.learner) is None:
            learner = SessionLearner(model.trainer, self._folder, options, warn=self._warn)
            learner.restore()
        self.kind, self.name, self._model, self.learner = model.kind, model.name, model, learner
        gc.collect()
        gc.freeze()  # a search through all that was loaded would stop every request for half a second
        self._state = "ready"

    def _fail(self, batch: Sequence[_EngineRequest], failure: Exception) -> None:
        for waiting in batch:
            waiting.settle(failure)

    def _play(self, batch: list[_EngineRequest]) -> None:
        """Roll out all jobs together, then learn. If the rollout fails, each job is tried alone."""
        assert self.learner is not None
        try:
            group_ids, trajectories = self._run_rollout(batch)
        except Exception as error:
            if isinstance(error, RuntimeError):  # the server could not answer
                self.learner.forget_sampler()
            if len(batch) > 1:
                for waiting in batch:
                    self._play([waiting])
            else:
                self._fail(batch, _as_session_failure(error))
            return
        finally:
            self._sampler = None  # a step would have to copy the weights that it holds
        by_group = group_by(trajectories, lambda t: t.group_id)
        for group_id, waiting in zip(group_ids, batch, strict=True):
            waiting.group = assign_rewards(by_group[group_id], waiting.rewards, waiting.job.session_id)
        learning = [w for w in batch if w.job.learn and w.failure is None]
        self.learner.learn([t for waiting in learning for t in waiting.group])
        for waiting in batch:
            waiting.settle(waiting.failure or self._outcome(waiting))

    def _run_rollout(self, batch: list[_EngineRequest]) -> tuple[list[str], list[Trajectory]]:
        """(the group id of each session, the trajectories of all)."""
        assert self.learner is not None
        self._sampler = RecordingSampler(self.learner.sampler)
        groups: dict[str, Group] = {}
        for waiting in batch:
            group = self._group(waiting)
            if group.id in groups:  # two sessions with the same seed and task
                group.id += f"/{waiting.job.session_id}"
            groups[group.id] = group
        params = SamplingParams(max_tokens=self.options.max_tokens, temperature=self.options.temperature)
        version = self.learner.version
        trajectories = rollout(list(groups.values()), self._sampler, params, seed=self.options.seed, version=version)
        return list(groups), trajectories

    def _outcome(self, waiting: _EngineRequest) -> SessionOutcome:
        assert self.learner is not None
        tokens = sum(t.num_action_tokens for t in waiting.group)
        outcome = SessionOutcome({i: env.ended for i, env in enumerate(waiting.envs)})
        outcome.entropy = -math.fsum(t.total_logprob for t in waiting.group) / tokens if tokens else None
        if waiting.job.learn:
            outcome.loss = self.learner.progress.loss
            outcome.advantages = session_advantages(waiting.group, waiting.rewards.keys())
        return outcome

    def _group(self, waiting: _EngineRequest) -> Group:
        """The session's episodes. Sessions with the same seed and task have the same random draws."""
        job, model = waiting.job, self._model
        assert model is not None and self.learner is not None
        tokenizer = model.client.get_tokenizer()
        task = model.prompt_writer.write(job.task)
        if not can_encode(task, tokenizer, model.reads_text):  # fails this session only
            words = ", ".join(repr(word[:40]) for word in find_unknown_words(task, tokenizer)[:8])
            message = f"{model.name} has a fixed vocabulary of words, and the prompt has others{words and f': {words}'}"
            raise SessionFailure("prompt_not_understood", f"{message}; use its words only")
        judge = job.open_judge(self._recorder(waiting))
        waiting.rewards.clear()
        waiting.envs = [
            RefineEnv(
                task,
                tokenizer,
                job.open_reviewer(
                    judge, sample, lambda: self._closing or waiting.failure is not None or job.is_cancelled()
                ),
                max_turns=job.max_iterations,
                compose=None if model.reads_text else lambda task, answers, feedback: task.model_prompt,
            )
            for sample in range(job.samples or self.options.samples)
        ]
        return Group(job.draw_name, task, [*waiting.envs])

    def _recorder(self, waiting: _EngineRequest) -> RecordAttempts:
        """Stores the answers of a turn of a session; a failure ends this session only."""
        began, job = time.time(), waiting.job

        def describe(one: JudgedAttempt) -> Experience:
            assert self.learner is not None and self._sampler is not None
            attempt = one.attempt
            waiting.rewards[one.sample, attempt.number] = session_reward(one.feedback, 1)
            sampled = self._sampler.record_of(attempt.prompt_tokens, attempt.tokens)
            job.metrics.observe_generation(sampled.seconds, len(attempt.prompt_tokens), len(attempt.tokens))
            return build_experience(
                job,
                one,
                began=began,
                tokens=True,
                logprobs=sampled.logprobs,
                policy_version=self.learner.version,
                policy_fingerprint=self._sampler.fingerprint,
            )

        def record(judged: Sequence[JudgedAttempt]) -> None:
            nonlocal began
            try:
                job.record([(describe(one), one.feedback) for one in judged])
            except Exception as error:
                waiting.failure = waiting.failure or error
            began = time.time()

        return record


def can_encode(task: Task, tokenizer: Any, reads_text: bool) -> bool:
    """Whether the tokenizer can encode the prompt (any one if `reads_text`); ValueError for an empty one."""
    if reads_text:
        return bool(encode_prompt(task, tokenizer))
    try:
        tokens = encode_prompt(task, tokenizer)
    except UnwritableText:
        return False
    text = task.model_prompt if isinstance(task.model_prompt, str) else task.prompt_text
    return tokenizer.decode(tokens, skip_special_tokens=False).split() == text.split()


def find_unknown_words(task: Task, tokenizer: Any) -> list[str]:
    """The words of the prompt, each once, that the tokenizer cannot encode and decode again."""

    def is_known(word: str) -> bool:
        try:
            return tokenizer.decode(tokenizer.encode(word, add_special_tokens=False)).split() == [word]
        except Exception:  # each library raises its own error for a word outside a fixed vocabulary
            return False

    text = task.model_prompt if isinstance(task.model_prompt, str) else task.prompt_text
    return [word for word in dict.fromkeys(text.split()) if not is_known(word)]


def _as_session_failure(error: Exception) -> SessionFailure:
    if isinstance(error, SessionFailure):
        return error
    return SessionFailure("generator_failed", f"{error}"[:1000] or type(error).__name__)
