"""The settings of one server: the engine's options, limits and vLLM servers, read from words and a file.

`rlvr serve engine --model ... limits.session_seconds=600 engine.micro_tokens=8192` sets two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.vllm import VllmOptions
from rlvr.engine.engine_options import EngineLimits
from rlvr.tinker_server.protocol.server_limits import Count, ServerLimits, WireLimits

# Earlier names of settings, and what they are called now.
RENAMED = {"limits.max_cells": "limits.request_logprobs", "limits.answer_cells": "limits.answer_logprobs"}
ONE_REQUEST = 0.75  # the default of `engine.one_request` here: the rest of the rows is for other requests


@dataclass(frozen=True)
class ServerSamplers:
    """The vLLM servers that sample, at `urls`. Adapters are published to `folder`, by default in the state folder;
    every server must read it by the same path. The last `adapters` that were used stay loaded.

    `timeout_s` bounds every call, after which the next server is asked; where none answers for `wait_s`, the client
    sends the request again. At most `concurrency` requests are in flight at a server.
    """

    urls: list[str] = field(default_factory=list[str])
    folder: str | None = None
    adapters: Count = 32
    timeout_s: float = VllmOptions.timeout_s
    wait_s: float = VllmOptions.wait_s
    concurrency: int = VllmOptions.concurrency

    def __post_init__(self) -> None:
        if self.urls:
            self.options()
        elif self.folder is not None:
            raise ValueError(
                f"sampler.folder={self.folder} has no effect without sampler.urls; add --samplers http://127.0.0.1:8790"
            )

    def options(self) -> VllmOptions:
        return VllmOptions(self.urls, self.timeout_s, self.wait_s, self.concurrency)


@dataclass(frozen=True)
class ServerSettings:
    """What `key=value` words set. Sections are `engine` and `sharding`, as in a run's config, `limits`, `wire` and
    `sampler`."""

    engine: EngineLimits = field(default_factory=lambda: EngineLimits(one_request=ONE_REQUEST))
    limits: ServerLimits = field(default_factory=ServerLimits)
    wire: WireLimits = field(default_factory=WireLimits)
    sampler: ServerSamplers = field(default_factory=ServerSamplers)
    sharding: ShardingOptions = field(default_factory=ShardingOptions)


def load_settings(words: Sequence[str], file: Path | None = None) -> ServerSettings:
    """The settings of `key=value` words and a YAML file, which they override; ValueError names every wrong one."""
    if not words and file is None:
        return ServerSettings()
    from rlvr.config.validate import load_settings as load_sections

    return load_sections(ServerSettings, words, file, {"engine": {"one_request": ONE_REQUEST}}, RENAMED)
