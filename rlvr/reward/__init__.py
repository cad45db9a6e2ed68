"""Rewards: what checks an answer. Importing this package registers the built-in ones (no torch)."""

from rlvr.reward import math as math
from rlvr.reward import text as text
from rlvr.reward.registry import Reward, known_rewards, options_of, register_reward, resolve_reward

__all__ = ["Reward", "known_rewards", "options_of", "register_reward", "resolve_reward"]
