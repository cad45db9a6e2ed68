"""The section `sampler` of a config: which part samples, and where. No network, no torch.

Exercised by `python -m pytest tests/test_vllm_sampler.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

SAMPLERS = ("trainer", "vllm")


class SamplerError(RuntimeError):
    """A sampling server gave no completion that can be trusted. The run stops; the same command resumes it."""


@dataclass(frozen=True)
class SamplerOptions:
    """Which part samples. `name` is trainer, the client that trains, or vllm, the servers at `urls`.

    A call that takes longer than `timeout_s` goes to the next server; if all are down, the run waits up to `wait_s` for
    one. At most `concurrency` requests are in flight at a server. Two engines round differently: unless
    `algorithm.importance_cap` is set, `importance_cap` is the cap of the truncated importance weights between sampler
    and trainer; 0 turns the correction off.
    """

    name: str = "trainer"
    urls: list[str] = field(default_factory=list[str])
    timeout_s: float = 600.0
    wait_s: float = 120.0
    concurrency: int = 64
    importance_cap: float = 2.0

    def __post_init__(self) -> None:
        if self.name not in SAMPLERS:
            raise ValueError(f"sampler.name={self.name!r}; expected {' or '.join(SAMPLERS)}")
        if self.name == "vllm" and not self.urls:
            raise ValueError("sampler.urls is empty; give the servers' addresses: sampler.urls=[http://127.0.0.1:8790]")
        for url in self.urls:
            check_url(url)
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"sampler.urls={self.urls}: a server is listed twice; list each once")
        if self.importance_cap and not self.importance_cap >= 1:
            raise ValueError(f"sampler.importance_cap={self.importance_cap}, expected at least 1, or 0 for none")
        for name, least in (("timeout_s", 0.1), ("wait_s", 0.0), ("concurrency", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"sampler.{name}={getattr(self, name)}, expected at least {least:g}")


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
