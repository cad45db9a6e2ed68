"""What an answer is compared with, as titles and texts: the expected answer, the tests, the verifiers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.service.dashboard.dashboard_data import as_list, as_mapping, visible_text
from rlvr.store import Session

Reference = list[tuple[str, str]]


def reference_of_session(session: Session) -> Reference:
    """The reference answer, tests and verifiers of a session, from its request and what was derived from that."""
    if session.kind == "run":
        return []
    request, metrics = session.request, session.metrics
    answer = metrics.get("expected_answer") if request.get("answer") is None else request["answer"]
    return _sections(answer, request.get("tests"), metrics.get("derived_tests"), request.get("verifiers"))


def reference_of_row(row: Mapping[str, Any]) -> Reference:
    """From a row of a run's `rollouts/`."""
    reference = as_mapping(row.get("reference"))
    return _sections(reference.get("answer"), reference.get("tests"))


def _sections(answer: Any, tests: Any, derived: Any = None, verifiers: Any = None) -> Reference:
    sections: dict[str, Sequence[str]] = {
        "Expected answer": [] if answer is None else [str(answer)],
        "Tests": [_describe_test(test) for test in as_list(tests)],
        "Tests from examples in the prompt": [_describe_test(test) for test in as_list(derived)],
        "Verifiers": [_describe_verifier(verifier) for verifier in as_list(verifiers)],
    }
    return [(title, visible_text(text)) for title, lines in sections.items() if (text := "\n".join(lines))]


def _describe_test(test: Any) -> str:
    pair = as_mapping(test)
    return f"input:\n{pair.get('input')}\noutput:\n{pair.get('output')}" if pair else str(test)


def _describe_verifier(verifier: Any) -> str:
    name, weight, options = [*as_list(verifier), "", "", ""][:3]
    described = ", ".join(f"{key}={value!r}" for key, value in as_mapping(options).items())
    return f"{name} (weight {weight}){f': {described}' if described else ''}"
