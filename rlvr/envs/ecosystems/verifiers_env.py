"""Environments of verifiers 0.4 (`verifiers:NAME`), unmodified: an installed package, or a taskset that it has itself.

    env: {name: "verifiers:OWNER/NAME@VERSION", kwargs: {taskset: {split: train}, heldout: {split: test}}}

They run in an interpreter of their own (`rlvr.envs.ecosystems.installs`), where one process plays all episodes. The
environment's harness calls the recorder, so what the policy read and sampled is kept token for token; reward and
metrics are what verifiers computes. Whatever fails there is an error of the episode, and no zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlvr.core.protocols import StepResult
from rlvr.core.types import Task
from rlvr.envs.agent.agent_env import AgentEnv
from rlvr.envs.agent.agent_run import AgentRun, Assignment, OnEnd, Result
from rlvr.envs.agent.agent_source import PlayedSource, read_rules
from rlvr.envs.ecosystems.guest_process import GuestError, GuestProcess, find_guest
from rlvr.envs.ecosystems.installs import find_python
from rlvr.envs.gym.gym_session import PRINTABLE
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.reward.reward_options import check_integer, check_mapping

HELDOUT_TASKS = 100  # of a taskset without end, unless the config says
LOAD_SECONDS = 1_800.0  # to load an environment, which may download its data
_GUEST = "verifiers_guest.py"
_FIELDS = ("idx", "hash", "side")  # of a task's meta: what its run is told


class VerifiersTasks(RowSource):
    """The tasks of a taskset. `configs` are those of the environment for the sides train and heldout; the latter is
    there if the held-out tasks are another selection of the taskset, else `heldout` is their share, or in a taskset
    without end their number. Of such a one the first `tasks` are trained on."""

    def __init__(self, guest: GuestProcess, configs: Mapping[str, Any], tasks: int, heldout: float | None) -> None:
        name = f"verifiers:{configs['train']['name']}"
        is_infinite = call(guest, name, "open", config=configs["train"])["infinite"]
        if heldout is None:
            heldout = 0 if "heldout" in configs else HELDOUT_TASKS if is_infinite else HELDOUT_FRACTION
        if is_infinite and (type(heldout) is not int or heldout < 0):
            raise ValueError(f"{name} has tasks without end; heldout={heldout!r}, expected a number of tasks")
        rows = self._read(guest, name, configs, "train", tasks + int(heldout) if is_infinite else None)
        self._is_game = len({task.prompt_text for task in rows}) < min(2, len(rows))
        if self._is_game:  # the prompt does not say which task it is; what the policy reads is verifiers' own
            rows = [replace(task, prompt=f"[{task.meta['name'] or task.id}] {task.prompt_text}") for task in rows]
        if "heldout" in configs:
            infinite = call(guest, name, "open", config=configs["heldout"])["infinite"]
            train, held = rows, self._read(guest, name, configs, "heldout", tasks if infinite else None)
        elif is_infinite:
            train, held = rows[:tasks], rows[tasks:]
        else:
            held = choose_heldout(rows, heldout, name, "heldout", "heldout to options of the taskset")
            chosen = {task.id for task in held}
            train = [task for task in rows if task.id not in chosen]
        super().__init__(name, train, held, "environment")

    @staticmethod
    def _read(guest: GuestProcess, name: str, configs: Mapping[str, Any], side: str, count: int | None) -> list[Task]:
        given = call(guest, name, "tasks", config=configs[side], count=count)
        if not given:
            raise ValueError(f"{name}: the taskset has no tasks ({side}); check its options")
        rows: list[Task] = []
        for row in given:
            messages = row["messages"]
            prompt = messages[0]["content"] if [one["role"] for one in messages] == ["user"] else messages
            meta = {"idx": row["idx"], "name": row["name"], "hash": row["hash"], "side": side}
            rows.append(Task(f"{'' if side == 'train' else side + '-'}{row['idx']}", prompt, meta))
        return rows

    vocabulary = PRINTABLE  # a taskset may write other characters too

    def advice(self) -> list[str]:
        return [] if self._is_game else super().advice()


def call(guest: GuestProcess, name: str, method: str, **params: Any) -> Any:
    try:
        return guest.call(method, params, LOAD_SECONDS)
    except GuestError as error:
        raise ValueError(f"{name}: {error}") from error


class VerifiersRun(AgentRun):
    """One episode in the process of the environments."""

    def __init__(self, guest: GuestProcess, configs: Mapping[str, Any]) -> None:
        self._guest, self._configs = guest, configs
        self._number, self._has_ended = 0, False

    def start(self, assignment: Assignment, on_end: OnEnd) -> None:
        def end(result: Any, error: str) -> None:
            self._has_ended = True
            on_end(Result(error=error) if error else Result.of(result))

        row = assignment.row
        params = {"config": self._configs[row["side"]], "base_url": assignment.base_url}
        self._number = self._guest.send("run", {**params, "idx": row["idx"], "hash": row["hash"]}, end)

    def stop(self) -> None:
        if not self._has_ended:
            self._guest.cancel(self._number)


class VerifiersEnv(AgentEnv):
    """One episode. Without a reward of verifiers it is an error, also where its budget ended it."""

    def _end(self, why: str, result: Result = Result()) -> StepResult:
        if result.reward is None and not result.error:
            result = replace(result, error=f"verifiers gave no reward: the budget of the episode was used up ({why})")
        return super()._end(why, result)


class VerifiersSource(PlayedSource):
    """An environment of verifiers, `verifiers:NAME`: an installed package, `OWNER/NAME[@VERSION]` or its name, a module
    in the current folder, or a taskset of verifiers itself.

    `taskset` are the options of the taskset, `options` those of the environment around it (`--env.*` of `vf-eval`:
    roles, timeouts, `id`). A role without a harness or runtime holds a chat with the tools of the task on this machine.
    `heldout` is the share of held-out tasks, which a hash of the prompt chooses, a mapping of options of the taskset
    that selects them, or, in a taskset without end, their number; there `tasks` are trained on. `python` is an
    interpreter with verifiers. `server` is the address (`tcp://127.0.0.1:5000`) of an environment server of verifiers
    that plays the episodes, in roles, harnesses and limits of its own: only the tasks are loaded here. `budget`,
    `rules` and `template_arguments` are those of the environment `agent`.
    """

    episode = VerifiersEnv

    def __init__(
        self,
        name: str,
        taskset: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        heldout: float | int | Mapping[str, Any] | None = None,
        tasks: int = 1_000,
        python: str | None = None,
        server: str | None = None,
        budget: Mapping[str, Any] | None = None,
        rules: Mapping[str, Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        for word, section in (("taskset", taskset), ("options", options)):
            check_mapping(f"verifiers: {word}", section, "its options")
        check_integer("verifiers: tasks", tasks, 1)
        if server is not None and (not isinstance(server, str) or not server.startswith(("tcp://", "ipc://"))):
            raise ValueError(f"verifiers: server={server!r:.80}, expected an address such as tcp://127.0.0.1:5000")
        if server is not None and options:
            raise ValueError("verifiers: options has no effect with a server, which has its own; leave one of them out")
        for rule in ("fields", "judges_failures"):
            if rule in (rules or {}):
                raise ValueError(
                    f"verifiers: rules.{rule} is not supported: verifiers gives tasks and rewards; leave it out"
                )
        # No attempt is made again, so equal calls are those of several roles or attempts, all of which are trained.
        own = read_rules(budget, {"keep_retried": True, **(rules or {}), "fields": _FIELDS}, needs_reward=True)
        config = {
            "name": name, "taskset": dict(taskset or {}), "options": dict(options or {}), "max_turns": own.budget.calls,
            "server": server,
        }  # fmt: skip
        self._configs = {"train": config}
        if isinstance(heldout, Mapping):
            self._configs["heldout"] = {**config, "taskset": {**config["taskset"], **heldout}}
        self._guest = find_guest(find_python("verifiers", python), _GUEST)
        inner = {
            "guest": self._guest,
            "configs": self._configs,
            "tasks": tasks,
            "heldout": None if "heldout" in self._configs else heldout,
        }
        super().__init__("verifiers", f"{__name__}:VerifiersTasks", inner, own, template_arguments)

    def open_run(self) -> VerifiersRun:
        return VerifiersRun(self._guest, self._configs)
