"""Graders in the OpenAI graders' schema: `Grader.of(config).grade(item, sample)` is a `Score`."""

from rlvr.reward.graders.grader import Grader
from rlvr.reward.graders.reward import endpoints
from rlvr.reward.graders.reward import grader as grader

__all__ = ["Grader", "endpoints"]
