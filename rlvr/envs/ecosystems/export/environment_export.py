"""Writes an environment of ours as a package or folder of another project (`rlvr env export`).

    verifiers    an installable package with a taskset, or for episodes of several turns an environment
    openenv      a server, with openenv.yaml and the task API
    harbor       a folder for each task, with a verifier that needs nothing but Python

It is written beside its place, tried in a process of its own, and moved when it works: a failure leaves nothing behind.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlvr.core.registry import did_you_mean
from rlvr.envs.ecosystems.export.exportable import Exportable, ExportRequest, read_environment
from rlvr.envs.ecosystems.export.harbor_folders import write_harbor
from rlvr.envs.ecosystems.export.task_package import SIDES, play_turns
from rlvr.envs.environment_package import check_folder, check_package_name
from rlvr.envs.gym.gym_session import OUT_OF_RANGE

TRIED = 2  # tasks of each side that are played in a process of its own
TRIAL_SECONDS = 300.0
_VERDICT_SECONDS, _MOST_EPISODE_SECONDS, _LEAST_MARGIN = 30.0, 3600.0, 0.1  # the last two are bounds of OpenEnv's
MOST_FILES, MOST_BYTES = 1_000, 20 << 20  # of code that comes along
_TEMPLATES = Path(__file__).parent / "templates"

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = {distribution}
version = "0.1.0"
description = {description}
readme = "README.md"
requires-python = ">=3.11"
dependencies = {dependencies}
{more}"""

_VERIFIERS_PROJECT = """
[tool.hatch.build.targets.wheel]
only-include = {included}
"""

_VERIFIERS_README = """\
# {name}

Tasks of `{reference}` with their verifier, for verifiers 0.4: {train:,} to train on, {heldout:,} held out.

```bash
pip install -e .
vf-eval {name} --env.taskset.side heldout -n 20 -m MODEL --client.base-url http://127.0.0.1:8000/v1
```

`--env.taskset.side train` has the tasks to train on. In rlvr:

```yaml
env: {{name: "verifiers:{name}", kwargs: {{taskset: {{side: train}}, heldout: {{side: heldout}}}}}}
```
"""

_OPENENV_PROJECT = """
[project.scripts]
server = "{name}.server.app:main"

[tool.hatch.build.targets.wheel]
only-include = {included}

[tool.hatch.build.targets.wheel.sources]
"server" = "{name}/server"
"tasks" = "{name}/tasks"
"""

_OPENENV_YAML = """\
spec_version: 1
name: {name}
version: 0.1.0
type: space
runtime: fastapi
app: server.app:app
port: 8000
"""

# What `openenv validate` reads. The margin is the least that it takes: how far below the most an answer without content
# has to stay.
_OPENENV_VALIDATION = """\
validation:
  reward: {{range: {range}, oracle_tolerance: 0.0, floor_margin: {margin:g}}}
  resources: {{cpu: 1.0, memory_mb: 1024, disk_mb: 2048, episode_timeout_s: {seconds:g}}}
  capabilities:
    verifier: {{kind: reward_channel}}
    task_api: true
    declared_task_count: {{train: {train}, test: {heldout}}}
  types: {{tags: [{tag}]}}
"""

_OPENENV_README = """\
# {name}

A server of OpenEnv for tasks of `{reference}`: {train:,} in the split train, {heldout:,} in the split test.

```bash
pip install -e .
python -m server.app --port 8000          # in this folder
```

An action is a turn of the policy, `{{"message": "..."}}`. `MAX_CONCURRENT_ENVS` says how many sessions there may be. In
rlvr: `env.name=openenv:http://127.0.0.1:8000`.

{range}
"""
_RANGE = """\
A turn gives from {low:g} to {high:g}. `openenv validate . --level static` reads that from openenv.yaml, with the
resources, which you may change, and the number of tasks. Its other levels need Docker and a `Dockerfile`."""
_NO_RANGE = """\
The range of the rewards is not known, and `openenv validate` asks for it: export again with
`--reward-range LOW,HIGH`."""


