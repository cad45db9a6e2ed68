"""What the tests of benchmarks share: rows of our own in the form of MATH-500 and HumanEval."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

PROBLEMS = [
    {"problem": f"What is half of {2 * n}?", "answer": f"{n}", "subject": "Algebra", "level": 1 + n % 5}
    for n in range(6)
]


def function(name: str, body: str) -> dict[str, Any]:
    """A row in HumanEval's form of a function that adds something to its argument."""
    check = "def check(candidate):\n" + "".join(f"    assert candidate({x}) == {x + int(body)}\n" for x in (1, 5))
    head = f'from typing import List\n\n\ndef {name}(x: int) -> int:\n    """Add {body}."""\n'
    return {
        **{"task_id": f"Test/{body}", "prompt": head, "entry_point": name, "test": check},
        "canonical_solution": f"    return x + {body}\n",
    }


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)
