"""What a sandboxed process can reach, under each tier; where a tier cannot be had; and that nothing outlives us.

The programs here report what they managed to do: a test passes where they managed nothing. Real processes throughout.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlvr.sandbox import Limits, NoTier, Sandbox
from rlvr.sandbox.processes import ZygoteProcess, ZygoteStartError
from rlvr.sandbox.seccomp import FREE, ZYGOTE, ZYGOTE_FORK, ZYGOTE_ONLY, answer_rules, program, ranges, zygote_rules
from tests.kit.without_unshare import WITHOUT_UNSHARE

TIERS = ("namespaces", "landlock")
ROOT = Path(__file__).parents[2]
CLONE = 56 if os.uname().machine == "x86_64" else 220


@pytest.fixture(scope="module", params=TIERS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox((request.param,), workers=1)
    except NoTier as refused:
        pytest.skip(str(refused))
    with made:
        yield made


def attempt(sandbox: Sandbox, code: str) -> str:
    """What `code`, the body of a function, returned inside, or the name of the exception that it raised."""
    body = textwrap.indent(textwrap.dedent(code), "        ")
    solution = (
        "import os, sys, ctypes, socket, signal, threading, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        f"def attempt():\n    try:\n{body}\n    except BaseException as error:\n        return type(error).__name__\n"
        "def said(text): return attempt() == text\n"
    )
    for guess in ("PermissionError", "FileNotFoundError", "OSError", "done", "BlockingIOError", "RuntimeError"):
        if sandbox.verify(solution, [f"assert said({guess!r})"]).passed:
            return guess
    pytest.fail(f"the program said something else: {sandbox.verify(solution, ['assert attempt() == 0'])}")


@pytest.mark.parametrize(
    "code",
    [
        "open('/etc/passwd').read(); return 'done'",
        f"open({str(ROOT / 'pyproject.toml')!r}).read(); return 'done'",
        "os.listdir('/proc'); return 'done'",
        "open('/proc/self/maps').read(); return 'done'",
        "open('/dev/mem').read(1); return 'done'",
        "open(os.__file__, 'a'); return 'done'",
        "os.mkdir('/escaped'); return 'done'",
        "os.chmod(os.__file__, 0o777); return 'done'",
        "os.utime(os.__file__); return 'done'",
        "os.truncate(os.__file__, 0); return 'done'",
        "socket.socket(); return 'done'",
        "socket.socket(socket.AF_UNIX); return 'done'",
        "os.fork(); return 'done'",
        "os.posix_spawn('/bin/true', ['true'], {}); return 'done'",
        "os.execv(sys.executable or '/usr/bin/python3', ['x']); return 'done'",
        "os.kill(1, signal.SIGKILL); return 'done'",
        "os.kill(-1, signal.SIGKILL); return 'done'",
        "os.kill(os.getppid(), signal.SIGSTOP); return 'done'",
        "os.setuid(0) or os.setgid(0); return 'done'",
        "os.chroot('.'); return 'done'",
        "os.memfd_create('x'); return 'done'",
        "os.pidfd_open(os.getpid()); return 'done'",
        "os.link(os.__file__, '/tmp/x'); return 'done'",
        "import resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1)); return 'done'",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid()); return 'done'",
        "import fcntl; fcntl.ioctl(0, 0x5412, b'x'); return 'done'",
    ],
)
def test_nothing_outside_can_be_reached(sandbox: Sandbox, code: str) -> None:
    assert attempt(sandbox, code) in ("PermissionError", "FileNotFoundError", "OSError")


@pytest.mark.parametrize(
    "call",
    ["ptrace(0, 0, 0, 0)", "unshare(0x10000000)", "mount(b'none', b'/tmp', b'tmpfs', 0, 0)", "syscall(321, 0, 0, 0)",
     "syscall(425, 1, 0)", "syscall(250, 0, 0)", "syscall(310, 1, 0, 0, 0, 0, 0)", "syscall(439 + 0x3, 0)",
     "prctl(4, 1, 0, 0, 0)", f"syscall({CLONE}, {ZYGOTE_FORK}, 0, 0, 0, 0)",
     f"syscall({CLONE}, 17, 0, 0, 0, 0)",
     "prctl(1, 0, 0, 0, 0)", "syscall(435, 0, 88)", "personality(0x0040000)"],
)  # fmt: skip
def test_system_calls_that_nothing_honest_needs_are_refused(sandbox: Sandbox, call: str) -> None:
    assert attempt(sandbox, f"return 'done' if libc.{call} >= 0 else 'OSError'") == "OSError"


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the call gates of x86")
@pytest.mark.parametrize("code", [b"\xb8\x14\x00\x00\x00\xcd\x80\xc3", b"\xb8\x27\x00\x00\x40\x0f\x05\xc3"])
def test_calls_by_another_architectures_numbers_end_the_process(sandbox: Sandbox, code: bytes) -> None:
    """getpid by `int 0x80`, and by the x32 number."""
    solution = (
        "import ctypes, mmap\n"
        f"code = {code!r}\n"
        "memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)\n"
        "memory.write(code)\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(memory))\n"
        "def f(): return ctypes.CFUNCTYPE(ctypes.c_int)(address)() or 1\n"
    )
    assert sandbox.verify(solution, ["assert f() != -2"]).reason == "crashed"


def test_an_answer_sees_no_environment_and_one_foreign_descriptor(sandbox: Sandbox) -> None:
    os.environ["RLVR_SECRET"] = "x"
    try:
        solution = (
            "import os, stat\n"
            "def environment(): return dict(os.environ)\n"
            "def descriptors():\n"
            "    found = 0\n"
            "    for number in range(3, 64):\n"
            "        try: found += not stat.S_ISCHR(os.fstat(number).st_mode)\n"
            "        except OSError: pass\n"
            "    return found\n"
        )
        tests = ["assert 'RLVR_SECRET' not in environment()", "assert descriptors() <= 1"]
        assert sandbox.verify(solution, tests).passed
    finally:
        del os.environ["RLVR_SECRET"]


def test_threads_asyncio_and_the_whole_standard_library_work(sandbox: Sandbox) -> None:
    solution = (
        "import asyncio, threading, decimal, sqlite3, ssl, zlib, lzma, bz2, hashlib, ctypes, multiprocessing\n"
        "async def inner(): await asyncio.sleep(0.001); return 3\n"
        "def f():\n"
        "    got = []\n"
        "    threads = [threading.Thread(target=got.append, args=(n,)) for n in range(5)]\n"
        "    [t.start() for t in threads]; [t.join() for t in threads]\n"
        "    return sorted(got), asyncio.run(inner()), hashlib.sha256(b'').hexdigest()[:4]\n"
    )
    assert sandbox.verify(solution, ["assert f() == ([0, 1, 2, 3, 4], 3, 'e3b0')"]).passed


def test_scratch_is_bounded_cannot_be_executed_and_is_empty_for_the_next_answer() -> None:
    with Sandbox(("namespaces",), workers=1, limits=Limits(scratch=1 << 20, files=16)) as sandbox:
        assert attempt(sandbox, "open('/tmp/x', 'wb').write(b'x' * (2 << 20)); return 'done'") == "OSError"
        assert attempt(sandbox, "[open(f'/tmp/{n}', 'w') for n in range(20)]; return 'done'") == "OSError"
        fill = "import os\nos.makedirs('/tmp/a/b/c')\nopen('/tmp/a/b/x', 'w').write('x')\nos.chmod('/tmp/a', 0)\n"
        look = "import os\ndef look(): return os.listdir('/tmp')\ndef here(): return os.getcwd()\n"
        assert sandbox.verify(fill + "def f(): return 1", ["assert f() == 1"]).passed
        assert sandbox.verify(look, ["assert look() == []", "assert here() == '/tmp'"]).passed


def test_no_state_is_left_to_the_next_answer(sandbox: Sandbox) -> None:
    spoil = (
        "import sys, math, builtins, json, random\n"
        "math.pi = 3; builtins.len = lambda x: 7; json.dumps2 = 1; sys.modules['evil'] = 1; sys.setrecursionlimit(99)\n"
        "def f(): return 1\n"
    )
    look = (
        "import sys, math, json\n"
        "def f():\n"
        "    return math.pi > 3.1, len([]), hasattr(json, 'dumps2'), 'evil' in sys.modules, sys.getrecursionlimit()\n"
    )
    sandbox.verify(spoil, ["assert f() == 1"])
    assert sandbox.verify(look, ["assert f() == (True, 0, False, False, 1000)"]).passed


def test_the_tables_agree_between_the_architectures() -> None:
    """No number stands twice, and nothing that is denied to answers is free."""
    for column, own in ((column, own) for column in (0, 1) for own in (ZYGOTE, ZYGOTE_ONLY)):
        numbers = [row[column] for row in [*FREE.values(), *own.values()] if row[column] >= 0]
        assert len(set(numbers)) == len(numbers)
        assert sum(high - low + 1 for low, high in ranges(sorted(numbers))) == len(numbers)
    for rules in (zygote_rules(True), zygote_rules(False), answer_rules()):
        whole = program(rules)
        assert len(whole) < 4096
        for index, (code, if_true, if_false, _) in enumerate(whole):
            if code & 7 == 5:
                assert index + 1 + max(if_true, if_false) < len(whole)


def test_a_tier_that_fails_its_self_test_is_not_used() -> None:
    """Of a name that stands for no isolation at all, the process itself says what it could do."""
    with pytest.raises(ZygoteStartError, match=r"self-test: could read /etc/passwd"):
        ZygoteProcess("nothing", "solver", Limits())


def run(code: str, python: str = sys.executable, **keywords: Any) -> str:
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, **keywords
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_where_unshare_is_refused_the_tier_is_landlock_and_says_so() -> None:
    assert run(WITHOUT_UNSHARE.format(no_landlock=False, unsafe=False)) == "landlock landlock True"


def test_without_a_working_tier_the_error_gives_the_reason_of_each() -> None:
    said = run(WITHOUT_UNSHARE.format(no_landlock=True, unsafe=False))
    assert said.startswith("refused: ") and "namespaces: " in said and "landlock: " in said and "allow_unsafe" in said


def test_without_a_tier_answers_run_only_where_that_is_allowed_and_verdicts_say_so() -> None:
    assert run(WITHOUT_UNSHARE.format(no_landlock=True, unsafe=True)) == "unsafe unsafe True"


@pytest.fixture
def open_python() -> Iterator[tuple[str, str]]:
    """An interpreter that every user may run, and the start of a program that imports a copy of the package with it."""
    python = "/usr/bin/python3" if os.geteuid() == 0 else sys.executable
    if not os.access(python, os.X_OK):
        pytest.skip("no interpreter that another user may run")
    if subprocess.run([python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]).returncode:
        pytest.skip(f"{python} is older than Python 3.11")
    open_to_all = Path("/var/tmp") / f"rlvr-test-{os.getpid()}"
    try:
        (open_to_all / "rlvr" / "core").mkdir(parents=True)
        (open_to_all / "rlvr" / "__init__.py").touch()
        for name in ("__init__.py", "types.py", "cpu_budget.py", "cancellation.py", "fair_queue.py"):
            shutil.copy(ROOT / "rlvr" / "core" / name, open_to_all / "rlvr" / "core")
        shutil.copytree(ROOT / "rlvr" / "sandbox", open_to_all / "rlvr" / "sandbox")
        subprocess.run(["chmod", "-R", "a+rX", str(open_to_all)], check=True)
        yield python, f"import os, sys\nsys.path.insert(0, {str(open_to_all)!r})\n"
    finally:
        shutil.rmtree(open_to_all, ignore_errors=True)


@pytest.mark.parametrize("tier", TIERS)
def test_a_plain_user_gets_every_tier(tier: str, open_python: tuple[str, str]) -> None:
    """Run as the user `nobody`, from a copy of the package: that user may read the copy and the interpreter."""
    python, start = open_python
    code = (
        f"{start}os.geteuid() == 0 and (os.setgroups([]), os.setgid(65534), os.setuid(65534))\n"
        f"from rlvr.sandbox import Sandbox\nwith Sandbox(({tier!r},), workers=1) as sandbox:\n"
        "    good = sandbox.verify('def f(): return 3', ['assert f() == 3'])\n"
        "    outside = sandbox.verify('def f(): return open(\"/etc/passwd\").read()', ['assert f()'])\n"
        "    print(os.getuid() != 0, good.tier, good.passed, outside.reason)\n"
    )
    assert run(code, python) == f"True {tier} True exception"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has ids to hide")
@pytest.mark.parametrize(("tier", "user"), [("namespaces", 1), ("landlock", 65534)])
def test_answers_of_root_run_as_another_user_on_a_host_without_its_name(
    tier: str, user: int, open_python: tuple[str, str]
) -> None:
    """Where that user can read the standard library, and root has the capabilities. What was started ends, too."""
    python, start = open_python
    program = (
        "import os, platform, socket\n"
        "def f(): return [*os.getresuid(), *os.getresgid(), *os.getgroups(), socket.gethostname(), platform.node()]\n"
        "def spin():\n    while True: pass\n"
    )
    code = (
        f"{start}from rlvr.sandbox import Sandbox\nwith Sandbox(({tier!r},), workers=1) as sandbox:\n"
        f"    shown = sandbox.verify({program!r}, ['assert f() == [{user}] * 6 + [\"sandbox\"] * 2'])\n"
        f"    late = sandbox.verify({program!r}, ['assert spin() == 1'], 1.0)\n"
        f"    again = sandbox.verify({program!r}, ['assert len(f()) == 8'])\n"
        "    print(shown.passed or shown.detail, late.reason, again.passed)\n"
    )
    assert run(code, python) == "True timeout True"


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found |= {int(child)} | descendants(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


def alive(pids: set[int]) -> set[int]:
    """Those that still run; a zombie, which only its parent's `wait` can remove, does not."""
    found: set[int] = set()
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


