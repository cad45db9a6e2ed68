"""The tier for systems that refuse namespaces: a Landlock domain, which cannot reach any file outside.

Inside, the standard library can be read and four device nodes used. There is no scratch folder, because nothing here
would bound the number of its files or remove it after a kill. Sockets, processes and signals are left to
`rlvr.sandbox.seccomp`; if the kernel can (ABI 4 and 6), the domain refuses them too.
Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import struct

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
VERSION = 1  # flag of CREATE_RULESET
PATH_BENEATH = 1
WRITE_FILE, READ_FILE, READ_DIR = 1 << 1, 1 << 2, 1 << 3
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # ABI: how many rights over files it knows; from 5 on there are 16
TCP = 0b11  # bind and connect, from ABI 4
SCOPES = 0b11  # abstract sockets and signals of others, from ABI 6
_libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: object) -> int:
    result = _libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result


def enter(readable: list[str], devices: list[str]) -> int:
    """Lock this process and its forks out of all other files, for good; returns the kernel's ABI."""
    abi = call(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION))
    handled = (1 << FILE_RIGHTS.get(abi, 16)) - 1
    rules = struct.pack("QQQ", handled, TCP if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = call(CREATE_RULESET, ctypes.c_char_p(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    try:
        for path in readable:
            allow(ruleset, path, READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE)
        for path in devices:
            allow(ruleset, path, READ_FILE | WRITE_FILE)
        if _libc.prctl(38, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "no_new_privs is refused")
        call(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    finally:
        os.close(ruleset)
    return abi


def allow(ruleset: int, path: str, rights: int) -> None:
    folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, folder)
        call(ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), ctypes.c_char_p(rule), ctypes.c_uint32(0))
    finally:
        os.close(folder)
