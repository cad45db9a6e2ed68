"""A rank that dies, hangs or fails ends the group with the reason, wherever it is; ranks end with their driver."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.sharded.rank_processes import RankProcesses
from rlvr.clients.sharded.sharded_client import ShardedTrainingClient, start_ranks
from rlvr.clients.sharded.sharding_options import RankError, ShardingOptions
from rlvr.core.files import find_damage
from rlvr.core.messages import AdamParams, Datum, NonFiniteError
from tests.kit.paths import python_path
from tests.kit.sharded_ranks import ForkedRanks, group_rows, start, tiny_policy
from tests.kit.tiny import with_inputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROWS = group_rows([12, 9, 12, 7])


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_faulty(fault: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ShardedTrainingClient:
    """Two ranks, of which one has a fault; a checkpoint is saved before it shows."""
    monkeypatch.setenv("RLVR_TEST_FAULT", fault)
    monkeypatch.setenv("PYTHONPATH", python_path())
    options = ShardingOptions(2, 120.0)
    return start_ranks(tiny_policy(), options, folder, start=start_faulty_ranks)


def start_faulty_ranks(options: ShardingOptions) -> RankProcesses:
    return ForkedRanks(options.ranks, "faulty_rank")


def train_a_step(client: ShardedTrainingClient) -> None:
    client.forward_backward(ROWS, "ppo").result()
    client.optim_step(AdamParams(0.001)).result()
    client.save_state("state").result()


def assert_ended(client: ShardedTrainingClient) -> None:
    """No process is left, and the next command says why."""
    assert not any(is_running(pid) for pid in client.group.processes.ids)
    with pytest.raises(RankError, match="already ended"):
        client.weights_sha256()
    client.close()


@pytest.mark.parametrize("place", ["forward", "backward", "step", "save"])
def test_a_killed_rank_ends_the_group_at_once(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = start_faulty(f"1 {place} kill", tmp_path, monkeypatch)
    command = {"step": "optim_step", "save": "save"}.get(place, "forward_backward")
    began = time.monotonic()
    with pytest.raises(RankError, match=rf"(?s){command}: rank 1 was killed by SIGKILL.*same command"):
        train_a_step(client)
    assert time.monotonic() - began < 60, "it waited for the deadline"
    assert not (tmp_path / "state").exists()
    assert_ended(client)


def test_a_rank_that_hangs_is_late_and_the_message_shows_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_faulty("1 backward hang", tmp_path, monkeypatch)
    client.group.timeout_s = 5.0
    with pytest.raises(RankError, match=r"(?s)sharding.timeout_s=5.*rank 1 is late.*meet_fate"):
        train_a_step(client)
    assert_ended(client)


def test_a_stopped_rank_is_late_however_much_is_sent_to_it(tmp_path: Path) -> None:
    client = start(tiny_policy(), tmp_path)
    client.group.timeout_s = 3.0
    os.kill(client.group.processes.ids[1], signal.SIGSTOP)
    with pytest.raises(RankError, match=r"rank 1 is late; it does not answer signals"):
        client.forward_backward(group_rows([200] * 300), "ppo").result()  # more than a socket takes
    assert_ended(client)


def test_an_interrupted_command_ends_the_group(tmp_path: Path) -> None:
    """Else the next command would take the replies to this one for its own, and return what was not asked for."""
    client = start(tiny_policy(), tmp_path)
    os.kill(client.group.processes.ids[1], signal.SIGSTOP)
    main = threading.main_thread().ident or 0  # a simulated signal would wait for the deadline with it
    threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        client.forward(ROWS[:2], "cross_entropy").result()
    assert_ended(client)


def test_a_mistake_of_one_rank_ends_the_group_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_faulty("0 forward raise", tmp_path, monkeypatch)
    with pytest.raises(RankError, match=r"(?s)rank 0 failed:.*Traceback.*a mistake of this rank alone"):
        train_a_step(client)
    assert_ended(client)


def test_a_full_disk_is_the_systems_error_and_the_state_before_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start_faulty("0 save full", tmp_path, monkeypatch)
    good = tmp_path / "state"
    with pytest.raises(OSError) as caught:
        train_a_step(client)
    assert caught.value.errno == 27  # EFBIG: `rlvr train` says to make room, and where
    assert caught.value.filename.startswith(f"{tmp_path}/.state")
    assert not good.exists() and not list(tmp_path.glob(".state*"))
    assert_ended(client)


def test_what_all_ranks_refuse_leaves_them_as_they_were(tmp_path: Path) -> None:
    """Mistakes in the data, and losses that are not finite, which are of one rank's row alone."""
    client = start(tiny_policy(), tmp_path)
    before = client.weights_sha256()
    inputs = {name: given for name, given in ROWS[1].loss_fn_inputs.items() if name != "advantages"}
    with pytest.raises(ValueError, match=r"datum 1 lacks 'advantages'"):
        client.forward_backward([ROWS[0], Datum(ROWS[1].model_input, inputs)], "ppo").result()
    far = [-1e20] * ROWS[2].model_input.length  # its square is beyond fp32
    rows = [*ROWS[:2], with_inputs(ROWS[2], logprobs=far), ROWS[3]]
    with pytest.raises(NonFiniteError) as caught:
        client.forward_backward(rows, "dro").result()
    assert caught.value.rows == [2]
    with pytest.raises(ValueError, match="no gradients were accumulated"):
        client.optim_step(AdamParams()).result()
    with pytest.raises(ValueError, match=r"checkpoint .* is damaged"):
        client.load_state(str(tmp_path / "nothing")).result()
    assert client.weights_sha256() == before
    train_a_step(client)
    assert find_damage(tmp_path / "2-ranks" / "state") == ""
    client.close()


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"sharding.port={port}.*leave it out"):
            start_ranks(tiny_policy(), ShardingOptions(2, port=port), tmp_path)


def test_ranks_that_were_started_end_if_the_next_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start_one(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        if started:
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(popen(*args, **kwargs))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", start_one)
    with pytest.raises(OSError, match="no more processes"):
        RankProcesses(2)
    assert len(started) == 1 and not is_running(started[0].pid)


def test_ranks_of_different_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"rank 1 has torch 1\.9, this process .*the same everywhere"):
        start_faulty("1 torch 1.9", tmp_path, monkeypatch)


def test_a_model_that_cannot_be_built_is_the_users_mistake(tmp_path: Path) -> None:
    policy = tiny_policy()
    policy.model.config["no_such_field"] = 1
    with pytest.raises(ValueError, match=r"no_such_field: not a field of a qwen3 config"):
        start(policy, tmp_path)


def test_ranks_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    """SIGKILL, while one rank computes and the other waits for it in a collective."""
    script = (
        "import os, sys, time; from pathlib import Path\n"
        "from test_sharded_faults import *\n"
        f"client = start_ranks(tiny_policy(), ShardingOptions(2), Path({str(tmp_path)!r}), start=start_faulty_ranks)\n"
        "print('ranks', *client.group.processes.ids, flush=True)\n"
        "client.forward_backward(ROWS, 'ppo')\n"
    )
    paths = [str(Path(__file__).parent), python_path()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "RLVR_TEST_FAULT": "1 forward hang"}
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env, text=True)
    assert driver.stdout is not None
    line = next(line for line in driver.stdout if line.startswith("ranks"))
    ids = [int(pid) for pid in re.findall(r"\d+", line)]
    time.sleep(1.0)
    assert len(ids) == 2 and all(is_running(pid) for pid in ids)
    driver.kill()
    driver.communicate()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in ids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in ids)
