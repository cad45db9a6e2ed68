"""A sandboxed command's root: read-only binds, four devices, a `/proc` of its own processes, and one writable `/tmp`,
with further writable places for a session of commands.

Runs in pid 1 of new namespaces (`rlvr.sandbox.sandboxed_command`). Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Sequence
from contextlib import suppress

from rlvr.sandbox import mounts

SOCKET = "/run/recorder"
# Not /dev/zero: a shared mapping of it is memory that no limit counts.
DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
OPEN = ("/tmp", "/dev/shm")  # writable for every user
IMAGE_HIDES = ("/dev", "/proc", "/run", "/sys", "/tmp")  # of an image: a sandbox has its own, or none
ETC = {
    "passwd": "root:x:0:0::/:/bin/false\nagent:x:1:1::/tmp:/bin/sh\n",
    "group": "root:x:0:\nagent:x:1:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
MOUNT_SETATTR, RECURSIVE, AT_FDCWD = 442, 0x8000, -100
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
BYTES_A_FILE = 16 << 10  # of the folder's size, for each file that may be in it
_libc = ctypes.CDLL(None, use_errno=True)


def bind(source: int, target: str, is_device: bool = False) -> None:
    """Bind an open path and all that is mounted below it, read-only."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, mode=0o755, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mounts.mount(f"/proc/self/fd/{source}", target, "", mounts.BIND | mounts.REC)
    os.close(source)
    wanted = ATTR_RDONLY | ATTR_NOSUID | (0 if is_device else ATTR_NODEV)
    attributes = struct.pack("QQQQ", wanted, 0, 0, 0)
    arguments = (ctypes.c_int(AT_FDCWD), os.fsencode(target), ctypes.c_uint(RECURSIVE), attributes, ctypes.c_size_t(32))
    mounts.check(_libc.syscall(ctypes.c_long(MOUNT_SETATTR), *arguments), f"mount_setattr on {target} (Linux 5.12)")


def mount_writable(root: str, places: Sequence[str], size: int) -> None:
    """Mount parts of one new folder in memory, of `size` bytes, at these places: it is reached only there."""
    options = f"size={size},nr_inodes={max(1_000, size // BYTES_A_FILE)},mode=755"
    mounts.mount("tmpfs", f"{root}/tmp", "tmpfs", mounts.NOSUID | mounts.NODEV, options)
    parts = [f"{root}/tmp/{number}" for number in range(len(places))]
    for part, place in sorted(zip(parts, places, strict=True), key=lambda pair: pair[1] == "/tmp"):  # it hides the rest
        os.makedirs(root + place, exist_ok=True)
        os.mkdir(part)
        os.chmod(part, 0o1777 if place in OPEN else 0o755)
        mounts.mount(part, root + place, "", mounts.BIND)


def list_image(image: str, own: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """What stands at the top of a root folder, by its place: (folders and files, what links lead to). Not the places of
    which a sandbox has its `own`. A link is made anew: in the sandbox it leads into the image, whatever it says."""
    hidden = {*IMAGE_HIDES, *(f"/{place.split('/')[1]}" for place in own)}
    found: dict[str, str] = {}
    links: dict[str, str] = {}
    for name in os.listdir(image):
        place, path = f"/{name}", f"{image}/{name}"
        mode = os.lstat(path).st_mode
        if place in hidden:
            continue
        if stat.S_ISLNK(mode):
            links[place] = os.readlink(path)
        elif stat.S_ISDIR(mode) or stat.S_ISREG(mode):
            found[place] = path
    return found, links


def build(
    readable: Sequence[str],
    recorder: str,
    scratch: int,
    writable: Sequence[str] = (),
    private: Sequence[str] = (),
    image: str = "",
) -> None:
    """Make it the root of this mount namespace, with `recorder` (a Unix socket, or "") at `SOCKET`. The places
    `writable` share the bytes of `/tmp`; `private` ones, of pid 1's user, have as many of their own. `image` is a root
    folder with the programs, if not the system's own among `readable`."""
    root = next(path for path in ("/mnt", "/tmp", "/dev") if os.path.isdir(path))
    mounts.mount("none", "/", "", mounts.REC | mounts.PRIVATE)
    found, links = list_image(image, (*writable, *private)) if image else ({}, {})
    places = {**found, **{path: path for path in (*readable, *DEVICES)}}
    if recorder:
        places[SOCKET] = recorder
    # Opened first: the new root may hide them.
    flags = {place: os.O_NOFOLLOW if place in found else 0 for place in places}
    sources = {place: os.open(path, os.O_PATH | os.O_CLOEXEC | flags[place]) for place, path in places.items()}
    mounts.mount("tmpfs", root, "tmpfs", mounts.NOSUID | mounts.NODEV, "size=1m,nr_inodes=4k,mode=755")
    for name in ("tmp", "proc"):
        os.makedirs(f"{root}/{name}")
    if private:
        mount_writable(root, private, scratch)
    mount_writable(root, (*OPEN, *writable), scratch)
    for place, target in links.items():
        os.symlink(target, root + place)
    for place, source in sources.items():
        bind(source, root + place, place in DEVICES)
    for name, text in ETC.items():
        with suppress(OSError):  # the user made /etc readable
            os.makedirs(f"{root}/etc", exist_ok=True)
            descriptor = os.open(f"{root}/etc/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            os.write(descriptor, text.encode())
            os.close(descriptor)
    os.symlink("/proc/self/fd", f"{root}/dev/fd")
    proc = mounts.RDONLY | mounts.NOSUID | mounts.NODEV | mounts.NOEXEC
    with suppress(OSError):  # refused where the outer /proc is masked, as in a container: there is none then
        mounts.mount("proc", f"{root}/proc", "proc", proc, "subset=pid")
    mounts.mount("none", root, "", mounts.REMOUNT | mounts.BIND | mounts.RDONLY | mounts.NOSUID | mounts.NODEV)
    os.chdir(root)
    number = ctypes.c_long(mounts.PIVOT_ROOT[os.uname().machine])
    mounts.check(_libc.syscall(number, ctypes.c_char_p(b"."), ctypes.c_char_p(b".")), "pivot_root")
    mounts.check(_libc.umount2(b".", mounts.DETACH), "umount")
    os.chdir("/tmp")
    mounts.check(_libc.sethostname(b"agent", 5), "sethostname")
