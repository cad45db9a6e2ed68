"""Tasks of Inspect for tests. Run by Inspect's own interpreter."""

from __future__ import annotations

import math
import time
from random import Random

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageSystem, ChatMessageUser, get_model
from inspect_ai.scorer import Score, accuracy, choice, match, model_graded_qa, scorer
from inspect_ai.solver import (
    generate,
    multiple_choice,
    prompt_template,
    self_critique,
    solver,
    system_message,
    use_tools,
)
from inspect_ai.tool import tool
from inspect_ai.util import sandbox


def sums(count: int, first: int = 0) -> list[Sample]:
    return [Sample(id=f"s{n}", input=f"{n} + 1", target=str(n + 1)) for n in range(first, first + count)]


@task
def addition(count: int = 20, first: int = 0) -> Task:
    solvers = [system_message("Add."), prompt_template("{prompt} = ?"), generate()]
    return Task(sums(count, first), solver=solvers, scorer=match())


@task
def capitals(shuffled: bool = False) -> Task:
    rows = [
        Sample(input=f"Capital of {land}?", choices=["Paris", "Rome", "Oslo"], target=letter)
        for land, letter in (("France", "A"), ("Italy", "B"), ("Norway", "C"))
    ]
    options = {"shuffle": Random()} if shuffled else {}
    return Task(rows, solver=multiple_choice(**options), scorer=choice())


@scorer(metrics=[accuracy()])
def length():
    async def score(state, target):
        said = state.output.completion
        if said == "raise":
            raise KeyError("lost")
        if said == "wait":
            time.sleep(1000)
        special = {
            "nan": math.nan, "odd": "maybe", "yes": True, "part": "P", "list": [1.0],
            "failed": Score.unscored(reason="grader_failed", explanation="no grade"),
        }  # fmt: skip
        value = special.get(said, len(said))
        return value if isinstance(value, Score) else None if said == "none" else Score(value=value)

    return score


@scorer(metrics={"*": [accuracy()]})
def parts():
    async def score(state, target):
        return Score(value={"long": len(state.output.completion) > 3, "right": state.output.completion == target.text})

    return score


@scorer(metrics=[accuracy()])
def in_box():
    async def score(state, target):
        await sandbox().exec(["true"])
        return Score(value=1)

    return score


@scorer(metrics=[accuracy()])
def hides_failure():
    async def score(state, target):
        try:
            await get_model("mockllm/model").generate("hello")
        except Exception:
            return Score(value=0)
        return Score(value=1)

    return score


@solver
def asks_twice():
    async def solve(state, generate):
        state = await generate(state)
        state.messages.append(ChatMessageUser(content="Sure?"))
        return await generate(state)

    return solve


@solver
def asks_another():
    async def solve(state, generate):
        state.output = await get_model("mockllm/model").generate("hello")
        return await generate(state)

    return solve


@tool
def shout():
    async def execute(word: str) -> str:
        """Shout.

        Args:
            word: What.
        """
        return word.upper()

    return execute


SPECIAL = {
    "length": lambda: {"solver": generate(), "scorer": length()},
    "two": lambda: {"solver": generate(), "scorer": [match(), parts()]},
    "judged": lambda: {"solver": generate(), "scorer": model_graded_qa()},
    "judged_by_name": lambda: {"solver": generate(), "scorer": model_graded_qa(model="mockllm/model")},
    "hidden": lambda: {"solver": generate(), "scorer": hides_failure()},
    "critique": lambda: {"solver": [generate(), self_critique()], "scorer": match()},
    "twice": lambda: {"solver": asks_twice(), "scorer": match()},
    "another": lambda: {"solver": asks_another(), "scorer": match()},
    "tools": lambda: {"solver": [use_tools(shout()), generate()], "scorer": match()},
    "in_box": lambda: {"solver": generate(), "scorer": in_box()},
    "box": lambda: {"solver": generate(), "scorer": match(), "sandbox": "local"},
    "silent": lambda: {"solver": system_message("hm"), "scorer": match()},
    "no_scorer": lambda: {"solver": generate()},
}


@task
def special(kind: str) -> Task:
    rows = [
        Sample(input=[ChatMessageSystem(content="Hm."), ChatMessageUser(content=f"{n}?")], target=str(n))
        for n in range(4)
    ]
    return Task(MemoryDataset(rows), **SPECIAL[kind]())
