"""Environments: where tasks come from and how an episode runs. Importing this package registers the built-in ones."""

from rlvr.envs import code_tasks as code_tasks
from rlvr.envs import dataset as dataset
from rlvr.envs import groups as groups
from rlvr.envs import gsm8k as gsm8k
from rlvr.envs import math500 as math500
from rlvr.envs import mini_mbpp as mini_mbpp
from rlvr.envs import procedural as procedural
from rlvr.envs import refine as refine
from rlvr.envs import rpn_arithmetic as rpn_arithmetic
from rlvr.envs import seeds as seeds
from rlvr.envs import small_tasks as small_tasks
from rlvr.envs import sorting as sorting
from rlvr.envs import toy as toy
from rlvr.envs.adversarial_tests import adversarial_source as adversarial_source
from rlvr.envs.agent import agent_source as agent_source
from rlvr.envs.games import game_source as game_source
from rlvr.envs.games import take_away as take_away
from rlvr.envs.gym import gym_source as gym_source
from rlvr.envs.gym import hidden_rule as hidden_rule
from rlvr.envs.learned_verifier import verdict_source as verdict_source
from rlvr.envs.prompt import PromptEnv, encode_prompt
from rlvr.envs.propose import propose_source as propose_source
from rlvr.envs.registry import known_environments, register_environment, resolve_environment
from rlvr.envs.tools import tool_arithmetic as tool_arithmetic
from rlvr.envs.tools import tool_source as tool_source

__all__ = ["PromptEnv", "encode_prompt", "known_environments", "register_environment", "resolve_environment"]
