"""`rlvr env init NAME`: a package with an environment of your own, its test and its README.

It is whole from the beginning: `pip install -e NAME` makes the environment known by its name, and its test plays it.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path

CONTRACTS = ("game", "tools", "rows")

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{distribution}"
version = "0.1.0"
description = "An environment for rlvr"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["rlvr"]

[project.entry-points."rlvr.plugins"]
{name} = "{name}"

[tool.hatch.build.targets.wheel]
packages = ["{name}"]
"""

_README = """\
# {name}

{what}

```bash
pip install -e .                 # makes the environment known as `{name}`
rlvr env check {name}
pytest
rlvr train env.name={name} model.name=./my-model training.steps=50
```
"""

_INIT = '''\
"""The environment `{name}`: importing this package registers it."""

from {name}.environment import {class_name}

__all__ = ["{class_name}"]
'''

_GAME = '''\
"""A game of guesses: `reset` begins an episode, `step` takes what the policy says."""

from __future__ import annotations

from rlvr import register_environment


@register_environment("{name}")
class {class_name}:
    """Find a number from 1 to 9; each answer says whether it is lower or higher."""

    max_turns = 5

    def reset(self, seed: int) -> str:
        """The same seed is the same episode: draw from it, never from a global generator."""
        self.hidden = 1 + seed % 9
        return "Guess my number from 1 to 9. Answer with the number only."

    def step(self, action: str) -> tuple[str, float, bool]:
        """(what the policy reads next, the reward of this step, whether the episode is over)."""
        guess = action.strip()
        if guess == str(self.hidden):
            return "Right.", 1.0, True
        if not guess.isdecimal():
            return "A number, please.", 0.0, False
        return ("Lower." if int(guess) > self.hidden else "Higher."), 0.0, False
'''

_GAME_TEST = """\
from {name} import {class_name}


def test_the_hidden_number_wins():
    game = {class_name}()
    assert "1 to 9" in game.reset(seed=3)
    assert game.step("9") == ("Lower.", 0.0, False)
    assert game.step("4") == ("Right.", 1.0, True)


def test_the_same_seed_is_the_same_episode():
    first, second = {class_name}(), {class_name}()
    assert first.reset(seed=7) == second.reset(seed=7)
    assert first.step("5") == second.step("5")
"""

_TOOLS = '''\
"""A safe: public methods are tools, which keep a state within an episode."""

from __future__ import annotations

from rlvr import register_environment


@register_environment("{name}")
class {class_name}:
    """Open a safe with a code of two digits."""

    def reset(self, seed: int) -> str:
        """Begins an episode; the text is added to the prompt. The same seed is the same episode."""
        self.code, self.pressed = f"{{seed % 100:02}}", ""
        return f"Open the safe. The digits of its code add up to {{sum(map(int, self.code))}}."

    def press(self, digit: int) -> str:
        """Press one digit."""
        self.pressed = (self.pressed + str(digit))[-2:]
        return "open" if self.pressed == self.code else "closed"

    def get_reward(self) -> float:
        """What the episode gives, once it is over."""
        return float(self.pressed == self.code)
'''

_TOOLS_TEST = """\
from {name} import {class_name}


def test_the_code_opens_the_safe():
    safe = {class_name}()
    assert "add up to 6" in safe.reset(seed=42)
    assert [safe.press(4), safe.press(2)] == ["closed", "open"]
    assert safe.get_reward() == 1.0


def test_another_code_does_not():
    safe = {class_name}()
    safe.reset(seed=42)
    safe.press(2)
    assert safe.get_reward() == 0.0
"""

_ROWS = '''\
"""Sums as rows with a reward: the last number of a completion counts."""

from __future__ import annotations

import re

from rlvr import Task, register_environment, register_reward
from rlvr.envs.row_source import RowSource


@register_reward("{name}")
def last_number(prompt: str, response: str, answer: str) -> float:
    """1.0 if the last number in the completion is the answer."""
    numbers = re.findall(r"-?\\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


@register_environment("{name}")
def {function}(most: int = 20) -> RowSource:
    """Sums of two numbers from 0 to `most`."""
    tasks = [
        Task(f"{{a}}+{{b}}", f"What is {{a}} + {{b}}?", {{"answer": str(a + b)}})
        for a in range(most + 1)
        for b in range(most + 1)
    ]
    heldout = [task for number, task in enumerate(tasks) if number % 10 == 7]
    train = [task for number, task in enumerate(tasks) if number % 10 != 7]
    return RowSource("{name}", train, heldout, reward="{name}", demonstrations="answer")
'''

_ROWS_TEST = """\
from rlvr.envs import resolve_environment
from {name}.environment import last_number


def test_the_last_number_counts():
    assert last_number("", "it is 12", "12") == 1.0
    assert last_number("", "12 or 13", "12") == 0.0
    assert last_number("", "none", "12") == 0.0


def test_no_task_is_both_trained_and_held_out():
    source = resolve_environment("{name}")
    trained = {{source.train(0, index, "").id for index in range(source.size(""))}}
    assert trained and not trained & {{task.id for task in source.heldout(None)}}
"""

_FILES = {
    "game": (_GAME, _GAME_TEST, "A game of several turns: a class with `reset` and `step`."),
    "tools": (_TOOLS, _TOOLS_TEST, "Tools with a state: a class with `reset`, whose other methods are tools."),
    "rows": (_ROWS, _ROWS_TEST, "Rows with a reward of their own."),
}


def check_package_name(folder: Path) -> str:
    """The module's name that a folder gives; ValueError for one that is none."""
    name = re.sub(r"[-.]", "_", folder.name)
    if not (name.isidentifier() and name.isascii()) or keyword.iskeyword(name) or name != name.lower():
        raise ValueError(f"{folder.name!r} cannot name a package; give lower-case letters, digits and _: my_game")
    return name


def check_folder(folder: Path) -> None:
    """ValueError for a place that has something in it."""
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{folder} exists and is not empty; give another name, or remove it")


def write_package(folder: str, contract: str = "game") -> list[Path]:
    """Write the package into a new folder, which names it; the files, in their order. `contract` is one of `CONTRACTS`.

    ValueError for a name that is no module's, another contract, or a folder with files in it.
    """
    root = Path(folder)
    name = check_package_name(root)
    if contract not in CONTRACTS:
        raise ValueError(f"contract={contract!r}, expected one of {', '.join(CONTRACTS)}")
    check_folder(root)
    class_name = "".join(part.capitalize() for part in name.split("_"))
    environment, test, what = _FILES[contract]
    init = _INIT if contract != "rows" else _INIT.replace("{class_name}", "{function}")
    texts = {
        "pyproject.toml": _PROJECT,
        "README.md": _README,
        f"{name}/__init__.py": init,
        f"{name}/environment.py": environment,
        f"tests/test_{name}.py": test,
    }
    words = {"name": name, "distribution": name.replace("_", "-"), "class_name": class_name, "what": what}
    written: list[Path] = []
    for place, text in texts.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.format(function=f"make_{name}", **words))
        written.append(path)
    return written
