"""Pages as HTML, by the Jinja templates of `templates/`, which escape every text.

The charts of a page stand in it as data; `assets/chart.js` draws them.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollout_page import describe_token, shade
from rlvr.service.dashboard.pages.rollouts_page import highlight

SPANS = ((60, 1, "s"), (3600, 60, "min"), (86400, 3600, "h"), (float("inf"), 86400, "d"))


def render(template: str, /, **data: Any) -> str:
    """The text of a template with what it shows."""
    return ENVIRONMENT.get_template(template).render(data)


def render_page(page: parts.Page, seen: str = "") -> str:
    """A page as HTML. `seen` names the state of the source that it shows (`page_changes`)."""
    return render(page.template, **page.data, page=page, source=page.source, seen=seen)


def describe_age(at: float) -> str:
    """A time as "3 min ago", as `assets/dashboard.js` goes on to say it."""
    past = max(0.0, time.time() - at)
    size, unit = next((size, unit) for most, size, unit in SPANS if past < most)
    return "now" if past < 5 else f"{past // size:.0f} {unit} ago"


def _write_chart(chart: Chart) -> str:
    """What `assets/chart.js` draws."""
    lines = [
        {"name": line.name, "points": line.points, "kind": line.style,
         "colour": number if line.colour is None else line.colour}
        for number, line in enumerate(chart.lines)
    ]  # fmt: skip
    more = {name: getattr(chart, name) for name in ("share", "x", "unit", "log", "zoom")}
    return json.dumps({"name": chart.title, "lines": lines, **more}, separators=(",", ":"))


ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"), autoescape=True, trim_blocks=True,
    lstrip_blocks=True, undefined=StrictUndefined,
)  # fmt: skip
ENVIRONMENT.globals.update(
    address=parts.address, work_address=parts.work_address, answer_address=parts.answer_address,
    list_menu=parts.list_menu, kind_of=parts.kind_of, number=parts.format_number, options=parts.options,
    good=parts.GOOD, describe_token=describe_token, shade=shade, highlight=highlight,
)  # fmt: skip
ENVIRONMENT.filters.update(
    thousands="{:,}".format,
    chart=_write_chart,
    age=describe_age,
    iso=lambda at: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
)
