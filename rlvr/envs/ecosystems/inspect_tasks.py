"""Tasks of Inspect 0.3 (`inspect:FILE.py@TASK`), unmodified: their samples, prompts and scorers, in one turn.

    env: {name: "inspect:arithmetic.py@addition", kwargs: {options: {digits: 2}}}

They run in an interpreter of their own (`rlvr.envs.ecosystems.installs`). What the policy reads is what the task's
solver asks, and the reward is the value of its scorer. Where a scorer gives no verdict, the episode is an error and no
zero. Tools, sandboxes, models of a scorer and solvers of several turns are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlvr.core.types import Task
from rlvr.envs.ecosystems.guest_process import GuestError, GuestProcess, find_guest
from rlvr.envs.ecosystems.installs import find_python
from rlvr.envs.gym.gym_session import PRINTABLE, Gym, GymSession, Observation
from rlvr.envs.gym.gym_source import GymSource
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.envs.tools.environment_class import call_user_code
from rlvr.reward.reward_options import check_mapping, check_number

LOAD_SECONDS = 1_800.0  # to load a task, which may download its data
_MARGIN = 30.0  # what is added where a process may have to be ended


class _InspectGym(Gym):
    """Sessions of one step: an answer goes in, and the reward comes out."""

    max_turns = 1

    def __init__(self, guest: GuestProcess, configs: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
        self.guest, self.configs, self.seconds = guest, configs, seconds

    def open(self) -> GymSession:
        return _ScoreSession(self)


class _ScoreSession(GymSession):
    def __init__(self, gym: _InspectGym) -> None:
        self._gym = gym
        self._task: Task | None = None

    async def reset(self, task: Task) -> Observation:
        self._task = task
        return Observation("")  # the prompt is the task's

    async def step(self, action: str) -> Observation:
        assert self._task is not None
        gym, meta = self._gym, self._task.meta
        config = gym.configs[meta["side"]]
        what = f"inspect:{config['name']}: task {self._task.id!r}"
        params = {"place": meta["place"], "hash": meta["hash"], "answer": action.encode("utf-8", "replace").decode()}

        def call() -> Any:
            try:
                return gym.guest.call("score", {"config": config, **params}, gym.seconds)
            except GuestError as error:
                raise EpisodeError(f"{what}: {error}") from error

        given = await call_user_code(what, gym.seconds + _MARGIN, call)
        return Observation.of_step(("", given["reward"], True, given["scores"]), what)


class InspectSource(GymSource):
    """A task of Inspect, `inspect:FILE.py@TASK`, or the name of one in an installed package.

    The task is called with `options`. `scorer` names the score that is the reward, if there are several: SCORER, or
    SCORER/KEY. `heldout` is the share of held-out samples, which a hash of the prompt chooses, or a mapping of options
    of the task that selects them. To score an answer may take `seconds`. `python` is an interpreter with inspect-ai.
    """

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any] | None = None,
        scorer: str | None = None,
        heldout: float | Mapping[str, Any] = HELDOUT_FRACTION,
        seconds: float = 60.0,
        python: str | None = None,
    ) -> None:
        check_mapping("inspect: options", options, "the task's options")
        check_number("inspect: seconds", seconds, 0, above=True)
        guest = find_guest(find_python("inspect", python), "inspect_guest.py")
        config = {"name": name, "options": dict(options or {}), "scorer": scorer}
        configs, train = {"train": config}, _read_rows(guest, config, "train")
        if isinstance(heldout, Mapping):
            configs["heldout"] = {**config, "options": {**config["options"], **heldout}}
            held = _read_rows(guest, configs["heldout"], "heldout")
        else:
            held = choose_heldout(train, heldout, f"inspect:{name}", "heldout", "heldout to options of the task")
            chosen = {task.id for task in held}
            train = [task for task in train if task.id not in chosen]
        rows = RowSource(f"inspect:{name}", train, held, "environment")
        super().__init__("inspect", _InspectGym(guest, configs, seconds), None, rows)
        self.vocabulary = PRINTABLE


def _read_rows(guest: GuestProcess, config: Mapping[str, Any], side: str) -> list[Task]:
    """The samples of a task as it asks them, of a side of the configs."""
    try:
        given = guest.call("samples", {"config": config}, LOAD_SECONDS)
    except GuestError as error:
        raise ValueError(f"inspect:{config['name']}: {error}") from error
    rows: list[Task] = []
    for place, one in enumerate(given):
        messages = one["messages"]
        prompt = messages[0]["content"] if [message["role"] for message in messages] == ["user"] else messages
        identity = f"{'' if side == 'train' else side + '-'}{one['id']}"
        rows.append(Task(identity, prompt, {"place": place, "hash": one["hash"], "side": side}))
    return rows
