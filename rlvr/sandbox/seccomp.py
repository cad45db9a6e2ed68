"""Which system calls a sandboxed process may make: two BPF programs, loaded with `prctl`. Standard library only.

A zygote loads `confine()` once and its forks inherit it: an allow-list of what Python needs to compute, to use its
scratch folder and to fork. In a user namespace the zygote can fork in one way only, which takes a capability that a
fork gives up at once. So an answer can start threads but no process, and no filter has to be loaded for each answer
(0.13 ms of processor time). Elsewhere a new fork loads `confine_answer()` to the same end.

Both first check the architecture (a 32-bit call on a 64-bit kernel has other numbers) and x32. A call that is not
allowed gets EPERM and the program goes on. x86-64 and aarch64 are supported; elsewhere `confine` raises OSError and the
tier is refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys

# name: (x86-64, aarch64); -1 if an architecture does not have it
FREE = {
    "read": (0, 63), "write": (1, 64), "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68),
    "lseek": (8, 62), "open": (2, -1), "openat": (257, 56), "close": (3, 57), "stat": (4, -1), "fstat": (5, 80),
    "lstat": (6, -1), "newfstatat": (262, 79), "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44),
    "access": (21, -1), "faccessat": (269, 48), "faccessat2": (439, 439), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72), "epoll_create": (213, -1), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "mremap": (25, 216), "madvise": (28, 233), "brk": (12, 214),
    "msync": (26, 227), "membarrier": (324, 283), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigtimedwait": (128, 137), "rt_sigsuspend": (130, 133),
    "sigaltstack": (131, 132), "pause": (34, -1), "alarm": (37, -1), "setitimer": (38, 103), "getitimer": (36, 102),
    "restart_syscall": (219, 128), "nanosleep": (35, 101), "clock_nanosleep": (230, 115), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, -1), "times": (100, 153),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getcpu": (309, 168), "pipe": (22, -1),
    "pipe2": (293, 59), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "truncate": (76, 45), "fallocate": (285, 47),
    "fadvise64": (221, 223), "copy_file_range": (326, 285), "sendfile": (40, 71), "close_range": (436, 436),
    "umask": (95, 166), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, -1), "mkdirat": (258, 34),
    "rmdir": (84, -1), "creat": (85, -1), "unlink": (87, -1), "unlinkat": (263, 35), "readlink": (89, -1),
    "readlinkat": (267, 78), "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockname": (51, 204),
    "getsockopt": (55, 209), "exit": (60, 93), "exit_group": (231, 94),
    "futex": (202, 98), "set_tid_address": (218, 96), "set_robust_list": (273, 99), "rseq": (334, 293),
    "getrandom": (318, 278), "uname": (63, 160), "sysinfo": (99, 179), "getrusage": (98, 165), "getrlimit": (97, 163),
    "setrlimit": (160, 164), "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getpgrp": (111, -1),
    "getpgid": (121, 155), "getsid": (124, 156), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getresuid": (118, 148), "getresgid": (120, 150), "getgroups": (115, 158),
    "getpriority": (140, 141), "wait4": (61, 260), "waitid": (247, 95), "tgkill": (234, 131),
}  # fmt: skip
# Harmless without a capability or a descriptor that only a zygote has.
ZYGOTE = {"recvmsg": (47, 212), "capset": (126, 91), "pidfd_send_signal": (424, 424)}
ZYGOTE_ONLY = {"fork": (57, -1), "recvmsg": (47, 212), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424)}
# Landlock does not cover these: without a file system of its own, a process could change what it cannot open.
OF_ANY_PATH = ("chmod", "fchmod", "fchmodat", "utimensat", "truncate")
CLONE, CLONE3, IOCTL, FCNTL, PRCTL = (56, 220), (435, 435), (16, 29), (72, 25), (157, 167)
PRLIMIT, SOCKETPAIR, SENDTO, TGKILL = (302, 261), (53, 199), (44, 206), (234, 131)

CLONE_THREAD = 0x10000
CLONE_NAMESPACES = 0x7E020000 | 0x2000 | 0x8000  # and CLONE_PTRACE, CLONE_PARENT
# How a zygote in a user namespace forks: with a host name of its own (NEWUTS), the cheapest thing that the kernel
# grants to CAP_SYS_ADMIN alone; a descriptor of the fork (PIDFD); SIGCHLD; and what libc's fork asks for.
ZYGOTE_FORK = 0x04000000 | 0x1000 | 0x01000000 | 0x00200000 | 17
IOCTLS = (0x5401, 0x541B, 0x5421, 0x5450, 0x5451)  # is it a terminal, bytes waiting, blocking or not, close on exec
FCNTLS = (8, 10, 15, 1024, 1026)  # who gets signals about a descriptor, and by which; leases; watching a folder
SHARED_LOCKS = (37, 38)  # these and `flock` outlive a process that has its descriptor from another
OWN_LOCKS = (6, 7)  # these end with it: a data base in a scratch folder needs them
PR_SET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 15, 16, 22, 38
AF_UNIX, SIGKILL = 1, 9

LOAD, JEQ, JGT, JGE, JSET, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
ALLOW, DENY, MISSING, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000
NUMBER, ARCH, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000
Instruction = tuple[int, int, int, int]
libc = ctypes.CDLL(None, use_errno=True)


def architecture() -> tuple[int, int]:
    """(column of the tables, AUDIT_ARCH); OSError on a machine that they do not cover."""
    machine = os.uname().machine
    if struct.calcsize("P") == 8 and sys.byteorder == "little":
        if machine == "x86_64":
            return 0, 0xC000003E
        if machine == "aarch64":
            return 1, 0xC00000B7
    raise OSError(errno.ENOSYS, f"no table of system calls for {machine}: x86-64 and aarch64 are known")


def confine(own_files: bool) -> None:
    """Load the allow-list into this process, for good and for all that it forks.

    `own_files`: it is in user and mount namespaces of its own, where every file that it can name is its own to change.
    """
    load(program(zygote_rules(own_files)))


def zygote_rules(own_files: bool) -> list[Instruction]:
    column, _ = architecture()
    fcntls = (*FCNTLS, *SHARED_LOCKS, *(() if own_files else OWN_LOCKS))
    needs_thread = [(JSET, 1, 0, CLONE_THREAD), (RETURN, 0, 0, DENY)]
    rules = [
        *when(
            CLONE[column],
            argument(0),
            *([*one_of((ZYGOTE_FORK,)), *needs_thread] if own_files else []),
            (JSET, 0, 1, CLONE_NAMESPACES),
            (RETURN, 0, 0, DENY),
            (RETURN, 0, 0, ALLOW),
        ),
        *when(CLONE3[column], (RETURN, 0, 0, MISSING)),  # its flags are out of a filter's reach: libc falls back
        *when(IOCTL[column], argument(1), *one_of(IOCTLS), (RETURN, 0, 0, DENY)),
        *when(
            FCNTL[column],
            argument(1),
            *[rule for command in fcntls for rule in ((JEQ, 0, 1, command), (RETURN, 0, 0, DENY))],
            (RETURN, 0, 0, ALLOW),
        ),
        *when(PRLIMIT[column], argument(0), *one_of((0,)), (RETURN, 0, 0, DENY)),  # only its own limits
        *when(
            SOCKETPAIR[column], argument(0), *one_of((AF_UNIX,)), (RETURN, 0, 0, DENY)
        ),  # asyncio wakes itself by one
        *when(  # to the other end only: an address may be that of a service outside, which Landlock allows
            SENDTO[column],
            argument(4),
            (JEQ, 0, 3, 0),
            (LOAD, 0, 0, ARGUMENTS + 8 * 4 + 4),
            (JEQ, 0, 1, 0),
            (RETURN, 0, 0, ALLOW),
            (RETURN, 0, 0, DENY),
        ),
        *when(
            PRCTL[column],
            argument(0),
            *one_of((PR_SET_NAME, PR_GET_NAME) if own_files else (PR_SET_NAME, PR_GET_NAME, PR_SET_SECCOMP)),
            (JEQ, 1, 0, 0xFFFFFFFF if own_files else PR_SET_PDEATHSIG),
            (RETURN, 0, 0, DENY),
            argument(1),
            *one_of((SIGKILL,)),
            (RETURN, 0, 0, DENY),
        ),
    ]
    free = [row for name, row in FREE.items() if own_files or name not in OF_ANY_PATH]
    more = ZYGOTE if own_files else ZYGOTE_ONLY
    numbers = sorted(row[column] for row in [*free, *more.values()] if row[column] >= 0)
    for low, high in ranges(numbers):
        rules += [(JGT, 3, 0, high), (JGE, 0, 1, low), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]
    return [*rules, (RETURN, 0, 0, DENY)]


def answer_rules() -> list[Instruction]:
    column, _ = architecture()
    rules = when(CLONE[column], argument(0), (JSET, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY))
    denied = [*ZYGOTE_ONLY.values(), PRCTL, TGKILL]
    numbers = [row[column] for row in denied if row[column] >= 0]
    for index, number in enumerate(numbers):  # all lead to the last but one instruction
        rules.append((JEQ, len(numbers) - index, 0, number))
    return [*rules, (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, DENY)]


def answer_program() -> tuple[object, int]:
    """The filter that `confine_answer` loads, prepared once: (an object to keep alive, the address of the filter)."""
    return prepare(program(answer_rules()))


def confine_answer(ready: tuple[object, int]) -> None:
    """In a fresh fork: no further process, no signal to others, no other user, no descriptor from elsewhere."""
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(ready[1]), 0, 0):
        raise OSError(ctypes.get_errno(), "the kernel refuses the answer's seccomp filter")


def program(rules: list[Instruction]) -> list[Instruction]:
    """`rules` behind the checks of the architecture."""
    column, audit = architecture()
    head = [(LOAD, 0, 0, ARCH), (JEQ, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER)]
    if column == 0:
        head += [(JGE, 0, 1, X32), (RETURN, 0, 0, KILL)]
    return head + rules


def when(number: int, *block: Instruction) -> list[Instruction]:
    """`block`, which ends with a return, for this system call; anything else goes on behind it."""
    return [(JEQ, 0, len(block), number), *block]


def one_of(values: tuple[int, ...]) -> list[Instruction]:
    """Allow where the loaded word is one of `values`, else go on."""
    return [rule for value in values for rule in ((JEQ, 0, 1, value), (RETURN, 0, 0, ALLOW))]


def argument(index: int) -> Instruction:
    """Load the low half of an argument: the kernel takes no more of those that are checked here."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * index)


def ranges(numbers: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and number <= found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def prepare(rules: list[Instruction]) -> tuple[object, int]:
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    code_buffer = ctypes.create_string_buffer(code, len(code))
    head = struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code_buffer))
    head_buffer = ctypes.create_string_buffer(head, len(head))
    return (code_buffer, head_buffer), ctypes.addressof(head_buffer)


def load(rules: list[Instruction]) -> None:
    buffers, address = prepare(rules)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.c_void_p(address), 0, 0):
        raise OSError(ctypes.get_errno(), "seccomp filters are refused")
    del buffers
