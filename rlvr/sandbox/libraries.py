"""Which files this Python's standard library needs: what a sandbox lets answers read.

Standard library only; runs in a zygote before it is isolated.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import sys


def library_files() -> list[str]:
    """Names of the shared libraries that this Python and its extension modules load; a fork loads them all to see."""
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            for folder in sys.path:
                for path in glob.glob(os.path.join(glob.escape(folder), "*.so")):
                    with contextlib.suppress(OSError):  # an extension whose library is not installed
                        ctypes.CDLL(path)
            names: list[bytes] = []
            kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t, ctypes.c_void_p)
            ctypes.CDLL(None).dl_iterate_phdr(kind(lambda info, *_: names.append(info[1] or b"") or 0), None)
            os.write(write, b"\0".join(names))
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        loaded = pipe.read().split(b"\0")
    os.wait()
    return sorted({os.fsdecode(name) for name in loaded if name.startswith(b"/") and os.path.isfile(name)})


def needed_files() -> tuple[list[str], list[str]]:
    """The paths that answers may read (the standard library), and the folders in them to hide (installed packages)."""
    stdlib = os.path.dirname(os.path.abspath(os.__file__))
    paths = [path for path in sys.path if os.path.exists(path)]
    paths += [*library_files(), "/etc/ld.so.cache", "/usr/share/zoneinfo"]
    folders: list[str] = []
    for path in sorted({os.path.abspath(path) for path in paths if os.path.exists(path)} | {stdlib}):
        if not any(path.startswith(folder + "/") for folder in folders):
            folders.append(path)
    packages = [os.path.join(stdlib, name) for name in ("site-packages", "dist-packages")]
    return folders, [path for path in packages if os.path.isdir(path)]
