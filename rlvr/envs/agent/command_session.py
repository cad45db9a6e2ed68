"""A session of sandboxed commands: they run one after the other over the same folders in memory.

    session = CommandSession.open(launcher, limits, places, files, environment)
    session.run(["/bin/bash", "-c", "ls"], "/app", seconds=10.0).output

What a command leaves are its files: all its processes end with it. No command sees the private places before `run`
gives them files. Nothing of it is on a disk, and closing the session leaves nothing.
"""

from __future__ import annotations

import json
import marshal
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlvr.envs.agent.agent_sandbox import AgentSandbox, SandboxLauncher
from rlvr.envs.limited_calls import EpisodeError

GRACE_SECONDS = 30.0  # beside a command's own: the machine may be busy
File = tuple[str, bool, bytes]  # its path, whether it is a program, what it holds


@dataclass(frozen=True)
class Places:
    """The folders of a session. Those `writable` are the commands' and have the sandbox's `scratch` bytes together,
    with `/tmp`; `private` ones have as many of their own. `image` is a root folder of the user's, whose programs and
    files stand there, read-only, in place of the system's; "": the system's."""

    writable: Sequence[str]
    private: Sequence[str] = ()
    image: str = ""


@dataclass(frozen=True)
class CommandEnd:
    """How a command ended: its exit code, the limit that it went beyond (`time`, `memory` or ""), the end of its
    output, and of the result files asked for the first that is there; `result_fault` says why there is none."""

    code: int
    used: str
    output: str
    result: bytes
    result_fault: str


@dataclass(frozen=True)
class PrivateFiles:
    """What the private places hold for a command, folders there that it may write to, and the results to read."""

    files: Sequence[File]
    open_folders: Sequence[str] = ()
    results: Sequence[str] = ()


@dataclass
class CommandSession:
    _channel: socket.socket
    _environment: Mapping[str, str]
    _received: bytearray = field(default_factory=bytearray)

    @classmethod
    def open(
        cls,
        launcher: SandboxLauncher,
        limits: AgentSandbox,
        places: Places,
        files: Sequence[File],
        environment: Mapping[str, str],
    ) -> CommandSession:
        """Build the sandbox with these files; a path that ends in / is an empty folder. EpisodeError if that fails."""
        try:
            channel = launcher.open(
                {
                    "readable": list(limits.readable) if places.image else launcher.readable, "image": places.image,
                    "writable": list(places.writable), "private": list(places.private),
                    "memory": limits.memory, "processes": limits.processes, "scratch": limits.scratch,
                    "files": list(files),
                }
            )  # fmt: skip
        except ValueError as error:
            raise EpisodeError(f"sandbox: {error}") from error
        session = cls(channel, environment)
        try:
            session._read_report(GRACE_SECONDS)
        except BaseException:
            session.close()
            raise
        return session

    def run(
        self,
        command: Sequence[str],
        folder: str,
        seconds: float,
        private: PrivateFiles | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> CommandEnd:
        """Run a command to its end; EpisodeError if the sandbox fails, which is not the command's fault."""
        message: dict[str, Any] = {
            "command": list(command), "folder": folder, "seconds": float(seconds),
            "environment": {**self._environment, **(environment or {})},
        }  # fmt: skip
        if private:
            message["files"], message["open_folders"] = list(private.files), list(private.open_folders)
            message["results"] = list(private.results)
        raw = marshal.dumps(message)
        try:
            self._channel.settimeout(GRACE_SECONDS)
            self._channel.sendall(len(raw).to_bytes(8, "little") + raw)
        except OSError as error:
            raise EpisodeError(f"the sandbox of the agent has ended ({error})") from error
        report, result, output = self._read_report(seconds + GRACE_SECONDS)
        said = output.decode("utf-8", "replace")
        return CommandEnd(report["code"], report["used"], said, result, report["result"])

    def close(self) -> None:
        """End all that is in the sandbox."""
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._channel.close()

    def _read_report(self, seconds: float) -> tuple[dict[str, Any], bytes, bytes]:
        self._channel.settimeout(seconds)
        while b"\n" not in self._received:
            self._receive()
        end = self._received.index(b"\n")
        report = json.loads(self._received[:end])
        sizes = report["result_bytes"], report["output_bytes"]
        while len(self._received) < end + 1 + sum(sizes):
            self._receive()
        rest = bytes(self._received[end + 1 :])
        self._received.clear()
        if "refused" in report:
            raise EpisodeError(f"sandbox: {report['refused']}")
        return report, rest[: sizes[0]], rest[sizes[0] :]

    def _receive(self) -> None:
        try:
            piece = self._channel.recv(1 << 16)
        except OSError as error:
            raise EpisodeError(f"the sandbox of the agent gave no report ({type(error).__name__}: {error})") from error
        if not piece:
            raise EpisodeError("the sandbox of the agent ended before the agent's command did")
        self._received += piece
