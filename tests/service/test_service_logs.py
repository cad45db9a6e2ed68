"""Logs of the service: filters in three dialects, one JSON object per line, with the ids of request and session."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from rlvr.web.logs import FieldLogger, bind_ids, clear_ids, get_logger, parse_filter, start_logging, write_as_json


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    names = ("rlvr", "rlvr.service", "uvicorn", "sqlalchemy", "part", "calm")
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    for name in names:
        logging.getLogger(name).setLevel(logging.NOTSET)
    clear_ids()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", (logging.INFO, {})),
        ("debug", (logging.DEBUG, {})),
        ("WARNING", (logging.WARNING, {})),
        ("warn", (logging.WARNING, {})),
        ("info,rlvr=debug", (logging.INFO, {"rlvr": logging.DEBUG})),
        ("error, rlvr_service::trainer=trace", (logging.ERROR, {"rlvr_service.trainer": logging.DEBUG})),
        ("uvicorn=off", (logging.INFO, {"uvicorn": logging.CRITICAL + 1})),
    ],
)
def test_a_filter_is_a_level_or_levels_by_part(text: str, expected: tuple[int, dict[str, int]]):
    assert parse_filter(text) == expected


@pytest.mark.parametrize("text", ["loud", "info,rlvr=loud", "=debug", "rlvr=", "info rlvr=debug"])
def test_another_filter_is_refused_with_an_example(text: str):
    with pytest.raises(ValueError, match="info,rlvr=debug"):
        parse_filter(text)


def lines(text: str, form: str = "json") -> tuple[io.StringIO, FieldLogger]:
    stream = io.StringIO()
    start_logging(text, form, stream)
    return stream, get_logger("rlvr.service.test")


def test_an_event_is_one_line_of_json_with_its_ids():
    stream, log = lines("info")
    bind_ids(request_id="req-1", session_id="s-1")
    log.info("trained", reward=0.5, text="two\nlines \x1b[31m")
    logging.getLogger("part").warning("of a library: %s", "here", extra={"more": 1})
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first["event"] == "trained" and first["reward"] == 0.5 and first["level"] == "info"
    assert (first["request_id"], first["session_id"]) == ("req-1", "s-1") and first["time"].endswith("Z")
    assert second["event"] == "of a library: here" and second["request_id"] == "req-1" and second["more"] == 1
    assert "\x1b" not in stream.getvalue()  # what a client sent moves no terminal's cursor


def test_levels_apply_by_part():
    stream, log = lines("warning,rlvr.service=debug")
    log.debug("seen")
    logging.getLogger("part").info("unseen")
    assert "seen" in stream.getvalue() and "unseen" not in stream.getvalue()


def test_an_exception_is_written_with_its_trace_on_the_same_line():
    stream, log = lines("info")
    try:
        raise ZeroDivisionError("here")
    except ZeroDivisionError:
        log.exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ZeroDivisionError: here" in json.loads(line)["traceback"]


def test_a_console_gets_readable_lines():
    stream, log = lines("info", "console")
    log.info("trained", reward=0.5)
    assert "trained" in stream.getvalue() and "reward=0.5" in stream.getvalue() and "{" not in stream.getvalue()


def test_a_json_log_has_a_start_in_json(capsys: pytest.CaptureFixture[str]):
    assert start_logging("error", "json") and not start_logging("error", "console")
    write_as_json("listening at http://127.0.0.1:1")
    line = json.loads(capsys.readouterr().err)
    assert (line["level"], line["event"]) == ("info", "listening at http://127.0.0.1:1") and line["time"]
