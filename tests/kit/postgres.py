"""A PostgreSQL of the tests' own: a private cluster in a temporary folder, reached by a Unix socket alone.

    with cluster() as server:
        url = server.database()      # a new, empty database
        server.stop(); server.start()

Debian's package `postgresql` has all it needs. `missing()` says why there is none, for a test to skip with.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


def binaries() -> Path | None:
    """Where initdb and postgres are: on the PATH, or the newest version of Debian's packages."""
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    places = [p.parent for p in Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    return max(places, key=lambda p: int(p.parent.name), default=None)


def missing() -> str:
    """'' where a cluster can be started, else what is missing."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "psycopg is not installed"
    if binaries() is None:
        return "PostgreSQL's server is not installed (Debian: apt-get install postgresql)"
    return "" if user() else "PostgreSQL refuses to run as root, and there is no user postgres or nobody"


def user() -> str:
    """The user that the server runs as: the current one, unless that is root."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    if os.getuid():
        return pwd.getpwuid(os.getuid()).pw_name
    return next((name for name in ("postgres", "nobody") if name in names), "")


class Server:
    """A cluster that may be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.process: subprocess.Popen[Any] | None = None
        found = binaries()
        assert found is not None
        self.binaries = found
        self.run("initdb", "-D", str(folder / "data"), "-U", "rlvr", "-A", "trust", "-E", "UTF8", "--no-sync")
        self.start()

    def as_user(self) -> dict[str, Any]:
        return {} if os.getuid() else {"user": user(), "group": pwd.getpwnam(user()).pw_gid, "extra_groups": []}

    def run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self.binaries / program, *arguments], capture_output=True, text=True, cwd=self.folder, **self.as_user()
        )
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        settings = {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder),
            "fsync": "off",
            "max_connections": "60",
            "shared_buffers": "16MB",
        }
        flags = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        log = (self.folder / "log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [self.binaries / "postgres", "-D", self.folder / "data", *flags],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                start_new_session=True,  # a Ctrl-C for the tests is not for the server
                **self.as_user(),
            )
        ready = ["pg_isready", "-h", str(self.folder), "-q", "-t", "1"]
        for _ in range(300):
            if subprocess.run([self.binaries / ready[0], *ready[1:]]).returncode == 0:
                return
            assert self.process.poll() is None, (self.folder / "log").read_text()
            # pg_isready answers at once where there is no socket yet
            subprocess.run(["sleep", "0.1"])
        raise AssertionError((self.folder / "log").read_text())

    def stop(self, how: int = signal.SIGINT) -> None:
        """SIGINT is a fast shutdown: sessions are ended. SIGQUIT is a crash."""
        if self.process is not None:
            self.process.send_signal(how)
            self.process.wait(30)
            self.process = None

    def url(self, name: str) -> str:
        return f"postgresql://rlvr@/{name}?host={self.folder}"

    def database(self) -> str:
        """The URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.run("createdb", "-h", str(self.folder), "-U", "rlvr", name)
        return self.url(name)


@contextmanager
def cluster() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="rlvr-pg-"))
    if not os.getuid():
        shutil.chown(folder, user())
    server = None
    try:
        server = Server(folder)
        yield server
    finally:
        if server is not None:
            server.stop(signal.SIGQUIT)  # nothing of it is kept
        shutil.rmtree(folder, ignore_errors=True)


def family(pid: int) -> list[int]:
    """A process and all that it began."""
    parents: dict[int, list[int]] = {}
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(words[1]), []).append(int(place.parent.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


@contextmanager
def freeze(server: Server) -> Iterator[None]:
    assert server.process is not None
    stopped = list[int]()
    try:
        while new := [pid for pid in family(server.process.pid) if pid not in stopped]:
            stopped += new  # first: what is stopped is continued also when this loop fails
            for pid in new:
                with suppress(ProcessLookupError):  # a worker of autovacuum may have ended meanwhile
                    os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def make_read_only(url: str) -> Iterator[None]:
    """A database that takes no writes, as a standby. Connections are ended before; those made meanwhile stay so."""
    import psycopg

    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as admin:

        def set_read_only(is_read_only: bool) -> None:
            admin.execute("SET default_transaction_read_only = off")
            admin.execute(
                f"ALTER DATABASE {admin.info.dbname} SET default_transaction_read_only = {is_read_only}".encode()
            )

        set_read_only(True)
        others = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        admin.execute(f"SELECT pg_terminate_backend(pid) {others}".encode())
        try:
            yield
        finally:
            set_read_only(False)
