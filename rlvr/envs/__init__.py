"""Environments: where tasks come from and how an episode runs. Importing this package registers the built-in ones."""

from rlvr.envs import code as code
from rlvr.envs import groups as groups
from rlvr.envs import gsm8k as gsm8k
from rlvr.envs import jsonl as jsonl
from rlvr.envs import math as math
from rlvr.envs import mini_mbpp as mini_mbpp
from rlvr.envs import refine_source as refine_source
from rlvr.envs import toy as toy
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import known_environments, register_environment, resolve_environment

__all__ = ["PromptEnv", "known_environments", "register_environment", "resolve_environment"]
