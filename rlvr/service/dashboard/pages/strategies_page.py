"""What a service learned: its prompting strategies with their probabilities and evidence, and from which sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.dashboard_data import Cell, Source, Table, finite_number
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.sessions_page import PATH as SESSIONS
from rlvr.service.dashboard.pages.sessions_page import session_table
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.service.learning.strategy_policy import EXPLORATION, StrategyTable

PATH = "/ui/strategies"
NEWEST = 12  # sessions below the strategies
COLUMNS = ("result", "iterations", "learned", "created")


def strategies_page(source: Source, parameters: Mapping[str, str]) -> parts.Page:
    if not isinstance(source, StoreSource):
        return parts.not_found_page(source, "page", PATH)
    policy, learned = source.strategies(), source.learning()
    shown = {name.replace("_", " "): f"{number:.4g}" for name, value in learned.items()
             if (number := finite_number(value)) is not None}  # fmt: skip
    tables: list[tuple[str, StrategyTable, Table, str]] = []
    if policy is not None:
        now = learned.get("strategies") or policy.probabilities
        tables = [(title, table, *_table(title, table, now[name])) for title, name, table in (
            ("First prompts", "first", policy.first), ("Prompts after feedback", "next", policy.next))]  # fmt: skip
    sessions, _ = source.sessions("done", "", "", 0, NEWEST)
    data = {
        "shown": shown, "tables": tables, "sessions": session_table(source, sessions, COLUMNS) if sessions else None,
        "every": parts.address(SESSIONS, result="done", **{f"c-{name}": "on" for name in COLUMNS}),
    }  # fmt: skip
    return parts.Page(source, "Strategies", "strategies.html", data, "Strategies")


def _table(title: str, table: StrategyTable, probabilities: Mapping[str, Any]) -> tuple[Table, str]:
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
        rows.append([Cell(name, class_="mono"), Cell(span=(uniform, probability)), f"{100 * probability:.1f} %",
                     f"{answers:,.0f}", mean, f"{table.effects[name]:+.3f}"])  # fmt: skip
    columns = [("From uniform to now", "wide"), ("Probability", "num"), ("Answers", "num"),
               ("Mean advantage ± 95 %", "num"), ("Expected gain over the average", "num")]  # fmt: skip
    note = f"Every strategy keeps {EXPLORATION / len(probabilities):.1%}. Older answers count less."
    return Table(columns, rows, title, "Strategy"), note
