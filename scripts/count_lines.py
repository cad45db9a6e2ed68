"""Print the lines of Python in each package of rlvr/, and fail if one has more than its budget.

    python scripts/count_lines.py

`line_budget.txt` beside this file has a line for each package: its name, the most lines it may have, and a sentence
that says why the number was last raised. A commit that raises a number writes the sentence anew.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUDGET = HERE / "line_budget.txt"


def count_lines(root: Path) -> dict[str, tuple[int, int]]:
    """(files, lines) of each package in the folder `root`; the files beside the packages are one named `top`."""
    found: dict[str, list[int]] = defaultdict(list)
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        found[parts[0] if len(parts) > 1 else "top"].append(len(path.read_text(encoding="utf-8").splitlines()))
    return {name: (len(lines), sum(lines)) for name, lines in found.items()}


def read_budget(path: Path) -> dict[str, int]:
    """The most lines of each package; ValueError for a line without a sentence."""
    budget: dict[str, int] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split(maxsplit=2)
        if len(words) < 3 or not words[1].isdigit():
            raise ValueError(f"{path}:{number}: {line!r}, expected a package, its lines and a sentence that says why")
        budget[words[0]] = int(words[1])
    return budget


def main() -> int:
    counts = count_lines(HERE.parent / "rlvr")
    try:
        budget = read_budget(BUDGET)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    mistakes: list[str] = []
    print(f"{'package':16}{'files':>6}{'lines':>8}{'budget':>8}")
    for name, (files, lines) in sorted(counts.items(), key=lambda item: -item[1][1]):
        most = budget.get(name)
        print(f"{name:16}{files:6,}{lines:8,}{'-' if most is None else f'{most:,}':>8}")
        if most is None:
            mistakes.append(f"{name}: no budget; add a line to {BUDGET.name}")
        elif lines > most:
            mistakes.append(
                f"{name}: {lines:,} lines, budget {most:,}; make it shorter, or raise the budget in {BUDGET.name} with "
                "a sentence that says what the lines are for"
            )
    total_files, total_lines = (sum(column) for column in zip(*counts.values(), strict=True))
    print(f"{'total':16}{total_files:6,}{total_lines:8,}{sum(budget.values()):8,}")
    mistakes += [f"{name}: no such package; take it out of {BUDGET.name}" for name in budget.keys() - counts.keys()]
    for mistake in mistakes:
        print(mistake, file=sys.stderr)
    return 1 if mistakes else 0


if __name__ == "__main__":
    sys.exit(main())
