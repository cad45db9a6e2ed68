"""What the answers of a session are compared with, as texts: the expected answer, the tests, the verifiers.

Exercised by tests/test_dashboard_sessions.py.
"""

from __future__ import annotations

from typing import Any

from rlvr.service.dashboard.dashboard_data import as_list, as_mapping, visible_text
from rlvr.store import Session


def reference_of(session: Session) -> list[tuple[str, str]]:
    """What the answers of a session are compared with: the expected answer, the tests, the verifiers it names."""
    if session.kind == "run":
        return []
    request, metrics = session.request, session.metrics
    answer = metrics.get("expected_answer") if request.get("answer") is None else request["answer"]
    sections = {
        "Expected answer": [] if answer is None else [str(answer)],
        "Tests": map(_describe_test, as_list(request.get("tests"))),
        "Tests from examples in the prompt": map(_describe_test, as_list(metrics.get("derived_tests"))),
        "Verifiers": map(_describe_verifier, as_list(request.get("verifiers"))),
    }
    return [(title, visible_text(text)) for title, lines in sections.items() if (text := "\n".join(lines))]


def _describe_test(test: Any) -> str:
    pair = as_mapping(test)
    return f"input:\n{pair.get('input')}\noutput:\n{pair.get('output')}" if pair else str(test)


def _describe_verifier(verifier: Any) -> str:
    name, weight, options = [*as_list(verifier), "", "", ""][:3]
    described = ", ".join(f"{key}={value!r}" for key, value in as_mapping(options).items())
    return f"{name} (weight {weight}){f': {described}' if described else ''}"
