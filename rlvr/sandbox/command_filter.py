"""Which system calls a sandboxed command may not make: a deny-list, because a command may be any program.

`rlvr.sandbox.seccomp` has the allow-list for answers, which only compute. Here everything is left that programs usually
do; what is taken is a second line behind namespaces and lost capabilities: calls that make namespaces or mounts, look
into other processes, reach the kernel's rarely used parts, or take memory that no limit counts. Standard library only.
"""

from __future__ import annotations

from rlvr.sandbox.seccomp import (
    ALLOW,
    CLONE,
    CLONE3,
    CLONE_NAMESPACES,
    DENY,
    IOCTL,
    JEQ,
    JGE,
    JGT,
    JSET,
    MISSING,
    PRLIMIT,
    RETURN,
    Instruction,
    architecture,
    argument,
    load,
    one_of,
    program,
    ranges,
    when,
)

# name: (x86-64, aarch64); -1 if an architecture does not have it
DENIED = {
    # namespaces, mounts and roots
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "unshare": (272, 97),
    "setns": (308, 268), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # rarely used parts of the kernel
    "bpf": (321, 280), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "perf_event_open": (298, 241), "userfaultfd": (323, 282), "personality": (135, 92), "modify_ldt": (154, -1),
    "uselib": (134, -1), "iopl": (172, -1), "ioperm": (173, -1), "lookup_dcookie": (212, 18), "nfsservctl": (180, 42),
    # the machine
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "sethostname": (170, 161), "setdomainname": (171, 162), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "acct": (163, 89), "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "vhangup": (153, 58),
    # memory that neither the limits nor the folder's size count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}  # fmt: skip
LAST_KNOWN = 469  # newer calls are missing for a command, until they are reviewed
SOCKET, MMAP = (41, 198), (9, 222)
AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # they type into a terminal


def deny_for_command() -> None:
    """Load the filter into this process, for good and for all that it starts."""
    load(program(command_rules()))


def command_rules() -> list[Instruction]:
    column, _ = architecture()
    deny: Instruction = (RETURN, 0, 0, DENY)
    allow: Instruction = (RETURN, 0, 0, ALLOW)
    rules: list[Instruction] = [
        (JGT, 0, 1, LAST_KNOWN),
        (RETURN, 0, 0, MISSING),
        *when(CLONE[column], argument(0), (JSET, 0, 1, CLONE_NAMESPACES), deny, allow),
        *when(CLONE3[column], (RETURN, 0, 0, MISSING)),  # its flags are out of a filter's reach: libc falls back
        *when(IOCTL[column], argument(1), (JEQ, 1, 0, TIOCSTI), (JEQ, 0, 1, TIOCLINUX), deny, allow),
        *when(PRLIMIT[column], argument(0), *one_of((0,)), deny),  # its own limits, not those of pid 1
        # A shared mapping without a file stays in memory after a process has let go of it, and no limit counts it.
        *when(MMAP[column], argument(3), (JSET, 0, 2, MAP_ANONYMOUS), (JSET, 0, 1, MAP_SHARED), deny, allow),
        *when(
            SOCKET[column],
            argument(0),
            *one_of((AF_UNIX, AF_INET, AF_INET6)),
            (JEQ, 0, 3, AF_NETLINK),
            argument(2),
            (JEQ, 0, 1, 0),  # the list of interfaces, which libraries ask for
            allow,
            deny,
        ),
    ]
    numbers = sorted(row[column] for row in DENIED.values() if row[column] >= 0)
    for low, high in ranges(numbers):
        rules += [(JGT, 3, 0, high), (JGE, 0, 1, low), deny, allow]
    return [*rules, allow]
