"""What an answer could leave to those after it, take from them, or get away with; each of these once worked."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import NoTier, Sandbox, mounts

TIERS = ("namespaces", "landlock")
ROOT = Path(__file__).parents[2]
TGKILL = 234 if os.uname().machine == "x86_64" else 131
WRITES = "open('/tmp/x', 'w').write('a')\ndef f(): return 1\n"
JOB: dict[str, Any] = {"solution": "def f(): return 1", "tests": ["assert f() == 1"]}


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    yield from open_sandbox(request.param)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Sandbox]:
    yield from open_sandbox("namespaces")


def open_sandbox(tier: str) -> Iterator[Sandbox]:
    try:
        made = Sandbox((tier,), workers=1)
    except NoTier as refused:
        pytest.skip(str(refused))
    with made:
        yield made


@pytest.mark.parametrize(
    ("end", "outcome", "reason"),
    [
        ("while True: pass", Outcome.TIMEOUT, "timeout"),
        ("raise ValueError", Outcome.FAILED, "exception"),
        ("os._exit(3)", Outcome.FAILED, "exception"),
        ("pass", Outcome.PASSED, ""),
    ],
)
def test_a_program_that_hangs_up_has_to_end_well_all_the_same(
    sandbox: Sandbox, end: str, outcome: Outcome, reason: str
) -> None:
    program = "import os, socket\nprint(3, flush=True)\nsocket.socket(fileno=os.dup(1)).shutdown(socket.SHUT_WR)\n"
    verdict = sandbox.verify(program + end, [{"input": "", "output": "3"}], timeout_s=0.5)
    assert (verdict.outcome, verdict.reason) == (outcome, reason)


def test_a_lock_on_a_shared_file_is_refused(sandbox: Sandbox) -> None:
    locks = ["fcntl.flock(2, fcntl.LOCK_EX | fcntl.LOCK_NB)", "fcntl.fcntl(2, 37, bytes(32))"]
    for lock in locks:
        solution = f"import fcntl\ndef f():\n    try: {lock}\n    except PermissionError: return 1\n"
        assert sandbox.verify(solution, ["assert f() == 1"]).passed


def test_flags_of_the_standard_descriptors_are_as_new_for_the_next_answer(sandbox: Sandbox) -> None:
    spoil = "import os\n[os.set_blocking(n, False) for n in (0, 1, 2)]\ndef f(): return 1\n"
    look = "import os\ndef f(): return [os.get_blocking(n) for n in (0, 1, 2)]\n"
    assert sandbox.verify(spoil, ["assert f() == 1"]).passed
    assert sandbox.verify(look, ["assert f() == [True] * 3"]).passed


def test_no_datagram_reaches_a_service_outside(sandbox: Sandbox, tmp_path: Path) -> None:
    path = os.path.relpath(tmp_path / "s", "/")  # from where a process under Landlock stands
    solution = (
        "import socket\ndef f():\n"
        "    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n    ends[0].send(b'x')\n"
        f"    try: ends[0].sendto(b'x', {'/' + path!r})\n    except PermissionError: return ends[1].recv(1)\n"
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as service:
        service.bind(str(tmp_path / "s"))
        os.chmod(tmp_path / "s", 0o777)
        service.setblocking(False)
        verdict = sandbox.verify(solution, ["assert f() == b'x'"])
        with pytest.raises(BlockingIOError):
            service.recv(1)
    assert verdict.passed, verdict


def test_no_signal_of_an_answer_ends_its_zygote(namespaces: Sandbox) -> None:
    before = namespaces.pids
    for number in [n for n in range(1, signal.NSIG) if n not in (signal.SIGKILL, signal.SIGSTOP)]:
        solution = f"import ctypes\ndef f(): return ctypes.CDLL(None).syscall({TGKILL}, 1, 1, {number})\n"
        namespaces.verify(solution, ["assert f() == 0"])
    for _ in range(2):
        assert namespaces.verify(**JOB).passed
    assert namespaces.pids == before


def test_a_scratch_folder_deeper_than_any_path_is_emptied(namespaces: Sandbox) -> None:
    before = namespaces.pids
    deep = "import os\nfor n in range(30):\n    os.mkdir('a' * 250); os.chdir('a' * 250)\ndef f(): return 1\n"
    look = "import os\ndef f(): return os.listdir('/tmp')\n"
    for _ in range(2):
        assert namespaces.verify(deep, ["assert f() == 1"]).passed
        assert namespaces.verify(look, ["assert f() == []"]).passed
    assert namespaces.pids == before


def test_wiping_a_folder_handles_equal_names_and_links(tmp_path: Path) -> None:
    """Folders that are called as those would be that are moved to the top; links that lead out of it."""
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    outside.mkdir()
    (outside / "kept").touch()
    for name in ("0/1/2/3", "1/0/0", "2/file", "a/0", "a/1"):
        (inside / name).mkdir(parents=True)
        (inside / name / "file").touch()
    (inside / "1" / "link").symlink_to(outside)
    (inside / "link").symlink_to(outside)
    mounts.wipe(str(inside))
    assert list(inside.iterdir()) == []
    assert (outside / "kept").exists()


SINGLE_ID = """
import ctypes, os, sys
user, group = os.geteuid(), os.getegid()
if ctypes.CDLL(None).unshare(0x10000000):
    sys.exit("no user namespace")
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
from rlvr.sandbox import Sandbox
with Sandbox(("namespaces",), workers=1) as sandbox:
    for solution in SOLUTIONS:
        print(sandbox.verify(solution, ["assert f() == 1"]).passed)
