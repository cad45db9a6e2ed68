"""Mathematics by value: the reward `math`, over readers and comparators of its own.

`rlvr.reward.extract` finds the answer, `spelling` writes it one way, `parse` and `values` read it into one of `kinds`,
`algebra` holds closed forms exactly, `compare` decides, and `peer` asks math-verify in a worker.
`python -m pytest tests/test_math_*.py` exercises them.
"""

from rlvr.reward.math.reward import verify_math

__all__ = ["verify_math"]
