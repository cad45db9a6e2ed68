"""The tier `namespaces`: new user, pid, network, mount, ipc, uts and cgroup namespaces, and a root of read-only binds.

The new root is a small tmpfs with the standard library and the shared libraries it needs under their own names, four
device nodes, and `/tmp`: another tmpfs, capped in bytes and inodes, from which nothing can be executed. There is no
`/proc` and nothing else. Needs no privilege; as root it also maps a second id, under which answers run.
Standard library only.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct

NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x40000000 | 0x20000 | 0x08000000 | 0x04000000 | 0x02000000
NOBODY_UID = 65534  # outside; inside it is SECOND
SECOND = 1
SCRATCH_MODE = 0o1777
RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
NOATIME, NODIRATIME, RELATIME, ST_RELATIME = 1024, 2048, 1 << 21, 4096
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
DETACH = 2
SET_DUMPABLE, CAPBSET_DROP, CAP_AMBIENT, CLEAR_ALL = 4, 24, 47, 4
SYS_ADMIN = 21  # the one capability that pid 1 keeps, to fork (`seccomp.ZYGOTE_FORK`)
KILL, SETGID, SETUID = 5, 6, 7
NEW_UTS = 0x04000000
SET_KEEPCAPS = 8
VERSION = struct.pack("Ii", 0x20080522, 0)
NO_CAPABILITIES = (VERSION, bytes(24))
_libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare(alone: int = 0) -> bool:
    """Put this process (for pids: its next child) into new namespaces; returns whether a second id was mapped. If not,
    its own id is `alone` there."""
    user, group, me = os.geteuid(), os.getegid(), os.getpid()
    second = user == 0 and map_from_outside(me)
    if not second:
        check(_libc.unshare(NEW_NAMESPACES), "unshare")
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{alone} {user} 1")
        write("/proc/self/gid_map", f"{alone} {group} 1")
    return second


def map_from_outside(me: int) -> bool:
    """Unshare while a fork that stays outside maps two ids; returns False, with nothing done, if it may not."""
    if not can_map(NOBODY_UID):
        return False
    ready, go = os.pipe()
    helper = os.fork()
    if helper == 0:
        done = 1
        try:
            os.close(go)
            if os.read(ready, 1):
                write(f"/proc/{me}/uid_map", f"0 0 1\n{SECOND} {NOBODY_UID} 1")
                write(f"/proc/{me}/gid_map", f"0 {os.getegid()} 1\n{SECOND} {NOBODY_UID} 1")
                done = 0
        finally:
            os._exit(done)
    try:
        check(_libc.unshare(NEW_NAMESPACES), "unshare")
        os.write(go, b"x")
    finally:
        os.close(go)
        os.close(ready)
        status = os.waitpid(helper, 0)[1]
    if status:
        raise OSError(1, "the ids of the new user namespace could not be mapped")
    return True


def can_map(user: int) -> bool:
    """Whether this user namespace has an id (a container may have few) and this process may map it."""
    if not has_capability(SETUID) or not has_capability(SETGID):
        return False
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as rows:
            mapped = [(int(first), int(count)) for first, _, count in (row.split() for row in rows)]
        if not any(first <= user < first + count for first, count in mapped):
            return False
    return True


def has_capability(capability: int) -> bool:
    with open("/proc/self/status") as rows:
        effective = next(row for row in rows if row.startswith("CapEff:"))
    return bool(int(effective.split()[1], 16) >> capability & 1)


def write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def new_root(readable: list[str], hidden: list[str], devices: list[str], scratch: int, files: int) -> None:
    """Build the root of this mount namespace from these paths and `/tmp` alone."""
    root = next(path for path in ("/tmp", "/mnt", "/dev") if os.path.isdir(path))
    mount("none", "/", "", REC | PRIVATE)
    # Opened first: the new root may hide them.
    sources = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC), os.path.isdir(path)) for path in [*readable, *devices]]
    mount("tmpfs", root, "tmpfs", NOSUID | NODEV, "size=1m,nr_inodes=2k,mode=755")
    for path, source, folder in sources:
        target = root + path
        os.makedirs(target if folder else os.path.dirname(target), mode=0o755, exist_ok=True)
        if not folder:
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(f"/proc/self/fd/{source}", target, "", BIND | REC)
        before = os.statvfs(target).f_flag  # a remount must keep these flags
        flags = before & (NOSUID | NODEV | NOEXEC | NOATIME | NODIRATIME) | (RELATIME if before & ST_RELATIME else 0)
        own = NOEXEC if path in devices else NODEV
        mount("none", target, "", REMOUNT | BIND | RDONLY | NOSUID | own | flags)
        os.close(source)
    for path in hidden:
        mount("tmpfs", root + path, "tmpfs", RDONLY | NOSUID | NODEV | NOEXEC, "size=4k,nr_inodes=2,mode=755")
    os.makedirs(root + "/tmp", exist_ok=True)
    options = f"size={scratch},nr_inodes={files + 1},mode={SCRATCH_MODE:o}"
    mount("tmpfs", root + "/tmp", "tmpfs", NOSUID | NODEV | NOEXEC, options)
    mount("none", root, "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    os.chdir(root)
    number = PIVOT_ROOT[os.uname().machine]
    check(_libc.syscall(ctypes.c_long(number), ctypes.c_char_p(b"."), ctypes.c_char_p(b".")), "pivot_root")
    check(_libc.umount2(b".", DETACH), "umount")
    os.chdir("/tmp")
    check(_libc.sethostname(b"sandbox", 7), "sethostname")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    texts = [os.fsencode(text) for text in (source, target, kind, options)]
    check(_libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3]), f"mount on {target}")


def wipe(folder: str) -> None:
    """Empty a folder, whatever the modes of its entries and however deep it is.

    Paths may be too long and open folders too many, so each inner folder is moved to the top and emptied there.
    """
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        names = remove_files(top)
        existing = frozenset(names)
        new_names = (new for new in map(str, itertools.count()) if new not in existing)
        while names:
            name = names.pop()
            os.chmod(name, 0o700, dir_fd=top)
            inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for deeper in remove_files(inner):
                    os.chmod(deeper, 0o700, dir_fd=inner)  # to move a folder changes its `..`
                    names.append(next(new_names))
                    os.rename(deeper, names[-1], src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)


def remove_files(folder: int) -> list[str]:
    """Unlink the files of an open folder; returns the names of the folders in it."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.name)
            else:
                os.unlink(entry.name, dir_fd=folder)
    return folders