@pytest.mark.parametrize("tier", TIERS)
def test_nothing_of_ours_is_left_after_a_kill(tier: str) -> None:
    """In mid-run, with a fork of the killed process still holding all of its descriptors."""
    code = (
        "import os, sys, threading, time\nfrom rlvr.sandbox import Sandbox\n"
        f"sandbox = Sandbox(({tier!r},), workers=2)\n"
        "job = dict(solution='while True: pass', tests=['assert f()'], timeout_s=60)\n"
        "for _ in range(2): threading.Thread(target=sandbox.verify, kwargs=job, daemon=True).start()\n"
        "time.sleep(1); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    ours = descendants(process.pid)
    assert len(alive(ours)) >= 8  # a keeper and a zygote for each of four, and the two that run
    process.kill()
    process.wait()
    deadline = time.monotonic() + 2
    while alive(ours) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(ours)
    process.stdout.close()


def test_a_zygote_that_is_killed_from_outside_is_replaced() -> None:
    with Sandbox(workers=1) as sandbox:
        for _ in range(3):
            before = set(sandbox.pids)
            for pid in descendants(os.getpid()) & {d for keeper in before for d in descendants(keeper)}:
                with contextlib.suppress(ProcessLookupError):  # it may have ended in between
                    os.kill(pid, signal.SIGKILL)
            verdict = sandbox.verify("def f(): return 3", ["assert f() == 3"])
            assert verdict.passed, verdict
            assert not before & set(sandbox.pids)
        before = {d for keeper in sandbox.pids for d in descendants(keeper)}
    assert not alive(before)


def test_no_descriptor_and_no_mount_is_left_behind() -> None:
    def files_and_mounts() -> tuple[int, str]:
        return len(os.listdir("/proc/self/fd")), Path("/proc/self/mounts").read_text()

    with Sandbox(workers=1):
        pass
    before = files_and_mounts()
    for _ in range(3):
        with Sandbox(workers=1) as sandbox:
            assert sandbox.verify("def f(): return 3", ["assert f() == 3"]).passed
    assert files_and_mounts() == before
