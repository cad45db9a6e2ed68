"""The wheel and the source distribution, as `make dist` builds them: what they hold, and that the wheel alone trains.

The wheel is installed by pip into an environment of its own that has nothing but it and the distributions that its
metadata asks for: those of this interpreter, linked. That takes seconds and no network, and fails if the package
imports what the extra `train` does not name. With `RLVR_TEST_INSTALL=1` pip installs everything from the package index
into an empty environment of every Python from 3.11 to 3.13 that is found: minutes, for a release.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
SHORT = [
    "--config-name=arithmetic", "sft.steps=2", "sft.batch_size=8", "training.steps=2", "training.prompts_per_step=2",
    "training.group_size=4", "evaluation.tasks=8", "evaluation.samples=2", "evaluation.every=0",
    "evaluation.interim_tasks=4",
]  # fmt: skip
FULL = os.environ.get("RLVR_TEST_INSTALL") == "1"
VERSIONS = ("3.11", "3.12", "3.13")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both distributions, built from a copy of the clone."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)],
        cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


def clean_environment() -> dict[str, str]:
    """Without what leads Python to this clone or this environment."""
    return {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}


def check_run(*command: str, cwd: Path) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=clean_environment(), capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def find_requirements(
    lines: Iterable[str], extras: frozenset[str], seen: set[tuple[str, frozenset[str]]] | None = None
) -> set[str]:
    """The distributions that `Requires-Dist` lines ask for under these extras, at every depth."""
    seen = set() if seen is None else seen
    for line in lines:
        need = Requirement(line)
        key = (need.name, frozenset({"", *need.extras}))
        if key in seen or (need.marker and not any(need.marker.evaluate({"extra": extra}) for extra in extras)):
            continue
        seen.add(key)
        find_requirements(metadata.requires(need.name) or (), key[1], seen)
    return {name for name, _ in seen}


def link_distribution(name: str, site: Path) -> None:
    """Link what a distribution installed at the top of site-packages into another."""
    found = metadata.distribution(name)
    tops = {
        Path(str(file)).parts[0] for file in found.files or () if Path(str(file)).parts[0] not in ("..", "__pycache__")
    }
    for top in tops:
        if not (site / top).exists():
            (site / top).symlink_to(Path(str(found.locate_file(top))))


def find_pythons() -> Iterator[tuple[str, str]]:
    """(version, interpreter) of each supported Python on the path that really starts."""
    for version in VERSIONS:
        for folder in os.environ.get("PATH", "").split(os.pathsep):
            path = shutil.which(f"python{version}", path=folder)
            code = "import sys, ensurepip, venv; print(sys.base_prefix == sys.prefix)"
            if path and subprocess.run([path, "-c", code], capture_output=True, check=False).returncode == 0:
                yield version, path
                break


def train(environment: Path, cwd: Path) -> None:
    """A shortened run of `arithmetic` by the command of the environment, in a folder that is not the clone."""
    command = str(environment / "bin" / "rlvr")
    where = check_run(str(environment / "bin" / "python"), "-c", "import rlvr; print(rlvr.__file__)", cwd=cwd)
    assert where.startswith(str(environment)), f"{where} is not the installed wheel"
    assert "FINAL RESULTS" in check_run(command, "train", *SHORT, cwd=cwd)
    summary = json.loads((cwd / "runs" / "arithmetic" / "summary.json").read_text())
    assert summary["tasks"] == 8


def test_the_wheel_trains_beside_only_what_its_metadata_asks_for(dist: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    check_run(sys.executable, "-m", "venv", str(environment), cwd=tmp_path)
    python = str(environment / "bin" / "python")
    [wheel] = dist.glob("*.whl")
    check_run(python, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", str(wheel), cwd=tmp_path)
    [site] = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as files:
        [name] = [n for n in files.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)]
        lines = email.message_from_bytes(files.read(name)).get_all("Requires-Dist", [])
    for requirement in find_requirements(lines, frozenset({"", "train"})):
        link_distribution(requirement, site)
    work = tmp_path / "work"
    work.mkdir()
    train(environment, work)
    missing = check_run(python, "-c", "import importlib.util as u; print(u.find_spec('pytest'))", cwd=work)
    assert missing.strip() == "None", "the environment must not hold what the wheel does not ask for"


@pytest.mark.skipif(not FULL, reason="set RLVR_TEST_INSTALL=1: it installs from the package index, minutes for each")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("version", VERSIONS)
def test_pip_installs_it_into_an_empty_environment(version: str, dist: Path, tmp_path: Path) -> None:
    python = dict(find_pythons()).get(version)
    if python is None:
        pytest.skip(f"no python{version} on the path")
    environment, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    began = time.monotonic()
    check_run(python, "-m", "venv", str(environment), cwd=tmp_path)
    [wheel] = dist.glob("*.whl")
    pip = [str(environment / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    check_run(*pip, "-c", str(ROOT / "constraints.txt"), f"{wheel}[train]", cwd=tmp_path)
    installed = time.monotonic()
    train(environment, work)
    size = int(check_run("du", "-sm", str(environment), cwd=tmp_path).split()[0])
    packages = len(list(environment.glob("lib/python*/site-packages/*.dist-info")))
    print(
        f"{version}: {packages} packages, {size} MB, {installed - began:.0f} s to install, "
        f"{time.monotonic() - installed:.0f} s to run"
    )


def test_the_wheel_holds_the_package_and_nothing_else(dist: Path) -> None:
    """Every file of `rlvr/` that git would carry, the license, and the wheel's own records."""
    [wheel] = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = {n for n in files.namelist() if n.startswith("rlvr/")}
        records = {n.partition(".dist-info/")[2] for n in files.namelist() if not n.startswith("rlvr/")}
    assert names == package_files()
    assert {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"} == records


def test_the_source_distribution_holds_what_a_clone_needs_and_no_results(dist: Path) -> None:
    [archive] = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {m.name.partition("/")[2] for m in files.getmembers() if m.isfile()}
    wanted = {"README.md", "LICENSE", "CITATION.cff", "SECURITY.md", "constraints.txt", "Makefile", "pyproject.toml"}
    assert wanted <= names and package_files() <= names
    assert {
        "tests/project/test_wheel.py",
        "docs/index.md",
        "examples/run_rlvr.py",
        "Dockerfile",
        "benchmarks/run.py",
    } <= names
    assert not [n for n in names if n.startswith((".ci/", "runs/", "benchmarks/results/", ".venv/", "site/"))]
    assert "rlvr/configs/arithmetic.yaml" in names
    assert archive.stat().st_size < 5 << 20


def package_files() -> set[str]:
    found = (path for path in (ROOT / "rlvr").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in found}