def export_environment(request: ExportRequest, target: str, out: str | None = None) -> Path:
    """Write the environment into the new folder `out` (by default named by both), and return it.

    ValueError for what cannot be exported, a folder with files in it, and what does not work when it is tried.
    """
    if target not in TARGETS:
        raise ValueError(f"env export: --to {target!r}{did_you_mean(target, TARGETS)}; expected {', '.join(TARGETS)}")
    folder = Path(out if out is not None else choose_name(request.name, target)).expanduser().absolute()
    check_folder(folder)
    if target != "harbor":  # whose folder is no package
        check_package_name(folder)
    exportable = read_environment(request)
    with _new_folder(folder) as place:
        TARGETS[target](exportable, place, re.sub(r"[-.]", "_", folder.name))
    return folder


def choose_name(reference: str, target: str) -> str:
    """A name for the folder: of letters, digits and _ alone, whatever the environment is called."""
    words = re.sub(r"[^a-z0-9]+", "_", reference.lower()).strip("_")[:60].strip("_") or "environment"
    return f"{words if words[0].isalpha() else f'env_{words}'}_{target}"


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write to, which gets its name when all went well and is removed otherwise."""
    near = next(parent for parent in folder.parents if parent.is_dir())
    place = Path(tempfile.mkdtemp(prefix=".rlvr-export-", dir=near))
    try:
        yield place
        folder.parent.mkdir(parents=True, exist_ok=True)
        umask = os.umask(0)
        os.umask(umask)
        place.chmod(0o777 & ~umask)
        check_folder(folder)  # it may be there by now
        place.rename(folder)  # over an empty folder too
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _write_verifiers(exportable: Exportable, place: Path, name: str) -> None:
    _check_code(exportable, name)
    is_game = exportable.package.recipe.episodes is not None
    module, exported = ("game", ["RlvrGame", "RlvrGameTaskset"]) if is_game else ("taskset", ["RlvrRowTaskset"])
    exportable.package.save(place / name / "tasks")
    shutil.copyfile(_TEMPLATES / f"verifiers_{module}.py", place / name / f"{module}.py")
    (place / name / "__init__.py").write_text(
        f'"""Tasks of rlvr for verifiers."""\n\nfrom {name}.{module} import {", ".join(exported)}\n\n'
        f"__all__ = {json.dumps(exported)}\n"
    )
    tops = _copy_code(exportable, place)
    _write_project(exportable, place, name, ["verifiers>=0.4.0"], _VERIFIERS_PROJECT, [name, *tops])
    _write_readme(exportable, place, name, _VERIFIERS_README)
    _try_package(exportable, place, f"{name}/tasks")


def _write_openenv(exportable: Exportable, place: Path, name: str) -> None:
    _check_code(exportable, name, "server", "tasks")
    exportable.package.save(place / "tasks")
    (place / "server").mkdir()
    (place / "server" / "__init__.py").write_text('"""A server of OpenEnv."""\n')
    shutil.copyfile(_TEMPLATES / "openenv_app.py", place / "server" / "app.py")
    (place / "openenv.yaml").write_text(_OPENENV_YAML.format(name=name) + _write_validation(exportable))
    tops = _copy_code(exportable, place)
    _write_project(exportable, place, name, ["openenv>=0.10.0"], _OPENENV_PROJECT, ["server", "tasks", *tops])
    given = exportable.package.recipe.reward_range
    told = _RANGE.format(low=given[0], high=given[1]) if given else _NO_RANGE
    _write_readme(exportable, place, name, _OPENENV_README, range=told)
    _try_package(exportable, place, "tasks")


def _write_validation(exportable: Exportable) -> str:
    """The block that `openenv validate` reads; nothing where the range of the rewards is not known."""
    recipe, tasks = exportable.package.recipe, exportable.package.tasks
    if recipe.reward_range is None:
        return ""
    low, high = recipe.reward_range
    seconds = (recipe.max_turns + 1) * (recipe.episodes["seconds"] if recipe.episodes else _VERDICT_SECONDS)
    return _OPENENV_VALIDATION.format(
        range=[low, high],
        margin=max(_LEAST_MARGIN, _LEAST_MARGIN * (high - low)),
        seconds=min(seconds, _MOST_EPISODE_SECONDS),
        tag="multi-turn" if recipe.max_turns > 1 else "single-turn",
        **{side: len(tasks[side]) for side in SIDES},
    )


TARGETS: dict[str, Callable[[Exportable, Path, str], None]] = {
    "verifiers": _write_verifiers,
    "openenv": _write_openenv,
    "harbor": write_harbor,
}


def _write_project(
    exportable: Exportable, place: Path, name: str, needs: list[str], template: str, included: list[str]
) -> None:
    text = _PROJECT.format(
        distribution=json.dumps(name.replace("_", "-")),
        description=json.dumps("Tasks with a verifier, exported from rlvr"),
        dependencies=json.dumps(["rlvr", *needs, *exportable.distributions]),
        more=template.format(name=name, included=json.dumps(included)),
    )
    (place / "pyproject.toml").write_text(text)


def _write_readme(exportable: Exportable, place: Path, name: str, template: str, **more: str) -> None:
    counts = {side: len(exportable.package.tasks[side]) for side in SIDES}
    reference = re.sub(r"[`\s]+", " ", exportable.name)
    (place / "README.md").write_text(
        template.format(name=name, reference=reference, **counts, **more), encoding="utf-8"
    )


def _check_code(exportable: Exportable, *taken: str) -> None:
    for name in exportable.local:
        if name in taken:
            raise ValueError(
                f"env export: the module {name!r} comes along, so the package needs another name; give --out"
            )


def _copy_code(exportable: Exportable, place: Path) -> list[str]:
    """Put the modules that are not installed beside the package; what they are called there."""
    copied: list[str] = []
    for name, path in exportable.local.items():
        if path.is_file():
            shutil.copyfile(path, place / f"{name}.py")
            copied.append(f"{name}.py")
            continue
        files = [one for one in sorted(path.rglob("*")) if one.is_file() and not _is_passed_over(one, path)]
        if len(files) > MOST_FILES or sum(one.stat().st_size for one in files) > MOST_BYTES:
            raise ValueError(
                f"env export: the package {name!r} in {path} has more than {MOST_FILES:,} files or "
                f"{MOST_BYTES >> 20} MB; put what the environment needs into a smaller one, or install it"
            )
        for one in files:
            target = place / name / one.relative_to(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(one, target)
        copied.append(name)
    return copied


def _is_passed_over(file: Path, root: Path) -> bool:
    parts = file.relative_to(root).parts
    links = [root.joinpath(*parts[: count + 1]).is_symlink() for count in range(len(parts))]
    return any(links) or any(part == "__pycache__" or part.startswith(".") for part in parts)


def _try_package(exportable: Exportable, place: Path, tasks: str) -> None:
    """Play the first tasks in a process that has only the package and rlvr, and compare with this process."""
    asked = [
        (side, number, turns)
        for side in SIDES
        for number, task in enumerate(exportable.package.tasks[side][:TRIED])
        for turns in dict.fromkeys(((exportable.demonstrate(task) or "0",), ("",)))
    ]
    own = [play_turns(exportable.package, exportable.package.find(side, n), turns) for side, n, turns in asked]
    paths = os.pathsep.join([str(place), str(Path(__file__).resolve().parents[4])])
    env = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "rlvr.envs.ecosystems.export.task_package"]
    given = json.dumps({"folder": str(place / tasks), "asked": asked})
    with tempfile.TemporaryDirectory() as elsewhere:
        try:
            done = subprocess.run(
                command, input=given, env=env, cwd=elsewhere, capture_output=True, text=True, timeout=TRIAL_SECONDS
            )
            other = json.loads(done.stdout.splitlines()[-1])
        except subprocess.TimeoutExpired:
            raise ValueError(f"env export: the package did not answer within {TRIAL_SECONDS:g} s when tried") from None
        except (ValueError, IndexError):
            said = done.stderr.strip().splitlines()[-1:]
            raise ValueError(
                f"env export: the package does not work in a process of its own: {' '.join(said)}; what its modules "
                "need must be installed, or lie in the same package as they do"
            ) from None
    for (side, number, turns), here, there in zip(asked, own, other, strict=True):
        if OUT_OF_RANGE in here.get("error", ""):
            raise ValueError(f"env export: task {number} of {side}: {here['error']}; give --reward-range LOW,HIGH")
        if here != there:
            raise ValueError(
                f"env export: task {number} of {side} with the turns {turns!r:.80} gives {here!r:.200} here and "
                f"{there!r:.200} in a process of its own; an environment must give the same everywhere"
            )
