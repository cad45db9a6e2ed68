"""The layers of docs/dev/architecture.md hold: who may import whom, and what never comes with `import rlvr`."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlvr

ROOT = Path(rlvr.__file__).parent
LAYERS = {
    "core": 0,
    **dict.fromkeys(("algorithms", "chat", "sandbox", "web"), 1),
    **dict.fromkeys(("engine", "reward"), 2),
    **dict.fromkeys(("clients", "compat.model_info", "compat.renderers", "recorder"), 3),
    **dict.fromkeys(("rollout", "envs", "tracking", "store"), 4),
    **dict.fromkeys(("compat", "training"), 5),
    "config": 6,
    "runs": 7,
    **dict.fromkeys(("audits", "benchmarks", "studies", "tinker_server"), 8),
    "service": 9,  # its dashboard shows studies
    "cli": 10,
    **dict.fromkeys(("__main__", "compat.recipes", "run_rlvr"), 11),
}
# Inside a package, from below. `*` are the parts that are not listed, which may import each other.
INNER_LAYERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "tinker_server": (("protocol",), ("backend",), ("http",), ("server_settings",), ("serve_engine",)),
    "tinker_server.protocol": (("errors", "proto", "server_limits"), ("wire",), ("schemas",), ("open_requests",)),
    "tinker_server.backend": (
        ("request_futures", "quotas"), ("storage",), ("runs",), ("sampling",), ("tinker_backend",)
    ),
    "tinker_server.http": (("*",), ("open_api",), ("app",)),
    "service": (
        ("service_metrics", "service_options", "session_problems"), ("settings", "learning"), ("models",),
        ("sessions",),
        ("generators", "dashboard"), ("http",), ("serve_service",), ("background_server",),
    ),
}  # fmt: skip
APART = {"service.evaluation"}  # a client of the service, which imports nothing of it
# What a part never imports, at any level of nesting.
FORBIDDEN = {
    "tinker_server.protocol": ("torch", "fastapi", "starlette", "uvicorn", "sqlite3", "rlvr.engine", "rlvr.store"),
    "tinker_server.backend": ("fastapi", "starlette", "uvicorn", "rlvr.web.middleware", "rlvr.web.server"),
    **dict.fromkeys(
        ("service.learning", "service.models", "service.sessions", "service.generators"),
        ("fastapi", "starlette", "uvicorn", "jinja2"),
    ),
}
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
    "wandb",
)
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def layer(module: str) -> tuple[str, int] | None:
    """(part, number) of a dotted name: the longest entry of LAYERS that it lies in; None for `rlvr` itself."""
    parts = module.removeprefix("rlvr.").split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(((name, LAYERS[name]) for name in names if name in LAYERS), None)


def module_name(path: Path, root: Path = ROOT) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def list_imports(path: Path, module_level: bool = False) -> tuple[tuple[str, int], ...]:
    """(dotted name, line) of every import; with `module_level` only of those that run when the file is imported."""
    return tuple(read_imports(path, module_level))


def read_imports(path: Path, module_level: bool) -> Iterator[tuple[str, int]]:
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


def upward(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Each import by `path` from another part of its own layer, or from a higher layer."""
    own, number = layer(module_name(path, root)) or ("", 0)
    for name, line in list_imports(path):
        if not name.startswith("rlvr.") or name == "rlvr.__version__":
            continue
        place = f"{path.relative_to(root)}:{line}"
        if (other := layer(name)) is None:  # `from rlvr import Score`: the exported names
            yield f"{place} imports {name}; import it from the module that defines it"
        elif other[0] != own and other[1] >= number:
            yield f"{place} (layer {number}) imports {name} (layer {other[1]})"


def inner_layer(module: str, package: str) -> tuple[str, int] | None:
    """(part, number) of a module inside `package`; None for one that is not in it, or that is the package itself."""
    if not module.startswith(f"{package}."):
        return None
    part = module.removeprefix(f"{package}.").split(".")[0]
    layers = INNER_LAYERS[package]
    found = next((number for number, parts in enumerate(layers) if part in parts), None)
    if found is not None:
        return part, found
    return next((("*", number) for number, parts in enumerate(layers) if "*" in parts), None)


