"""Unusual programs with their tests, what plain Python says of them, and what the sandbox says.

`tests/kit/sandbox_cases/honest.jsonl` holds programs that pass in plain Python; `self_reported` marks those with a test
that only asks what the answer's own objects say of themselves (`isinstance`, `is`, `callable`), which may be `invalid`.
`must_not_pass.jsonl` holds answers that must never pass: wrong ones, which fail in plain Python too, and `hostile`
ones, of which many fool plain Python. Where a case has an `honest` answer to the same tests, the other one is `invalid`
only if the honest one is: whether a test can be judged depends on the test alone. With `broken_test`, which uses a name
that it neither imports nor defines, both are `invalid`.

For each honest program there are three more answers, made here. Each has the same names and does nothing: its functions
return None, or an object that has no methods, or one that claims to equal, hold and be everything (`liar`).

    python -m tests.kit.unusual_programs                   # what the sandbox says, in each tier
    python -m tests.kit.unusual_programs --folder DIR      # of the two files in another folder
    python -m tests.kit.unusual_programs --verbose         # with the program, tests and detail of each surprise
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.core.types import Outcome
from rlvr.sandbox import Sandbox
from rlvr.sandbox.supervisor import TIERS
from rlvr.sandbox.verdict import Verdict

FOLDER = Path(__file__).parent / "sandbox_cases"
SECONDS = 5.0
SENTINEL = "every test held"

OBJECT = "class _Plain:\n    __slots__ = ()\n"
LIAR = """class _Liar:
    def _self(self, *args, **keywords): return self
    def _yes(self, *args, **keywords): return True
    __init__ = lambda self, *args, **keywords: None
    __call__ = __getattr__ = __getitem__ = __enter__ = __next__ = __await__ = __aenter__ = __anext__ = _self
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __matmul__ = _self
    __neg__ = __invert__ = __abs__ = __pow__ = __rpow__ = __iadd__ = __isub__ = __imul__ = __and__ = __or__ = _self
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes
    __exit__ = __instancecheck__ = __subclasscheck__ = __setitem__ = __delitem__ = _yes
    __hash__ = __len__ = __index__ = __int__ = lambda self: 1
    __iter__ = lambda self: iter((self,))
    __str__ = __repr__ = lambda self: ""
"""


@dataclass(frozen=True)
class ProgramCase:
    """An answer and its tests, which are texts or `{"input", "output"}`; the other fields as in the module's text."""

    name: str
    solution: str
    tests: tuple[Any, ...]
    setup: str = ""
    entry_point: str | None = None
    self_reported: bool = False
    hostile: bool = False
    broken_test: bool = False
    honest: str | None = None

    @property
    def job(self) -> dict[str, Any]:
        return {
            "solution": self.solution, "tests": list(self.tests), "setup": self.setup, "entry_point": self.entry_point,
            "timeout_s": SECONDS,
        }  # fmt: skip


def load_cases(path: Path) -> list[ProgramCase]:
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [ProgramCase(**{**row, "tests": tuple(row["tests"])}) for row in rows]


def plain_results(case: ProgramCase) -> list[bool]:
    """Which tests pass in plain Python, each in a process of its own."""
    return [_passes_plainly(case, test) for test in case.tests]


def plain_verdicts(cases: Iterable[ProgramCase]) -> list[list[bool]]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(plain_results, cases))


