"""Rewards: functions that score an answer. Importing this package registers the built-in ones (no torch).

To add one: write it in a file here with `@register_reward`, and import that file below. If a request to the service may
set its options, list them in `OPTION_SCHEMAS` of `rlvr.service.sessions.verifier_options`.
"""

from rlvr.reward import by_row as by_row
from rlvr.reward import classifier as classifier
from rlvr.reward import code as code
from rlvr.reward import composite as composite
from rlvr.reward import environment as environment
from rlvr.reward import graders as graders
from rlvr.reward import judge as judge
from rlvr.reward import math as math
from rlvr.reward.adapters import NoRewardError
from rlvr.reward.reasoning_gym import gym_reward as gym_reward
from rlvr.reward.registry import Reward, known_rewards, options_of, register_reward, resolve_reward
from rlvr.reward.text import exact_answers as exact_answers
from rlvr.reward.text import form as form
from rlvr.reward.text import ifeval as ifeval
from rlvr.reward.text import own_words as own_words
from rlvr.reward.text import quality as quality
from rlvr.reward.text import repetition as repetition
from rlvr.reward.text import rules as rules

__all__ = ["NoRewardError", "Reward", "known_rewards", "options_of", "register_reward", "resolve_reward"]
