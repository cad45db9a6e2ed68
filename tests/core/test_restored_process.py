"""Each test finds the process as it was at first: `restore_process` of tests/conftest.py puts back what others change.

A suite of two tests runs inside this one: the first changes everything, the second compares with what was at first.
"""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TWO_TESTS = """
import os
import sys

import torch

from rlvr.algorithms import advantages, registry
from rlvr.clients import registry as clients
from rlvr.algorithms.losses.clipped import Cispo
from rlvr.clients.mock.mock_client import MOCK
from rlvr.config.interpolate import mask_secrets
from rlvr.envs import registry as envs
from rlvr.reward import registry as rewards

os.environ["RLVR_TEST_OLD"] = os.environ["RLVR_TEST_GONE"] = "old"


def read():
    return {
        "folder": os.getcwd(),
        "path": list(sys.path),
        "threads": torch.get_num_threads(),
        "variables": [os.environ.get(f"RLVR_TEST_{name}") for name in ("OLD", "GONE", "NEW")],
        "advantages": set(advantages.ADVANTAGES),
        "algorithms": dict(registry.ALGORITHMS),
        "clients": dict(clients._registered),
        "environments": set(envs._environments._entries),
        "rewards": set(rewards._rewards._entries),
        "secrets": mask_secrets("a value to hide"),
    }


BEFORE = read()


def test_changes(tmp_path):
    from rlvr.config import interpolate

    os.chdir(tmp_path)
    sys.path.insert(0, str(tmp_path))
    torch.set_num_threads(BEFORE["threads"] + 1)
    os.environ.update(RLVR_TEST_OLD="new", RLVR_TEST_NEW="new")
    del os.environ["RLVR_TEST_GONE"]
    advantages.register_advantage("left_over", baseline="batch")(list)
    fields = {"advantage": "left_over", "loss": Cispo(0.2, 0.2), "reduction": "token_mean", "drop_equal_groups": False}
    registry.register_algorithm(registry.Algorithm("left_over", **fields))
    clients.register_client("left_over", MOCK)
    envs.register_environment("left_over")(lambda: None)
    rewards.register_reward("left_over")(lambda case: 0.0)
    interpolate._secrets["a value to hide"] = "RLVR_TEST_NEW"
    assert [name for name, value in read().items() if value == BEFORE[name]] == []


def test_sees_the_old():
    assert [name for name, value in read().items() if value != BEFORE[name]] == []
"""


def test_a_test_sees_nothing_of_the_one_before(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(TWO_TESTS)
    pytester.runpytest_inprocess("-p", "tests.conftest", "-p", "no:cacheprovider").assert_outcomes(passed=2)
