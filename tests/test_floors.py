"""The floors of docs/architecture.md hold: who may import whom, and what never comes with `import rlvr`."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr

ROOT = Path(rlvr.__file__).parent
FLOORS = {
    **dict.fromkeys(("cores", "draws", "files", "futures", "halt", "messages"), 0),
    **dict.fromkeys(("protocols", "registry", "tensors", "types"), 0),
    **dict.fromkeys(("algorithms", "http_line", "sandbox"), 1),
    **dict.fromkeys(("engine", "reward"), 2),
    **dict.fromkeys(("clients", "model_info", "renderers", "scoring"), 3),
    **dict.fromkeys(("rollout", "envs", "tracking", "store"), 4),
    **dict.fromkeys(("toy", "training"), 5),
    **dict.fromkeys(("build", "build_client", "config"), 6),
    **dict.fromkeys(("audit", "bench", "doctor", "service"), 7),
    "cli": 8,
    **dict.fromkeys(("__main__", "recipes", "run_rlvr"), 9),
}
# On one floor only these may meet: build turns config into objects.
BESIDE = {("build", "config"), ("build", "build_client"), ("build_client", "config")}
HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "peft",
    "datasets",
    "matplotlib",
    "scipy",
    "mlflow",
    "tensorboard",
)
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part(path: Path, root: Path = ROOT) -> str:
    """The top-level module or package of a file: `clients` for clients/local.py."""
    return path.relative_to(root).parts[0].removesuffix(".py")


def imported(path: Path, module_level: bool = False) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of every import; with `module_level` only of those that run when the file is imported."""
    todo: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write `from rlvr...`, not a relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif module_level and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        elif module_level and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo.extend(node.orelse)
            continue
        todo.extend(ast.iter_child_nodes(node))


def rises(path: Path, root: Path = ROOT) -> Iterator[str]:
    """What `path` imports from its own floor or a higher one. The modules of floor 0 may know each other."""
    own = part(path, root)
    for name, line in imported(path):
        if not name.startswith("rlvr.") or name == "rlvr.__version__":
            continue
        other, place = name.split(".")[1], f"{path.relative_to(root)}:{line}"
        if other not in FLOORS:  # `from rlvr import Score`: the exported names
            yield f"{place} imports {name}; import it from the module that defines it"
        elif other == own or (own, other) in BESIDE or FLOORS[own] == FLOORS[other] == 0:
            continue
        elif FLOORS[other] >= FLOORS[own]:
            yield f"{place} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})"


def test_every_file_has_a_floor():
    assert {part(path) for path in FILES} <= set(FLOORS)


def test_a_file_imports_only_from_lower_floors_or_its_own_package():
    assert [mistake for path in FILES for mistake in rises(path)] == []


def test_torch_is_imported_at_module_level_only_by_the_engine():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        if part(path) != "engine"
        for name, line in imported(path, module_level=True)
        if name.split(".")[0] in HEAVY
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import rlvr",
        "import rlvr.config, rlvr.tracking",
        "import rlvr.cli, sys; sys.argv = ['rlvr', '--help']; rlvr.cli.main()",
    ],
    ids=["import", "config", "help"],
)
def test_light_imports_stay_light(code: str):
    """`import rlvr` and `rlvr --help` load none of the heavy libraries."""
    report = f"import sys; print([m for m in {HEAVY} if m in sys.modules], file=sys.stderr)"
    script = f"try:\n    {code}\nexcept SystemExit as end:\n    assert not end.code, end.code\n{report}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"


def test_exported_names_are_sorted_and_there():
    assert rlvr.__all__ == sorted(rlvr.__all__)
    assert [name for name in rlvr.__all__ if getattr(rlvr, name, None) is None] == []


def test_no_file_is_too_long_to_read():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > 400} == {}


def test_the_rule_catches_a_neighbour_and_a_higher_floor_and_looks_into_functions(tmp_path: Path):
    source = tmp_path / "reward" / "fake.py"
    source.parent.mkdir()
    source.write_text(
        "import torch\nfrom rlvr.types import Score\ndef f():\n    from rlvr.engine import model\n"
        "    import rlvr.training\n    from rlvr import Task\n    from rlvr.reward import text\n"
    )
    assert sorted(rises(source, tmp_path)) == [
        "reward/fake.py:4 (floor 2) imports rlvr.engine.model (floor 2)",
        "reward/fake.py:5 (floor 2) imports rlvr.training (floor 5)",
        "reward/fake.py:6 imports rlvr.Task; import it from the module that defines it",
    ]
    assert sorted(imported(source, module_level=True)) == [("rlvr.types.Score", 2), ("torch", 1)]


def test_the_modules_a_user_names_are_there_after_importing_the_package():
    """`import rlvr; rlvr.algorithms`, without loading them before they are asked for."""
    code = "import sys, rlvr; assert 'rlvr.algorithms' not in sys.modules; rlvr.algorithms.PPO, rlvr.reward; rlvr.nope"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "module 'rlvr' has no attribute 'nope'" in done.stderr