def upward_inside(path: Path, root: Path = ROOT) -> Iterator[str]:
    """Each import by `path` from a higher layer of its own package, or from a neighbour of its own layer there."""
    module = module_name(path, root)
    for package in INNER_LAYERS:
        if (own := inner_layer(module, package)) is None:
            continue
        for name, line in list_imports(path):
            other = inner_layer(name.removeprefix("rlvr."), package) if name.startswith("rlvr.") else None
            if other is not None and other[0] != own[0] and other[1] >= own[1]:
                yield f"{path.relative_to(root)}:{line} (layer {own[1]} of {package}) imports {name} (layer {other[1]})"


def imports_forbidden(path: Path, root: Path = ROOT) -> Iterator[str]:
    module = module_name(path, root)
    banned = [name for part, names in FORBIDDEN.items() if f"{module}.".startswith(f"{part}.") for name in names]
    for name, line in list_imports(path):
        if any(f"{name}.".startswith(f"{one}.") for one in banned):
            yield f"{path.relative_to(root)}:{line} imports {name}"


def test_every_part_of_a_layered_package_has_a_layer():
    modules = {module_name(path) for path in FILES}
    for package in INNER_LAYERS:
        parts = {m.removeprefix(f"{package}.").split(".")[0] for m in modules if m.startswith(f"{package}.")}
        assert [
            p for p in parts if inner_layer(f"{package}.{p}", package) is None and f"{package}.{p}" not in APART
        ] == []
        named = {part for layer in INNER_LAYERS[package] for part in layer}
        assert named - parts <= {"*"}, f"{package} has no {named - parts}"


def test_a_file_imports_only_from_lower_layers_of_its_own_package():
    assert [mistake for path in FILES for mistake in upward_inside(path)] == []


def test_folders_beside_each_other_import_in_one_direction():
    """In every package: of two folders in one folder, at most one imports the other, also by way of a third."""
    files = {f"rlvr.{module_name(path)}": path.relative_to(ROOT).parent for path in FILES}
    graph: dict[Path, set[Path]] = {}
    for path in FILES:
        own = path.relative_to(ROOT).parent
        for name, _ in list_imports(path):
            other = files.get(name) or files.get(name.rpartition(".")[0])
            if other is not None and own != other and own.parent == other.parent:
                graph.setdefault(own, set()).add(other)
    graphlib.TopologicalSorter(graph).prepare()


def test_no_part_imports_what_it_is_to_be_free_of():
    assert [mistake for path in FILES for mistake in imports_forbidden(path)] == []


@pytest.mark.parametrize(
    ("file", "code", "found"),
    [
        ("tinker_server/protocol/new.py", "from rlvr.tinker_server.backend.quotas import OwnerQuotas", "layer 1"),
        ("tinker_server/backend/runs/new.py", "def f():\n    from rlvr.tinker_server.http import app", "layer 2"),
        ("tinker_server/backend/storage/new.py", "import rlvr.tinker_server.backend.runs.executor", "layer 2"),
        ("tinker_server/http/dependencies.py", "from rlvr.tinker_server.http.open_api import open_routes", "layer 1"),
        ("service/sessions/new.py", "from rlvr.service.http.runtime import Service", "layer 5"),
        ("service/dashboard/new.py", "from rlvr.service.generators import build_generator", "layer 4"),
        ("tinker_server/backend/new.py", "from fastapi import Request", "fastapi"),
        ("tinker_server/protocol/new.py", "def f():\n    import torch.nn", "torch"),
    ],
)
def test_the_rule_inside_a_package_finds_a_planted_import(tmp_path: Path, file: str, code: str, found: str):
    source = tmp_path / file
    source.parent.mkdir(parents=True)
    source.write_text(f"{code}\n")
    [mistake] = [*upward_inside(source, tmp_path), *imports_forbidden(source, tmp_path)]
    assert found in mistake and file in mistake


def test_every_file_has_a_layer():
    assert [str(path) for path in FILES if layer(module_name(path)) is None] == []


