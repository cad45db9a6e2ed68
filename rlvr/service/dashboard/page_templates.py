"""Pages as HTML, by the Jinja templates of `templates/`, which escape every text.

The charts of a page stand in it as data; `assets/chart.js` draws them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlvr.service.dashboard.dashboard_data import Chart
from rlvr.service.dashboard.pages import page_parts as parts
from rlvr.service.dashboard.pages.rollout_page import describe_token, shade
from rlvr.service.dashboard.pages.rollouts_page import highlight


def render(template: str, /, **data: Any) -> str:
    """The text of a template with what it shows."""
    return ENVIRONMENT.get_template(template).render(data)


def render_page(page: parts.Page, seen: str = "") -> str:
    """A page as HTML. `seen` names the state of the source that it shows (`page_changes`)."""
    return render(page.template, **page.data, page=page, source=page.source, seen=seen)


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
    iso=lambda at: datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds"),
)
