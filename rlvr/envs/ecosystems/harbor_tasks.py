"""Reads task folders of Harbor (Terminal-Bench), and says of each whether it can run without an image of its own.

    NAME/instruction.md, task.toml, environment/Dockerfile, tests/test.sh, solution/solve.sh

A task runs here if its Dockerfile begins from a plain base image, whose place the system's own programs take, and only
copies files of `environment/` and makes folders. With an image of the user, a root folder, the Dockerfile may do
anything else too, which is taken to be done there. `read_task` raises `NeedsImage`, with the reason, for all others.

Harbor allows a network unless a task says otherwise, so `public` is no need of one; hosts on a list are.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

from rlvr.envs.agent.command_session import File

WORKDIR = "/app"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
AGENT_SECONDS, VERIFIER_SECONDS = 600.0, 600.0  # where task.toml has none
COPIED = ("/root", "/home")  # of an image, with the working directory: an episode writes to a copy of its own
MOST_COPIED = 128 << 20  # bytes
PRIVATE = ("/tests", "/logs", "/solution")  # which no command of the policy sees
ALWAYS_WRITABLE = ("/app", "/root", "/home", "/opt", "/srv", "/var")
_SYSTEM = ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys", "usr", "tmp")
_PLAIN = re.compile(
    r"(docker\.io/)?(library/)?(ubuntu|debian|python|bash|buildpack-deps)(:[\w.-]+)?|ghcr\.io/[\w-]+/t-bench/(ubuntu|python)"
    r"[\w.:-]*"
)
_IGNORED = ("CMD", "LABEL", "EXPOSE", "MAINTAINER", "USER", "SHELL", "STOPSIGNAL")
_DOWNLOADS = re.compile(
    r"(?:^|[;&|(]|\b(?:sudo|then|do|if)\b)\s*(apt|apt-get|apk|curl|wget|uvx?|pip3?|pipx|npm|npx|git\s+clone|"
    r"python3? -m pip)\b(?!\s+(?:--version|-V)\b)",
    re.MULTILINE,
)


class NeedsImage(Exception):
    """Why a task cannot run here."""


@dataclass(frozen=True)
class HarborTask:
    """A task folder that can run here. `sources` are files of `environment/` by their place in the sandbox, `folders`
    are made there beside the working directory."""

    folder: Path
    instruction: str
    workdir: str
    sources: Mapping[str, Path]
    folders: Sequence[str]
    environment: Mapping[str, str]
    agent_seconds: float
    verifier_seconds: float
    verifier_environment: Mapping[str, str]
    solution_environment: Mapping[str, str]
    memory: int | None
    image: str = ""

    @property
    def writable(self) -> list[str]:
        """The folders at the top that its commands may write to."""
        always = [
            one for one in ALWAYS_WRITABLE if not self.image or one in COPIED or not os.path.exists(self.image + one)
        ]
        return sorted({*always, *(_find_top(f"{place}/") for place in (*self.sources, self.workdir, *self.folders))})

    def read_sources(self) -> list[File]:
        """Folders, whose path ends in /, and files."""
        folders: list[File] = [(f"{place}/", False, b"") for place in (self.workdir, *self.folders)]
        return folders + [_read_file(place, path) for place, path in self.sources.items()]

    def read_folder(self, name: str) -> list[File]:
        """The files of `tests` or `solution`, at the place of that name."""
        folder = self.folder / name
        return [_read_file(f"/{name}/{path.relative_to(folder)}", path) for path in _list_files(folder)]


def find_task_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a task, else the tasks in it; ValueError if there are none."""
    if not folder.is_dir():
        raise ValueError(f"harbor: there is no folder {str(folder)!r}; give one task folder, or a folder of them")
    if (folder / "task.toml").is_file():
        return [folder]
    found = sorted(path.parent for path in folder.glob("*/task.toml"))
    if not found:
        raise ValueError(f"harbor: {str(folder)!r} has no task.toml, and no folder in it has one; give a task folder")
    return found


def read_task(folder: Path, image: str = "") -> HarborTask:
    """NeedsImage if the task cannot run here, ValueError if the folder is no task. `image` is a root folder, or ""."""
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        agent, verifier, environment, solution = (
            _read_table(config, name) for name in ("agent", "verifier", "environment", "solution")
        )
        if config.get("steps") or (folder / "steps").is_dir():
            raise NeedsImage("the task has several steps")
        _check_environment(folder, environment, image)
        _check_network(environment, agent, verifier)
        _check_verifier(folder, verifier)
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
        dockerfile = folder / "environment" / "Dockerfile"
        copied = _CopiedFiles(folder / "environment", bool(image))
        if dockerfile.is_file():
            copied.read(dockerfile.read_text(encoding="utf-8"))
        elif dockerfile.parent.is_dir():
            copied.copy(["."], ".")
        workdir = str(environment.get("workdir") or copied.workdir)
        _check_place(workdir)
        sources = {**_list_image_files(image, [*COPIED, *copied.sources, f"{workdir}/"]), **copied.sources}
        return HarborTask(
            folder, instruction, workdir, sources, copied.folders, {**copied.variables, **_read_variables(environment)},
            _read_seconds(agent, AGENT_SECONDS), _read_seconds(verifier, VERIFIER_SECONDS), _read_variables(verifier),
            _read_variables(solution), _read_memory(environment), image,
        )  # fmt: skip
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"harbor: the task {folder} cannot be read ({error})") from error


