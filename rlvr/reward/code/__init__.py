"""Programs as answers: how problems are written (`formats`), where the answer is (`extract`), its value (`reward`)."""

from rlvr.reward.code.extract import Extracted, extract
from rlvr.reward.code.formats import Problem
from rlvr.reward.code.reward import code as code

__all__ = ["Extracted", "Problem", "extract"]
