"""That an engine's process keeps what it frees, unless its user or an idle server says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rlvr.engine.malloc import SETTINGS, _glibc

pytestmark = pytest.mark.skipif(_glibc() is None, reason="the C library's malloc is not GNU's")

# 24 strings of 8 MB, freed and asked for again: the share of their pages that the system has to find a third time.
# Small pages, whatever the machine prefers: PR_SET_THP_DISABLE.
PASSES = """
import ctypes, resource
from rlvr.engine import malloc
ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)
{first}
def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20
def work():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = [bytes([i + 1]) * (8 << 20) for i in range(24)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
work(); work()
pages = work() * resource.getpagesize() / (24 * (8 << 20))
free = held()
{last}
print(pages, free - held())
"""


def measure(first: str, last: str = "", **environment: str) -> tuple[float, int]:
    clean = {name: value for name, value in os.environ.items() if name not in (*SETTINGS, "GLIBC_TUNABLES")}
    code = PASSES.format(first=first, last=last)
    done = subprocess.run([sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages, given_back = done.stdout.split()
    return float(pages), int(given_back)


def test_memory_freed_by_one_pass_is_reused_by_the_next() -> None:
    assert measure("")[0] > 0.5
    assert measure("malloc.keep_freed_memory()")[0] < 0.05


def test_a_rank_returns_every_large_block_that_it_frees() -> None:
    assert measure("malloc.return_freed_memory()")[0] > 0.95


def test_much_free_memory_is_returned_and_little_stays() -> None:
    first = "malloc.keep_freed_memory()"
    assert measure(first, "malloc.release_free_memory(64 << 20)")[1] > 150  # MiB of the 192
    assert measure(first, "malloc.release_free_memory(1 << 40)")[1] < 8


def test_a_heap_that_is_mostly_free_is_returned_after_a_step_and_a_used_one_stays() -> None:
    first = "malloc.keep_freed_memory(); malloc.MOST_FREE = 64 << 20"
    assert measure(first, "malloc.release_unused_heap()")[1] > 150  # MiB of the 192
    assert measure(first, "kept = [bytes(8 << 20) for _ in range(16)]; malloc.release_unused_heap()")[1] < 8
    assert measure("malloc.keep_freed_memory()", "malloc.release_unused_heap()")[1] < 8  # less than a gigabyte


@pytest.mark.slow
def test_an_engine_keeps_and_an_idle_one_gives_back() -> None:
    built = """
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer
config = {"model_type": "qwen3", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 16,
          "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 32}
tokenizer = build_tokenizer("characters", "01", end="<end>", pad="<pad>")
engine = Engine(build_model(config, tokenizer, seed=0, device="cpu", dtype="float32"))
"""
    pages, given_back = measure(built, "engine.release()")
    assert pages < 0.05
    assert given_back > 150  # MiB of the 192


@pytest.mark.parametrize(
    ("name", "value", "pages"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072", 1.0),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072", 1.0),
        ("GLIBC_TUNABLES", "glibc.pthread.rseq=1", 0.0),  # says nothing of malloc
    ],
)
def test_the_users_own_settings_stay(name: str, value: str, pages: float) -> None:
    assert measure("malloc.keep_freed_memory()", **{name: value})[0] == pytest.approx(pages, abs=0.2)