def _find_top(place: str) -> str:
    return "/" + place.split("/")[1]


def _list_image_files(image: str, places: Sequence[str]) -> dict[str, Path]:
    """What an image has in the folders that commands write to: it is copied for each episode."""
    found: dict[str, Path] = {}
    for top in sorted({_find_top(place) for place in places}) if image else ():
        for path in sorted([Path(image + top), *Path(image + top).rglob("*")]):
            place = f"/{path.relative_to(image)}"
            if path.is_symlink():
                raise NeedsImage(f"the image has a link where commands write ({place}); put a file or folder there")
            if path.is_file():
                found[place] = path
    if (size := sum(path.stat().st_size for path in found.values())) > MOST_COPIED:
        raise NeedsImage(
            f"the image has {size >> 20} MB where commands write, at most {MOST_COPIED >> 20} MB are copied"
        )
    return found


def _check_environment(folder: Path, environment: Mapping[str, Any], image: str) -> None:
    reasons = {
        f"it runs in the image {environment.get('docker_image')!r}": environment.get("docker_image") and not image,
        f"it needs {environment.get('gpus')} GPUs": environment.get("gpus"),
        "it needs MCP servers": environment.get("mcp_servers"),
        "it has a health check, so a service": environment.get("healthcheck"),
        f"it runs on {environment.get('os')}": str(environment.get("os", "linux")).lower() != "linux",
    }
    for reason, holds in reasons.items():
        if holds:
            raise NeedsImage(reason)
    for name in ("docker-compose.yaml", "docker-compose.yml"):
        if (folder / "environment" / name).exists():
            raise NeedsImage(f"the task has services (environment/{name})")


def _check_network(*tables: Mapping[str, Any]) -> None:
    hosts = [str(host) for table in tables for host in table.get("allowed_hosts") or ()]
    if hosts or any(table.get("network_mode") == "allowlist" for table in tables):
        raise NeedsImage(f"it needs a network (allowed_hosts: {', '.join(hosts) or 'none'})")


def _check_verifier(folder: Path, verifier: Mapping[str, Any]) -> None:
    if (mode := verifier.get("environment_mode", "shared")) != "shared":
        raise NeedsImage(f"the task's tests run in an image of their own (verifier.environment_mode={mode!r})")
    if (path := verifier.get("import_path")) is not None:
        raise NeedsImage(f"the task has a verifier of its own ({path!r})")
    script = folder / "tests" / "test.sh"
    if not script.is_file():
        raise ValueError(f"harbor: the task {folder} has no tests/test.sh")
    text = "\n".join(line for line in script.read_text(encoding="utf-8").splitlines() if not _is_comment(line))
    if found := _DOWNLOADS.search(text):
        raise NeedsImage(f"the task's tests download what they need (tests/test.sh uses {found[1]})")