"""


def test_an_answer_that_owns_the_scratch_folder_cannot_lock_the_next_one_out() -> None:
    """Where only one id is mapped, answers run as the owner of `/tmp`."""
    locks = ["import os\nos.chmod('/tmp', 0)\ndef f(): return 1\n", WRITES + "import os\nos.chmod('/tmp', 0o555)\n"]
    code = f"SOLUTIONS = {[WRITES, locks[0], WRITES, locks[1], WRITES]!r}\n" + SINGLE_ID
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    if "no user namespace" in done.stderr or "no sandbox works here" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.stdout.split() == ["True"] * 5, done.stderr


def test_no_answer_pays_for_processes_that_another_has_ended(sandbox: Sandbox) -> None:
    """To start both takes longer than this answer has; one of these tries is enough on a busy machine."""
    passed = False
    for _ in range(5):
        for pid in sandbox.pids:
            os.kill(pid, signal.SIGKILL)
        passed = passed or sandbox.verify(**JOB, timeout_s=0.06).passed
    assert passed


def test_an_exception_in_verify_many_stops_running_programs_and_starts_no_more() -> None:
    slow = {"solution": "while True: pass", "tests": ["assert f()"], "timeout_s": 60}
    with Sandbox(workers=2) as sandbox:
        begun = time.monotonic()
        with pytest.raises(ValueError, match="tests="):
            sandbox.verify_many([slow, {**slow, "tests": []}, slow, slow])
        assert time.monotonic() - begun < 30
        assert all(verdict.passed for verdict in sandbox.verify_many([JOB] * 4))


# Reads its own memory page by page: `write` refuses an address that is not mapped.
SCANS = """
import ctypes, os
def f(key):
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    needle, (read, write) = bytes(one ^ 1 for one in key), os.pipe()
    os.set_blocking(write, False)
    found = []
    for start in {id(b'x' * 100000) >> 12, id([]) >> 12, id(needle) >> 12, libc.sbrk(0) >> 12}:
        for step in (1, -1):
            place, missed = start, 0
            while missed < 64 and abs(place - start) < 20000:
                size = libc.write(write, ctypes.c_void_p(place << 12), 4096)
                page = os.read(read, 4096) if size > 0 else b''
                missed = 0 if page else missed + 1
                if needle + b' of another' in page: found.append(place)
                place += step
    return len(found)
"""


@pytest.mark.parametrize("lines", [30, 3000])
def test_an_answer_does_not_find_the_text_of_another_in_memory(sandbox: Sandbox, lines: int) -> None:
    text = "def f(): return 'the secret of another'\n" + "# a line of a usual answer\n" * lines
    for _ in range(3):
        assert sandbox.verify(text, ["assert f() == 'the secret of another'"]).passed
    key = bytes(one ^ 1 for one in b"the secret")
    verdict = sandbox.verify(SCANS, [f"assert f({key!r}) == 0"], timeout_s=20)
    assert verdict.passed, verdict.detail
    assert sandbox.verify(SCANS + "k = 'the ' + 'secret of another'", [f"assert f({key!r}) > 0"], timeout_s=20).passed
