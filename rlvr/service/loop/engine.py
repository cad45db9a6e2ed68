"""A generator whose weights are trained: a model in this process, or at a Tinker server.

One thread owns the client: it loads the model after the service is up, plays all waiting sessions together (each a
group of `samples` episodes, in one lockstep rollout), and lets `Learner` make its steps in between. So what is learned
from was sampled by the weights that learn, and no two threads ever compute at once.

A conversation is refined turn by turn in one context. A model that can read no feedback (one with a vocabulary of
words, such as the demo's) is asked the same again. What each is worth is in `rlvr.service.loop.group`.

`python -m pytest tests/test_service_learning.py` exercises it. A session in a batch waits for the others' turns; what
comes meanwhile waits for the batch.
"""

from __future__ import annotations

import asyncio
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rlvr.envs.critics import Bench, BlendCritic
from rlvr.envs.prompt import encode_prompt
from rlvr.envs.refine import Attempt, RefineEnv
from rlvr.messages import SamplingParams
from rlvr.reward.blend import session_reward
from rlvr.reward.feedback import Feedback
from rlvr.rollout import Group, rollout
from rlvr.service.loop.group import Heard, advantages, worth
from rlvr.service.loop.jobs import Job, Outcome, SessionFailure, experience_of
from rlvr.service.loop.learning import Learner, LearnerOptions
from rlvr.service.loop.models import Model, Say
from rlvr.types import Task, Trajectory, group_by

GATHER_S = 0.01  # how long the first of several sessions waits for those that were asked for at the same moment
MOST = 64  # sessions of one rollout


@dataclass(frozen=True)
class EngineOptions:
    """`samples` episodes a session, unless the request says otherwise; `max_tokens` of an answer, unless the model's
    run had fewer."""

    samples: int = 4
    max_tokens: int = 512
    temperature: float = 1.0
    seed: int = 0


@dataclass(eq=False)
class _Waiting:
    """A job on its way through the thread: `loop` is where its `record` runs and its future is awaited."""

    job: Job
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Outcome]
    rewards: dict[tuple[int, int], float | None] = field(default_factory=dict[tuple[int, int], float | None])
    envs: list[RefineEnv] = field(default_factory=list[RefineEnv])
    group: list[Trajectory] = field(default_factory=list[Trajectory])
    failure: Exception | None = None
    began: float = field(default_factory=time.time)

    def settle(self, result: Outcome | Exception) -> None:
        def set_() -> None:
            if not self.done.done():
                self.done.set_exception(result) if isinstance(result, Exception) else self.done.set_result(result)

        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(set_)


