"""What a run says of itself: `metrics.jsonl`, the live view in the terminal, the final table and the reward curve.

    with Console() as console, MetricsLog(folder / "metrics.jsonl") as log:
        console.phase("rl", total=200)
        log.append({"phase": "rl", "step": 1, "reward": 0.4})
        console.step({"reward": 0.4}, done=1)

A metric row is a flat dictionary; the view shows those of the names it knows and skips what is absent. What the
numbers mean is in docs/metrics.md. Exercised by `python -m pytest tests/test_tracking.py`.
"""

from rlvr.tracking.console import Console, readable, readable_lines
from rlvr.tracking.log import MetricsLog
from rlvr.tracking.report import final_table, plot_curve

__all__ = ["Console", "MetricsLog", "final_table", "plot_curve", "readable", "readable_lines"]
