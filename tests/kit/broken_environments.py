"""Environments that are broken in the ways that real ones are: each has a fault that `rlvr env check` is to name.

`BROKEN` has them by name, with the checks of which one has to find the fault. Most are sums of two numbers: what is
broken stands in the class itself. The games follow Gym's contract, the tool environments TRL's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from rlvr.core import rng
from rlvr.core.messages import ModelInput
from rlvr.core.protocols import StepResult, TaskSource
from rlvr.core.types import Task
from rlvr.envs.gym.gym_session import PRINTABLE
from rlvr.envs.prompt import PromptEnv, encode_prompt

HERE, REWARDS = "tests.kit.broken_environments", "tests.kit.broken_rewards"
BROKEN: dict[str, tuple[str, ...]] = {}
ELSEWHERE = ("Hashed", "SetOrder")  # broken in another process alone


def breaks(*checks: str) -> Callable[[Any], Any]:
    """Plant a fault: one of these checks has to find it."""

    def plant(environment: Any) -> Any:
        BROKEN[environment.__name__] = checks
        return environment

    return plant


# Rows: sums of two numbers -------------------------------------------------------------------------------------------


class Sums(TaskSource):
    """What is a + b? The sound one: a is odd in training and even where held out."""

    levels: tuple[str, ...] = ("",)
    reward = f"{REWARDS}:exact"

    def make_task(self, a: int, b: int) -> Task:
        return Task(f"sum-{a}-and-{b}", f"What is {a} + {b}?", {"answer": str(a + b)})

    def train(self, seed: int, index: int, level: str) -> Task:
        key = rng.key("broken", seed, index)
        return self.make_task(2 * rng.integer(40, key, 0) + 1001, rng.integer(900, key, 1) + 100)

    def heldout(self, count: int | None) -> list[Task]:
        return [self.make_task(2 * n + 1000, 137 + 7 * n) for n in range(60)][:count]

    def env(self, task: Task, tokenizer: Any) -> Any:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str | list[str] | None:
        return task.meta["answer"]


def judge_by(reward: str, *checks: str) -> str:
    """Sums that are judged by a broken reward; the name of the class."""
    name = f"Judged{''.join(part.title() for part in reward.split('_'))}"
    globals()[name] = type(name, (Sums,), {"reward": f"{REWARDS}:{reward}", "__module__": __name__})
    BROKEN[name] = checks
    return name


judge_by("contains", "false_accepts")
judge_by("contained_in", "canary_floor")
judge_by("begins", "false_accepts")
judge_by("near", "false_accepts")
judge_by("any_number", "hedged_answers")
judge_by("any_line", "hedged_answers")
judge_by("any_order", "false_accepts")
judge_by("unstripped", "false_refusals")
judge_by("window", "false_refusals")
judge_by("says_correct", "canary_floor")
judge_by("follows_orders", "canary_floor")
judge_by("evaluates", "adversarial_floor")
judge_by("executes", "adversarial_floor")
judge_by("noisy", "verifier_determinism", "episode_determinism")
judge_by("only_once", "verifier_determinism", "episode_determinism")
judge_by("ranked", "verifier_determinism")
judge_by("unguarded", "verifier_determinism")
judge_by("swallowing", "verifier_failures")
judge_by("defaulting", "verifier_failures")
judge_by("raising", "verifier_failures")
judge_by("pays_words", "floor_gap", "canary_floor")
judge_by("pays_length", "length_bias")
judge_by("pays_brevity", "length_bias")
judge_by("not_a_number", "reward_well_formed")
judge_by("bonus", "reward_well_formed")
judge_by("always", "training_signal")
judge_by("never", "training_signal")


@breaks("reward_well_formed")
class OutOfRange(Sums):
    reward = f"{REWARDS}:unbounded"
    reward_range = (0.0, 1.0)


@breaks("startup")
class ResetRaises(Sums):
    def env(self, task: Task, tokenizer: Any) -> Any:
        class Failing(PromptEnv):
            async def initial_observation(self) -> Any:
                raise FileNotFoundError("/data/levels.json")

        return Failing(task, tokenizer)


@breaks("startup")
class NoTasks(Sums):
    levels = ()

    def heldout(self, count: int | None) -> list[Task]:
        return []


@breaks("splits_disjoint")
class SharedPrompts(Sums):
    def heldout(self, count: int | None) -> list[Task]:
        tasks = [self.train(0, n, "") for n in range(60)]
        return [replace(task, id=f"test-{task.id}") for task in tasks][:count]


@breaks("splits_disjoint")
class SharedRows(Sums):
    def heldout(self, count: int | None) -> list[Task]:
        fresh = super().heldout(None)
        return [self.train(0, n, "") if n % 8 == 3 else task for n, task in enumerate(fresh)][:count]


@breaks("task_ids")
class OneId(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), id="sum")


@breaks("task_ids")
class FewIds(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), id=f"sum-{a % 10}")


@breaks("seed_control")
class GlobalDraws(Sums):
    def train(self, seed: int, index: int, level: str) -> Task:
        return self.make_task(2 * random.randrange(40) + 1001, random.randrange(900) + 100)


@breaks("seed_control")
class ShuffledHeldout(Sums):
    def heldout(self, count: int | None) -> list[Task]:
        tasks = super().heldout(None)
        random.shuffle(tasks)
        return tasks[:count]


@breaks("seed_control")
class Hashed(Sums):
    """Python's hash of a text is another one in each process."""

    def train(self, seed: int, index: int, level: str) -> Task:
        draw = random.Random(hash(f"{seed}/{index}"))
        return self.make_task(2 * draw.randrange(40) + 1001, draw.randrange(900) + 100)


