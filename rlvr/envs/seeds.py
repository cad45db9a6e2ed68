"""Tasks without rows: a number each, from which a game or an environment of another project makes its episode.

env: {name: "my_game:Game", kwargs: {inner: seeds, inner_kwargs: {prompt: "Play well.", heldout: 200}}}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlvr.core import rng
from rlvr.core.protocols import Env, TaskSource
from rlvr.core.types import Task
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.reward.reward_options import check_integer

_RANGE = 1 << 30  # seeds to train on are below, held-out ones from here


class NumberedSource(TaskSource):
    """A task source by number: `make(number)` is a training task, for numbers below `tasks` (None: a billion),
    `make_heldout` one held out.

    An epoch has each of the `tasks` once. Both must be functions of the number alone.
    """

    levels, reward = ("",), "environment"

    def __init__(
        self, make: Callable[[int], Task], tasks: int | None, make_heldout: Callable[[int], Task], heldout: int
    ) -> None:
        self._make, self._tasks, self._make_heldout, self._heldout = make, tasks, make_heldout, heldout
        self._order: tuple[tuple[int, int], list[int]] | None = None  # of the last (seed, epoch)
        if tasks == 0:
            self.levels = ()
        elif tasks is not None:
            self.size = lambda level: tasks  # pyright: ignore[reportAttributeAccessIssue] - a member that may be None

    def train(self, seed: int, index: int, level: str) -> Task:
        if self._tasks is None:
            return self._make(rng.integer(_RANGE, rng.key("seeds", seed, index)))
        epoch, place = divmod(index, self._tasks)
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), rng.permutation(self._tasks, rng.key("seeds", seed, epoch))
        return self._make(self._order[1][place])

    def heldout(self, count: int | None) -> list[Task]:
        wanted = self._heldout if count is None else min(count, self._heldout)
        return [self._make_heldout(number) for number in range(wanted)]

    def env(self, task: Task, tokenizer: Any) -> Env:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> None:
        return None


@register_environment("seeds")
class SeedSource(NumberedSource):
    """Tasks without rows: the `seed` of an episode, in a task's meta. `prompt` stands before what the episode says.

    With `tasks` the training seeds are 0 to tasks - 1; without, they are drawn from a billion. `heldout` others are
    held out.
    """

    def __init__(self, prompt: str = "", tasks: int | None = None, heldout: int = 100) -> None:
        if not isinstance(prompt, str):
            raise ValueError(f"seeds: prompt={prompt!r:.80}, expected a text")
        if tasks is not None:
            check_integer("seeds: tasks", tasks, 1)
        check_integer("seeds: heldout", heldout, 0)

        def make(seed: int) -> Task:
            return Task(f"seed-{seed}", prompt, {"seed": seed})

        super().__init__(make, tasks, lambda number: make(_RANGE + number), heldout)
