"""Mathematics by value: the reward `math`.

`rlvr.reward.text.final_answer` finds the answer, `spelling` normalizes it, `parse` and `values` read it into one of
`kinds`, `algebra` holds closed forms exactly, `compare` decides, and `math_reward` asks math-verify where it cannot.
"""

from rlvr.reward.math.math_reward import verify_math

__all__ = ["verify_math"]