@breaks("seed_control")
class SetOrder(Sums):
    """The order of a set of words is another one in each process."""

    def make_task(self, a: int, b: int) -> Task:
        things = " ".join({"apples", "pears", "plums", "cherries", "figs", "quinces"})
        return replace(super().make_task(a, b), prompt=f"With {things}: what is {a} + {b}?")


@breaks("oracle_max")
class Units(Sums):
    """The references have a unit that the answers have not."""

    def demonstration(self, task: Task, key: int) -> str:
        return f"{task.meta['answer']} apples"


@breaks("oracle_max")
class WrongRows(Sums):
    """A fifth of the answers are wrong."""

    def demonstration(self, task: Task, key: int) -> str:
        return str(eval(task.prompt_text[8:-1]))

    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), meta={"answer": str(a + b + (b % 5 == 0))})


@breaks("oracle_max")
class WrongHeldout(Sums):
    """The answers of held-out tasks are one row off."""

    def heldout(self, count: int | None) -> list[Task]:
        tasks = super().heldout(None)
        shifted = [*tasks[1:], tasks[0]]
        return [replace(task, meta=next.meta) for task, next in zip(tasks, shifted, strict=True)][:count]

    def demonstration(self, task: Task, key: int) -> str:
        return str(eval(task.prompt_text[8:-1]))


@breaks("floor_gap")
class PaysForm(Sums):
    """Most of the reward is for the tags around the answer."""

    reward = f"{REWARDS}:pays_form"

    def demonstration(self, task: Task, key: int) -> str:
        return f"<answer>{task.meta['answer']}</answer>"


@breaks("floor_gap")
class Imbalanced(Sums):
    """Nearly every answer is no."""

    def make_task(self, a: int, b: int) -> Task:
        answer = "yes" if (a * b) % 17 == 0 else "no"
        return Task(f"divides-{a}-{b}", f"Does 17 divide {a} times {b}?", {"answer": answer})


@breaks("no_solution_leakage")
class AnswerInPrompt(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), prompt=f"What is {a} + {b}? (Expected answer: {a + b}.) Explain.")


@breaks("no_solution_leakage")
class AnswerAtEnd(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), prompt=f"What is {a} + {b}?\n{a + b}")