class EngineGenerator:
    """`opener(folder, say)` loads the model, whose client saves in `folder`; it runs in the generator's thread and may
    say how far it is."""

    def __init__(
        self,
        opener: Callable[[Path, Say], Model],
        folder: Path,
        options: EngineOptions = EngineOptions(),
        learner: LearnerOptions = LearnerOptions(),
        *,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.kind, self.name = "local", ""
        self._opener, self._folder, self.options, self._warn = opener, folder, options, warn
        self._learner_options = learner
        self._model: Model | None = None
        self.learner: Learner | None = None
        self._state, self._detail = "loading", "the model is being loaded"
        self._line: queue.Queue[_Waiting | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._closing = False
        self._heard: Heard | None = None

    # Asked from the event loop

    def start(self) -> None:
        self._thread.start()

    def health(self) -> dict[str, Any]:
        told = {"kind": self.kind, "name": self.name, "state": self._state, "detail": self._detail}
        return told | {"learns": "weights"}

    def learning(self) -> dict[str, Any]:
        if (learner := self.learner) is None:
            return {"policy_entropy": None, "training_loss": None, "updates": 0, "learning_rate": None}
        p = learner.progress
        return {
            "policy_entropy": p.entropy,
            "training_loss": p.loss,
            "updates": p.steps,
            "learning_rate": learner.learning_rate,
            "sessions_learned": p.sessions,
            "sessions_without_signal": p.silent,
            "steps_refused": p.refused,
        }

    def posed(self, text: str) -> tuple[Task, str] | None:
        """The prompt as a task of the model's own environment, and the reward that judges it."""
        poses = self._model.poses if self._model else None
        task = poses.posed(text) if poses else None
        return None if poses is None or task is None else (task, poses.reward)

    def decode(self, tokens: Sequence[int]) -> str | None:
        if (model := self._model) is None:
            return None
        return model.client.get_tokenizer().decode(list(tokens), skip_special_tokens=False)

    async def run(self, job: Job) -> Outcome:
        if self._state == "down" or self._closing:
            raise SessionFailure("generator_down", self._detail if self._state == "down" else "the service is stopping")
        loop = asyncio.get_running_loop()
        waiting = _Waiting(job, loop, loop.create_future())
        self._line.put(waiting)
        return await waiting.done

    async def learn(self, result: float | None) -> None:
        """The thread has done so already, in between two batches."""

    async def close(self) -> None:
        """What is under way comes to the end of its turn; then what was gathered is learned from."""
        self._closing = True
        self._line.put(None)
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    # The thread

    def _work(self) -> None:
        try:
            self._load()
        except Exception as error:
            self._state, self._detail = "down", f"{error}" or type(error).__name__
            self._warn(f"the model could not be loaded: {self._detail}")
        while (batch := self._take()) is not None:
            if self.learner is None:
                self._fail(batch, SessionFailure("generator_down", self._detail))
            else:
                self._guarded(batch)
        if self.learner is not None:
            self.learner.close()

    def _guarded(self, batch: list[_Waiting]) -> None:
        """Whatever happens to a batch, the thread lives on, and nobody waits for an answer that never comes."""
        try:
            self._play(batch)
        except Exception as error:
            self._warn(f"a batch of sessions failed: {type(error).__name__}: {error}")
            self._fail(batch, _typed(error))

    def _load(self) -> None:
        def say(text: str) -> None:
            if self._closing:
                raise SessionFailure("generator_down", "the service stopped while its model was being made")
            self._detail = text

        self._folder.mkdir(parents=True, exist_ok=True)
        model = self._opener(self._folder, say)
        for note in model.notes:
            self._warn(note)
        most = min(filter(None, (model.max_tokens, self.options.max_tokens)))
        self.options = replace(self.options, max_tokens=most)
        options = replace(self._learner_options, max_tokens=most, temperature=self.options.temperature)
        learner = Learner(model.client, self._folder, options, warn=self._warn)
        learner.restore()
        self.kind, self.name, self._model, self.learner = model.kind, model.name, model, learner
        self._state, self._detail = "ready", f"{learner.progress.steps} steps learned"

    def _take(self) -> list[_Waiting] | None:
        """All that wait; None once the generator is closed and nothing does."""
        first = self._line.get()
        if first is None:
            return None
        time.sleep(GATHER_S)
        taken = [first]
        while len(taken) < MOST:
            try:
                more = self._line.get_nowait()
            except queue.Empty:
                break
            if more is None:
                self._line.put(None)
                break
            taken.append(more)
        return taken

    def _fail(self, batch: Sequence[_Waiting], failure: Exception) -> None:
        for waiting in batch:
            waiting.settle(failure)

    def _play(self, batch: list[_Waiting]) -> None:
        """One rollout of all, then one look at what can be learned. What fails with others is tried alone."""
        assert self.learner is not None
        try:
            groups, played = self._rolled(batch)
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    self._play([waiting])
            else:
                self._fail(batch, _typed(error))
            return
        finally:
            self._heard = None  # it holds the weights of now, which a step would have to copy
        by_group = group_by(played, lambda t: t.group_id)
        for name, waiting in zip(groups, batch, strict=True):
            waiting.group = worth(by_group[name], waiting.rewards, waiting.job.session_id)
        learning = [w for w in batch if w.job.learn and w.failure is None]
        self.learner.learn([t for waiting in learning for t in waiting.group])
        self._detail = f"{self.learner.progress.steps} steps learned"
        for waiting in batch:
            waiting.settle(waiting.failure or self._outcome(waiting))

    def _rolled(self, batch: list[_Waiting]) -> tuple[list[str], list[Trajectory]]:
        """(the group of each session, the trajectories of all)."""
        assert self.learner is not None
        self._heard = Heard(self.learner.sampler)
        groups: dict[str, Group] = {}
        for waiting in batch:
            group = self._group(waiting)
            if group.id in groups:  # the same seed and task twice at once
                group.id += f"/{waiting.job.session_id}"
            groups[group.id] = group
        params = SamplingParams(max_tokens=self.options.max_tokens, temperature=self.options.temperature)
        version = self.learner.progress.steps
        played = rollout(list(groups.values()), self._heard, params, seed=self.options.seed, version=version)
        return list(groups), played

    def _outcome(self, waiting: _Waiting) -> Outcome:
        assert self.learner is not None
        tokens = sum(t.num_action_tokens for t in waiting.group)
        outcome = Outcome({i: env.ended for i, env in enumerate(waiting.envs)})
        outcome.entropy = -math.fsum(t.total_logprob for t in waiting.group) / tokens if tokens else None
        if waiting.job.learn:
            outcome.loss = self.learner.progress.loss
            outcome.advantages = advantages(waiting.group, waiting.rewards.keys())
        return outcome

    def _group(self, waiting: _Waiting) -> Group:
        """The session's episodes. The same seed and task draw the same, whatever the session is called."""
        job, model = waiting.job, self._model
        assert model is not None and self.learner is not None
        tokenizer = model.client.get_tokenizer()
        task = job.task
        if model.chat and isinstance(task.prompt, str):
            task = replace(task, prompt=[{"role": "user", "content": task.prompt}])
        if not understood(task, tokenizer, model.reads):  # this session's failure alone
            told = f"{model.name} knows a fixed vocabulary of words, and the prompt holds others; ask in its own words"
            raise SessionFailure("prompt_not_understood", told)
        bench = Bench(job.case.blend)
        waiting.rewards.clear()
        waiting.began = time.time()
        waiting.envs = [
            RefineEnv(
                task,
                tokenizer,
                BlendCritic(
                    bench,
                    min_confidence=job.min_confidence,
                    convergence_threshold=job.convergence_threshold,
                    record=self._recorder(waiting, sample),
                    cancelled=lambda: self._closing or waiting.failure is not None or job.cancelled(),
                ),
                max_turns=job.max_iterations,
                compose=None if model.reads else lambda task, answers, feedback: task.prompt,
            )
            for sample in range(job.samples or self.options.samples)
        ]
        name = job.session_id if job.seed is None else f"{job.task.id}/{job.seed}"
        return Group(name, task, [*waiting.envs])

    def _recorder(self, waiting: _Waiting, sample: int) -> Callable[[Attempt, Feedback], Any]:
        began = [time.time()]

        async def record(attempt: Attempt, feedback: Feedback) -> None:
            assert self.learner is not None and self._heard is not None
            waiting.rewards[sample, attempt.number] = session_reward(feedback, 1)
            e = experience_of(
                waiting.job,
                attempt,
                feedback,
                sample=sample,
                began=began[0],
                tokens=True,
                logprobs=self._heard.logprobs(attempt.prompt_tokens, attempt.tokens),
                policy_version=self.learner.progress.steps,
                policy_fingerprint=self._heard.fingerprint,
            )
            try:
                there = asyncio.run_coroutine_threadsafe(waiting.job.record(e, feedback), waiting.loop)
                await asyncio.wrap_future(there)
            except Exception as error:  # this session's alone: the others of the batch go on
                waiting.failure = waiting.failure or error
            began[0] = time.time()

        return record


def understood(task: Task, tokenizer: Any, reads: bool) -> bool:
    """Whether a tokenizer can say the prompt. One that `reads` can say all but an empty one, which is a ValueError."""
    if reads:
        return bool(encode_prompt(task, tokenizer))
    try:
        seen = encode_prompt(task, tokenizer)
    except ValueError:
        raise
    except Exception:  # a vocabulary without a word for the unknown: each library has its own error
        return False
    return tokenizer.decode(seen, skip_special_tokens=False).split() == task.prompt_text.split()


def _typed(error: Exception) -> SessionFailure:
    if isinstance(error, SessionFailure):
        return error
    return SessionFailure("generator_failed", f"{error}"[:1000] or type(error).__name__)
