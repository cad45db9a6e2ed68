"""What the service writes down: one event per line, with the ids of its request and session; never a key or a body.

    RLVR_LOG=info,rlvr.service=debug rlvr serve

    log = logger("rlvr.service.loop.sessions")
    log.info("session over", iterations=3)

A filter is a level, or `part=level` with commas between them; `rlvr_service::trainer=debug` is read as
`rlvr_service.trainer`. Lines are JSON, or for people where standard error is a terminal. It is `logging` underneath, so
that uvicorn's warnings and any library's come out in the same form. Exercised by tests/test_service_logs.py.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from contextvars import ContextVar
from typing import Any

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 1,
}
# Chatty at `info`, and never about us.
CALM = ("uvicorn", "httpx2", "httpcore", "sqlalchemy", "alembic", "nicegui", "engineio", "socketio", "watchfiles")
# What a record has of its own; whatever else is there was said as `extra`.
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message", "fields"}
_ids: ContextVar[dict[str, str] | None] = ContextVar("ids", default=None)


def note(**ids: str) -> None:
    """Ids that every later event of this request, and of what it begins, is written with."""
    _ids.set({**(_ids.get() or {}), **ids})


def forget() -> None:
    """Begin without ids: a connection's next request is another one."""
    _ids.set(None)


class Log:
    """A logger that takes its fields by name."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _say(self, level: int, event: str, fields: dict[str, Any], exc_info: Any = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event.replace("%", "%%"), exc_info=exc_info, extra={"fields": fields})

    def debug(self, event: str, **fields: Any) -> None:
        self._say(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._say(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._say(logging.WARNING, event, fields)

    def error(self, event: str, exc_info: Any = None, **fields: Any) -> None:
        self._say(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, **fields: Any) -> None:
        """An error, with the trace of the exception that is being handled."""
        self._say(logging.ERROR, event, fields, sys.exc_info())


def logger(name: str) -> Log:
    return Log(name)


class JsonLines(logging.Formatter):
    """A record as one line of JSON. ASCII: what a client sent cannot move a terminal's cursor."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": moment(record), "level": record.levelname.lower(), "event": said(record), **fields_of(record)}
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=True, default=str)


class Console(logging.Formatter):
    """A record as a line for people: `12:30:05 info  session over  iterations=3`."""

    def format(self, record: logging.LogRecord) -> str:
        told = "  ".join(f"{name}={plain(value)}" for name, value in fields_of(record).items())
        line = f"{moment(record)[11:19]} {record.levelname.lower():<7} {plain(said(record)):<24}  {told}".rstrip()
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def moment(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def said(record: logging.LogRecord) -> str:
    return record.msg.replace("%%", "%") if hasattr(record, "fields") else record.getMessage()


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    more = {name: value for name, value in vars(record).items() if name not in _USUAL}
    return {**(_ids.get() or {}), **more, **getattr(record, "fields", {})}


def plain(value: Any) -> str:
    """Text that moves no cursor, whoever wrote it."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text.isprintable() else json.dumps(text)


def parse_filter(text: str) -> tuple[int, dict[str, int]]:
    """(level of everything, {logger: its level}), e.g. of `info,rlvr=debug`."""
    general, parts = logging.INFO, dict[str, int]()
    for directive in filter(None, (part.strip() for part in text.split(","))):
        name, equals, level = directive.rpartition("=")
        if level.lower() not in LEVELS or (equals and not name) or " " in name:
            raise ValueError(
                f"log filter {text[:200]!r}: {directive[:100]!r} is neither a level ({', '.join(LEVELS)}) nor "
                "part=level; expected for example info,rlvr=debug (RLVR_LOG, else LOG_LEVEL, else RUST_LOG)"
            )
        if equals:
            parts[name.strip().replace("::", ".")] = LEVELS[level.lower()]
        else:
            general = LEVELS[level.lower()]
    return general, parts


def start_logging(text: str = "info", form: str = "auto", stream: Any = None) -> None:
    """Log to standard error. `form` is `json`, `console`, or `auto`: console for a terminal."""
    stream = stream or sys.stderr
    general, parts = parse_filter(text)
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Console() if form == "console" or (form == "auto" and stream.isatty()) else JsonLines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(general)
    for name in CALM:
        logging.getLogger(name).setLevel(max(general, logging.WARNING))
    for name, level in parts.items():
        logging.getLogger(name).setLevel(level)