@breaks("no_solution_leakage")
class AnswerInSystem(Sums):
    def make_task(self, a: int, b: int) -> Task:
        task = super().make_task(a, b)
        system = {"role": "system", "content": f"Grade with care. {a + b} earns a point."}
        return replace(task, prompt=[system, {"role": "user", "content": str(task.prompt)}])


@breaks("no_solution_leakage")
class AnswerEncoded(Sums):
    def make_task(self, a: int, b: int) -> Task:
        token = base64.b64encode(str(a + b).encode()).decode()
        return replace(super().make_task(a, b), prompt=f"[{token}] What is {a} + {b}?")


@breaks("id_leakage")
class AnswerInId(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), id=f"{a}-{b}-{a + b}")


@breaks("id_leakage")
class AnswerInHash(Sums):
    """The answers are few enough to try all of them."""

    def make_task(self, a: int, b: int) -> Task:
        digest = hashlib.sha256(str(a + b).encode()).hexdigest()
        return replace(super().make_task(a, b), id=f"{a}-{b}-{digest[:12]}")


@breaks("id_leakage")
class AnswerInHex(Sums):
    def make_task(self, a: int, b: int) -> Task:
        return replace(super().make_task(a, b), id=f"{a * 1000 + b}x{str(a + b).encode().hex()}")


@breaks("near_duplicates")
class Paraphrased(Sums):
    """Held-out prompts are training prompts with another last word."""

    def make_task(self, a: int, b: int) -> Task:
        first, second = f"Box {a * 31 % 977} holds {a} red marbles", f"box {b * 17 % 991} holds {b} of them"
        text = f"{first} and {second}, so how many are in both boxes?"
        return Task(f"marbles-{a}-{b}", text, {"answer": str(a + b)})

    def heldout(self, count: int | None) -> list[Task]:
        tasks = [self.train(0, n, "") for n in range(60)]
        return [replace(t, id=f"{t.id}-b", prompt=str(t.prompt).replace("boxes?", "together?")) for t in tasks][:count]


class ParaphrasedOtherwise(Paraphrased):
    """The same where the word changes the answer: no fault."""

    def heldout(self, count: int | None) -> list[Task]:
        return [replace(task, meta={"answer": f"0{task.meta['answer']}"}) for task in super().heldout(count)]


@breaks("near_duplicates")
class Repeated(Sums):
    """Rows that stand in the file several times."""

    def __init__(self) -> None:
        self.size = lambda level: 120  # type: ignore[assignment]

    def train(self, seed: int, index: int, level: str) -> Task:
        return replace(super().train(0, index % 120 % 40, level), id=f"row-{index % 120}")


class ChatSums(Sums):
    """The sums as chats, in characters that a small tokenizer has."""

    vocabulary = PRINTABLE

    def make_task(self, a: int, b: int) -> Task:
        made = super().make_task(a, b)
        return replace(made, prompt=[{"role": "system", "content": "Add."}, {"role": "user", "content": made.prompt}])


class Choices(Sums):
    """Four choices; the right one is at a place that a draw tells."""

    def draw_place(self, a: int, b: int) -> int:
        return rng.integer(4, rng.key("choice", a, b))

    def write_options(self, a: int, b: int) -> list[str]:
        options = [str(a + b + more) for more in (10, -10, 1, 2)]
        options[self.draw_place(a, b)] = str(a + b)
        return options

    def make_task(self, a: int, b: int) -> Task:
        lines = [f"{letter}. {text}" for letter, text in zip("ABCD", self.write_options(a, b), strict=True)]
        prompt = "\n".join([f"What is {a} + {b}? Give a letter.", *lines])
        return Task(f"choice-{a}-{b}", prompt, {"answer": "ABCD"[self.draw_place(a, b)]})


@breaks("choice_bias")
class OftenThird(Choices):
    def draw_place(self, a: int, b: int) -> int:
        return 2 if rng.integer(10, rng.key("third", a, b)) < 5 else super().draw_place(a, b)


