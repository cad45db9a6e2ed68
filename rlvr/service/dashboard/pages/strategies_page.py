"""What a service learned: its prompting strategies with their probabilities and evidence, and from which sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlvr.service.dashboard.dashboard_data import Source, finite_number
from rlvr.service.dashboard.element_tree import Child, Page, Tree, h
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.sessions_page import PATH as SESSIONS
from rlvr.service.dashboard.pages.sessions_page import session_table
from rlvr.service.dashboard.session_source import StoreSource
from rlvr.service.learning.strategy_policy import EXPLORATION, StrategyTable

PATH = "/ui/strategies"
NEWEST = 12  # sessions below the strategies
COLUMNS = ("result", "iterations", "learned", "created")


def strategies_page(source: Source, parameters: Mapping[str, str]) -> Page:
    if not isinstance(source, StoreSource):
        return parts.not_found_page(source, "page", PATH)
    policy, learned = source.strategies(), source.learning()
    shown = {name.replace("_", " "): f"{number:.4g}" for name, value in learned.items()
             if (number := finite_number(value)) is not None}  # fmt: skip
    tables: list[Child] = []
    if policy is None:
        why = "No session has taught a strategy yet. "
        why += "A generator whose weights are trained chooses none; its numbers are above and on the page of a session."
        tables = [h("p", why, class_="panel empty")]
    else:
        now = learned.get("strategies") or policy.probabilities
        tables = [_table(title, table, now[name]) for title, name, table in (
            ("First prompts", "first", policy.first), ("Prompts after feedback", "next", policy.next))]  # fmt: skip
    sessions, _ = source.sessions("done", "", "", 0, NEWEST)
    every = parts.address(SESSIONS, result="done", **{f"c-{name}": "on" for name in COLUMNS})
    return parts.frame_page(
        source, "Strategies", "Strategies",
        h("div", h("h1", "Strategies"), h("p", "What was learned, and from what.", class_="dim"), class_="head"),
        h("section", parts.figures(shown), class_="panel", aria_label="Learning") if shown else None,
        *tables,
        h("section", h("h2", "What the newest sessions taught"),
          h("p", "An advantage is how much better an answer was than its task's mean; it moves the strategy that wrote "
            "the prompt.", class_="dim"),
          session_table(source, sessions, COLUMNS) if sessions else h("p", "No session yet.", class_="empty"),
          h("p", h("a", "All sessions with what they taught", href=every)), class_="panel stack tight"),
    )  # fmt: skip


def _table(title: str, table: StrategyTable, probabilities: Mapping[str, Any]) -> Tree:
    count = float(table.counts_K.sum())
    variance = table.squares / count - (float(table.sums_K.sum()) / count) ** 2 if count else 0.0
    uniform = 1 / len(probabilities)
    rows: list[list[Child]] = []
    for place, (name, probability) in enumerate(probabilities.items()):
        answers, total = float(table.counts_K[place]), float(table.sums_K[place])
        mean = "–"
        if answers >= 2:
            mean = f"{total / answers:+.3f} ± {1.96 * math.sqrt(max(0.0, variance) / answers):.3f}"
        rows.append([h("span", name, class_="mono"), parts.span(uniform, probability), f"{100 * probability:.1f} %",
                     f"{answers:,.0f}", mean, f"{table.effects[name]:+.3f}"])  # fmt: skip
    columns = [("From uniform to now", "wide"), ("Probability", "num"), ("Answers", "num"),
               ("Mean advantage ± 95 %", "num"), ("Expected gain over the average", "num")]  # fmt: skip
    texts = [
        h("div", h("h3", f"{name}, temperature {strategy.temperature:g}"),
          parts.block(strategy.words(["(the answer)"], "(the review)") or "(the task alone)"))
        for name, strategy in table.strategies.items()
    ]  # fmt: skip
    note = f"Every strategy keeps {EXPLORATION / len(probabilities):.1%}. Older answers count less."
    return h(
        "section", h("h2", title), parts.data_table(columns, rows, title, head="Strategy"), h("p", note, class_="dim"),
        h("details", h("summary", "What each adds to the task"), h("div", texts, class_="stack")),
        class_="panel stack tight",
    )  # fmt: skip
