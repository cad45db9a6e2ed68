"""Tiny real models and a tokenizer, built once: two layers, weights large enough that nothing hides in rounding."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Tests run on the CPU in float32 whatever the machine has, and so do the processes that they start. RLVR_TEST_GPU=1
# runs those marked `gpu` instead, on the devices that are there. Said before torch is imported.
os.environ.update(
    {}
    if os.environ.get("RLVR_TEST_GPU")
    else dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
)

# Tiny tensors gain nothing from a second thread, and two spinning threads beside other work lose tenfold. Runs without
# `engine.threads` follow the variable too: a test of how cores are divided takes it out of the environment.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent / "kit"))  # modules that stand for a user's own have no package

from tests.kit.tiny import CONFIGS, END, PAD, WORDS

gc.disable()  # until all tests are collected: searching the growing heap takes a third of the time of importing it

# No test is timed: on a busy machine an example that once takes more than hypothesis's 200 ms would fail as "flaky".
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The files that take longest. Where processes share the files (`--dist loadfile`), these are handed out first, so
# that no process ends long after the others; pytest-xdist's own order is by the number of tests.
LONG = (
    "test_docs", "test_audit_attack", "test_service_learning", "test_schedule_kill", "test_kill", "test_recipes",
    "test_tinker_cookbook", "test_tinker_restart", "test_service_openapi",
)  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    # A background job or nohup ignores SIGINT, and so do its children: no test of Ctrl-C could pass. Where this process
    # has a handler, its children get the default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m slow` leaves out the files without such a test: importing them all takes each process half a minute."""
    if collection_path.suffix != ".py" or config.option.markexpr != "slow":
        return None
    text = collection_path.read_text(encoding="utf-8")
    return None if "mark.slow" in text or "mark_slow" in text else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = bool(os.environ.get("RLVR_TEST_GPU"))
    others = [item for item in items if (item.get_closest_marker("gpu") is not None) != asked]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish(session: pytest.Session) -> None:
    # What was imported and collected stays: each full collection of garbage would search all of it, for half a second.
    # None is made before: it takes a second of each process, and its finds are small.
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def restore_process() -> Iterator[None]:
    """Put back what a test changes for the whole process, so that none depends on those before it: registered names,
    secrets to hide, environment variables, the import path, the current directory, torch's threads.

    What was registered by a module of ours stays: it is imported once, at first use.
    """
    import torch

    holders: list[Any] = [os.environ, *registries()]
    before, path, folder = [dict(holder) for holder in holders], list(sys.path), os.getcwd()
    threads = torch.get_num_threads()
    yield
    for holder, known in zip(holders, before, strict=True):
        for name in [name for name, entry in holder.items() if name not in known and not is_ours(entry)]:
            del holder[name]
        for name, entry in known.items():
            if name not in holder or holder[name] != entry:
                holder[name] = entry
    sys.path[:] = path
    os.chdir(folder)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def registries() -> list[dict[str, Any]]:
    """Every dictionary that users of the package register names in, and the secrets that messages leave out."""
    from rlvr.algorithms import optimizers, reductions, registry
    from rlvr.algorithms.advantages import ADVANTAGES
    from rlvr.algorithms.losses import LOSSES
    from rlvr.algorithms.optimizers import OPTIMIZERS
    from rlvr.algorithms.terms import TERMS
    from rlvr.clients import registry as clients
    from rlvr.clients.samplers import SAMPLERS
    from rlvr.config import interpolate
    from rlvr.envs import registry as envs
    from rlvr.reward import registry as rewards
    from rlvr.tracking.trackers import TRACKERS
    from rlvr.training.curriculum import CURRICULA
    from rlvr.training.schedules import SCHEDULES

    variants = [ADVANTAGES, LOSSES, OPTIMIZERS, TERMS, SAMPLERS, TRACKERS, CURRICULA, SCHEDULES, clients.CLIENTS]
    named = [envs._environments._entries, rewards._rewards._entries, clients._registered, interpolate._secrets]
    named += [reductions._known._entries, optimizers._decays._entries]
    return [registry.ALGORITHMS, LOSSES._by_path, *named, *(kind._known for kind in variants)]


