"""Plug-ins: modules that register names (a reward, an environment, a loss, a callback, ...) when they are imported.

An installed package names them as entry points, and then its names work like built-in ones, in any order:

    [project.entry-points."rlvr.plugins"]
    my_package = "my_package.for_rlvr"      # a module, or `module:function`, which is called without arguments

They are imported when a name is looked up that is not known yet, so that they cost nothing to others. `imports` of a
config names further modules (`import_modules`), which are imported before any name of that config is looked up.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

GROUP = "rlvr.plugins"
_lock = threading.RLock()
_failures: list[str] | None = None  # of the plug-ins that are installed, None while they are not imported


def load_plugins() -> list[str]:
    """Import the plug-ins of the installed packages, once in a process: what was wrong with those that failed."""
    global _failures
    with _lock:
        if _failures is None:
            _failures = []  # said first: a plug-in may look up a name itself
            try:
                _failures = _import_all()
            except BaseException:  # Ctrl-C: the next lookup begins anew
                _failures = None
                raise
        return _failures


def _import_all() -> list[str]:
    """Import every plug-in. One that failed is tried again after others: it may need a name of theirs."""
    waiting = sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))
    while True:
        failed: dict[EntryPoint, str] = {}
        for entry in waiting:
            try:
                found = entry.load()
                if entry.attr:
                    found()
            except (Exception, SystemExit) as error:
                package = f" of the package {entry.dist.name}" if entry.dist else ""
                failed[entry] = f"the plug-in {entry.name!r}{package} ({entry.value}) {describe_failure(error)}"
        if len(failed) in (0, len(waiting)):
            return list(failed.values())
        waiting = list(failed)


def describe_plugins() -> str:
    """What a message about an unknown name says of plug-ins that failed, "" if none did."""
    return "".join(f"; {failure}" for failure in load_plugins())


def import_modules(names: Sequence[str]) -> None:
    """Import the modules that `imports` of a config names, with the current directory importable."""
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"imports: {name!r} is not of the form 'package.module'")
        if not {"", os.getcwd()} & set(sys.path):
            sys.path.append(os.getcwd())
        importlib.invalidate_caches()
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:
            remedy = "correct it"
            if name.endswith(".py"):
                remedy = f"leave .py out: {name[:-3]}"
            elif isinstance(error, ModuleNotFoundError) and name.startswith(error.name or " "):
                remedy = "run from the folder that holds it, or install it"
            raise ValueError(f"imports: {name!r} {describe_failure(error)}; {remedy}") from error


def describe_failure(error: BaseException) -> str:
    """What a module raised while it was imported, and where in it."""
    package = os.path.dirname(os.path.dirname(__file__))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
    own = [(frame.filename, frame.lineno) for frame in frames if not frame.filename.startswith(package)]
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else own[-1] if own else None
    at = f" ({place[0]}:{place[1]})" if place else ""
    return f"failed to import: {type(error).__name__}: {error}{at}"
