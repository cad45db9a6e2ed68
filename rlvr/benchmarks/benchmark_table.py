"""The table of a model's benchmarks: a row each, every rate with its 95 % interval over tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.tracking.run_report import format_rate

HEAD = (
    *("benchmark", "prompt", "tasks", "samples", "pass@1 strict", "pass@1 lenient", "pass@k strict"),
    *("unjudged", "truncated"),
)


def write_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The table in Markdown, its columns aligned."""
    rows = [HEAD, *(_write_row(name, result) for name, result in results.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    head, *body = (f"| {' | '.join(row)} |" for row in padded)
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([head, rule, *body])


def _write_row(name: str, result: Mapping[str, Any]) -> tuple[str, ...]:
    rates, k = result["rates"], result["k"]
    at_k = _write_rate(rates.get(f"pass@{k}")) + f" (k={k})" if k > 1 else "-"
    completions = result["tasks"] * result["samples"]
    tasks, judged = result["tasks"], rates["pass@1"].get("n", result["tasks"])
    return (
        *(
            name,
            result["prompt"],
            f"{tasks:,}" if judged == tasks else f"{judged:,} of {tasks:,}",
            f"{result['samples']:,}",
        ),
        *(_write_rate(rates["pass@1"]), _write_rate(rates.get(f"watched/{result['lenient']}")), at_k),
        *(f"{result['unjudged']:,}", f"{100 * result['truncated'] / completions:.1f}%"),
    )


def _write_rate(estimate: Mapping[str, float | None] | None) -> str:
    return "-" if estimate is None else format_rate(estimate)
