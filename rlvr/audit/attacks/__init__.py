"""The hack suite: hostile programs by category, and honest ones that must not be taken for hostile. Data, not tools."""

from rlvr.audit.attacks import control, escape, evidence, honest, material, usage
from rlvr.audit.attacks.suite import Attack

HOSTILE = [attack for part in (control, evidence, material, usage, escape) for attack in part.ATTACKS]
HONEST = honest.ATTACKS

__all__ = ["HONEST", "HOSTILE", "Attack"]
