"""Task folders of Harbor from tasks of one turn: the policy writes its answer to a file, which the verifier judges.

    train/00001-ID/instruction.md, task.toml, environment/Dockerfile, tests/test.sh, tests/judge.pyz, tests/task.json
    heldout/00001-ID/...

`judge.pyz` has the verifier's own code, which needs nothing but Python 3.11: no image is built, and no package is
installed. What the tests know lies in `tests` and `solution` alone, which no command of the policy sees.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any

from rlvr.core.types import Outcome, Task
from rlvr.envs.ecosystems.export.exportable import Exportable, find_module, is_installed
from rlvr.envs.ecosystems.export.task_package import SIDES, write_prompt, write_row
from rlvr.reward import Reward, known_rewards
from rlvr.reward.registry import reward_spec
from rlvr.reward.signatures import Case

TRIED = 1  # tasks of each side that the archive judges before anything is kept
JUDGE_SECONDS = 60.0
_JUDGE = Path(__file__).parent / "templates" / "harbor_judge.py"
_DATE = (2020, 1, 1, 0, 0, 0)  # in the archive, so that equal ones have equal bytes
_REWARD_PACKAGE = '''"""The part of the package that judges."""

from rlvr.reward.registry import Reward, known_rewards, options_of, register_reward, resolve_reward

__all__ = ["Reward", "known_rewards", "options_of", "register_reward", "resolve_reward"]
'''
_INSTRUCTION = """\
{prompt}

Write your answer, and nothing else, to the file `/app/answer.txt`.
"""
_TEST = """\
#!/bin/bash
# Judges /app/answer.txt and writes the reward. The archive needs Python 3.11 or newer, and nothing else.
for python in /usr/local/bin/python3 /usr/bin/python3; do
    if [ -x "$python" ]; then
        exec "$python" -I -S /tests/judge.pyz
    fi
done
echo "there is no python3 in /usr/local/bin and /usr/bin" >&2
exit 1
"""
_CONFIG = """\
schema_version = "1.4"

[task]
name = "rlvr/{name}"

[agent]
timeout_sec = 600.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
"""
_DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\n"
_SOLVE = "#!/bin/bash\ncp /solution/answer.txt /app/answer.txt\n"
_README = """\
# Task folders of Harbor

Tasks of `{reference}`: {train:,} in `train`, {heldout:,} in `heldout`. The verifier of each is in `tests/judge.pyz`.

```bash
rlvr train --config=terminal.yaml env.name=harbor:./train env.kwargs.heldout=./heldout
harbor run -p ./heldout/{first} -a oracle
```
"""


def write_harbor(exportable: Exportable, place: Path, name: str) -> None:
    reward = _check_reward(exportable)
    modules = _list_modules(exportable, reward)
    given = {"modules": modules, "reward": exportable.package.recipe.reward}
    archive = place / ".judge.pyz"
    write_archive(archive, modules)
    _try_archive(exportable, archive, given)
    first = ""
    for side in SIDES:
        tasks = exportable.package.tasks[side]
        for number, (task, solution) in enumerate(
            zip(tasks, _find_solutions(exportable, reward, tasks), strict=True), 1
        ):
            folder = place / side / name_folder(number, task)
            first = folder.name
            _write_task(folder, task, given, solution)
            _share(archive, folder / "tests" / "judge.pyz")
    archive.unlink()
    counts = {side: len(exportable.package.tasks[side]) for side in SIDES}
    reference = re.sub(r"[`\s]+", " ", exportable.name)
    (place / "README.md").write_text(_README.format(reference=reference, first=first, **counts), encoding="utf-8")


def name_folder(number: int, task: Task) -> str:
    """A name without anything that a path could mean: ids are data."""
    words = re.sub(r"[^a-z0-9]+", "-", task.id.lower())[:40].strip("-")
    return f"{number:05}-{words}" if words else f"{number:05}"


def _check_reward(exportable: Exportable) -> Reward:
    reward, name = exportable.reward, exportable.name
    if reward is None:
        raise ValueError(
            f"environment {name!r} cannot be exported to harbor: its episodes are turns of a class, and Harbor's tasks "
            "are files and a test; give --to openenv or --to verifiers"
        )
    if reward.waits_for:
        raise ValueError(
            f"environment {name!r} cannot be exported to harbor: its reward {reward.name} waits for "
            f"{reward.waits_for}, which a task folder without an image does not have; give --to openenv or verifiers"
        )
    return reward


def _find_solutions(exportable: Exportable, reward: Reward, tasks: Sequence[Task]) -> list[str | None]:
    """The demonstration of each task, where it passes: those of some environments have mistakes on purpose."""
    shown = [exportable.demonstrate(task) for task in tasks]
    given = [(number, text) for number, text in enumerate(shown) if text is not None]
    scores = reward.judge_all([Case.of_task(tasks[number], text) for number, text in given])
    passed = {number for (number, _), score in zip(given, scores, strict=True) if score.outcome is Outcome.PASSED}
    return [text if number in passed else None for number, text in enumerate(shown)]


def _write_task(folder: Path, task: Task, given: Mapping[str, Any], solution: str | None) -> None:
    texts = {
        "instruction.md": _INSTRUCTION.format(prompt=write_prompt(task)),
        "task.toml": _CONFIG.format(name=folder.name),
        "environment/Dockerfile": _DOCKERFILE,
        "tests/test.sh": _TEST,
        "tests/task.json": _write_given(task, given),
    }
    if solution is not None:
        texts |= {"solution/solve.sh": _SOLVE, "solution/answer.txt": solution}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            (folder / path).write_bytes(text.encode())
        except UnicodeEncodeError as error:
            raise ValueError(
                f"task {task.id!r:.80} has text that is no Unicode ({error}); it cannot be exported"
            ) from error


def _share(source: Path, target: Path) -> None:
    """Put `source` at `target` too: as a hard link where the file system can, else as a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _write_given(task: Task, given: Mapping[str, Any]) -> str:
    return json.dumps({**given, "row": json.loads(write_row(task))})


