"""Graders in the OpenAI graders' schema: `Grader.of(config).grade(item, sample)` is a `Score`."""

from rlvr.reward.graders.grader import Grader
from rlvr.reward.graders.grader_reward import grader as grader
from rlvr.reward.graders.grader_reward import parse_endpoints

__all__ = ["Grader", "parse_endpoints"]