def hide_host_name() -> bool:
    """Take a host name of one's own outside of other namespaces; returns whether the kernel permits it."""
    if _libc.unshare(NEW_UTS):
        return False
    check(_libc.sethostname(b"sandbox", 7), "sethostname")
    return True


def can_change_user(readable: list[str]) -> bool:
    """Whether root may take another id, end processes that have it, and would still read these files and folders."""
    if os.geteuid() or not all(map(has_capability, (KILL, SETGID, SETUID))):
        return False
    helper = os.fork()
    if helper == 0:
        done = 1
        try:
            become(NOBODY_UID)
            for path in readable:
                os.close(os.open(path, os.O_RDONLY))
            done = 0
        finally:
            os._exit(done)
    return os.waitpid(helper, 0)[1] == 0


def become(user: int) -> None:
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def drop_privileges(user: int | None, spaces: bool) -> None:
    """Become that user and group, if any; keep one capability in a user namespace and none elsewhere."""
    for capability in range(64):
        if _libc.prctl(CAPBSET_DROP, capability, 0, 0, 0) and capability < 38:
            break  # not permitted: an unprivileged process has none to drop
    _libc.prctl(CAP_AMBIENT, CLEAR_ALL, 0, 0, 0)
    if user is not None:
        check(_libc.prctl(SET_KEEPCAPS, 1, 0, 0, 0), "prctl")
        become(user)
        check(_libc.prctl(SET_KEEPCAPS, 0, 0, 0, 0), "prctl")
    bits = 1 << SYS_ADMIN if spaces else 0
    check(_libc.capset(VERSION, struct.pack("IIIIII", bits, bits, 0, 0, 0, 0)), "capset")


def hide_memory() -> None:
    """No core, no ptrace, nothing under `/proc` for others of the same user."""
    check(_libc.prctl(SET_DUMPABLE, 0, 0, 0, 0), "prctl")
