"""What a service learned: its prompting strategies with their probabilities and evidence, and from which sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr.core.task_statistics import wilson_interval
from rlvr.service.dashboard.dashboard_data import Cell, Source, Table
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollouts_page import PATH as ROLLOUTS
from rlvr.service.dashboard.pages.sessions_page import PATH as SESSIONS
from rlvr.service.dashboard.pages.sessions_page import session_table
from rlvr.service.dashboard.run_charts import estimate
from rlvr.service.dashboard.session_source import StoreSource, describe_learning
from rlvr.service.learning.strategy_policy import EXPLORATION, StrategyTable

PATH = "/ui/strategies"
NEWEST = 12  # sessions below the strategies
COLUMNS = ("result", "iterations", "learned", "created")


def strategies_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    if not isinstance(source, StoreSource):
        return parts.not_found_page(source, "page", PATH)
    policy, learned = source.strategies(), source.learning()
    tables: list[tuple[str, StrategyTable, Table, str]] = []
    if policy is not None:
        now = learned.get("strategies") or policy.probabilities
        passed = source.count_by_strategy()
        tables = [(title, table, *_table(title, table, now[name], passed)) for title, name, table in (
            ("First prompts", "first", policy.first), ("Prompts after feedback", "next", policy.next))]  # fmt: skip
    sessions, _ = source.sessions("done", "", "", 0, NEWEST)
    data = {
        "shown": describe_learning(learned), "tables": tables,
        "sessions": session_table(source, sessions, COLUMNS) if sessions else None,
        "every": parts.address(SESSIONS, result="done", **{f"c-{name}": "on" for name in COLUMNS}),
    }  # fmt: skip
    return parts.Page(source, "Strategies", "strategies.html", data, "Strategies")


def _table(
    title: str, table: StrategyTable, probabilities: Mapping[str, Any], passed: Mapping[str, tuple[int, int]]
) -> tuple[Table, str]:
    """The strategies as rows, and a note on them."""
    count = float(table.counts_K.sum())
    variance = table.squares / count - (float(table.sums_K.sum()) / count) ** 2 if count else 0.0
    uniform = 1 / len(probabilities)
    rows: list[list[Cell | str]] = []
    for place, (name, probability) in enumerate(probabilities.items()):
        answers, total = float(table.counts_K[place]), float(table.sums_K[place])
        mean = "–"
        if answers >= 2:
            mean = f"{total / answers:+.3f} ± {1.96 * math.sqrt(max(0.0, variance) / answers):.3f}"
        good, judged = passed.get(name, (0, 0))
        rate = estimate(vars(wilson_interval(good / judged, judged)), "pass@1") if judged else "–"
        rows.append([Cell(name, parts.address(ROLLOUTS, strategy=name), "mono"), Cell(span=(uniform, probability)),
                     f"{100 * probability:.1f} %", f"{answers:,.0f}", rate, mean,
                     f"{table.effects[name]:+.3f}"])  # fmt: skip
    columns = [("From uniform to now", "wide"), ("Probability", "num"), ("Answers", "num"),
               ("Passed, 95 %", "num"), ("Mean advantage ± 95 %", "num"),
               ("Expected gain over the average", "num")]  # fmt: skip
    note = (
        f"Every strategy keeps {100 * EXPLORATION / len(probabilities):.1f} %. An advantage is how much better an "
        "answer was than its task's mean, and moves the strategy that wrote the prompt; older answers count less. The "
        "share that passed is of all stored answers, to easy and hard tasks alike."
    )
    return Table(columns, rows, title, "Strategy"), note
