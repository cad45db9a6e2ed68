"""Programming problems in MBPP's format, generated: what a small transformer can learn from nothing."""

from rlvr.envs.mini_mbpp.source import MiniMBPP

__all__ = ["MiniMBPP"]
