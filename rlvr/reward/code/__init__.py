"""Programs as answers: how problems are written (`formats`), where the answer is (`extract`), its value (`reward`)."""

from rlvr.reward.code.code_reward import code as code
from rlvr.reward.code.formats import CodeProblem
from rlvr.reward.code.program_extraction import ExtractedProgram, extract

__all__ = ["ExtractedProgram", "CodeProblem", "extract"]
