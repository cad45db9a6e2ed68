"""A language model as a judge: the reward `judge`, and the requests that the model graders ask in the same way."""

from rlvr.reward.judge.judge_reward import judge as judge
from rlvr.reward.judge.judge_reward import judge_with

__all__ = ["judge_with"]
