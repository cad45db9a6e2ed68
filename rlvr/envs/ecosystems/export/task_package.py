"""The tasks of an exported environment with their verifier or episodes, as a package for another project plays them.

    recipe.json                    {"format", "reward": {name, options}} or {..., "episodes": {path, options, seconds}}
    train.jsonl, heldout.jsonl     {"id", "prompt", "meta", "level", "shown"}, one task a line

Only text goes in and out, so it needs neither a tokenizer nor a model.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlvr.core.futures import run_to_end
from rlvr.core.plugins import import_modules
from rlvr.core.types import Score, Task
from rlvr.envs.gym.gym_session import OUT_OF_RANGE, ClassGym, Observation
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import build_messages
from rlvr.reward import Reward, resolve_reward
from rlvr.reward.signatures import Case

FORMAT = 1
SIDES = ("train", "heldout")
Json = dict[str, Any]


@dataclass(frozen=True)
class ExportRecipe:
    """How answers are judged: by the reward {name, options}, or by `episodes` of the class {path, options, seconds}.
    `imports` are modules that register names of the reward. A turn whose reward is out of `reward_range` is an error of
    its episode."""

    reward: Json | None = None
    episodes: Json | None = None
    imports: list[str] = field(default_factory=list[str])
    max_turns: int = 1
    reward_range: list[float] | None = None
    format: int = FORMAT


def write_row(task: Task) -> str:
    """A task as a line; ValueError if it holds what is no JSON."""
    row: Json = {"id": task.id, "prompt": task.prompt, "meta": task.meta, "level": task.level}
    if task.shown_prompt is not None:
        row["shown"] = task.shown_prompt
    try:
        return json.dumps(row, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"task {task.id!r:.80} cannot be written as JSON ({error}); it cannot be exported") from error


def read_row(line: str) -> Task:
    row = json.loads(line)
    return Task(row["id"], row["prompt"], row["meta"], row["level"], row.get("shown"))


class TaskPackage:
    """The files in a folder. Methods may be called from several threads."""

    def __init__(self, recipe: ExportRecipe, tasks: Mapping[str, Sequence[Task]]) -> None:
        self.recipe, self.tasks = recipe, tasks
        import_modules(recipe.imports)
        self._reward: Reward | None = None
        self._gym: ClassGym | None = None
        if recipe.reward is not None:
            self._reward = resolve_reward(recipe.reward["name"], **recipe.reward["options"])
            self._reward.start()
        if recipe.episodes is not None:
            self._gym = ClassGym(recipe.episodes["path"], recipe.episodes["options"], recipe.episodes["seconds"])

    @classmethod
    def load(cls, folder: Path) -> TaskPackage:
        given = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
        if given.get("format") != FORMAT:
            raise ValueError(
                f"{folder}: format {given.get('format')!r}, this version of rlvr reads {FORMAT}; export it again"
            )
        tasks = {
            side: [read_row(line) for line in (folder / f"{side}.jsonl").read_text(encoding="utf-8").splitlines()]
            for side in SIDES
        }
        return cls(ExportRecipe(**given), tasks)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps(asdict(self.recipe), indent=2) + "\n")
        for side in SIDES:
            with open(folder / f"{side}.jsonl", "w", encoding="utf-8") as file:
                file.writelines(f"{write_row(task)}\n" for task in self.tasks[side])

    def find(self, side: str, place: int) -> Task:
        if side not in self.tasks or not 0 <= place < len(self.tasks[side]):
            sizes = ", ".join(f"{side} has {len(tasks):,} tasks" for side, tasks in self.tasks.items())
            raise ValueError(f"there is no task {place} of {side!r}: {sizes}")
        return self.tasks[side][place]

    def judge(self, task: Task, answer: str) -> Score:
        assert self._reward is not None
        return self._reward.judge_all([Case.of_task(task, answer)])[0]

    def open(self, task: Task) -> PackageEpisode:
        return PackageEpisode(self, task, self._gym)


class PackageEpisode:
    """One episode. Its methods block, and raise EpisodeError where it cannot go on: that is no reward of 0."""

    def __init__(self, package: TaskPackage, task: Task, gym: ClassGym | None) -> None:
        self._package, self._task, self._num_turns, self._is_over = package, task, 0, False
        self._session = gym.open() if gym else None

    def begin(self) -> str:
        """What the policy reads first, behind the task's messages."""
        return run_to_end(self._session.reset(self._task)).text if self._session else ""

    def step(self, text: str) -> Observation:
        """Take a turn of the policy."""
        if self._is_over:
            raise EpisodeError("the episode is over; begin another")
        self._num_turns += 1
        if self._session is None:
            said = self._judge(text)
        else:
            said = run_to_end(self._session.step(text))
        low, high = self._package.recipe.reward_range or (-math.inf, math.inf)
        if not low <= said.reward <= high:
            raise EpisodeError(f"the turn gave the reward {said.reward:g}, {OUT_OF_RANGE} [{low:g}, {high:g}]")
        if self._num_turns >= self._package.recipe.max_turns and not said.done:
            said = Observation(said.text, said.reward, True, said.metrics)
        self._is_over = said.done
        return said

    def _judge(self, text: str) -> Observation:
        score = self._package.judge(self._task, text)
        if score.value is None:
            raise EpisodeError(f"the verifier could not judge: {score.reason} {score.detail[-2_000:]}")
        return Observation("", score.value, True, score.parts)

    def close(self) -> None:
        if self._session:
            run_to_end(self._session.close())


def list_messages(task: Task, text: str = "") -> list[dict[str, str]]:
    """What the policy reads: the task's messages, and a text behind the last one."""
    *before, last = build_messages(task.model_prompt)
    return [*before, {**last, "content": f"{last['content']}{text}"}]


def write_prompt(task: Task, text: str = "") -> str:
    """What the policy reads, as one text: several messages are paragraphs."""
    return "\n\n".join(message["content"] for message in list_messages(task, text))


def play_turns(package: TaskPackage, task: Task, turns: Sequence[str]) -> Json:
    """What an episode gives: its first text, and the rewards of these turns, or why it failed."""
    try:
        episode = package.open(task)
        try:
            first, rewards = episode.begin(), list[float]()
            for turn in turns:
                said = episode.step(turn)
                rewards.append(said.reward)
                if said.done:
                    break
            return {"first": first, "rewards": rewards}
        finally:
            episode.close()
    except EpisodeError as error:
        return {"error": str(error)}


def main() -> None:
    """Play turns that stand in the input as JSON: {"folder", "asked": [[side, place, turns]]}; print what they gave."""
    given = json.loads(sys.stdin.read())
    package = TaskPackage.load(Path(given["folder"]))
    found = [play_turns(package, package.find(side, place), turns) for side, place, turns in given["asked"]]
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()