def _passes_plainly(case: ProgramCase, test: Any) -> bool:
    is_program = isinstance(test, dict)
    parts = [case.solution]
    if not is_program:
        parts += [
            case.setup,
            test,
            *([f"check({case.entry_point})"] if case.entry_point else []),
            f"print({SENTINEL!r})",
        ]
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "answer.py"
        script.write_text("\n".join(parts), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-X", "utf8", "-W", "ignore", str(script)], cwd=folder, capture_output=True,
                timeout=SECONDS, input=test["input"].encode() if is_program else b"", check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
    printed = done.stdout.decode(errors="replace")
    if done.returncode:
        return False
    if not is_program:
        return printed.endswith(SENTINEL + "\n")
    lines, expected = ([line.rstrip() for line in text.rstrip().split("\n")] for text in (printed, test["output"]))
    return lines == expected


def empty_answers(case: ProgramCase) -> list[ProgramCase]:
    """Answers with the names of `case` that do none of its work: see the module's text."""
    if any(isinstance(test, dict) for test in case.tests):
        return []
    names: list[str] = []
    for node in ast.parse(case.solution.removeprefix("\ufeff")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    nothing = "".join(f"def {name}(*args, **keywords): pass\n" for name in names)
    objects = OBJECT + "".join(f"def {name}(*args, **keywords): return _Plain()\n" for name in names)
    liars = LIAR + "".join(f"{name} = _Liar()\n" for name in names)
    made = {"nothing": nothing, "object": objects, "liar": liars}
    return [
        replace(case, name=f"{case.name}:{kind}", solution=text, honest=case.solution, hostile=kind == "liar")
        for kind, text in made.items()
    ]


def judge(cases: Sequence[ProgramCase], sandbox: Sandbox) -> list[Verdict]:
    return sandbox.verify_many([case.job for case in cases])


@dataclass(frozen=True)
class Surprise:
    """A case whose verdict is not the one that it must have, and why."""

    case: ProgramCase
    verdict: Verdict
    why: str

    def text(self, verbose: bool) -> str:
        line = f"{self.case.name}: {self.why}: {self.verdict.outcome.value} {self.verdict.reason} {self.verdict.detail}"
        if not verbose:
            return line[:150].replace("\n", " ")
        tests = "\n--\n".join(str(test) for test in self.case.tests)
        return f"{line}\n{self.case.solution}--\n{self.case.setup}{tests}\n"


def honest_surprises(cases: Sequence[ProgramCase], verdicts: Sequence[Verdict]) -> list[Surprise]:
    """Honest programs that are neither accepted nor refused as tests that cannot be judged."""
    pairs = zip(cases, verdicts, strict=True)
    return [
        Surprise(case, got, "honest") for case, got in pairs if got.outcome not in (Outcome.PASSED, Outcome.INVALID)
    ]


def other_surprises(
    cases: Sequence[ProgramCase], verdicts: Sequence[Verdict], honest: Sequence[Verdict | None]
) -> list[Surprise]:
    """Answers that pass, and answers whose test is `invalid` for them alone; `honest`: the honest answers' verdicts."""
    found: list[Surprise] = []
    for case, got, right in zip(cases, verdicts, honest, strict=True):
        if got.passed or got.outcome is Outcome.ERROR:
            found.append(Surprise(case, got, "must not pass"))
        elif case.broken_test and got.outcome is not Outcome.INVALID:
            found.append(Surprise(case, got, "the test is broken"))
        elif right is not None and (got.outcome is Outcome.INVALID) != (right.outcome is Outcome.INVALID):
            found.append(Surprise(case, got, f"the honest answer is {right.outcome.value} {right.reason}"))
    return found


def measure(
    sandbox: Sandbox, folder: Path = FOLDER, *, empty: bool = True
) -> dict[str, tuple[Counter[str], list[Surprise]]]:
    """Outcomes and surprises of the honest programs, of the others, and of the empty answers."""
    honest, others = load_cases(folder / "honest.jsonl"), load_cases(folder / "must_not_pass.jsonl")
    verdicts = judge(honest, sandbox)
    table = {"honest": (_outcomes(verdicts), honest_surprises(honest, verdicts))}

    given = [replace(case, solution=case.honest) for case in others if case.honest is not None]
    by_name = {case.name: got for case, got in zip(given, judge(given, sandbox), strict=True)}
    got = judge(others, sandbox)
    rights = [by_name.get(case.name) for case in others]
    table["must not pass"] = (_outcomes(got), other_surprises(others, got, rights))
    if empty:
        made = [(answer, right) for case, right in zip(honest, verdicts, strict=True) for answer in empty_answers(case)]
        got = judge([answer for answer, _ in made], sandbox)
        found = other_surprises([answer for answer, _ in made], got, [right for _, right in made])
        table["empty answers"] = (_outcomes(got), found)
    return table


def _outcomes(verdicts: Iterable[Verdict]) -> Counter[str]:
    return Counter(verdict.outcome.value for verdict in verdicts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--tiers", nargs="+", default=TIERS)
    parser.add_argument("--no-empty", action="store_true", help="leave out the empty answers")
    parser.add_argument("--verbose", action="store_true")
    asked = parser.parse_args()
    for tier in asked.tiers:
        with Sandbox([tier]) as sandbox:
            table = measure(sandbox, asked.folder, empty=not asked.no_empty)
        for name, (outcomes, surprises) in table.items():
            counts = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
            print(f"## {tier}, {name}: {sum(outcomes.values())}: {counts}; {len(surprises)} surprises")
            for surprise in surprises:
                print("  " + surprise.text(asked.verbose))


if __name__ == "__main__":
    main()