def is_ours(entry: Any) -> bool:
    """Whether an entry of a registry of functions is one of the package's own."""
    return isinstance(entry, tuple) and str(entry[1].__module__).startswith("rlvr.")


@pytest.fixture(scope="module", autouse=True)
def close_sdk_connections() -> Iterator[None]:
    """Close the tinker SDK's clients after the module that opened them: the task of each one's heartbeat keeps it alive
    and warns of the stopped server. Then collect their connections. Otherwise a later test fails, during which the
    collector happens to run."""
    yield
    if "tinker" in sys.modules:
        from tinker.lib.internal_client_holder import InternalClientHolder

        for holder in [found for found in gc.get_objects() if type(found) is InternalClientHolder]:
            asyncio.run_coroutine_threadsafe(holder.aclose(), holder.get_loop()).result(30)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()
            gc.freeze()  # survivors need not be searched again, which took more than a second a module


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    from rlvr.engine.tokenizer import build_tokenizer

    return build_tokenizer("words", WORDS, end=END, pad=PAD)


@pytest.fixture(scope="session")
def pristine(tokenizer: Any) -> Callable[[str], Any]:
    """A model of `CONFIGS` by name, built once and never to be trained: take a `fresh` one for that."""
    from rlvr.engine.model_loading import build_model

    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            # 0.02, the usual spread, gives a tiny model logits near 0: every distribution would be uniform.
            config = {**CONFIGS[kind], "initializer_range": 0.2}
            made[kind] = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
        return made[kind]

    return get


@pytest.fixture(scope="session")
def fresh(pristine: Callable[[str], Any]) -> Callable[..., Any]:
    """A new engine on a copy of a tiny model; limits by keyword (`max_rows=3`)."""
    from rlvr.engine.engine import Engine
    from rlvr.engine.engine_options import EngineLimits

    def make(kind: str = "qwen3", dtype: Any = None, device: str = "cpu", **limits: int) -> Any:
        model = copy.deepcopy(pristine(kind))
        if device != "cpu":
            model.device = next(model.module.to(device).parameters()).device
        if dtype is not None:
            model.module.to(dtype)
            model.dtype = dtype
        return Engine(model, EngineLimits(**limits))

    return make


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where `client` builds: the processor, or what `tests/kit/devices.py` lets a test choose."""
    if getattr(request, "param", "cpu") != "pretended":
        yield {"gpu": "cuda"}.get(getattr(request, "param", "cpu"), "cpu")
        return
    from tests.kit.pretend_gpu import pretend_gpu

    with pretend_gpu():
        yield "cuda"


@pytest.fixture
def client(fresh: Callable[..., Any], tmp_path: Path, device: str) -> Callable[..., Any]:
    """A training client on an engine of its own; `lora` makes it an adapter's."""
    from rlvr.clients.local import LocalTrainingClient

    def make(
        kind: str = "qwen3", *, lora: Any = None, engine: Any = None, name: str = "policy", seed: int = 0, **how: Any
    ):
        engine = engine or fresh(kind, **{"device": device, **how})
        return LocalTrainingClient(engine, engine.create_policy(name, lora=lora, seed=seed), tmp_path / name)

    return make


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A private PostgreSQL (postgres.py), started when the first test asks for it; a skip where there is none."""
    from tests.kit.postgres import cluster, missing

    if why := missing():
        pytest.skip(why)
    with cluster() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a store, on either database: a test that takes it runs on both."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    return request.getfixturevalue("postgres").database()


@pytest.fixture
def new_server(tmp_path: Path) -> Iterator[Any]:
    """A `tinker_backend.ServerFactory`, whose server is closed at the end."""
    from tests.kit.tinker_backend import ServerFactory

    factory = ServerFactory(tmp_path)
    yield factory
    factory.close()
