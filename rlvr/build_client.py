"""From a config to the training client it asks for: a table of logits, an engine in this process, or a server.

torch is imported inside, when a model is really needed here: `client=mock` runs without it. Exercised by
`python -m pytest tests/test_build.py tests/test_clients_tinker.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rlvr.clients.mock import MockTrainingClient
from rlvr.clients.tinker import TinkerTrainingClient, connect
from rlvr.config.schema import Config
from rlvr.cores import Shares, cores, spinning, split
from rlvr.protocols import TaskSource
from rlvr.reward import resolve_reward
from rlvr.toy import toy_policy
from rlvr.training.start import is_model, model_and_tokenizer, remote_start, start_folder

EXTRA = "pip install 'rlvr[train]'"
# Clients that do not offer every road to the gradient, as the local one does.
OFFERS: Mapping[str, Any] = {"mock": MockTrainingClient, "tinker": TinkerTrainingClient}


def vocabulary(config: Config, source: TaskSource) -> list[str]:
    """The words that the toy policy can say."""
    words = getattr(source, "vocabulary", None)
    if not words:
        raise ValueError(
            f"client=mock: the environment {config.env.name!r} has no `vocabulary` to make a table of logits "
            "over; use env.name=toy, give the environment a `vocabulary` (a list of words), or use client=local"
        )
    return list(words)


def shares(config: Config, source: TaskSource, total: int | None = None) -> Shares:
    """Who has the cores in this run: torch's threads, and the sandbox's workers where they verify beside them."""
    rewards = [resolve_reward(config.reward.type or source.reward, **config.reward.kwargs)]
    rewards += [resolve_reward(name) for name in config.reward.watch]
    beside = config.client == "local" and any(reward.waits == "processes" for reward in rewards)
    asked = list(_asked_workers(config.reward.kwargs))
    device = beside and _on_device(config)
    return split(total or cores(), config.engine.threads, max(asked, default=0), beside=beside, device=device)


def _asked_workers(value: Any) -> Iterator[int]:
    """The `sandbox.workers` in a reward's options, those of its parts too."""
    if isinstance(value, Mapping):
        sandbox = value.get("sandbox")
        if isinstance(sandbox, Mapping) and isinstance(count := sandbox.get("workers"), int):
            yield count
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _asked_workers(part)


def _on_device(config: Config) -> bool:
    """Whether the model computes elsewhere than on the cores."""
    if config.model.device != "auto":
        return config.model.device != "cpu"
    if find_spec("torch") is None:
        return False
    from rlvr.engine.model import pick_device

    return pick_device(config.model.device).type != "cpu"


def build_engine(config: Config, source: TaskSource) -> Any:
    """The engine with its model."""
    try:
        import torch

        from rlvr.engine.engine import Engine
        from rlvr.engine.model import build_model, load_model
        from rlvr.engine.tokenizer import load_tokenizer, quiet
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; training needs the extra: {EXTRA}") from error
    quiet()  # its advice is for people who call it, not for people who call us
    torch.set_num_threads(shares(config, source).threads)
    options = config.model
    where = {"device": options.device, "dtype": options.dtype}
    name, tokenizer = model_and_tokenizer(options.name, options.tokenizer, options.start_from)
    if name:
        model = load_model(name, load_tokenizer(tokenizer), **where)
    else:
        if not options.tokenizer:
            raise ValueError("model.tokenizer is missing: words, characters, or a tokenizer's folder or hub name")
        tokenizer = named_tokenizer(options.tokenizer, config, source)
        model = build_model(options.config, tokenizer, seed=config.seed, **where)
    return Engine(model, config.engine)


def named_tokenizer(name: str, config: Config, source: TaskSource) -> Any:
    """From a folder or the hub, or, by its kind, built from the words of the environment."""
    from rlvr.engine.tokenizer import build_tokenizer, load_tokenizer

    if name not in ("words", "characters", "pieces"):
        return load_tokenizer(name)
    words = getattr(source, "vocabulary", None)
    if not words:
        raise ValueError(
            f"model.tokenizer={name}: the environment {config.env.name!r} has no `vocabulary` to build it from; name a "
            "tokenizer's folder or hub name instead"
        )
    ends = {"end": getattr(source, "end_word", "<end>"), "pad": getattr(source, "pad_word", "<pad>")}
    return build_tokenizer(name, words, **ends)


