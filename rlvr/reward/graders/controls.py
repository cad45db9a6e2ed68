"""Controls: answers made from the task alone, graded to find out whether a failure is the grader's or the answer's.

A grader that cannot grade an answer is to blame if it can grade no control either; else the answer is. Controls are the
item's reference, as it stands and in the usual forms (`#### 7`, `\\boxed{7}`, tags, JSON). An item without a reference
has one control: a plain sentence. No answer has a part in them, so none can turn its failure into an error.
`python -m pytest tests/test_graders_controls.py` exercises it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlvr.reward.judge.judge_requests import PLAIN

REFERENCE_FIELDS = ("answer", "reference", "reference_answer", "ground_truth", "expected", "target", "gold", "solution")


def make_controls(item: Mapping[str, Any]) -> list[str]:
    """The control answers of an item, the likeliest to be graded first."""
    found = (item[name] for name in REFERENCE_FIELDS if item.get(name) not in (None, "", [], {}))
    reference = next(found, None)
    if reference is None:
        return [PLAIN]
    text = reference if isinstance(reference, str) else json.dumps(reference, default=str)
    fields = json.dumps({"answer": reference}, default=str)
    return [text, f"#### {text}", f"\\boxed{{{text}}}", f"<answer>{text}</answer>", f"The answer is {text}.", fields]