def _list_modules(exportable: Exportable, reward: Reward) -> list[str]:
    """The modules that register the reward, and those that its options or the rows name."""
    known = known_rewards()
    rows = [task.meta.get("reward") for tasks in exportable.package.tasks.values() for task in tasks]
    names = {text for text in _list_texts([reward.kwargs, rows]) if text in known}
    return sorted({reward.spec.function.__module__, *(reward_spec(name).function.__module__ for name in names)})


def _list_texts(given: Any) -> Iterator[str]:
    if isinstance(given, str):
        yield given
    elif isinstance(given, (Mapping, list, tuple)):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _list_texts(one)


def write_archive(path: Path, modules: Iterable[str]) -> None:
    """An archive that `python3` runs: the judge, and the source of the modules with all of ours that they import."""
    files = collect_sources([*modules, "rlvr.core.types", "rlvr.reward.registry", "rlvr.reward.signatures"])
    files["__main__.py"] = _JUDGE.read_bytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, _DATE), files[name], zipfile.ZIP_DEFLATED)


def collect_sources(modules: Iterable[str]) -> dict[str, bytes]:
    """The files of modules and of all that they import, here or in functions, by their places in an archive; but for
    installed packages, and the standard library."""
    found: dict[str, bytes] = {}
    todo, seen = list(modules), set[str]()
    while todo:
        name = todo.pop()
        parents = [name.rsplit(".", count)[0] for count in range(1, name.count(".") + 1)]
        for one in (name, *parents):
            if one in seen or one.split(".")[0] in sys.stdlib_module_names:
                continue
            seen.add(one)
            place = find_module(one)
            if place is None or is_installed(place):
                continue
            is_package = place.is_dir()
            file, path = place / "__init__.py" if is_package else place, one.replace(".", "/")
            raw = file.read_bytes() if file.is_file() else b""
            if one == "rlvr.reward":  # which imports every reward
                raw = _REWARD_PACKAGE.encode()
            found[f"{path}/__init__.py" if is_package else f"{path}.py"] = raw
            todo += _list_imports(raw, one if is_package else one.rpartition(".")[0])
    return found


def _list_imports(raw: bytes, package: str) -> Iterator[str]:
    todo: list[ast.AST] = [ast.parse(raw)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
        todo += ast.iter_child_nodes(node)


def _try_archive(exportable: Exportable, archive: Path, given: Mapping[str, Any]) -> None:
    """Judge answers by the archive, and compare with this process."""
    tasks = [task for side in SIDES for task in exportable.package.tasks[side][:TRIED]]
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(os.path.realpath(folder)) / name) for name in ("task.json", "answer.txt", "reward.txt")]
        for task in tasks:
            Path(files[0]).write_text(_write_given(task, given))
            for answer in dict.fromkeys((exportable.demonstrate(task) or "0", "")):
                Path(files[1]).write_bytes(answer.encode())
                own = exportable.package.judge(task, answer).value
                other, said = _run_archive(archive, files)
                if own != other:
                    raise ValueError(
                        f"environment {exportable.name!r} cannot be exported to harbor: its reward "
                        f"{given['reward']['name']} gives {own} here and {other} by Python alone, as a task folder "
                        f"without an image has it: {said}; give --to openenv or --to verifiers"
                    )


def _run_archive(archive: Path, files: list[str]) -> tuple[float | None, str]:
    """(the reward or None, the last line of the output)"""
    Path(files[2]).unlink(missing_ok=True)
    command = [sys.executable, "-I", "-S", str(archive), *files]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=JUDGE_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"it took longer than {JUDGE_SECONDS:g} s"
    said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
    value = float(Path(files[2]).read_text()) if Path(files[2]).exists() and not done.returncode else None
    return value, " ".join(said)[:500]
