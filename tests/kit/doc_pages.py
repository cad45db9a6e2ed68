"""Runs the code blocks of a page of the documentation, for tests/project/test_docs.py.

A page is run from top to bottom as a reader would type it, in a folder of its own that holds what pages name
(`./my-model`, `gsm8k/`, `tasks.jsonl`, the clone's `examples` and `rlvr`):

- python: executed, one namespace a page; a first line `# name.py` makes it a module of that name. A text block right
  after it is its output, to the letter;
- bash: every line is a command that is really run, made smaller by `SMALLER` and `sizes` below, but for the runs of
  `WHOLE`; `make` is looked up in the Makefile and `pip install` in pyproject.toml, for they would install (`make
  train` is the training it starts);
- yaml: written where its first line `# name.yaml` says, then loaded and checked as a config (a file of a group by
  itself says nothing); without a name it is a part of a config and is checked on top of `arithmetic`;
- toml: parsed; pyi: a stub of the API reference, parsed; text: what a program printed, or a session of the commands
  in `SHOWN`, which other tests run. Any other command in a text block, and any other language, fails the page;
- indented by four: bash where every line starts with one of the commands, else text.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rlvr.benchmarks.benchmark_plan import has_benchmarks
from rlvr.cli.main import run
from rlvr.config import load
from rlvr.config.build_config import build_config
from tests.kit.forked_process import Program, run_forked
from tests.kit.study_runs import make_runs, read_study

ROOT = Path(__file__).parents[2]

# What the commands of the pages are given on top, so that they take seconds: sizes, and files for what a hub has.
LOOKS = ["evaluation.tasks=4", "evaluation.samples=2"]
WARM_UP = ["sft.steps=2", "sft.batch_size=8"]
STEPS = ["training.steps=2", "training.prompts_per_step=2", "training.group_size=4"]
PARTS = ["training.steps=2", *LOOKS, "engine.threads=1"]  # sizes in the words of other systems stay as they are
SMALLER = {
    "arithmetic": [
        *WARM_UP,
        *STEPS,
        *LOOKS,
        "evaluation.every=0",
        "evaluation.interim_tasks=4",
        "run.checkpoint_every=1",
    ],
    "mini_mbpp": [
        *WARM_UP,
        *STEPS,
        *LOOKS,
        "training.num_substeps=1",
        "evaluation.every=0",
        "evaluation.interim_tasks=4",
    ],
    "tool_use": [*WARM_UP, *STEPS, *LOOKS, "evaluation.every=0"],
    "algorithms_study/arithmetic": [*WARM_UP, *STEPS, *LOOKS],
    "reasoning_gym": [*WARM_UP, *STEPS, *LOOKS, "evaluation.every=0", "evaluation.interim_tasks=4"],
    "families": [*STEPS, *LOOKS, "training.steps=10"],
    "refine": [*WARM_UP, *STEPS, *LOOKS, "evaluation.every=0", "evaluation.interim_tasks=4"],
    **{
        name: [*STEPS, *LOOKS, "evaluation.k=2", "rollout.max_tokens=8", "engine.threads=1"]
        for name in ("dataset", "jsonl")
    },
    "gsm8k": [*STEPS, *LOOKS, "evaluation.k=2", "rollout.max_tokens=8", "env.kwargs.path=gsm8k", "engine.threads=1"],
    "smollm": [*STEPS, *LOOKS, "evaluation.k=2", "rollout.max_tokens=8", "model.name=my-model", "engine.threads=1"],
    **{
        f"gsm8k_{size}b": [*STEPS, *LOOKS, "rollout.max_tokens=8", "env.kwargs.path=gsm8k", "engine.threads=1"]
        for size in (0.5, 1.5)
    },
    "mbpp": [
        *STEPS,
        *LOOKS,
        "evaluation.k=2",
        "rollout.max_tokens=8",
        "env.kwargs.few_shot=0",
        "num_train_problems=8",
        "engine.threads=1",
    ],
    "train_rlvr": ["max_steps=2", *LOOKS],
    "train_rlvr_model": [*WARM_UP, *PARTS],
    "train_rlvr_large": [*WARM_UP, *PARTS],
    "train_rlvr_test": [*WARM_UP, *PARTS],
}
OWN = [*STEPS, *LOOKS, "engine.threads=1"]  # a config that a page itself wrote
# Of an agent, which is a process for each episode: tests/envs/test_agent.py has more of them.
AGENT = ["training.steps=1", "training.prompts_per_step=1", "training.group_size=4", "evaluation.tasks=2",
         "evaluation.samples=1", "engine.threads=1"]  # fmt: skip
WHOLE = ("guessing.yaml", "leash.yaml")  # those of which the page shows what a whole run prints; they take seconds
SCRIPTS = {
    "examples/grpo_from_scratch.py": ["--steps", "2"],
    "examples/rlvr_train.py": [
        "num_iterations=2",
        "problems_per_iteration=2",
        "num_train_problems=8",
        "max_tokens=8",
        "env.kwargs.few_shot=0",
        *LOOKS,
        "evaluation.k=2",
        "engine.threads=1",
    ],
}
RECIPES = {  # commands of the form `python -m rlvr.compat.recipes.NAME`
    "rl_loop": ["batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2"],
    "rl_basic": ["max_tokens=8", "max_steps=2", "batch_size=2", "group_size=2", *LOOKS, "engine.threads=1"],
    "math_rl": ["max_tokens=8", "max_steps=2", "batch_size=2", "group_size=2", *LOOKS, "engine.threads=1"],
    "sl_basic": ["max_tokens=8", "max_steps=2", "batch_size=4", *LOOKS, "engine.threads=1"],
}
CONFIGURED = ("examples/run_rlvr.py", "rlvr/run_rlvr.py")  # scripts that take a config's name, by default this one:
DEFAULT = "train_rlvr_model"
COMMANDS = ("rlvr", "python", "python3", "make", "pip")
# Commands that pages show in text blocks, with what they print. They are not run here, but by these tests, or install.
SHOWN = {
    "curl": "tests/service/test_service_http.py, tests/service/test_session_results.py",
    "DATABASE_URL=postgresql://me@host/restored rlvr serve": "tests/service/test_service_backup.py",
    "createdb": "tests/service/test_service_backup.py",
    "docker compose up": "tests/project/test_deploy.py",
    "export": "sets what the next command reads",
    "pg_dump": "tests/service/test_service_backup.py",
    "pg_restore": "tests/service/test_service_backup.py",
    "pip install": "installs",
    'python -c "import sqlite3': "tests/service/test_service_backup.py",
    "python -m rlvr.store": "tests/store/test_store_migrate.py",
    "python -m tinker_cookbook.recipes.math_rl.train env=arithmetic": "tests/tinker_server/test_tinker_cookbook.py",
    "python -m venv": "installs",
    "rlvr study --config-name=smollm seeds=1..5": "takes an hour; tests/benchmarks/test_pretrained_algorithms.py",
    "ray start": "needs several machines",
    "export RAY_AUTH_MODE=token": "tests/clients/test_ray_cluster.py",
    "ray get-auth-token --generate": "tests/clients/test_ray_cluster.py",
    "rlvr train --config-name=mbpp model.name=./my-model 'reward.kwargs.sandbox={ray": (
        "tests/sandbox/test_ray_sandbox.py"
    ),
    "rlvr train --config-name=dataset model.name=./SmolLM2-135M-Instruct.Q4_1.gguf": "tests/engine/test_engine_gguf.py",
    "python -m benchmarks.algorithm_study": "tests/benchmarks/test_algorithm_study.py",
    "python -m benchmarks.algorithm_rates": "tests/benchmarks/test_algorithm_rates.py",
    "python -m benchmarks.pretrained_algorithms": "tests/benchmarks/test_pretrained_algorithms.py",
    "rlvr demo": "tests/cli/test_demo.py",
    "rlvr env export": "tests/envs/test_environment_export.py",
    "inspect eval": "tests/envs/test_inspect_model.py",
    "export PYTHONPATH=$(python -c": "tests/envs/test_inspect_model.py",
    "rlvr env install verifiers": "tests/envs/test_guest_process.py",
    "rlvr train --config=openenv.yaml": "tests/envs/test_openenv.py",
    "cat reverse.yaml": "shows a file",
    "rlvr train --config=reverse.yaml": "tests/envs/test_verifiers.py",
    "rlvr serve --demo": "tests/service/test_service_starts.py",
    "rlvr record --model ./my-model --out traffic.jsonl": "tests/recorder/test_record_command.py",
    "rlvr rows traffic.jsonl": "tests/recorder/test_record_command.py",
    "rlvr serve engine --model ./my-model --config server.yaml": "tests/tinker_server/test_tinker_settings.py",
    "rlvr serve engine --model ./my-model engine.gradient_checkpointing": "tests/tinker_server/test_tinker_settings.py",
    "rlvr serve engine --model Qwen/Qwen3-8B=./my-model --host 10.0.0.1": "tests/service/test_service_replicas.py",
    "export TINKER_BASE_URL=http://10.0.0.1:8000": "tests/service/test_service_replicas.py",
    "rlvr serve --model tinker:Qwen/Qwen3-8B --host 10.0.0.11": "tests/service/test_service_replicas.py",
    "sqlite3": "tests/service/test_service_backup.py",
    "rlvr serve engine --model ./my-model --host 0.0.0.0": (
        "tests/tinker_server/test_tinker_serve.py; it listens on every address"
    ),
}
PORTS = {"engine": "8000"}  # where a server listens of which the page gives no --port


def load_gen(name: str = "gen") -> Any:
    """The program that fills the pages, docs/gen.py, or one beside it."""
    if str(ROOT / "docs") not in sys.path:
        sys.path.append(str(ROOT / "docs"))
    return importlib.import_module(name)


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    follows: bool  # nothing but blank lines since the block before

    @property
    def file(self) -> str:
        """The file that the first line names, e.g. `# mine.yaml: what it is for`."""
        found = re.match(r"# ([\w./-]+\.(?:yaml|py))\b", self.text)
        return found[1] if found else ""


def blocks(page: str) -> list[Block]:
    """The code blocks of a page, fenced or indented."""
    found: list[Block] = []
    fenced: tuple[str, int] | None = None
    inside: list[str] = []
    follows, before = False, "\n"  # `before` is the last line of prose: a list's items may go on indented
    for number, line in enumerate([*(ROOT / page).read_text(encoding="utf-8").splitlines(), ""], 1):
        fence = re.match(r"\s*(`{3,}|~{3,})(.*)", line)
        if fenced is None and inside and not line.startswith("    ") and line.strip():
            found.append(indented_block(inside, number))
            inside, follows = [], False
        if fence and fenced is None:
            fenced, inside = (fence[2].strip().partition(" ")[0], number), []
        elif fence and fenced is not None:
            found.append(Block(fenced[0], textwrap.dedent("\n".join(inside)) + "\n", fenced[1], follows))
            fenced, inside, follows = None, [], True
        elif fenced is not None or (line.startswith("    ") and not re.match(r"\s*([-*]|\d+\.) ", before)):
            inside.append(line)
        elif line.strip():
            follows, before = False, line
    assert fenced is None, f"{page}: a block that is never closed"
    return [*found, indented_block(inside, 0)] if inside else found


def indented_block(lines: list[str], number: int) -> Block:
    commands = all(line.split()[0] in COMMANDS for line in lines if line.strip())
    return Block("bash" if commands else "text", textwrap.dedent("\n".join(lines)) + "\n", number, False)


def sizes(words: list[str]) -> list[str]:
    """What makes a training command small. Supervised learning has no RL sizes; what the page typed stays typed."""
    named = next((w.partition("=")[2] for w in words if w.startswith("--config-name=")), "")
    path = next((w.partition("=")[2] for w in words if w.startswith("--config=")), "")
    if path in WHOLE:
        return []
    file = Path(path).read_text() if path else ""
    extra = SMALLER.get(named, SMALLER[DEFAULT]) if named else [*(WARM_UP if "sft:" in file else []), *OWN]
    if "name: agent\n" in file:
        extra = AGENT
    if {"mode=sft", "training.mode=sft"} & set(words):
        extra = [word for word in extra if not word.startswith(("training.", "evaluation.every"))]
    if "epochs" in file or any("epochs=" in word for word in words):  # either epochs or steps
        extra = [word for word in extra if not word.startswith("training.steps=")]
    if "client: mock" in file:
        extra = [word for word in extra if not word.startswith("engine.")]
    return extra


def python(block: Block, page: str, namespace: dict[str, Any]) -> str:
    """What it printed."""
    if block.file:
        code = f"from {block.file.removesuffix('.py')} import *"
    else:
        code = "\n" * block.line + block.text
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, page, "exec"), namespace)
    return printed.getvalue()


def typed_address(words: list[str]) -> str:
    """Where a server listens that is started by these words."""
    port = words[words.index("--port") + 1] if "--port" in words else PORTS[words[2]]
    return f"http://127.0.0.1:{port}"


class Server:
    """`rlvr serve ...` as a page has it, in a process of its own and on a free port instead of the `typed` one."""

    def __init__(self, words: list[str]) -> None:
        self.typed = typed_address(words)
        at = words.index("--port") if "--port" in words else len(words)
        typed = ["-m", "rlvr.cli.main", *words[1:at], "--port", "0", *words[at + 2 :]]
        self.process = Program(typed, stderr=subprocess.PIPE)
        assert self.process.stderr is not None
        said: list[str] = []
        for text in self.process.stderr:
            said.append(text)
            if listening := re.search(r"listening at (http://[^\s,\"]+)", text):
                self.url = listening[1]
                return
        raise AssertionError(f"{shlex.join(words)}: it ended\n{''.join(said)}")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.stderr is not None
        with self.process.stderr as rest:
            rest.read()
        self.process.wait(60)


def bash(block: Block, serving: list[Server]) -> None:
    for line, environment, words in typed_commands(block):
        for server in serving:
            environment = {name: value.replace(server.typed, server.url) for name, value in environment.items()}
        os.environ.update(environment)
        if words:
            command(line, words, serving)


def typed_commands(block: Block) -> Iterator[tuple[str, dict[str, str], list[str]]]:
    """Each command: its line, the NAME=value before it, its words."""
    environment: dict[str, str] = {}
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["export"]:
            words.pop(0)
        while words and "=" in words[0] and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        if words or environment:
            yield line, environment, words


def trainings(block: Block) -> Iterator[tuple[str, list[str]]]:
    """Every training that a block starts: what was typed, and the words after `rlvr train`."""
    if block.language == "bash":
        for line, _, words in (typed for typed in typed_commands(block) if typed[2]):
            if words[:2] == ["rlvr", "train"]:
                yield line, words[2:]
            elif words[:2] == ["make", "train"]:
                yield line, make_command("train")[2:]
            elif words[0].startswith("python") and words[1] in CONFIGURED:
                yield (
                    line,
                    words[2:] if any("--config" in w for w in words) else [*words[2:], f"--config-name={DEFAULT}"],
                )
    elif block.language == "python":
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "run":
                words = ast.literal_eval(node.args[0])
                if words[0] == "train":
                    yield ast.unparse(node), words[1:]


def make_command(target: str) -> list[str]:
    """The command that the Makefile runs for a target."""
    recipe = re.search(rf"^{target}:.*\n\t\$\(VENV\)/bin/(rlvr .*)$", (ROOT / "Makefile").read_text(), re.M)
    assert recipe, f"make {target} runs no rlvr command"
    return shlex.split(recipe[1])


def command(line: str, words: list[str], serving: list[Server]) -> None:
    if words[:2] == ["rlvr", "serve"]:
        for earlier in [server for server in serving if server.typed == typed_address(words)]:
            serving.remove(earlier)
            earlier.stop()
        serving.append(Server(words))
        return
    for server in serving:
        words = [word.replace(server.typed, server.url) for word in words]
    if words[0] == "rlvr":
        is_configured = words[1] in ("train", "config", "study") or any(w.startswith("--config") for w in words)
        small = sizes(words) if is_configured else []
        if words[1] == "evaluate" and "--like" not in words and has_benchmarks(words[3:]):
            small = ["evaluation.tasks=2", "rollout.max_tokens=8", "engine.threads=1"]
        if words[1] == "push" and words[3] == "OWNER/REPO":  # tests/tracking/test_push.py has a hub
            words = [*words[:3], "./instead-of-the-hub"]
        if words[1] == "study":  # one run of each variant
            words = ["seeds=1" if word.startswith("seeds=") else word for word in words]
        if words[1] == "audit" and "--attack" in words and "--category" not in words:
            small = ["--category", "odd result"]  # tests/audits/test_audit_attack.py runs them all
        if words[1] == "audit" and "--against" in words:  # the peer needs a minute for the rows that it hangs on
            at = words.index("--labelled") + 1
            words = [*words[:at], "pairs.jsonl", *words[at + 1 :]]
        if words[1] == "bench":  # names and options are checked, nothing is measured
            small = ["--list"]
        if words[1] == "study":  # tests/studies/test_study.py starts a process for each run
            make_runs(read_study([*words[2:], *small]))
        code = run([*words[1:], *small])
        assert code == 0, f"{line}: exit code {code}"
    elif words[:2] == ["python", "-m"]:
        small = RECIPES[words[2].removeprefix("rlvr.compat.recipes.")]
        done = run_forked([*words[1:], *small], timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    elif words[0] in ("python", "python3"):
        script = words[1]
        assert (ROOT / script).is_file(), f"{line}: there is no {script}"
        small = SCRIPTS.get(script, [])
        if script in CONFIGURED:
            small = sizes(words if any("--config-name" in w for w in words) else [*words, f"--config-name={DEFAULT}"])
        done = run_forked([*words[1:], *small], timeout=300)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    elif words[0] == "make":
        # Not even a dry run: make runs a line that calls $(MAKE) for real, and `make test` is what runs this.
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert set(words[1:]) <= set(targets), f"{line}: the Makefile has {', '.join(targets)}"
        if "train" in words:
            command(line, make_command("train"), serving)
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {name for word in words for part in re.findall(r"\[(.+)\]", word) for name in part.split(",")}
        known = words[2:] in (["tinker"], ["openai"])  # clients, installed without this project
        assert known or (asked and asked <= set(extras)), f"{line}: the extras are {', '.join(extras)}"
    else:
        pytest.fail(f"{line}: not a command that this test knows how to run")


def check_session(block: Block) -> None:
    """What a text block shows that was typed must be run somewhere."""
    for line in block.text.splitlines():
        if line.startswith(">>> "):
            pytest.fail(f"{line}: it is not run; make the block python")
        if line.startswith("$ ") and not line[2:].startswith(tuple(SHOWN)):
            pytest.fail(f"{line}: it is not run; make the block bash, or enter the command and its test in SHOWN")


def yaml(block: Block) -> None:
    if block.file:
        path = Path(block.file)
        in_a_group = path.parent.name not in ("", "configs")
    else:
        path, in_a_group = Path("configs/part.yaml"), False
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"defaults: [arithmetic, _self_]\n{block.text}", encoding="utf-8")
    if not in_a_group:
        build_config(load(None, str(path)))


def run_page(page: str) -> None:
    """Every block, from top to bottom, in the folder we are in."""
    found = blocks(page)
    for block in found:  # a page may run a file that it shows further down
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text, encoding="utf-8")
    namespace: dict[str, Any] = {"__name__": "page"}
    serving: list[Server] = []
    try:
        _run(found, page, namespace, serving)
    finally:
        for server in serving:
            server.stop()


def _run(found: list[Block], page: str, namespace: dict[str, Any], serving: list[Server]) -> None:
    printed: str | None = None
    for block in found:
        try:
            if block.language == "python":
                printed = python(block, page, namespace)
                continue
            if block.language == "text":
                check_session(block)
                if printed is not None and block.follows:
                    assert block.text.strip() == printed.strip(), f"it prints\n{printed}"
            elif block.language == "bash":
                bash(block, serving)
            elif block.language == "yaml":
                yaml(block)
            elif block.language == "toml":
                tomllib.loads(block.text)
            elif block.language == "pyi":
                ast.parse(block.text)
            elif block.language == "json":
                json.loads(block.text)
            else:
                pytest.fail(f"language {block.language!r}: python, bash and yaml are run; toml, pyi and json parsed")
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"in the block at {page}:{block.line}")
            raise
        printed = None