class _CopiedFiles:
    """What a Dockerfile puts where. NeedsImage for whatever is more than files, unless an image `is_built` of it."""

    def __init__(self, context: Path, is_built: bool) -> None:
        self._context, self._is_built, self.workdir = context, is_built, WORKDIR
        self.sources: dict[str, Path] = {}
        self.folders: list[str] = []
        self.variables: dict[str, str] = {}
        self._has_base = False

    def read(self, text: str) -> None:
        text = "\n".join(line for line in text.splitlines() if not _is_comment(line))
        for line in re.sub(r"\\\s*\n", " ", text).splitlines():
            word, _, rest = line.strip().partition(" ")
            if word:
                self._take(word.upper(), rest.strip())

    def _take(self, word: str, rest: str) -> None:
        if word in _IGNORED:
            return
        if word == "FROM" and self._is_built:
            return
        if word == "FROM":
            if self._has_base or not _PLAIN.fullmatch(rest):
                raise NeedsImage(f"the task's Dockerfile has no plain base image (FROM {rest:.80})")
            self._has_base = True
        elif word in ("WORKDIR", "ENV", "COPY", "ADD") and ("$" in rest or "<<" in rest):
            if self._is_built and word == "ENV" and "<<" not in rest:
                self._take(word, self._expand(rest))
                return
            raise NeedsImage(f"the task's Dockerfile has more than plain paths ({word} {rest:.80})")
        elif word == "WORKDIR":
            self.workdir = str(PurePosixPath(self.workdir) / _split(rest)[0])
        elif word == "ENV":
            words = _split(rest)
            pairs = [one.partition("=") for one in words] if "=" in words[0] else [rest.partition(" ")]
            self.variables.update({name: value.strip() for name, _, value in pairs})
        elif word in ("COPY", "ADD"):
            words = _split(rest)
            if any(one.startswith(("--from", "--mount", "http:", "https:", "git@")) for one in words) or (
                word == "ADD" and any(".t" in one for one in words)  # an archive, which ADD unpacks
            ):
                if self._is_built:
                    return
                raise NeedsImage(f"the task's Dockerfile has more than files of its own ({word} {rest:.80})")
            *sources, target = [one for one in words if not one.startswith("--")]
            self.copy(sources, target)
        elif not self._is_built and not (word == "RUN" and self._make_folders(rest)):
            raise NeedsImage(f"the task's Dockerfile builds an image ({word} {rest:.80})")

    def _make_folders(self, command: str) -> bool:
        """Whether a command of RUN only makes folders. Those in private places are the verifier's to make."""
        if not re.fullmatch(r"[\w./&\s-]+", command):
            return False
        calls = [one.split() for one in command.split("&&")]
        paths = [path for call in calls for path in call[1:] if path not in ("-p", "--parents")]
        if any(call[:1] != ["mkdir"] for call in calls) or any(path[0] in "-&" for path in paths):
            return False
        for path in paths:
            place = os.path.normpath(PurePosixPath(self.workdir) / path)
            if _find_top(place) not in PRIVATE:
                _check_place(place)
                self.folders.append(place)
        return True

    def _expand(self, text: str) -> str:
        """With the variables so far; NeedsImage for another one."""
        known = {"PATH": SYSTEM_PATH, "HOME": "/root", **self.variables}
        try:
            return Template(text).substitute(known)
        except (KeyError, ValueError) as error:
            raise NeedsImage(f"the task's Dockerfile has a variable that is not known (ENV {text:.80})") from error

    def copy(self, sources: list[str], target: str) -> None:
        if (self._context / ".dockerignore").exists():
            if self._is_built:
                return
            raise NeedsImage("the task's environment has a .dockerignore")
        place = PurePosixPath(os.path.normpath(PurePosixPath(self.workdir) / target))
        found: list[Path] = []
        for source in sources:
            pattern = os.path.normpath(source.lstrip("/") or ".")
            if pattern.startswith(".."):
                raise NeedsImage(f"the task's Dockerfile copies {source}, which is outside of environment/")
            found += [self._context] if pattern == "." else sorted(self._context.glob(pattern))
        if not found and self._context.is_dir() and not self._is_built:
            raise NeedsImage(f"the task's Dockerfile copies {', '.join(sources)}, which environment/ does not have")
        into = len(found) > 1 or target.endswith("/") or str(place) == self.workdir
        for path in found:
            if path.is_dir():
                files = {str(place / one.relative_to(path)): one for one in _list_files(path)}
            else:
                files = {str(place / path.name if into else place): path}
            self.sources.update({k: v for k, v in files.items() if v != self._context / "Dockerfile"})
        for one in list(self.sources):
            if self._is_built and _is_system(one):  # the image has it
                del self.sources[one]
            else:
                _check_place(str(PurePosixPath(one).parent))


def _is_system(place: str) -> bool:
    return place.split("/")[1] in _SYSTEM


def _check_place(place: str) -> None:
    top = place.split("/")[1] if place.startswith("/") else ""
    if not top or _is_system(place) or f"/{top}" in PRIVATE:
        raise NeedsImage(f"the task puts files into {place}, which is the sandbox's own")


def _split(rest: str) -> list[str]:
    if rest.startswith("["):
        return [str(one) for one in json.loads(rest)]
    try:
        return shlex.split(rest)
    except ValueError as error:
        raise NeedsImage(f"the task's Dockerfile cannot be read ({rest:.80}: {error})") from error


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith("#")


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _read_file(place: str, path: Path) -> File:
    return place, os.access(path, os.X_OK), path.read_bytes()


def _read_table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = config.get(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"harbor: task.toml: {name}={table!r:.80}, expected a table")
    return table


def _read_variables(table: Mapping[str, Any]) -> dict[str, str]:
    found = {str(name): str(value) for name, value in dict(table.get("env") or {}).items()}
    for name, value in found.items():
        if "${" in value:
            raise NeedsImage(f"the task takes {name} from the host's environment")
    return found


def _read_seconds(table: Mapping[str, Any], default: float) -> float:
    value = table.get("timeout_sec", default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"harbor: task.toml: timeout_sec={value!r:.40}, expected seconds")
    return float(value)


def _read_memory(environment: Mapping[str, Any]) -> int | None:
    value = environment.get("memory_mb")
    if value is not None and (type(value) is not int or value < 64):
        raise ValueError(f"harbor: task.toml: memory_mb={value!r:.40}, expected a whole number from 64 on")
    return None if value is None else value << 20
