"""`rlvr env export`: what it writes is played as the original, and what cannot be exported leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Task, Trajectory
from rlvr.envs.ecosystems.export.environment_export import choose_name, export_environment
from rlvr.envs.ecosystems.export.exportable import ExportRequest
from rlvr.envs.ecosystems.export.harbor_folders import name_folder
from rlvr.envs.ecosystems.export.task_package import TaskPackage
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE

TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
HOSTILE = [
    "../../outside",
    "/etc/passwd",
    "a b\nc",
    "",
    "\u202egnp.exe",
    "é" * 300,
    "con",
    "..",
    "x/../../y",
    "0\u2028",
]
ROWS = "export_rows.jsonl"
GAME = """
class Game:
    max_turns = 2
    started = 0  # a state of the class

    def reset(self, seed):
        Game.started += 1
        self.hidden = 1 + seed % 3
        return "guess"

    def step(self, action):
        if action.strip() == str(self.hidden):
            return "", 1.0, True
        return "again", -0.25, False
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write_rows(count: int = 24) -> dict[str, Any]:
    """Options of the environment `dataset`: rows in many scripts, whose ids are hostile."""
    rows = [
        {
            "id": HOSTILE[n % len(HOSTILE)] + str(n // len(HOSTILE)),
            "prompt": f"Größe {n}: 数 ≥ 0? 🙂",
            "answer": f"ß{n}",
        }
        for n in range(count)
    ]
    Path(ROWS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": ROWS, "heldout_fraction": 0.3}


def export(name: str, target: str, tasks: int = 1_000, **options: Any) -> Path:
    return export_environment(ExportRequest(name, options, tasks=tasks), target, f"made_{target}")


def play(source: Any, task: Any, *turns: str) -> Trajectory:
    """An episode in which the policy says these turns."""
    made = apply_prompt_options(source, TEXT, PromptOptions())
    task = next(one for one in made.heldout(None) if one.id == task.id)
    said = [list(TEXT.encode(turn, add_special_tokens=False)) for turn in turns]
    groups = open_groups(made, [task], 1, TEXT, "g")
    sampler = ScriptedSamplingClient(TEXT, lambda i: [*said[i % len(said)], TEXT.eos_token_id])
    (played,) = rollout(groups, sampler, SamplingParams(max_tokens=900), seed=1)
    score([played], resolve_reward(made.reward).plus_environment(made.environment_weight))
    return played


def bash(command: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': {'command': command}})}\n</tool_call>"


def test_task_folders_are_played_by_right_and_wrong_answers() -> None:
    root = export("dataset", "harbor", **write_rows(10))
    original = resolve_environment("dataset", path=ROWS, heldout_fraction=0.3)
    source = resolve_environment(f"harbor:{root}/train", heldout=f"{root}/heldout", controls=True)
    held, trained = source.heldout(None), [source.train(0, n, "") for n in range(source.size(""))]
    assert not source.left_out, "the solutions get more than doing nothing"
    assert len(held) == len(original.heldout(None)) and len(held) + len(trained) == 10
    first = {task.prompt.partition("\n")[0] for task in held}
    assert first == {task.prompt for task in original.heldout(None)}
    task, folder = held[0], Path(held[0].meta["folder"])
    right = (folder / "solution/answer.txt").read_text().strip()
    assert right == json.loads((folder / "tests/task.json").read_text())["row"]["meta"]["answer"]
    for command, expected in (
        (f"echo '{right}' > answer.txt", 1.0),
        ("echo ß > answer.txt", 0.0),
        ("true", 0.0),
        ("ln -s /tests/task.json answer.txt", 0.0),
        ("ln -s /solution/answer.txt answer.txt", 0.0),
        (f"printf '{right}' > other; ln other answer.txt", 0.0),
        ("mkfifo answer.txt", 0.0),
        ("mkdir answer.txt", 0.0),
        ("touch answer.txt; chmod 0 answer.txt", 0.0),
        ("yes > answer.txt & sleep 0.2; kill $!", 0.0),
    ):
        assert play(source, task, bash(command), "done").reward == expected, command
    looked = play(
        source, task, bash("ls -R /app /tests /solution; cat /tests/* /solution/*; find / -name '*.pyz'"), "x"
    )
    assert (
        looked.reward == 0.0 and right not in looked.response and ".pyz" not in looked.response.replace("'*.pyz'", "")
    )
    assert right not in TEXT.decode(looked.prompt_tokens)


def test_names_of_tasks_are_no_paths() -> None:
    for one in HOSTILE:
        name = name_folder(7, Task(one, "?"))
        assert re.fullmatch(r"00007(-[a-z0-9-]{1,40})?", name) and Path(name).name == name
    assert [choose_name(name, "harbor") for name in ("../../etc:Foo Bar", "数", "9", "verifiers:a/b@1")] == [
        "etc_foo_bar_harbor", "environment_harbor", "env_9_harbor", "verifiers_a_b_1_harbor",
    ]  # fmt: skip


def test_a_verifier_that_gives_no_verdict_leaves_no_reward() -> None:
    Path("export_breaking.py").write_text(
        "def judge(prompt, response, meta):\n    if response == 'break':\n        raise KeyError('lost')\n"
        "    return float(response.strip() == meta['answer'])\n"
    )
    request = ExportRequest("dataset", write_rows(6), "export_breaking:judge")
    root = export_environment(request, "harbor", "made")
    source = resolve_environment(f"harbor:{root}/train", heldout=f"{root}/heldout")
    task = source.heldout(1)[0]
    right = (Path(task.meta["folder"]) / "solution/answer.txt").read_text().strip()
    assert play(source, task, bash(f"echo {right} > answer.txt"), "done").reward == 1.0
    broken = play(source, task, bash("echo break > answer.txt"), "done")
    assert broken.reward is None and "KeyError" in (broken.scores["environment"].detail or "")


@pytest.mark.parametrize("target", ["verifiers", "openenv"])
def test_packages_hold_the_tasks_and_the_code(target: str) -> None:
    Path("export_game.py").write_text(GAME)
    root = export("export_game:Game", target, tasks=7)
    assert (root / "export_game.py").read_text() == GAME and stat.S_IMODE(root.stat().st_mode) & 0o055 == 0o055
    (recipe,) = root.rglob("recipe.json")
    package = TaskPackage.load(recipe.parent)
    assert [len(package.tasks[side]) for side in ("train", "heldout")] == [7, 7]
    seeds = [{task.meta["seed"] for task in package.tasks[side]} for side in ("train", "heldout")]
    assert not seeds[0] & seeds[1] and len(seeds[0]) == len(seeds[1]) == 7
    task = package.tasks["train"][0]
    right = str(1 + task.meta["seed"] % 3)
    for turns, rewards in (([right], [1.0]), (["0", right], [-0.25, 1.0]), (["0", "0"], [-0.25, -0.25])):
        episode = package.open(task)
        assert episode.begin() == "guess"
        said = [episode.step(turn) for turn in turns]
        assert [one.reward for one in said] == rewards and [one.done for one in said] == [False, True][-len(said) :]


def test_the_range_of_the_rewards_is_in_the_package_of_openenv() -> None:
    """As the class, the verifier or the request says; a reward out of it is refused before anything is written."""
    Path("export_ranged.py").write_text(GAME.replace("max_turns = 2", "max_turns = 2\n    reward_range = (-0.25, 1)"))
    Path("export_unranged.py").write_text(GAME)

    def read(name: str, reward_range: tuple[float, float] | None = None) -> Any:
        request = ExportRequest(name, tasks=3, reward_range=reward_range)
        root = export_environment(request, "openenv", f"made_{len(list(Path().iterdir()))}")
        assert TaskPackage.load(root / "tasks").recipe.reward_range == (reward_range and list(reward_range)) or not (
            reward_range
        )
        return yaml.safe_load((root / "openenv.yaml").read_text()).get("validation")

    given = read("export_ranged:Game")
    assert given["reward"] == {"range": [-0.25, 1.0], "oracle_tolerance": 0.0, "floor_margin": 0.125}
    assert given["capabilities"]["declared_task_count"] == {"train": 3, "test": 3}
    assert given["resources"]["episode_timeout_s"] == 90 and given["types"] == {"tags": ["multi-turn"]}
    assert read("rpn_arithmetic")["reward"]["range"] == [0.0, 1.0], "what the reward `combined` says"
    assert read("export_unranged:Game") is None
    assert read("export_unranged:Game", (-1.0, 1.0))["reward"]["range"] == [-1.0, 1.0]
    before = sorted(Path().iterdir())
    for wrong, words in (((0.0, 1.0), "out of its reward_range .*--reward-range"), ((1.0, 0.0), "lower number first")):
        with pytest.raises(ValueError, match=words):
            read("export_unranged:Game", wrong)
    assert sorted(Path().iterdir()) == before


@pytest.mark.parametrize(
    ("name", "options", "target", "words"),
    [
        ("sorting", {}, "harbour", "did you mean 'harbor'"),
        ("tool_arithmetic", {}, "openenv", "several turns or tools"),
        ("refine", {"inner": "sorting"}, "verifiers", "several turns or tools"),
        ("tests.kit.turn_letters:TurnLetters", {}, "verifiers", "cannot be exported"),
        ("mini_mbpp", {}, "harbor", "its reward code waits for processes"),
        ("export_refused:Game", {}, "harbor", "its episodes are turns of a class"),
        ("export_refused:Needs", {}, "verifiers", "No module named 'export_helper'"),
        ("export_refused:rows", {}, "openenv", "cannot be written as JSON"),
        ("export_refused:empty", {}, "openenv", "the environment has no tasks"),
        ("sorting", {"digitts": 3}, "openenv", "did you mean 'digits'"),
    ],
)
def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    tmp_path: Path, name: str, options: dict[str, Any], target: str, words: str
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code/export_helper.py").write_text("")
    (tmp_path / "code/export_refused.py").write_text(
        f"""{GAME}

class Needs(Game):
    def reset(self, seed):
        import export_helper
        return export_helper.__name__


def make(train, heldout):
    from rlvr.envs.row_source import RowSource
    return RowSource("rows", train, heldout, "exact_match")


def rows():
    from rlvr import Task
    tasks = [Task(str(n), f"{{n}}?", {{"answer": {{n}}}}) for n in range(9)]
    return make(tasks[1:], tasks[:1])


def empty():
    return make([], [])
"""
    )
    os.chdir(tmp_path / "code")
    before = sorted(path.name for path in tmp_path.rglob("*.py"))
    with pytest.raises(ValueError, match=re.escape(words)):
        export_environment(ExportRequest(name, options, tasks=5), target, str(tmp_path / "deep/er/made"))
    assert sorted(path.name for path in tmp_path.rglob("*.py")) == before
    assert [path.name for path in tmp_path.iterdir()] == ["code"]


def test_a_reward_that_no_import_leads_to_is_refused() -> None:
    request = ExportRequest("sorting", reward=lambda prompt, response: 1.0)
    for target in ("harbor", "verifiers", "openenv"):
        with pytest.raises(ValueError, match=r"its reward cannot be imported .*<lambda>"):
            export_environment(request, target, "made")
    for tasks in (0, -1, 2.5, 10**9, True):
        with pytest.raises(ValueError, match="expected a whole number from 1"):
            export_environment(ExportRequest("sorting", tasks=tasks), "harbor", "made")  # type: ignore[arg-type]
    assert not list(Path().iterdir())


def test_a_folder_with_files_and_a_name_that_is_none_are_refused(tmp_path: Path) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").write_text("mine")
    Path("link").symlink_to(tmp_path / "elsewhere")
    for out, words in (
        ("full", "is not empty"), ("link", "is not empty"), ("full/mine.txt", "is not empty"), ("a b", "cannot name"),
        ("Größe", "cannot name"), ("..", "is not empty"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            export_environment(ExportRequest("sorting", tasks=2), "openenv", out)
    assert sorted(path.name for path in Path().iterdir()) == ["full", "link"]
    Path("export_sorting.py").write_text(
        "class Game:\n    def reset(self, seed): ...\n    def step(self, action): ...\n"
    )
    with pytest.raises(ValueError, match="the package needs another name"):
        export_environment(ExportRequest("export_sorting:Game", tasks=2), "verifiers", "export_sorting")
    Path("empty").mkdir()
    assert export_environment(ExportRequest("sorting", tasks=2), "openenv", "empty/").name == "empty"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["verifiers", "openenv"])
def test_the_package_builds_a_wheel_with_all_of_it(target: str) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    Path("export_wheel.py").write_text(GAME)
    root = export("export_wheel:Game", target, tasks=3)
    done = subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=root, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    (wheel,) = (root / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    inside = "made_verifiers/game.py" if target == "verifiers" else "made_openenv/server/app.py"
    tasks = {f"made_{target}/tasks/{name}" for name in ("recipe.json", "train.jsonl", "heldout.jsonl")}
    assert {inside, "export_wheel.py", *tasks} <= names