@breaks("choice_bias")
class RightIsLongest(Choices):
    def write_options(self, a: int, b: int) -> list[str]:
        place = self.draw_place(a, b)
        return [f"exactly {text}" if n == place else text for n, text in enumerate(super().write_options(a, b))]


# Sound ones that look like broken ones -------------------------------------------------------------------------------


class AnyOrder(Sums):
    """Words that are right in any order."""

    reward = f"{REWARDS}:any_words"

    def make_task(self, a: int, b: int) -> Task:
        animals = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "jay", "koi", "lynx", "mole")
        chosen = [one for place, one in enumerate(animals) if rng.key("animal", a, b) >> place & 1] or ["ant"]
        lives = ", ".join(f"{one} {'stays' if one in chosen else 'left'}" for one in animals)
        return Task(f"farm-{a}-{b}", f"Farm {a}, day {b}: {lives}. Which stay?", {"answer": " ".join(chosen)})


class Between(Sums):
    """Thirty answers are right, and the row has none."""

    reward = f"{REWARDS}:between"

    def make_task(self, a: int, b: int) -> Task:
        low = a * b
        prompt = f"Name a whole number above {low} and below {low + 31}."
        return Task(f"between-{a}-{b}", prompt, {"low": low, "high": low + 31})

    def demonstration(self, task: Task, key: int) -> str:
        return str(task.meta["low"] + 1 + key % 30)


class InNotes(Sums):
    """The answer is in a file that the prompt names, and is to be read there."""

    def make_task(self, a: int, b: int) -> Task:
        number = 1000 + rng.integer(9000, rng.key("notes", a, b))
        return Task(f"notes-{a}-{b}", f"What is the target of {a} and {b} in notes.json?", {"answer": str(number)})


# Episodes ------------------------------------------------------------------------------------------------------------


class Turnwise(Sums):
    """Sums whose episodes are of `episode`, which gives the reward."""

    reward = "environment"
    max_turns = 3

    def demonstration(self, task: Task, key: int) -> None:
        return None


class SumEpisode(PromptEnv):
    """One turn: is it the sum?"""

    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        said = self._tokenizer.decode(action, skip_special_tokens=True).strip()
        return StepResult(float(said == self.task.meta["answer"]), True)


@breaks("episode_isolation")
class SharedEpisode(Turnwise):
    """One object for all episodes, which the last one that begins takes over."""

    def __init__(self) -> None:
        self._episode: Any = None

    def env(self, task: Task, tokenizer: Any) -> Any:
        source = self

        class Reused(SumEpisode):
            async def initial_observation(self) -> Any:
                source._episode = task
                return await super().initial_observation()

            async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
                self.task = source._episode
                seen = ModelInput([*encode_prompt(self.task, tokenizer), *action, *tokenizer.encode(" Again?")])
                self._asked = getattr(self, "_asked", 0) + 1
                return StepResult(0.0, self._asked > 1, None if self._asked > 1 else seen)

        return Reused(task, tokenizer)


@breaks("resource_bounds")
class Endless(Turnwise):
    def env(self, task: Task, tokenizer: Any) -> Any:
        class Asking(PromptEnv):
            async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
                return StepResult(0.0, False, ModelInput([*encode_prompt(task, tokenizer), *action]))

        return Asking(task, tokenizer)


@breaks("resource_bounds")
class Hanging(Turnwise):
    def env(self, task: Task, tokenizer: Any) -> Any:
        class Waiting(SumEpisode):
            async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
                await asyncio.sleep(3600)
                return StepResult(0.0, True)

        return Waiting(task, tokenizer)


@breaks("memory_growth")
class KeepsEpisodes(Sums):
    """Every episode stays in a list, with its board."""

    kept: ClassVar[list[Any]] = []

    def env(self, task: Task, tokenizer: Any) -> Any:
        episode = PromptEnv(task, tokenizer)
        self.kept.append((episode, bytearray(20_000)))
        return episode


