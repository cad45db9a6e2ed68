"""Honest programs pass in the sandbox or their test is `invalid`; what plain Python refuses never passes there.

The cases are in `tests/kit/sandbox_cases/`; `tests/kit/unusual_programs.py` judges them and prints the table.
The quick tests take a part of them in the first tier, the slow ones all in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from rlvr.core.types import Outcome
from rlvr.sandbox import Sandbox
from rlvr.sandbox.supervisor import NoTier
from tests.kit.unusual_programs import (
    FOLDER,
    ProgramCase,
    Surprise,
    empty_answers,
    honest_surprises,
    judge,
    load_cases,
    other_surprises,
    plain_verdicts,
)  # fmt: skip

# Honest programs that the sandbox fails in one of the tiers. A name here must not be added lightly.
NOT_JUDGED = {"temp_file_roundtrip"}  # there is no folder for files in the landlock tier
# It writes frames with a value that it guessed, which is no more than returning the guess.
GUESSES = {"writes_to_every_channel"}
HONEST = [case for case in load_cases(FOLDER / "honest.jsonl") if case.name not in NOT_JUDGED]
OTHERS = [case for case in load_cases(FOLDER / "must_not_pass.jsonl") if case.name not in GUESSES]
ACCEPTED = 0.97  # of the honest programs whose tests ask for more than what the answer's objects say of themselves


@pytest.fixture(scope="module", params=("namespaces", "landlock"))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    try:
        made = Sandbox((request.param,))
    except NoTier as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    with made:
        yield made


def texts(surprises: Sequence[Surprise]) -> str:
    return "\n".join(surprise.text(verbose=False) for surprise in surprises)


def check_truth(honest: Sequence[ProgramCase], others: Sequence[ProgramCase]) -> None:
    right = [replace(case, solution=case.honest) for case in others if case.honest and not case.broken_test]
    refused = [
        case.name
        for case, held in zip([*honest, *right], plain_verdicts([*honest, *right]), strict=True)
        if not all(held)
    ]
    assert not refused, f"plain Python refuses {refused}"
    wrong = [case for case in others if not case.hostile]
    accepted = [case.name for case, held in zip(wrong, plain_verdicts(wrong), strict=True) if all(held)]
    assert not accepted, f"plain Python accepts {accepted}"


def check_honest(sandbox: Sandbox, cases: Sequence[ProgramCase], share: float) -> None:
    """None fails, and of those whose tests do not rest on the objects' own word at least `share` passes."""
    verdicts = judge(cases, sandbox)
    assert not (found := honest_surprises(cases, verdicts)), texts(found)
    decided = [(case, got) for case, got in zip(cases, verdicts, strict=True) if not case.self_reported]
    refused = [Surprise(case, got, "not accepted") for case, got in decided if not got.passed]
    assert len(refused) <= (1 - share) * len(decided), texts(refused)


def check_others(sandbox: Sandbox, cases: Sequence[ProgramCase]) -> None:
    """None passes, and an answer's test is `invalid` only if it is for an honest answer as well."""
    given = [replace(case, solution=case.honest) for case in cases if case.honest is not None]
    by_name = {case.name: got for case, got in zip(given, judge(given, sandbox), strict=True)}
    got = judge(cases, sandbox)
    found = other_surprises(cases, got, [by_name.get(case.name) for case in cases])
    assert not found, texts(found)
    broken = {case.name: by_name[case.name].outcome for case in cases if case.broken_test}
    assert set(broken.values()) <= {Outcome.INVALID}, broken


def test_the_cases_are_many_and_have_names_of_their_own():
    names = [case.name for case in HONEST]
    assert len(set(names)) == len(names) >= 320
    others = [case.name for case in OTHERS]
    assert len(set(others)) == len(others) >= 150
    assert sum(case.self_reported for case in HONEST) <= 0.03 * len(HONEST)


def test_plain_python_agrees_with_a_part_of_the_cases():
    check_truth(HONEST[::16], OTHERS[::8])


@pytest.mark.slow
def test_plain_python_agrees_with_the_cases():
    check_truth(HONEST, OTHERS)
    # Nothing that does no work passes, but for the tests that rest on the objects' own word: these tests can fail.
    empty = [made for case in HONEST if not case.self_reported for made in empty_answers(case) if not made.hostile]
    passed = [case.name for case, held in zip(empty, plain_verdicts(empty), strict=True) if all(held)]
    assert not passed


@pytest.mark.parametrize("sandbox", ["namespaces"], indirect=True)
def test_honest_programs_of_every_kind_pass(sandbox: Sandbox):
    check_honest(sandbox, HONEST[::4], 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", ["namespaces"], indirect=True)
def test_what_plain_python_refuses_does_not_pass(sandbox: Sandbox):
    check_others(sandbox, OTHERS[::2])


@pytest.mark.slow
def test_all_honest_programs_pass(sandbox: Sandbox):
    check_honest(sandbox, HONEST, ACCEPTED)


@pytest.mark.slow
def test_nothing_passes_that_plain_python_refuses(sandbox: Sandbox):
    check_others(sandbox, OTHERS)


@pytest.mark.slow
def test_answers_that_do_nothing_pass_no_test(sandbox: Sandbox):
    honest = judge(HONEST, sandbox)
    made = [(empty, right) for case, right in zip(HONEST, honest, strict=True) for empty in empty_answers(case)]
    answers = [empty for empty, _ in made]
    found = other_surprises(answers, judge(answers, sandbox), [right for _, right in made])
    assert not found, texts(found)
