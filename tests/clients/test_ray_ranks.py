"""`client=sharded` with ranks that Ray places: the gradient, the messages of what goes wrong, a run that goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.cli.main import run
from rlvr.clients.sharded.ray_ranks import RayRank, RayRanks, find_interface
from rlvr.clients.sharded.sharded_client import ShardedTrainingClient, start_ranks
from rlvr.clients.sharded.sharding_options import RankError, ShardingOptions
from rlvr.core.messages import AdamParams
from rlvr.core.ray_cluster import RayError
from tests.kit.local_ray import open_cluster
from tests.kit.sharded_ranks import (
    LORA,
    group_rows,
    measure_difference,
    move_adapter,
    read_gradients,
    start,
    start_alone,
    tiny_policy,
)
from tests.kit.tiny import gradients
from tests.kit.tiny_run import TINY

ROWS = group_rows([12, 9, 12, 40, 7, 3])
OPTIONS = ShardingOptions(2, timeout_s=600.0, ray="local")


def test_the_interface_of_an_address_is_found() -> None:
    assert find_interface("127.0.0.1") in ("lo", "lo0")
    assert find_interface("203.0.113.7") == ""  # reserved for documentation


# --- with Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with open_cluster(2) as ray:
        yield ray


@pytest.fixture
def client(cluster: Any, tmp_path: Path) -> Iterator[ShardedTrainingClient]:
    made = start_ranks(tiny_policy(), OPTIONS, tmp_path / "ray")
    yield made
    made.close()


def wait_for_end(client: ShardedTrainingClient) -> None:
    """No process is left, and the next command says that the ranks were ended."""
    with pytest.raises(RankError, match="already ended"):
        client.weights_sha256()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/exe").exists() for pid in client.group.processes.ids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all-weights", "adapter"])
def test_gradient_and_steps_are_those_of_one_process_and_the_bits_those_of_ranks_here(
    cluster: Any, lora: Any, tmp_path: Path
) -> None:
    policy = tiny_policy("qwen3", lora, micro_tokens=24)
    alone = start_alone(policy, tmp_path)
    if lora:
        move_adapter(alone)
    begin = alone.save_state("begin").result().path
    clients = [start_ranks(policy, OPTIONS, tmp_path / "ray"), start(policy, tmp_path)]
    for one in (alone, *clients):
        one.load_state(begin).result()
        one.forward_backward(ROWS, "ppo").result()
    placed = read_gradients(clients[0], tmp_path / "gradients")
    assert measure_difference(placed, gradients(alone)) < 1e-6
    for one in clients:
        one.optim_step(AdamParams(0.01)).result()
        one.forward_backward(ROWS, "importance_sampling").result()
        assert one.optim_step(AdamParams(0.01)).result().of_client["ranks/transfer_s"] > 0
    assert clients[0].weights_sha256() == clients[1].weights_sha256() != alone.weights_sha256()
    state = clients[0].save_state("state").result().path
    alone.load_state_with_optimizer(state).result()
    assert alone.weights_sha256() == clients[0].weights_sha256()
    for one in clients:
        one.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_rank_ends_the_group_at_once(client: ShardedTrainingClient) -> None:
    pid = client.group.processes.ids[1]
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    began = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s)rank 1 \(process {pid} on .*is gone.*same command"):
        while True:
            client.forward_backward(ROWS, "ppo").result()
    assert time.monotonic() - began < 60, "it waited for the deadline"
    wait_for_end(client)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_late_rank_ends_the_group_and_the_message_shows_where_it_is(client: ShardedTrainingClient) -> None:
    client.group.timeout_s = 3.0
    os.kill(client.group.processes.ids[1], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"(?s)sharding.timeout_s=3.*rank 0 is late.*in measure.*rank 1 .* not answer"):
        client.forward_backward(ROWS, "ppo").result()
    wait_for_end(client)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mistake_of_one_rank_ends_the_group_with_its_traceback(client: ShardedTrainingClient, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 failed:.*Traceback.*no_such_argument"):
        client.group.call_each("has_file", [{"path": tmp_path}, {"no_such_argument": 1}])
    wait_for_end(client)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cluster_without_room_says_what_is_missing_and_keeps_nothing(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    with pytest.raises(RayError, match=r"3 ranks with 1 CPU each .* 2 CPU \(\d free\) on 1 machine"):
        RayRanks(ShardingOptions(3, ray="local", wait_s=2.0))
    with pytest.raises(RayError, match=r"1 ranks with 1 CPU and 1 GPU each"):
        RayRanks(ShardingOptions(1, ray="local", gpus_per_rank=1, wait_s=1.0))
    assert time.monotonic() - began < 60
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["client=sharded", "sharding.ray=local", "sharding.ranks=9", "sharding.wait_s=1"]
    assert run(["train", "--config=tiny.yaml", *words]) == 1
    assert "9 ranks with 1 CPU each" in (said := capfd.readouterr().err) and "Traceback" not in said
    RayRanks(OPTIONS).end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_rank_sees_no_device_that_it_did_not_ask_for(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray leaves them visible, though another actor may have them."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    RayRank()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_another_torch_is_refused_with_both_versions(cluster: Any) -> None:
    import torch

    class OldRank(RayRank):
        def describe(self) -> bytes:
            return json.dumps({**json.loads(super().describe()), "torch": "1.9"}).encode()

    with pytest.raises(RayError, match=rf"has torch 1\.9, this process has torch {re.escape(torch.__version__)}"):
        RayRanks(OPTIONS, OldRank)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_whose_rank_is_killed_goes_on_to_the_same_bits(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = ["train", "--config=tiny.yaml", "client=sharded", "sharding.ray=local", "sft.steps=4"]
    assert run([*command, "run.name=whole"]) == 0
    send, calls = RayRanks.send, {"steps": 0}

    def kill_later(ranks: RayRanks, rank: int, message: Any) -> None:
        calls["steps"] += message.name == "optim_step" and rank == 1
        if calls["steps"] == 3:
            calls["steps"] += 1
            os.kill(ranks.ids[1], signal.SIGKILL)
        send(ranks, rank, message)

    monkeypatch.setattr(RayRanks, "send", kill_later)
    assert run([*command, "run.name=killed"]) == 1
    assert "is gone" in (said := capfd.readouterr().err) and "same command" in said
    assert run([*command, "run.name=killed"]) == 0
    hashes = [
        json.loads(Path(f"runs/{name}/summary.json").read_text())["weights_sha256"] for name in ("whole", "killed")
    ]
    assert hashes[0] == hashes[1]


TWO_NODES = """
import subprocess, sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
second = cluster.add_node(num_cpus=1)
run = f"mount -t tmpfs none {sys.argv[2]} && exec {sys.executable} -c '{sys.argv[1]}' {cluster.address} {sys.argv[2]}"
driver = subprocess.Popen(["unshare", "-m", "sh", "-c", run], stdout=subprocess.PIPE, text=True)
for line in driver.stdout:
    print(line, end="", flush=True)
    if line.startswith("trained"):
        cluster.remove_node(second, allow_graceful=False)
