"""Functions with many parameters and records with many fields have a reason; the count of lines refuses growth."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr

ROOT = Path(rlvr.__file__).parent
SCRIPT = ROOT.parent / "scripts" / "count_lines.py"
MOST_PARAMETERS, MOST_FIELDS = 8, 12  # `self` and `cls` are not counted

COMMAND = "the options of a command line"
SETTINGS = "settings of a config, each a key"
WIRE = "the fields of a request or response"
TABLE = "the columns of a table"
STATE = "the state of one long-lived object, which its methods share"
PARAMETERS = {
    "Loop.__init__": "a run without a config: each is a setting of a run, by the same name",
    "update": "rlvr.update: an update without a config; each but the first three has a default",
    "verify": COMMAND,
    "audit": COMMAND,
    "check_env": COMMAND,
    "evaluate_service": COMMAND,
    "export": COMMAND,
    "bench": COMMAND,
    "serve": COMMAND,
    "study": COMMAND,
    "serve_engine": COMMAND,
    "dataset": SETTINGS,
    "textarena_source": SETTINGS,
    "harbor_source": SETTINGS,
    "RefineSource.__init__": SETTINGS,
    "AdversarialSource.__init__": SETTINGS,
    "AgentSource.__init__": SETTINGS,
    "ToolSource.__init__": SETTINGS,
    "VerifiersSource.__init__": SETTINGS,
    "VerdictSource.__init__": SETTINGS,
    "TrainingRuns.load_weights": WIRE,
    "build_experience": TABLE,
    "ExperienceQueries.experiences": "each narrows a query, and callers name them",
    "Engine.enqueue": "what the Tinker protocol's `sample` asks for, under its names",
    "attend": "the interface of `transformers` for attention functions",
    "connect": "where and how to reach a server, and what to train there; callers name them",
    "SourceDataset.__init__": "the interface of the cookbook's datasets, and what a task source needs",
    "RowSource.__init__": "the parts of a task source, which environments name",
    "estimate_memory": "the quantities of one formula, which callers name",
    "judge_in_chunks": "what a sampled and judged task depends on, which callers name",
    "evaluate": "everything an evaluation depends on, which callers name",
    "Plan.__init__": "what the reading of a test file found, one part each",
    "Sandbox.verify": "a program, its tests, and how they are run; users name them",
    "VerificationJob.__init__": "those of `Sandbox.verify`",
}
FIELDS = {
    "TaskSource": "what an environment may say of itself, each with a default",
    "RewardSpec": "what a reward may say of itself, each with a default",
    "RunConfig": "the sections of a config",
    "TrainArguments": "the arguments of `rlvr.train`, which an editor completes",
    "ServeArguments": "the arguments of `rlvr.serve`, which an editor completes",
    "ChatRequest": "what a request of any dialect may ask for",
    "TrainingOptions": SETTINGS,
    "ClusterOptions": SETTINGS,
    "Settings": SETTINGS,
    "ServerLimits": SETTINGS,
    "Config": "the words of a recipe, which are those of the cookbook",
    "SessionRequest": WIRE,
    "SampleRequest": WIRE,
    "DetailedMetrics": WIRE,
    "ExperienceRow": WIRE,
    "SessionRow": WIRE,
    "SessionResult": WIRE,
    "AnswerRow": TABLE,
    "Session": TABLE,
    "Experience": TABLE,
    "Trajectory": "the record that travels from sampling over judging to learning, and that users' rewards read",
    "SamplingRequest": STATE,
    "_Episode": STATE,
    "Service": STATE,
    "LiveSession": STATE,
    "SessionJob": "all that a generator is told of a session, and nothing else",
    "RunQueue": STATE,
    "SampleRequests": STATE,
    "CheckedEnvironment": STATE,
}


def count_parameters(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, int]]:
    """(name, number of parameters) of every function; a method's name has its class in front."""
    for node in ast.iter_child_nodes(tree):
        name = inside
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = f"{inside}{node.name}"
            given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            yield name, len([argument for argument in given if argument not in ("self", "cls")])
        if isinstance(node, ast.ClassDef):
            name = f"{inside}{node.name}"
        yield from count_parameters(node, f"{name}." if name != inside else inside)


def count_fields(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, number of fields) of every class: the annotated names in its body that belong to an instance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            own = [part for part in node.body if isinstance(part, ast.AnnAssign)]
            yield node.name, len([part for part in own if "ClassVar" not in ast.unparse(part.annotation)])


@functools.cache
def oversized() -> tuple[set[str], set[str]]:
    """The functions with many parameters and the records with many fields, of all files, which are parsed once."""
    functions, records = set[str](), set[str]()
    for path in ROOT.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions |= {name for name, count in count_parameters(tree) if count > MOST_PARAMETERS}
        records |= {name for name, count in count_fields(tree) if count > MOST_FIELDS}
    return functions, records


def test_functions_with_many_parameters_are_listed_with_a_reason() -> None:
    found = oversized()[0]
    assert found - PARAMETERS.keys() == set(), "group what belongs together, or say here why it is better as it is"
    assert PARAMETERS.keys() - found == set(), "these have fewer parameters by now: take them off the list"


def test_records_with_many_fields_are_listed_with_a_reason() -> None:
    found = oversized()[1]
    assert found - FIELDS.keys() == set(), "group what belongs together, or say here why it is better as it is"
    assert FIELDS.keys() - found == set(), "these have fewer fields by now: take them off the list"


def test_parameters_of_methods_and_inner_functions_are_counted() -> None:
    code = "class A:\n    x: int\n    y: ClassVar[int]\n    def f(self, a, *, b):\n        def g(c): ...\n"
    assert list(count_parameters(ast.parse(code))) == [("A.f", 2), ("A.f.g", 1)]
    assert list(count_fields(ast.parse(code))) == [("A", 1)]


def count(folder: Path, budget: str) -> subprocess.CompletedProcess[str]:
    """Run the script on a folder with one package of two lines."""
    (folder / "rlvr" / "part").mkdir(parents=True, exist_ok=True)
    (folder / "rlvr" / "part" / "a.py").write_text("x = 1\n\n")
    (folder / "scripts").mkdir(exist_ok=True)
    (folder / "scripts" / "line_budget.txt").write_text(budget)
    (folder / "scripts" / "count_lines.py").write_text(SCRIPT.read_text(encoding="utf-8"))
    command = [sys.executable, str(folder / "scripts" / "count_lines.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("budget", "code", "expected"),
    [
        ("part 2 as it was\n", 0, "part"),
        ("part 1 as it was\n", 1, "part: 2 lines, budget 1"),
        ("other 9 as it was\n", 1, "part: no budget"),
        ("part 2 as it was\nother 9 as it was\n", 1, "other: no such package"),
        ("part 2\n", 1, "expected a package, its lines and a sentence"),
    ],
)
def test_a_package_beyond_its_budget_is_refused(tmp_path: Path, budget: str, code: int, expected: str) -> None:
    counted = count(tmp_path, budget)
    assert counted.returncode == code and expected in counted.stdout + counted.stderr
