"""What a run says of itself: `metrics.jsonl`, the live view, the final table, the reward curve, and trackers.

    with Console() as console, MetricsLog(folder / "metrics.jsonl") as log:
        console.phase("rl", total=200)
        log.append({"phase": "rl", "step": 1, "reward": 0.4})
        console.step({"reward": 0.4}, done=1)

A metric row is a flat dictionary; the view shows those of the names it knows and skips what is absent. What the numbers
mean is in docs/run/metrics.md.
"""

from rlvr.tracking.console import RunConsole, readable, readable_lines
from rlvr.tracking.metrics_log import MetricsLog
from rlvr.tracking.run_report import evaluation_table, final_table, plot_curve
from rlvr.tracking.trackers import Trackers, TrackingOptions

__all__ = [
    "RunConsole",
    "MetricsLog",
    "Trackers",
    "TrackingOptions",
    "evaluation_table",
    "final_table",
    "plot_curve",
    "readable",
    "readable_lines",
]