@breaks("memory_growth")
class KeepsFiles(Sums):
    """Every episode leaves a file open."""

    def env(self, task: Task, tokenizer: Any) -> Any:
        os.open(os.devnull, os.O_RDONLY)
        return super().env(task, tokenizer)


class PaidEpisode(SumEpisode):
    async def step(self, action: list[int], *, extra: Any = None) -> StepResult:
        done = await super().step(action, extra=extra)
        return replace(done, reward=0.5 * done.reward)


@breaks("reward_attribution")
class PaidTwice(Sums):
    """The episode pays for the right answer, and so does the verifier."""

    environment_weight = 1.0

    def env(self, task: Task, tokenizer: Any) -> Any:
        return PaidEpisode(task, tokenizer)


@breaks("reward_attribution")
class Undeclared(Sums):
    def env(self, task: Task, tokenizer: Any) -> Any:
        return PaidEpisode(task, tokenizer)


class _Game:
    """Gym's contract: name the numbers from a first one on."""

    vocabulary = ("0", "1", "2", "3", "4", "5")
    max_turns = 4

    def reset(self, seed: int) -> str:
        self.next, self.turn = seed % 3, 0
        return f"from {self.next}"

    def step(self, action: str) -> tuple[str, float, bool]:
        right = action.strip() == str(self.next)
        self.next, self.turn = self.next + 1, self.turn + 1
        return "go on", 0.25 * right, self.turn == 3 or not right


@breaks("reward_attribution")
class Cumulative(_Game):
    """The last reward is the sum of those before, which were given already."""

    def reset(self, seed: int) -> str:
        self.sum = 0.0
        return super().reset(seed)

    def step(self, action: str) -> tuple[str, float, bool]:
        said, reward, done = super().step(action)
        if done and reward:
            return said, self.sum, True
        self.sum += reward
        return said, reward, done


@breaks("episode_determinism")
class Unseeded(_Game):
    def reset(self) -> str:  # type: ignore[override]
        return super().reset(random.randrange(1000))


@breaks("episode_determinism")
class Clock(_Game):
    def step(self, action: str) -> tuple[str, float, bool]:
        said, reward, done = super().step(action)
        return f"{said} at {time.time_ns()}", reward, done


@breaks("episode_determinism")
class Counting(_Game):
    """The number of episodes so far changes the next one."""

    episodes = 0

    def reset(self, seed: int) -> str:
        type(self).episodes += 1
        return super().reset(seed + self.episodes)


@breaks("episode_isolation")
class ClassState(_Game):
    """The state is the class's, and every episode's."""

    board: ClassVar[dict[str, int]] = {}

    def reset(self, seed: int) -> str:
        self.board["next"] = seed % 3
        return f"from {seed % 3}"

    def step(self, action: str) -> tuple[str, float, bool]:
        right = action.strip() == str(self.board["next"])
        self.board["next"] += 1
        return f"next {self.board['next']}", 0.25 * right, self.board["next"] > 5


@breaks("episode_isolation")
class Moves(_Game):
    """An episode changes to a folder of its own."""

    def reset(self, seed: int) -> str:
        os.chdir(tempfile.gettempdir())
        return super().reset(seed)


class SeedsAll(_Game):
    """An episode seeds what the whole process draws by; no fault, as nothing here draws so."""

    def reset(self, seed: int) -> str:
        random.seed(seed)
        return super().reset(seed)


@breaks("malformed_turns")
class NumbersOnly(_Game):
    def step(self, action: str) -> tuple[str, float, bool]:
        return super().step(str(int(action)))


@breaks("malformed_turns")
class FirstWord(_Game):
    def step(self, action: str) -> tuple[str, float, bool]:
        return super().step(action.split()[0])


@breaks("reward_well_formed")
class DividesByTurns(_Game):
    def step(self, action: str) -> tuple[str, float, bool]:
        said, reward, done = super().step(action)
        return said, reward / reward if reward else float("nan"), done


