"""`rlvr env init`: the package that it writes works as it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlvr.envs.environment_package import CONTRACTS, write_package
from tests.kit.slow_cases import mark_slow_but


@pytest.mark.parametrize("contract", mark_slow_but(1, CONTRACTS))
def test_the_package_is_found_by_its_name_and_its_tests_pass(tmp_path: Path, contract: str) -> None:
    name = f"my_{contract}_of_tests"
    root = tmp_path / name.replace("_", "-")
    files = write_package(str(root), contract)
    assert [path.relative_to(root).parts[0] for path in files] == ["pyproject.toml", "README.md", name, name, "tests"]
    info = root / f"{name}-0.1.0.dist-info"  # what `pip install -e` writes
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(f"[rlvr.plugins]\n{name} = {name}\n")
    assert f'{name} = "{name}"' in (root / "pyproject.toml").read_text()
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH"), os.getcwd()])])
    program = (
        "import json; from rlvr.envs import resolve_environment; "
        f"source = resolve_environment({name!r}); "
        "print(json.dumps([source.reward, source.max_turns, len(source.heldout(3))]))"
    )
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", program], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reward, turns, heldout = json.loads(done.stdout)
    assert heldout == 3 and (reward, turns) == {
        "game": ("environment", 5), "tools": ("environment", 4), "rows": (name, 1),
    }[contract]  # fmt: skip
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(root / "tests")]
    done = subprocess.run(words, env=environ, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_what_cannot_be_a_package_is_refused(tmp_path: Path) -> None:
    for wrong in ("My_game", "2game", "class", "a b"):
        with pytest.raises(ValueError, match="cannot name a package"):
            write_package(str(tmp_path / wrong))
    with pytest.raises(ValueError, match="contract='gym', expected one of game, tools, rows"):
        write_package(str(tmp_path / "mine"), "gym")
    write_package(str(tmp_path / "mine"))
    with pytest.raises(ValueError, match="is not empty"):
        write_package(str(tmp_path / "mine"))