def build_client(
    config: Config,
    source: TaskSource,
    folder: Path,
    say: Callable[[str], None],
    warn: Callable[[str], None],
    *,
    fresh: bool = True,
) -> Any:
    """The training client with its untrained policy; it saves in `folder`. `say` and `warn` hear about the model.

    Unless it is `fresh`, its weights are about to be loaded: `model.start_from` need not be there any more.
    """
    if config.client == "mock":
        policy = toy_policy(vocabulary(config, source), config.seed, end=getattr(source, "end_word", "<end>"))
        say(f"{len(policy.logits):,} trainable parameters, float64 in numpy")
        return MockTrainingClient(policy, folder)
    if config.client == "tinker":
        return _remote_client(config, source, say, warn, fresh)
    engine = build_engine(config, source)
    share = shares(config, source)
    for told in (share.crowd, spinning() if share.threads > 1 else ""):
        if told:
            warn(told)
    from rlvr.clients.local import LocalTrainingClient

    policy = engine.create_policy("policy", lora=config.model.lora, seed=config.seed)
    for note in engine.model.notes:
        warn(note)
    say(
        f"{sum(p.numel() for p in policy.parameters.values()):,} trainable parameters, {engine.model.dtype} on "
        f"{engine.model.device}".replace("torch.", "")
    )
    if fresh and config.model.start_from and not is_model(start_folder(config.model.start_from)):
        from rlvr.engine.checkpoint import load_adapter

        load_adapter(start_folder(config.model.start_from), policy)
    return LocalTrainingClient(engine, policy, folder)


def _remote_client(
    config: Config, source: TaskSource, say: Callable[[str], None], warn: Callable[[str], None], fresh: bool
) -> TinkerTrainingClient:
    options = config.model
    if options.tokenizer:
        from rlvr.engine.tokenizer import quiet

        quiet()
    _answering(options.base_url or os.environ.get("TINKER_BASE_URL"))
    client = connect(
        options.name,
        start_from=remote_start(options.start_from) if fresh and options.start_from else None,
        lora=options.lora,
        seed=config.seed,
        base_url=options.base_url,
        api_key=options.api_key,
        tokenizer=named_tokenizer(options.tokenizer, config, source) if options.tokenizer else None,
    )
    if (temperature := config.rollout.temperature) != 1 and config.training.mode == "rlvr":
        warn(
            f"rollout.temperature={temperature:g}, but a Tinker server scores answers at temperature 1: the gradient "
            "is of another policy than the one that sampled. training.gap_stop is off for this; watch "
            "sampling/sampling_logp_difference/mean, and use rollout.temperature=1 unless you know better"
        )
    say(f"{client.base_model} at {options.base_url or 'the server that the tinker SDK finds'}")
    return client


def _answering(address: str | None) -> None:
    """ValueError where nobody listens: the SDK would ask for five minutes before it says so."""
    if address is None:
        return  # the SDK's own choice
    try:
        parts = urlsplit(address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=10).close()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"model.base_url={address}: nobody answers there ({error}); start the server (rlvr serve engine), or give "
            "its address, http://127.0.0.1:8000 say"
        ) from error


def release(client: Any) -> None:
    """Tell a server that nobody asks any more; one that is gone by now has nothing to be told."""
    if isinstance(client, TinkerTrainingClient):
        with suppress(ValueError, RuntimeError, OSError):
            client.close()


def weights_hash(client: Any) -> Callable[[], str]:
    """What computes the hash of a client's weights; of weights on a server it is ''."""
    return (lambda: "") if isinstance(client, TinkerTrainingClient) else client.policy.sha256


def circumstances(client: Any) -> dict[str, str | int]:
    """What the bits of a run depend on beside its config."""
    if isinstance(client, MockTrainingClient):
        return {"numpy": np.__version__}
    if isinstance(client, TinkerTrainingClient):
        return {"server": client.base_model}
    import torch

    device = next(iter(client.policy.parameters.values())).device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads(), "device": name}
