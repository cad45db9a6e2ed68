"""Task folders of Harbor in a sandbox: honest episodes, tasks that cannot run here, and policies that cheat."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Trajectory
from rlvr.envs.ecosystems.harbor import read_reward
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
SECRET = "the answer that only the tests know"
TEST = """
# checks /app/out.txt
if [ "$(cat out.txt 2>/dev/null)" = "$(cat /tests/expected.txt)" ]; then score=1; else score=0; fi
echo $score > /logs/verifier/reward.txt
"""
CONFIG = 'schema_version = "1.4"\n[agent]\ntimeout_sec = 30.0\n[verifier]\ntimeout_sec = 5.0\n'
SOLVE = f"printf '%s' '{SECRET}' > out.txt"
DOCKERFILE = "FROM ubuntu:24.04\n# its files\nWORKDIR /app\nCOPY data/ ./data/\n"


def write_task(folder: Path, name: str = "write", **files: str) -> Path:
    """A task folder; `files` replace its own, by names such as tests__test_sh."""
    given = {
        "instruction_md": f"Write the secret to out.txt. ({name})", "task_toml": CONFIG, "tests__test_sh": TEST,
        "tests__expected_txt": SECRET, "solution__solve_sh": SOLVE, "environment__Dockerfile": DOCKERFILE,
        "environment__data__hint_txt": "a hint", **files,
    }  # fmt: skip
    for path, text in given.items():
        place = folder / name / re.sub(r"_(\w+)$", r".\1", path.replace("__", "/"))
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder / name


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def source(folder: Path, **options: Any) -> Any:
    made = resolve_environment(f"harbor:{folder}", **options)
    return apply_prompt_options(made, TEXT, PromptOptions())


def play(folder: Path, *commands: str, size: int = 1, **options: Any) -> list[Trajectory]:
    """Episodes of the task that run these commands, one a turn."""
    made = source(folder, **options)
    said = [list(TEXT.encode(turn, add_special_tokens=False)) for turn in (*map(bash, commands), "done")]
    groups = open_groups(made, [made.train(0, 0, "")], size, TEXT, "g")
    sampler = ScriptedSamplingClient(TEXT, lambda i: [*said[i // size], TEXT.eos_token_id])
    played = rollout(groups, sampler, SamplingParams(max_tokens=3_000), seed=1)
    score(played, resolve_reward(made.reward).plus_environment(made.environment_weight))
    return played


def detail(t: Trajectory) -> str:
    assert t.reward is None
    return t.scores["environment"].detail or ""


def test_commands_share_the_folder_and_the_tests_give_the_reward(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    (t,) = play(task, "pwd; cat data/hint.txt; export A=1; exit 3", f"echo A=$A; {SOLVE}")
    assert t.reward == 1.0
    assert "/app\na hint\n[exit code 3]" in t.response and "A=\n" in t.response
    prompt = TEXT.decode(t.prompt_tokens)
    assert "Write the secret" in prompt and '"bash"' in prompt and SECRET not in prompt
    (t,) = play(task, "ls")
    assert t.reward == 0.0 and "data" in t.response


def test_episodes_share_nothing(tmp_path: Path) -> None:
    played = play(write_task(tmp_path), "ls /app /tmp /root; touch /app/mine /tmp/mine /root/mine", "ls", size=2)
    assert [t.reward for t in played] == [0.0, 0.0]
    first = [t.response.partition("\nmine")[0] for t in played]
    assert all("/root:" in listing for listing in first), "no folder of the three had it at the beginning"


ATTACKS = {
    "read the tests": "cat /tests/* /solution/* /proc/1/root/tests/*; ls -R /tests /logs",
    "look for the tests on the host": "grep -rs 'only the tests' / --include=expected.txt --include=solve.sh",
    "write the reward": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; echo 1 > /logs/reward.txt",
    "write the reward in JSON": "echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "write the reward later": "setsid sh -c 'while :; do echo 1 > /logs/verifier/reward.txt; done' >/dev/null 2>&1 &",
    "replace the folders": "rm -rf /logs /tests; mv /logs /l; ln -s /app /logs; ln -s /app /tests",
    "fill the disk": "yes > /app/full; yes > /tmp/full; yes > /root/full; for i in $(seq 3000); do : > $i; done",
    "fill the other disk": "yes > /logs/full; yes > /tests/full; yes > /solution/full",
    "close the folders": "mkdir -p /logs/verifier/a; chmod 0 /logs/verifier/a /logs /tests; cd /; chmod 0 /app",
    "kill the driver": "kill -9 1 $PPID; kill -TERM 1; kill -9 -1",
    "change what the tests begin with": (
        'd=/root/.local/lib/python3.11/site-packages; mkdir -p $d; echo \'open("/logs/verifier/reward.txt","w")'
        '.write("1"); import os; os.kill(os.getppid(), 9)\' | tee $d/usercustomize.py > /root/x.py; '
        "echo 'echo 1 > /logs/verifier/reward.txt; kill -9 $$' | tee ~/.bashrc > ~/.profile; echo > /usr/bin/python3"
    ),
}


@pytest.mark.parametrize("command", ATTACKS.values(), ids=ATTACKS)
def test_a_policy_that_cheats_gets_nothing(tmp_path: Path, command: str) -> None:
    test = f"sleep 0.3; python3 -c pass\n{TEST}sleep 0.3\n"
    (t,) = play(write_task(tmp_path, tests__test_sh=test), command, "ls", sandbox={"scratch": 4 << 20})
    assert t.reward == 0.0, t.scores
    assert SECRET not in t.response


def test_limits_end_a_command_and_not_the_episode(tmp_path: Path) -> None:
    config = (
        CONFIG.replace("[agent]\ntimeout_sec = 30.0", "[agent]\ntimeout_sec = 2.0") + "[environment]\nmemory_mb = 64\n"
    )
    eat = "python3 -c 'x = bytearray(300 << 20)'; echo after"
    (t,) = play(write_task(tmp_path, task_toml=config), eat, "echo begun; sleep 60", "echo no", call_seconds=20)
    assert t.reward == 0.0 and "MemoryError" in t.response and "after" in t.response
    assert "begun\n[it took longer than " in t.response and "the time of the task is over" in t.response


@pytest.mark.parametrize(
    ("test", "words"),
    [
        ("exit 1", "wrote no reward .missing.; it ended with 1"),
        ("echo ok", "wrote no reward"),
        ("sleep 60", "it took longer than 1 s"),
        ("echo nan > /logs/verifier/reward.txt", "expected a finite number"),
        ("echo much > /logs/verifier/reward.txt", "expected a finite number"),
        ("mkdir /logs/verifier/reward.txt", "wrote no reward .irregular"),
        ("ln -s /app/data/hint.txt /logs/verifier/reward.txt", "wrote no reward .irregular"),
        ('echo \'{"a": 1, "b": 0}\' > /logs/verifier/reward.json', "reward_key"),
    ],
)
def test_tests_that_fail_are_an_error_and_no_zero(tmp_path: Path, test: str, words: str) -> None:
    config = CONFIG.replace("5.0", "1.0")
    (t,) = play(write_task(tmp_path, tests__test_sh=test, task_toml=config), "ls")
    assert re.search(words, detail(t)), detail(t)


def test_a_reward_has_a_name_or_none() -> None:
    assert read_reward(b" 0.25\n", "reward", "") == 0.25
    assert read_reward(b'{"correct": 0.5}', "reward", "") == 0.5
    assert read_reward(b'{"reward": 1, "style": 0}', "reward", "") == 1.0
    assert read_reward(b'{"reward": 1, "style": 0}', "style", "") == 0.0
    for raw in (b"", b"true", b"[1]", b"inf", b'{"reward": "1"}', b'{"a": 1, "b": 2}', b"\xff", b"[" * 100_000):
        with pytest.raises(EpisodeError, match="reward"):
            read_reward(raw, "reward", "it")


OUT = {
    "image": ({"task_toml": CONFIG + '[environment]\ndocker_image = "x/y:1"\n'}, "the image 'x/y:1'"),
    "gpus": ({"task_toml": CONFIG + "[environment]\ngpus = 1\n"}, "1 GPUs"),
    "network": (
        {"task_toml": f'{CONFIG}network_mode = "allowlist"\nallowed_hosts = ["x.org"]\n'},
        "(allowed_hosts: x.org",
    ),
    "hosts": ({"task_toml": CONFIG + '[environment]\nnetwork_mode = "allowlist"\n'}, "(allowed_hosts: none)"),
    "services": ({"environment__docker_compose_yaml": ""}, ""),
    "run": ({"environment__Dockerfile": "FROM ubuntu:24.04\nRUN apt-get \\\n install x\n"}, "RUN apt-get"),
    "made": ({"environment__Dockerfile": "FROM ubuntu:24.04\nRUN mkdir -p /usr/share/x\n"}, "the sandbox's own"),
    "more": ({"environment__Dockerfile": "FROM ubuntu:24.04\nRUN mkdir -p a && make\n"}, "RUN mkdir -p a && make"),
    "base": ({"environment__Dockerfile": "FROM pytorch/pytorch:2\n"}, "no plain base image"),
    "system": ({"environment__Dockerfile": "FROM ubuntu\nCOPY data /usr/share/x\n"}, "which is the sandbox's own"),
    "download": ({"tests__test_sh": "set -e\ncurl -LsSf https://x | sh\n"}, "tests/test.sh uses curl"),
    "steps": ({"task_toml": CONFIG + '[[steps]]\nname = "one"\n'}, "several steps"),
    "secret": ({"task_toml": CONFIG.replace("5.0", '5.0\nenv = {KEY = "${KEY}"}')}, "from the host's environment"),
}


def test_tasks_that_need_more_are_named_with_the_reason(tmp_path: Path) -> None:
    for name, (files, _) in OUT.items():
        folder = write_task(tmp_path, name, **{k: v for k, v in files.items() if "compose" not in k})
        if name == "services":
            (folder / "environment/docker-compose.yaml").write_text("")
    with pytest.raises(ValueError, match=r"no task can run without Docker.*gpus: it needs 1 GPUs"):
        source(tmp_path)
    for number in range(4):
        write_task(tmp_path, f"good{number}")
    made = source(tmp_path)
    said = made.advice()[0]
    assert f"{len(OUT)} tasks of harbor:" in said
    for name, (_, words) in OUT.items():
        assert re.search(f"{name}: [^;]*{re.escape(words)}", said), name
    ids = {made.train(0, n, "").id for n in range(made.size(""))} | {task.id for task in made.heldout(None)}
    assert ids == {f"good{number}" for number in range(4)} and len(made.heldout(None)) >= 1


def make_image(folder: Path) -> Path:
    """A root folder with bash, cat, what they need, and a program and files of its own; links that lead out of it."""
    for program in ("/bin/bash", "/bin/cat"):
        said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+) \(0x", said)):
            place = folder / path.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    (folder / "usr/local/bin").mkdir(parents=True)
    (folder / "usr/local/bin/greet").write_text("#!/bin/bash\necho of the image > out.txt\n")
    (folder / "usr/local/bin/greet").chmod(0o755)
    for place, text in (("app/made.txt", "built"), ("opt/tool/data", "data"), ("etc/motd", "hello")):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text)
    (folder / "outside").symlink_to("/etc/hostname")
    return folder


BUILT = """
FROM mine:1 AS base
RUN make everything
ENV PATH=/opt/tool:$PATH
COPY data/ ./data/
COPY --from=base /x /usr/x
"""


def test_a_task_that_needs_an_image_runs_in_a_root_folder_of_the_user(tmp_path: Path) -> None:
    """Inside the same walls: the system's programs and files are not there, the image's are, and stay as they are."""
    image = make_image(tmp_path / "image")
    test = TEST.replace("$(cat /tests/expected.txt)", "of the image")
    folder = write_task(tmp_path / "tasks", environment__Dockerfile=BUILT, tests__test_sh=test)
    with pytest.raises(ValueError, match=r"no plain base image .*env\.kwargs\.image=FOLDER"):
        source(folder)
    look = "cat made.txt data/hint.txt /opt/tool/data /etc/motd; [[ $PATH == /opt/tool:* ]] && echo paths"
    commands = (
        look, "greet; echo changed > made.txt; cat made.txt", "echo x > /opt/tool/data; echo x > /etc/motd",
        "[[ -e /usr/bin/python3 ]] || echo no python; cat /outside; cat /tests/expected.txt",
    )  # fmt: skip
    (t,) = play(folder, *commands, image=str(image))
    assert t.reward == 1.0
    for words in ("builta hintdatahello", "paths", "changed", "no python", "Read-only file system"):
        assert words in t.response, (words, t.response)
    hostname = Path("/etc/hostname").read_text().strip()
    assert hostname not in t.response and SECRET not in t.response
    assert (image / "app/made.txt").read_text() == "built" and (image / "opt/tool/data").read_text() == "data"
    (t,) = play(folder, "cat made.txt", image=str(image))
    assert t.reward == 0.0 and "built" in t.response, "the next episode begins with the image again"


def test_an_image_that_cannot_be_used_is_named_before_anything_runs(tmp_path: Path) -> None:
    image = make_image(tmp_path / "images/good")
    for name in ("good", "lost"):
        write_task(tmp_path / "tasks", name, environment__Dockerfile=BUILT)
    made = source(tmp_path / "tasks", image=str(tmp_path / "images/{task}"))
    assert made.left_out == {"lost": f"there is no root folder {tmp_path / 'images/lost'}"}
    (image / "bin/bash").unlink()
    for change, words in (
        (lambda: None, "cannot be used"),
        (lambda: (image / "app/link").symlink_to("/etc"), r"a link where commands write \(/app/link\)"),
        (lambda: shutil.rmtree(image), "there is no folder"),
    ):
        change()
        with pytest.raises(ValueError, match=words):
            source(tmp_path / "tasks/good", image=str(image))
    with pytest.raises(ValueError, match="which the policy could read"):
        source(tmp_path / "tasks/good", image="/")


def test_a_dockerfile_says_where_files_go(tmp_path: Path) -> None:
    dockerfile = """
        FROM python:3.12-slim
        ENV MODE=test OTHER="two words"
        WORKDIR /srv/app
        COPY --chown=1:1 data/hint.txt renamed.txt
        COPY ["data", "/srv/data"]
        COPY . .
        WORKDIR deeper
        CMD ["sleep", "infinity"]
    """
    task = write_task(tmp_path, environment__Dockerfile=dockerfile, environment__run_sh="echo run")
    (task / "environment/run.sh").chmod(0o755)
    command = (
        "pwd; echo $MODE $OTHER; cat ../renamed.txt /srv/data/hint.txt ../data/hint.txt; ../run.sh; ls ..; touch x"
    )
    (t,) = play(task, command)
    assert "/srv/app/deeper\ntest two words\na hinta hinta hintrun\ndata\ndeeper\nrenamed.txt\nrun.sh\n" in t.response
    assert "[exit" not in t.response


MORE = """
FROM ubuntu:24.04
WORKDIR /workspace
# Create the logs directory
RUN mkdir -p /logs/verifier && mkdir --parents data/raw /srv/out
"""
ANY_NETWORK = ('[environment]\nnetwork_mode = "public"\n', "[environment]\nallow_internet = true\n")


@pytest.mark.parametrize("table", ANY_NETWORK)
def test_a_task_may_make_folders_and_allow_a_network(tmp_path: Path, table: str) -> None:
    """Harbor allows a network where a task says nothing; commands here have none, whatever the task allows."""
    task = write_task(tmp_path, environment__Dockerfile=MORE, task_toml=CONFIG + table)
    look = (
        "ls -d data/raw /srv/out; ls /logs | wc -l; : < /dev/tcp/1.1.1.1/53; touch data/raw/x /srv/out/x && echo made"
    )
    (t,) = play(task, look, SOLVE)
    assert t.reward == 1.0 and "/srv/out\ndata/raw\n0\n" in t.response and "made" in t.response
    assert "Network is unreachable" in t.response


def test_a_task_needs_no_folder_for_its_environment(tmp_path: Path) -> None:
    task = write_task(tmp_path)
    shutil.rmtree(task / "environment")
    (t,) = play(task, "pwd; ls | wc -l", SOLVE)
    assert t.reward == 1.0 and "/app\n0" in t.response


def test_controls_leave_out_tasks_that_cannot_be_solved(tmp_path: Path) -> None:
    for number in range(2):
        write_task(tmp_path, f"good{number}")
    write_task(tmp_path, "free", tests__test_sh="echo 1 > /logs/verifier/reward.txt")
    write_task(tmp_path, "unsolved", solution__solve_sh="true")
    write_task(tmp_path, "broken", tests__test_sh="exit 1")
    made = source(tmp_path, controls=True)
    assert made.left_out == {
        "broken": made.left_out["broken"],
        "free": "its solution is given 1, and doing nothing 1",
        "unsolved": "its solution is given 0, and doing nothing 0",
    }
    assert "wrote no reward" in made.left_out["broken"]


def test_a_folder_without_tasks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no task\.toml"):
        source(tmp_path)
    with pytest.raises(ValueError, match="there is no folder"):
        source(tmp_path / "none")
    write_task(tmp_path, task_toml="[agent]\ntimeout_sec = 'long'\n")
    with pytest.raises(ValueError, match="timeout_sec='long', expected seconds"):
        source(tmp_path)
