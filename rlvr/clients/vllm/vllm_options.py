"""`sampler.name=vllm`: its options. No network, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import urlsplit

from rlvr.clients.sampler_options import SamplerOptions
from rlvr.core.messages import SamplingParams
from rlvr.core.protocols import SamplingClient, TrainingClient
from rlvr.core.registry import load_path
from rlvr.core.variants import setting


class SamplerError(RuntimeError):
    """A sampling server gave no completion that can be trusted. The run stops; the same command resumes it."""


@dataclass(frozen=True)
class VllmOptions(SamplerOptions):
    """The vLLM servers at `urls` sample.

    A call that takes longer than `timeout_s` goes to the next server; if all are down, the run waits up to `wait_s` for
    one. At most `concurrency` requests are in flight at a server. Two engines round differently: unless
    `algorithm.importance_cap` is set, `importance_cap` is the cap of the truncated importance weights between sampler
    and trainer; 0 turns the correction off.
    """

    name = "vllm"
    title = "vLLM"
    needs_folders = True
    uncompared = ("urls", "timeout_s", "wait_s", "concurrency")

    urls: list[str] = field(default_factory=list[str])
    timeout_s: float = setting(600.0, low=0.1, expected="at least 0.1", may_be_infinite=True)
    wait_s: float = setting(120.0, low=0, expected="at least 0", may_be_infinite=True)
    concurrency: int = setting(64, low=1, expected="at least 1")
    importance_cap: float = setting(2.0, low=0, expected="at least 1, or 0 for none")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.urls:
            raise ValueError("sampler.urls is empty; give the servers' addresses: sampler.urls=[http://127.0.0.1:8790]")
        for url in self.urls:
            check_url(url)
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"sampler.urls={self.urls}: a server is listed twice; list each once")
        if self.importance_cap and self.importance_cap < 1:
            raise ValueError(f"sampler.importance_cap={self.importance_cap}, expected at least 1, or 0 for none")

    @property
    def servers(self) -> Sequence[str]:
        return self.urls

    @property
    def correction(self) -> float:
        return self.importance_cap

    def check_sampling(self, params: SamplingParams) -> None:
        for name, off in (("top_k", -1), ("top_p", 1.0), ("min_p", 0.0)):
            if (given := getattr(params, name)) != off:
                raise ValueError(
                    f"rollout.{name}={given} with sampler.name=vllm: its log-probs would be of the distribution that "
                    f"{name} has cut, which training cannot use; leave "
                    f"rollout.{name} out"
                )

    def attach(
        self, client: TrainingClient, *, has_adapter: bool, keep: int, warn: Callable[[str], None]
    ) -> TrainingClient:
        sample_from_vllm = load_path("sampler", "rlvr.clients.vllm.vllm_clients:sample_from_vllm")  # when it is needed
        return cast(TrainingClient, sample_from_vllm(client, self, has_adapter=has_adapter, keep=keep, warn=warn))

    def open_served(self, tokenizer: Any, warn: Callable[[str], None]) -> AbstractContextManager[SamplingClient]:
        open_served_model = load_path("sampler", "rlvr.clients.vllm.vllm_clients:open_served_model")
        return cast("AbstractContextManager[SamplingClient]", open_served_model(self, tokenizer, warn))


def check_url(url: str) -> None:
    """ValueError unless it is the base address of a server, without a path, a query or a password."""
    parts = urlsplit(url)
    try:
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        sound = False
    if not sound or parts.path.strip("/") or parts.query or parts.fragment or "@" in parts.netloc:
        bare = url.rpartition("@")[2].partition("?")[0][:200]
        raise ValueError(f"sampler.urls: {bare!r}, expected an address without a path, such as http://127.0.0.1:8790")
