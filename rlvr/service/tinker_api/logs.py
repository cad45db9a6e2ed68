"""What the server writes down: one JSON object per line, never a key, a body or a prompt.

Every HTTP request has an id (the `x-request-id` header of its answer, and a field of every refusal), so that what a
client shows can be found here. Polls that found nothing yet and heartbeats are left out unless the level is `debug`:
there are thousands of them. Exercised by tests/test_tinker_http.py.
"""

from __future__ import annotations

import logging
import sys
from logging.handlers import RotatingFileHandler
from pathlib import Path

from rlvr.service.logs import JsonLines

LOGGER = logging.getLogger("rlvr")
LEVELS = ("debug", "info", "warning", "error")


def start_logging(file: Path | None, level: str = "info") -> None:
    """Log to `file` (standard error where it is None); warnings and worse go to standard error in any case."""
    if level not in LEVELS:
        raise ValueError(f"log level {level!r}, expected one of {', '.join(LEVELS)}")
    console = logging.StreamHandler(sys.stderr)
    handlers: list[logging.Handler] = [console]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        console.setLevel(logging.WARNING)
        handlers.append(RotatingFileHandler(file, maxBytes=64 << 20, backupCount=3, encoding="utf-8"))
    for logger in (LOGGER, logging.getLogger("uvicorn.error")):
        logger.handlers[:] = handlers
        logger.setLevel(level.upper())
        logger.propagate = False
    for handler in handlers:
        handler.setFormatter(JsonLines())
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)


def log_request(
    *, request_id: str, owner: str, method: str, path: str, status: int, seconds: float, quiet: bool, reason: str = ""
) -> None:
    """One request and how it was answered. `owner` is a hash of the key, `reason` what a refused client was told."""
    level = logging.DEBUG if quiet else logging.INFO if status < 400 else logging.WARNING
    if not LOGGER.isEnabledFor(level):
        return
    fields: dict[str, object] = {
        "request_id": request_id, "owner": owner, "method": method, "path": path[:300], "status": status,
        "seconds": round(seconds, 4),
    }  # fmt: skip
    if reason:
        fields["reason"] = reason[:2_000]
    LOGGER.log(level, "request", extra=fields)