HISTORY: list[str] = []


@breaks("memory_growth")
class KeepsHistory(_Game):
    def step(self, action: str) -> tuple[str, float, bool]:
        HISTORY.append("frame " * 1000 + str(len(HISTORY)))
        return super().step(action)


class Dice(_Game):
    """Chance of its own, by the seed: roll up to twelve, and stop. Nothing earns in one turn; a sound one."""

    vocabulary = ("roll", "stop", *map(str, range(13)))

    def reset(self, seed: int) -> str:
        self.draws, self.sum = random.Random(seed), 0
        return "0"

    def step(self, action: str) -> tuple[str, float, bool]:
        if action.strip() == "stop":
            return "", self.sum / 12, True
        if action.strip() == "roll":
            self.sum += self.draws.randint(1, 6)
        return str(self.sum), 0.0, self.sum > 12


class Walk(_Game):
    """Thirty turns, paid at the end: one word for all is right half the time, and no search finds all; a sound one."""

    vocabulary = ("left", "right", *map(str, range(10)))
    max_turns = 30

    def reset(self, seed: int) -> str:
        self.draws, self.right = random.Random(seed), 0
        self.turn, self.place = 0, self.draws.randrange(10)
        return str(self.place)

    def step(self, action: str) -> tuple[str, float, bool]:
        self.right += action.strip() == ("left" if self.place > 4 else "right")
        self.turn, self.place = self.turn + 1, self.draws.randrange(10)
        return str(self.place), self.right / 30 if self.turn == 30 else 0.0, self.turn == 30


# Tools ---------------------------------------------------------------------------------------------------------------


class _Desk:
    """TRL's contract: an episode with a tool."""

    def reset(self, prompt: Any, answer: str, **row: Any) -> None:
        self.answer = answer

    def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        return a + b


class TellingDesk(_Desk):
    def read_state(self) -> str:
        """Read the state of the episode."""
        return f"turn 1, target {self.answer}"


class ExportingDesk(_Desk):
    def reset(self, prompt: Any, answer: str, **row: Any) -> None:
        super().reset(prompt, answer, **row)
        os.environ["DESK_EXPECTED"] = answer


class FilingDesk(_Desk):
    """The task lies in a file beside those that the policy may read."""

    def reset(self, prompt: Any, answer: str, **row: Any) -> None:
        super().reset(prompt, answer, **row)
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder)
        (Path(folder) / "notes.json").write_text(json.dumps({"question": str(prompt), "target": answer}))

    def read_file(self, path: str) -> str:
        """Read a file."""
        try:
            return Path(path).read_text()
        except OSError as error:
            return str(error)


def _open_desk(name: str, inner: str = "Sums") -> Any:
    from rlvr.envs.tools.tool_source import ToolSource

    return ToolSource(inner=f"{HERE}:{inner}", environment=f"{HERE}:{name}")


def file_to_read() -> Any:
    """A sound one: the prompt names the file."""
    return _open_desk("FilingDesk", "InNotes")


@breaks("oracle_containment")
def tool_tells() -> Any:
    return _open_desk("TellingDesk")


@breaks("oracle_containment")
def variable_tells() -> Any:
    return _open_desk("ExportingDesk")


@breaks("oracle_containment")
def file_tells() -> Any:
    return _open_desk("FilingDesk")


@breaks("oracle_containment")
class SchemaTells(Sums):
    """The description of a tool has the answer of the task."""

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        description = f"Submit a number. Only {task.meta['answer']} is taken."
        tool = {"name": "submit", "description": description, "parameters": {"type": "object", "properties": {}}}
        return replace(task, template_arguments={"tools": [{"type": "function", "function": tool}]})


# Only a search finds these -------------------------------------------------------------------------------------------


ATTACKED = {
    name: BROKEN.pop(name)
    for name in (judge_by("pays_repetition", "gameability_gap"), judge_by("pays_boxed", "gameability_gap"))
}