driver.wait()
cluster.shutdown()
"""

DRIVER = """
import sys
import ray
from tests.kit.sharded_ranks import *
from rlvr.clients.sharded.sharding_options import RankError
options = ShardingOptions(2, 120.0, ray=sys.argv[1], wait_s=60.0)
try:
    start_ranks(tiny_policy(), options, Path(sys.argv[2]))
except ValueError as error:
    print("refused:", error, flush=True)
client = start_ranks(tiny_policy(), options, Path(sys.argv[2]).parent / "seen")
client.forward_backward(group_rows([12, 9, 3]), "ppo").result()
print("trained on", sum(node["Alive"] for node in ray.nodes()), "machines", flush=True)
try:
    while True:
        client.forward_backward(group_rows([12, 9, 3]), "ppo").result()
except RankError as error:
    print("lost:", error, flush=True)
"""


def can_hide_folders() -> bool:
    """Whether a process here may have mounts of its own, as another machine has."""
    tool = shutil.which("unshare")
    return tool is not None and subprocess.run([tool, "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not can_hide_folders(), reason="no process here may have mounts of its own")
def test_two_machines_train_and_a_hidden_run_folder_or_a_lost_machine_ends_it(tmp_path: Path) -> None:
    """Two Ray nodes here, and a driver that has a mount of its own over one folder, which the ranks therefore miss."""
    pytest.importorskip("ray")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    paths = [str(Path(__file__).parents[1] / "kit"), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    switches = {"RAY_memory_monitor_refresh_ms": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    with tempfile.TemporaryDirectory() as folder:  # a short path: sockets are in it
        done = subprocess.run(
            [sys.executable, "-c", TWO_NODES, DRIVER, str(hidden)], capture_output=True, text=True, timeout=380,
            env={**os.environ, **switches, "RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
    said = done.stdout
    assert re.search(r"refused: client=sharded: rank 0 on \S+ does not see the run folder \S+hidden", said), done.stderr
    assert "run.root on a file system that all machines mount" in said
    assert "trained on 2 machines" in said, done.stderr
    assert re.search(r"lost: forward_backward: rank \d \(process \d+ on \S+\) is gone", said), done.stderr
