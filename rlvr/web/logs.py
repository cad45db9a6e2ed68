"""The log of both servers: one event per line, with the ids of its request and session; never a key or a body.

    RLVR_LOG=info,rlvr.service=debug rlvr serve

    log = get_logger("rlvr.service.sessions.sessions")
    log.info("session over", iterations=3)

A filter is a level, or `part=level` separated by commas; `rlvr_service::trainer=debug` is read as
`rlvr_service.trainer`. Lines are JSON, or text for people if standard error is a terminal. It is built on `logging`, so
warnings of uvicorn and other libraries have the same form.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path
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
# Libraries that log much at `info`.
QUIET_LIBRARIES = (
    "uvicorn",
    "httpx2",
    "httpcore",
    "sqlalchemy",
    "alembic",
)
# The attributes of every record; the others were given as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message", "fields"}
_ids: ContextVar[dict[str, str] | None] = ContextVar("ids", default=None)


def bind_ids(**ids: str) -> None:
    """Add ids to every later event of this request and of the tasks and threads it starts."""
    _ids.set({**(_ids.get() or {}), **ids})


def clear_ids() -> None:
    """Forget all ids: the next request of a connection has its own."""
    _ids.set(None)


class FieldLogger:
    """A logger that takes fields by name."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def _write(self, level: int, event: str, fields: dict[str, Any], exc_info: Any = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(
                level, event.replace("%", "%%"), exc_info=exc_info, extra={"fields": {**(_ids.get() or {}), **fields}}
            )

    def debug(self, event: str, **fields: Any) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: Any) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, exc_info: Any = None, **fields: Any) -> None:
        self._write(logging.ERROR, event, fields, exc_info)

    def exception(self, event: str, **fields: Any) -> None:
        """Log an error with the traceback of the current exception."""
        self._write(logging.ERROR, event, fields, sys.exc_info())


def get_logger(name: str) -> FieldLogger:
    return FieldLogger(name)


class JsonLines(logging.Formatter):
    """Write a record as one line of JSON, in ASCII: text from a client cannot move a terminal's cursor."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": utc_timestamp(record),
            "level": record.levelname.lower(),
            "event": event_text(record),
            **record_fields(record),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["traceback"] = "".join(traceback.format_exception(*record.exc_info))
        return json.dumps(line, ensure_ascii=True, default=str)


class ConsoleLines(logging.Formatter):
    """Write a record as a line for people: `12:30:05 info  session over  iterations=3`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "  ".join(f"{name}={printable(value)}" for name, value in record_fields(record).items())
        clock, event = utc_timestamp(record)[11:19], printable(event_text(record))
        line = f"{clock} {record.levelname.lower():<7} {event:<24}  {fields}".rstrip()
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        return line


def utc_timestamp(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def event_text(record: logging.LogRecord) -> str:
    return record.msg.replace("%%", "%") if hasattr(record, "fields") else record.getMessage()


def record_fields(record: logging.LogRecord) -> dict[str, Any]:
    more = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    return {**(_ids.get() or {}), **more, **getattr(record, "fields", {})}


def printable(value: Any) -> str:
    """The value as text without control characters."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if text.isprintable() else json.dumps(text)


def parse_filter(text: str) -> tuple[int, dict[str, int]]:
    """Parse e.g. `info,rlvr=debug` into (general level, {logger: level})."""
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


def write_as_json(text: str) -> None:
    """Print a message as a line of a JSON log, at any level of that log."""
    record = logging.makeLogRecord({"msg": text, "levelname": "INFO"})
    print(JsonLines().format(record), file=sys.stderr, flush=True)


def start_logging(text: str = "info", form: str = "auto", stream: Any = None, file: Path | None = None) -> bool:
    """Log to standard error and, with `file`, to that file; then only warnings and worse go to standard error. Returns
    whether standard error gets JSON.

    `form` is `json`, `console`, or `auto`: console on a terminal. Files are JSON and rotate at 64 MB.
    """
    stream = stream or sys.stderr
    level, parts = parse_filter(text)
    console = logging.StreamHandler(stream)
    is_text = form == "console" or (form == "auto" and stream.isatty())
    console.setFormatter(ConsoleLines() if is_text else JsonLines())
    handlers: list[logging.Handler] = [console]
    if file is not None:
        console.setLevel(logging.WARNING)
        handlers.append(_open_file(file))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    for name, part_level in parts.items():
        logging.getLogger(name).setLevel(part_level)
    return not is_text


@contextmanager
def log_to_file(text: str, file: Path) -> Iterator[None]:
    """Write what our loggers say in the block to a file. The log of the program that it is part of stays its own."""
    level, parts = parse_filter(text)
    ours, handler = logging.getLogger("rlvr"), _open_file(file)
    before = {name: logging.getLogger(name).level for name in ("rlvr", *parts)}
    for name, part_level in {"rlvr": level, **parts}.items():
        logging.getLogger(name).setLevel(part_level)
    propagates, ours.propagate = ours.propagate, False
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()
        ours.propagate = propagates
        for name, old_level in before.items():
            logging.getLogger(name).setLevel(old_level)


def _open_file(file: Path) -> logging.Handler:
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = RotatingFileHandler(file, maxBytes=64 << 20, backupCount=3, encoding="utf-8")
    handler.setFormatter(JsonLines())
    return handler
