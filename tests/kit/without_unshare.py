"""A program that forbids itself `unshare` (and Landlock) by seccomp, and then asks the sandbox for a tier."""

from __future__ import annotations

WITHOUT_UNSHARE = """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
x86 = os.uname().machine == "x86_64"
rules = [(0x20, 0, 0, 0)]
for number in ((272, 56) if x86 else (97, 220)):  # unshare; clone with CLONE_NEWUSER
    if number in (272, 97): rules += [(0x15, 0, 1, number), (6, 0, 0, 0x50001)]
    else: rules += [(0x15, 0, 3, number), (0x20, 0, 0, 16), (0x45, 0, 1, 0x10000000), (6, 0, 0, 0x50001)]
if {no_landlock}: rules += [(0x20, 0, 0, 0), (0x15, 0, 1, 444), (6, 0, 0, 0x50000 | 38)]
rules += [(6, 0, 0, 0x7fff0000)]
code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
kept = ctypes.create_string_buffer(code, len(code))
head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(kept)), 16)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, head, 0, 0) == 0
from rlvr.sandbox import NoTier, Sandbox
try:
    with Sandbox(workers=1, allow_unsafe={unsafe}) as sandbox:
        verdict = sandbox.verify("def f(): return 3", ["assert f() == 3"])
        print(sandbox.tier, verdict.tier, verdict.passed)
except NoTier as error:
    print("refused:", error)
"""
