"""Interpreters of their own for packages of other projects that do not fit beside ours: where they are, and how made.

`rlvr env install KIND` makes the folder `KIND-VERSION` in `~/.cache/rlvr/environments`, or where `RLVR_ENVIRONMENTS`
says. Any other interpreter that has the package serves too: its path is the option `python` of the environment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlvr.core.registry import did_you_mean

_COMPLETE = "rlvr-complete"  # a file in a folder whose packages are all there


@dataclass(frozen=True)
class Install:
    """The packages of a kind, the versions of Python that take them (None: no newest), and the size on a disk.
    `index` has the packages of an owner; "" if the kind has no packages besides its own."""

    version: str
    packages: tuple[str, ...]
    oldest: tuple[int, int]
    newest: tuple[int, int] | None
    megabytes: int
    index: str = ""


INSTALLS = {
    "verifiers": Install(  # some of its harnesses are started by uv
        "0.4.0", ("verifiers[ta]==0.4.0", "uv"), (3, 11), (3, 14), 660, "https://hub.primeintellect.ai/{owner}/simple/"
    ),
    "openenv": Install("0.10.0", ("openenv==0.10.0",), (3, 10), None, 480),
    "inspect": Install("0.3.285", ("inspect-ai==0.3.285",), (3, 11), None, 330),
    "textarena": Install("0.7.4", ("textarena==0.7.4",), (3, 10), None, 120),
    "nemo_gym": Install("0.4.0", ("nemo-gym==0.4.0",), (3, 12), None, 1_400),
    "gem": Install("0.1.0", ("gem-llm==0.1.0",), (3, 10), (3, 12), 370),
}


def find_install(kind: str) -> Install:
    if kind not in INSTALLS:
        raise ValueError(
            f"there is no kind of environments {kind!r} to install{did_you_mean(kind, INSTALLS)}; expected one of "
            f"{', '.join(INSTALLS)}"
        )
    return INSTALLS[kind]


def locate(kind: str) -> Path:
    """The folder of a kind's interpreter, which may not be there."""
    root = os.environ.get("RLVR_ENVIRONMENTS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(root).expanduser() if root else cache / "rlvr/environments") / f"{kind}-{find_install(kind).version}"


def is_complete(kind: str) -> bool:
    return (locate(kind) / _COMPLETE).exists()


def find_python(kind: str, given: str | None = None) -> str:
    """The interpreter of a kind: `given`, or that of `rlvr env install`. ValueError if there is none."""
    if given is not None:
        path = shutil.which(os.path.expanduser(given))
        if path is None:
            raise ValueError(f"{kind}: python={given!r} is no program; give the path of an interpreter that has {kind}")
        return os.path.abspath(path)
    if not is_complete(kind):
        raise ValueError(
            f"{kind} {find_install(kind).version} is not installed in {locate(kind)}; run `rlvr env install {kind}`, "
            "or give the option python=PATH of an interpreter that has it"
        )
    return str(locate(kind) / "bin/python")


def list_commands(kind: str, packages: Sequence[str] = (), index: str | None = None) -> list[list[str]]:
    """The commands that make a kind's interpreter, by uv where it is there, with further packages: `NAME`, a folder, or
    `OWNER/NAME[@VERSION]` of the kind's own index."""
    install, folder = find_install(kind), locate(kind)
    wanted, indexes = list(install.packages), [index] if index else []
    for package in packages:
        if os.path.exists(package):
            wanted.append(os.path.abspath(package))
            continue
        owner, _, name = package.rpartition("/")
        name, _, version = name.partition("@")
        if owner and not install.index:
            raise ValueError(f"{package!r}: {kind} has no index of owners; give the name of a package, or its folder")
        if owner:
            indexes.append(install.index.format(owner=owner))
        wanted.append(f"{name}=={version}" if version not in ("", "latest") else name)
    wanted += [word for one in dict.fromkeys(indexes) for word in ("--extra-index-url", one)]
    python, uv = _find_base(install), shutil.which("uv")
    target = str(folder / "bin/python")
    make = [] if os.path.exists(target) else [[uv, "venv", "--python", python] if uv else [python, "-m", "venv"]]
    fill = [uv, "pip", "install", "--python", target] if uv else [target, "-m", "pip", "install"]
    return [*([*command, str(folder)] for command in make), [*fill, *wanted]]


def _find_base(install: Install) -> str:
    """An interpreter that takes the packages: this one if it can; uv fetches one that is not there."""
    newest = install.newest or (3, 14)
    if install.oldest <= sys.version_info[:2] <= newest:
        return sys.executable
    minors = range(newest[1], install.oldest[1] - 1, -1)
    found = [path for minor in minors if (path := shutil.which(f"python3.{minor}"))]
    if found or shutil.which("uv"):
        return found[0] if found else f"3.{newest[1]}"
    raise ValueError(
        f"{install.packages[0]} needs Python {'.'.join(map(str, install.oldest))} to {'.'.join(map(str, newest))}, and "
        "there is none on the PATH; install one, or uv"
    )


def install(kind: str, packages: Sequence[str] = (), index: str | None = None) -> None:
    """Run the commands. ValueError if one of them fails."""
    hint = ""
    if packages:
        hint = (
            "; packages that want different versions of a library get an interpreter each: RLVR_ENVIRONMENTS=FOLDER "
            f"rlvr env install {kind} PACKAGE, and python=FOLDER/{locate(kind).name}/bin/python in env.kwargs"
        )
    for command in list_commands(kind, packages, index):
        locate(kind).parent.mkdir(parents=True, exist_ok=True)
        if code := subprocess.run(command).returncode:
            raise ValueError(f"`{' '.join(command)}` ended with exit code {code}; its output says why{hint}")
    if broken := find_conflicts(locate(kind)):
        raise ValueError(f"what is installed in {locate(kind)} does not fit together: {broken}{hint}")
    (locate(kind) / _COMPLETE).touch()


def find_conflicts(folder: Path) -> str:
    """The first requirements of what is installed there that are not met; "" if there are none."""
    target, uv = str(folder / "bin/python"), shutil.which("uv")
    command = [uv, "pip", "check", "--python", target] if uv else [target, "-m", "pip", "check"]
    done = subprocess.run(command, capture_output=True, text=True)
    return "; ".join((done.stdout or done.stderr).strip().splitlines()[:3]) if done.returncode else ""
