"""What the service measures of its own work: sessions, completions, tokens, and the time and errors of its parts.

    metrics = ServiceMetrics()
    metrics.observe_generation(seconds=1.2, prompt_tokens=50, completion_tokens=200)

Counters of this process, in a registry of their own; `rlvr.service.http.routes_read` adds them to /metrics.
docs/service/operations.md lists the names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from rlvr.core.types import Score
from rlvr.store.records import Experience, Session

SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
ITERATIONS = (1, 2, 3, 5, 8, 13, 20, 50)


class ServiceMetrics:
    """Safe from any thread: verifiers and an engine report from theirs."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._ended = Counter("rlvr_sessions_ended", "Sessions that ended.", ("kind", "status"), registry=registry)
        self._session_seconds = Histogram(
            "rlvr_session_seconds", "From a session's start to its end, without its time in the queue.", ("kind",),
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._session_iterations = Histogram(
            "rlvr_session_iterations", "Iterations of a session that ended.", ("kind",), buckets=ITERATIONS,
            registry=registry,
        )  # fmt: skip
        self._completions = Counter(
            "rlvr_completions", "Completions by what they were sampled for, their place (first, later) and outcome.",
            ("kind", "attempt", "outcome"), registry=registry,
        )  # fmt: skip
        self._tokens = Counter("rlvr_tokens", "Tokens of prompts and of completions.", ("of",), registry=registry)
        self._generator_seconds = Histogram(
            "rlvr_generator_seconds", "From the request for a completion to the completion, retries included.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._generator_errors = Counter(
            "rlvr_generator_errors", "Sessions that the generator failed, after all retries.", ("code",),
            registry=registry,
        )  # fmt: skip
        self._verifier_seconds = Histogram(
            "rlvr_verifier_seconds", "A call of a verifier; it judges the completions that arrive together.",
            ("verifier",), buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._verdicts = Counter(
            "rlvr_verdicts", "Verdicts by verifier. `error`: the verifier broke or had no time.",
            ("verifier", "outcome"), registry=registry,
        )  # fmt: skip

        for kind in ("train", "evaluate"):  # from the start: a rate of counters that are not there yet is no rate
            for attempt, outcome in product(("first", "later"), ("passed", "failed")):
                self._completions.labels(kind, attempt, outcome)
            self._ended.labels(kind, "done")

    def collect(self) -> Iterator[Metric]:
        yield from self._registry.collect()

    def count_session(self, session: Session, kind: str) -> None:
        """Count a session that ended."""
        self._ended.labels(kind, session.status.value).inc()
        if session.started is not None and session.finished is not None:
            self._session_seconds.labels(kind).observe(max(0.0, session.finished - session.started))
            self._session_iterations.labels(kind).observe(session.iterations)

    def count_completion(self, e: Experience) -> None:
        self._completions.labels(e.kind, "first" if e.iteration == 1 else "later", e.outcome).inc()

    def observe_generation(self, seconds: float, prompt_tokens: int, completion_tokens: int) -> None:
        self._generator_seconds.observe(seconds)
        self._tokens.labels("prompt").inc(prompt_tokens)
        self._tokens.labels("completion").inc(completion_tokens)

    def count_generator_error(self, code: str) -> None:
        self._generator_errors.labels(code).inc()

    def observe_verifier(self, name: str, seconds: float, scores: Sequence[Score]) -> None:
        """`rlvr.reward.blend.Observe`: one call of a verifier and its verdicts."""
        self._verifier_seconds.labels(name).observe(seconds)
        self._verdicts.labels(name, "error")  # 0 until there is one, so that its share is 0 and not missing
        for score in scores:
            self._verdicts.labels(name, score.outcome.value).inc()