def test_a_file_imports_only_from_lower_layers_or_its_own_package():
    assert [mistake for path in FILES for mistake in upward(path)] == []


def test_torch_is_imported_at_module_level_only_by_the_engine():
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in FILES
        if not module_name(path).startswith("engine")
        for name, line in list_imports(path, module_level=True)
        if name.split(".")[0] in HEAVY
    ]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import rlvr",
        "import rlvr.config, rlvr.tracking",
        "import rlvr.cli.main, sys; sys.argv = ['rlvr', '--help']; rlvr.cli.main.main()",
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


def test_an_exported_name_that_needs_torch_says_how_to_install_it():
    code = "import sys; sys.modules['torch'] = None; import rlvr; rlvr.Datum; rlvr.LoraConfig; rlvr.Engine"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "rlvr.Engine needs torch: pip install 'rlvr[train]'" in done.stderr, done.stderr


def test_no_test_file_imports_another():
    """What tests share is in files of its own, which pytest does not collect."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    found = [
        f"{path.name}:{line} imports {name}"
        for path in files
        for name, line in list_imports(path)
        if name.startswith(("tests.", "test_")) and any(part.startswith("test_") for part in name.split(".")[:3])
    ]
    assert found == []


def test_exported_names_are_sorted_and_there():
    assert rlvr.__all__ == sorted(rlvr.__all__)
    assert [name for name in rlvr.__all__ if getattr(rlvr, name, None) is None] == []


def test_no_file_is_too_long_to_read():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: n for name, n in lengths.items() if n > 650} == {}


def test_the_rule_catches_a_neighbour_and_a_higher_layer_and_looks_into_functions(tmp_path: Path):
    source = tmp_path / "reward" / "fake.py"
    source.parent.mkdir()
    source.write_text(
        "import torch\nfrom rlvr.core.types import Score\ndef f():\n    from rlvr.engine import model\n"
        "    import rlvr.training\n    from rlvr import Task\n    from rlvr.reward import text\n"
    )
    assert sorted(upward(source, tmp_path)) == [
        "reward/fake.py:4 (layer 2) imports rlvr.engine.model (layer 2)",
        "reward/fake.py:5 (layer 2) imports rlvr.training (layer 5)",
        "reward/fake.py:6 imports rlvr.Task; import it from the module that defines it",
    ]
    assert sorted(list_imports(source, module_level=True)) == [("rlvr.core.types.Score", 2), ("torch", 1)]


def test_the_modules_a_user_names_are_there_after_importing_the_package():
    """`import rlvr; rlvr.algorithms`, without loading them before they are asked for."""
    code = "import sys, rlvr; assert 'rlvr.algorithms' not in sys.modules; rlvr.algorithms.PPO, rlvr.reward; rlvr.nope"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "module 'rlvr' has no attribute 'nope'" in done.stderr


def test_the_picture_of_the_layers_shows_every_part() -> None:
    picture = (ROOT.parent / "docs" / "images" / "layers.svg").read_text(encoding="utf-8")
    drawn = set(re.findall(r'font-weight="bold"[^>]*>([\w.]+)<', picture))
    assert drawn == set(LAYERS) - {"__main__", "run_rlvr", "compat.model_info", "compat.renderers"}


def test_every_file_that_the_architecture_page_names_exists() -> None:
    page = (ROOT.parent / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"`([a-z_]+/[\w./]*)`", page)) - {
        "rlvr/",
        "benchmarks/",
        "tests/project/test_layers.py",
        "tests/training/test_kill.py",
    }
    assert len(paths) > 50
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []


def test_no_two_files_import_each_other() -> None:
    """No cycle among the files of the package, imports inside functions included."""
    files = {f"rlvr.{module_name(path)}": path for path in FILES}
    graph = {
        name: {
            found
            for target, _ in list_imports(path)
            if (found := next((t for t in (target, target.rpartition(".")[0]) if t in files), name)) != name
        }
        for name, path in files.items()
    }
    sorter = graphlib.TopologicalSorter(graph)
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))
