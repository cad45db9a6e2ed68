"""Rewards: what checks an answer. Importing this package registers the built-in ones (no torch)."""

from rlvr.reward import arithmetic as arithmetic
from rlvr.reward import code as code
from rlvr.reward import graders as graders
from rlvr.reward import judge as judge
from rlvr.reward import math as math
from rlvr.reward import quality as quality
from rlvr.reward import repetition as repetition
from rlvr.reward import rules as rules
from rlvr.reward import text as text
from rlvr.reward.adapters import NotJudged
from rlvr.reward.registry import Reward, known_rewards, options_of, register_reward, resolve_reward

__all__ = ["NotJudged", "Reward", "known_rewards", "options_of", "register_reward", "resolve_reward"]
