"""Task folders of Harbor and Terminal-Bench (`harbor:FOLDER`), played without Docker where a task needs no image.

    env: {name: "harbor:./tasks", kwargs: {max_turns: 8, controls: true}}

The policy has one tool, `bash`. Its commands run in a sandbox (`rlvr.envs.agent.command_session`) without a network,
over the folders of the task in memory; what they leave are files, and every process ends with its command. When the
episode is over, `tests/test.sh` runs over the same folders, with `/tests` and `/logs` that no command of the policy saw
or could write to, and a home of its own. A reward that is missing or broken is an error of the episode, and no zero.

Tests that run the policy's program run it with their own rights, as in Harbor: it could write the reward.
A task that needs an image runs in a root folder of the user's where one is given (`image`), inside the same walls.
Left out on purpose: building images, services, a network, and tasks of several steps.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.types import Task
from rlvr.envs.agent.agent_sandbox import AgentSandbox, SandboxLauncher
from rlvr.envs.agent.command_session import CommandEnd, CommandSession, Places, PrivateFiles
from rlvr.envs.ecosystems.harbor_tasks import PRIVATE, SYSTEM_PATH, HarborTask, NeedsImage, find_task_folders, read_task
from rlvr.envs.limited_calls import CallError, EpisodeError, run_ending_call
from rlvr.envs.row_source import HELDOUT_FRACTION, RowSource, choose_heldout
from rlvr.envs.tools.environment_class import ToolEnvironment, ToolSession
from rlvr.envs.tools.tool import Tool, ToolProblem
from rlvr.envs.tools.tool_source import ToolSource
from rlvr.reward.reward_options import check_integer, check_number

_SHELL = "/bin/bash"
_VERIFIER, _HOME = "/logs/verifier", "/logs/home"
_REWARDS = (f"{_VERIFIER}/reward.json", f"{_VERIFIER}/reward.txt")
_TRIAL_SECONDS = 20.0
_TASK = "{task}"  # in the path of an image
_MOST_NAMED = 20  # of the tasks that are left out
_USED = {"time": "it took longer than {seconds:g} s", "memory": "it used more memory than it may"}


def bash(command: str) -> str:
    """Run a command with bash and read its output. Files stay for the next command; processes end with their own."""
    raise ToolProblem("the episode has not begun")


class HarborTools(ToolEnvironment):
    """Plays task folders. A command may take `call_seconds`; of rewards with names, `reward_key` is the one."""

    has_reward = True

    def __init__(
        self, limits: AgentSandbox, call_seconds: float, max_concurrent: int, reward_key: str = "reward"
    ) -> None:
        self.limits, self.call_seconds, self.reward_key = limits, call_seconds, reward_key
        self.slots = EpisodeSlots(max_concurrent)
        self.tools = [replace(Tool.of(bash, has_own_limit=True), ends_late_calls=True)]
        self._launcher = SandboxLauncher([_SHELL], limits)
        self._launcher.check("")

    def open(self) -> ToolSession:
        return _FolderSession(self)

    def begin(self, task: HarborTask) -> CommandSession:
        """A sandbox with the files of a task."""
        own = [f"{path}/bin" for path in self.limits.readable]
        variables = {
            "PATH": ":".join([*own, SYSTEM_PATH]), "HOME": "/root", "TMPDIR": "/tmp", "LANG": "C.UTF-8",
            **task.environment,
        }  # fmt: skip
        readable = self.limits.readable if task.image else self._launcher.readable
        is_free = [not any(f"{path}/".startswith(f"{one}/") for path in readable) for one in task.writable]
        places = Places([one for one, free in zip(task.writable, is_free, strict=True) if free], PRIVATE, task.image)
        limits = replace(self.limits, memory=task.memory or self.limits.memory)
        return CommandSession.open(self._launcher, limits, places, task.read_sources(), variables)

    def try_image(self, task: HarborTask) -> str:
        """Why no command runs in the image of a task; "" if one does."""
        try:
            session = self.begin(task)
        except EpisodeError as error:
            return f"the image {task.image} cannot be used: {error}"
        try:
            ended = session.run([_SHELL, "-c", "true"], task.workdir, _TRIAL_SECONDS)
            return f"the image {task.image} runs no {_SHELL}: {ended.output[-200:]}" if ended.code else ""
        except EpisodeError as error:
            return f"the image {task.image} cannot be used: {error}"
        finally:
            session.close()

    def verify(self, task: HarborTask, session: CommandSession) -> float:
        """The reward that a task's tests write; EpisodeError if they write none."""
        files = PrivateFiles(task.read_folder("tests"), (_VERIFIER, _HOME), _REWARDS)
        own = {"HOME": _HOME, "TMPDIR": _HOME, **task.verifier_environment}
        ended = session.run([_SHELL, "/tests/test.sh"], task.workdir, task.verifier_seconds, files, own)
        what = f"harbor: task {task.folder.name!r}: tests/test.sh"
        if ended.used:
            raise EpisodeError(f"{what}: {_USED[ended.used].format(seconds=task.verifier_seconds)}")
        if ended.result_fault:
            raise EpisodeError(
                f"{what} wrote no reward ({ended.result_fault}); it ended with {ended.code}: {ended.output[-500:]}"
            )
        return read_reward(ended.result, self.reward_key, what)

    def play(self, task: HarborTask, with_solution: bool) -> float:
        """The reward of a control: the task's own solution, or nothing done."""
        session = self.begin(task)
        try:
            if with_solution:
                files = task.read_folder("solution")
                if not files:
                    raise EpisodeError(f"harbor: task {task.folder.name!r} has no solution/solve.sh")
                seconds, own = task.agent_seconds, task.solution_environment
                command = [_SHELL, "/solution/solve.sh"]
                ended = session.run(command, task.workdir, seconds, PrivateFiles(files), own)
                if ended.used:
                    said = _USED[ended.used].format(seconds=seconds)
                    raise EpisodeError(f"harbor: task {task.folder.name!r}: solution/solve.sh: {said}")
            return self.verify(task, session)
        finally:
            session.close()


class _FolderSession(ToolSession):
    def __init__(self, environment: HarborTools) -> None:
        self._environment, self.slots = environment, environment.slots
        self._session: CommandSession | None = None
        self._task: HarborTask | None = None
        self._seconds_left = 0.0
        self._failure: EpisodeError | None = None

    async def reset(self, task: Task) -> str:
        def begin() -> None:
            self._task = read_task(Path(task.meta["folder"]), task.meta["image"])
            self._session = self._environment.begin(self._task)
            self._seconds_left = self._task.agent_seconds

        await self._call(begin, f"harbor: task {task.id!r}")
        return ""

    def list_tools(self) -> Sequence[Tool]:
        return [replace(tool, function=self._bash) for tool in self._environment.tools]

    def _bash(self, command: str) -> str:
        assert self._session and self._task
        if self._failure:
            raise ToolProblem("the environment has failed")
        if self._seconds_left <= 0:
            raise ToolProblem("the time of the task is over")
        if "\0" in command:
            raise ToolProblem("a command cannot have a null character")
        seconds = min(self._environment.call_seconds, self._seconds_left)
        began = time.monotonic()
        try:
            ended = self._session.run([_SHELL, "-c", command], self._task.workdir, seconds)
        except EpisodeError as failure:
            self._failure = failure
            raise ToolProblem("the environment has failed") from failure
        finally:
            self._seconds_left -= time.monotonic() - began
        return _describe(ended, seconds)

    async def get_reward(self) -> float:
        task, session = self._task, self._session
        assert task and session
        if self._failure:
            raise self._failure
        return await self._call(lambda: self._environment.verify(task, session), f"harbor: {task.folder.name!r}")

    async def close(self) -> None:
        if self._session:
            self._session.close()

    @staticmethod
    async def _call(function: Any, what: str) -> Any:
        try:
            return await run_ending_call(function, None, EpisodeError)
        except CallError as error:
            raise EpisodeError(f"{what}: {error}") from error


def _describe(ended: CommandEnd, seconds: float) -> str:
    """What the policy reads of a command."""
    why = _USED[ended.used].format(seconds=seconds) if ended.used else f"exit code {ended.code}" if ended.code else ""
    lead = f"{ended.output}\n" if ended.output and not ended.output.endswith("\n") else ended.output
    return f"{lead}[{why}]" if why else ended.output


def read_reward(raw: bytes, key: str, what: str) -> float:
    """The number in a reward file: alone, or by name in an object of JSON. EpisodeError for anything else."""
    try:
        given = json.loads(raw)
        if isinstance(given, dict):
            if key not in given and len(given) != 1:
                raise EpisodeError(
                    f"{what} wrote the rewards {', '.join(given) or '(none)'}; say which one counts: "
                    "env.kwargs.reward_key=NAME"
                )
            given = given.get(key, next(iter(given.values())))
        if isinstance(given, bool) or not math.isfinite(given):
            raise ValueError
        return float(given)
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise EpisodeError(f"{what} wrote the reward {raw[:80]!r}, expected a finite number") from None


@dataclass(frozen=True)
class TaskControls:
    """What a task's own solution is given, and what doing nothing is; `fault`: why the task is not fit to train on."""

    oracle: float = math.nan
    nop: float = math.nan
    fault: str = ""


def run_controls(tools: HarborTools, tasks: Sequence[HarborTask]) -> list[TaskControls]:
    """Play the solution of each task, and nothing, and compare."""

    def compare(task: HarborTask) -> TaskControls:
        try:
            oracle, nop = tools.play(task, with_solution=True), tools.play(task, with_solution=False)
        except EpisodeError as failure:
            return TaskControls(fault=str(failure))
        fault = "" if oracle > nop else f"its solution is given {oracle:g}, and doing nothing {nop:g}"
        return TaskControls(oracle, nop, fault)

    with ThreadPoolExecutor(min(4, tools.slots.most)) as pool:
        return list(pool.map(compare, tasks))


class HarborTasks(RowSource):
    """The tasks that can run here; `left_out` says why the other tasks cannot. `heldout` is a share of the tasks,
    or another folder of tasks."""

    def __init__(
        self,
        name: str,
        tasks: Sequence[HarborTask],
        left_out: Mapping[str, str],
        heldout: float | Sequence[HarborTask],
    ) -> None:
        self.left_out = left_out
        if not tasks:
            raise ValueError(
                f"{name}: no task can run without Docker. {self._list_left_out()}. For tasks that need an image give a "
                "root folder of your own: env.kwargs.image=FOLDER"
            )
        rows = _make_rows(tasks)
        if isinstance(heldout, Sequence):
            held = _make_rows(heldout, "heldout-")
        else:
            held = (
                choose_heldout(rows, heldout, name, "heldout", "heldout to a folder of tasks") if len(rows) > 1 else []
            )
        chosen = {task.id for task in held}
        data = f"{len(rows):,} task folders; {len(left_out):,} others need an image or a network and are left out"
        super().__init__(name, [task for task in rows if task.id not in chosen], held, "environment", data=data)

    def _list_left_out(self) -> str:
        named = [f"{name}: {why}" for name, why in list(self.left_out.items())[:_MOST_NAMED]]
        more = len(self.left_out) - len(named)
        return "; ".join(named) + (f"; and {more:,} more" if more else "")

    def advice(self) -> list[str]:
        said = [f"{len(self.left_out):,} tasks of {self.name} are left out: {self._list_left_out()}"]
        return (said if self.left_out else []) + super().advice()


def _make_rows(tasks: Sequence[HarborTask], prefix: str = "") -> list[Task]:
    return [
        Task(f"{prefix}{one.folder.name}", one.instruction, {"folder": str(one.folder), "image": one.image})
        for one in tasks
    ]


def harbor_source(
    folder: str,
    heldout: float | str = HELDOUT_FRACTION,
    max_turns: int = 16,
    call_seconds: float = 60.0,
    max_concurrent: int = 8,
    sandbox: Mapping[str, Any] | None = None,
    reward_key: str = "reward",
    controls: bool = False,
    image: str | None = None,
) -> ToolSource:
    """The tasks of Harbor in `folder`, one or a folder of them; those that need an image or a network are left out.
    `heldout` is the share of held-out tasks, which a hash of the instruction chooses, or another folder of tasks.

    A command may take `call_seconds`, and all of an episode the task's `[agent] timeout_sec`. `sandbox` are limits:
    `memory` (a task's `memory_mb` goes before it), `processes`, `scratch` (bytes of files, in memory) and `readable`
    (folders with further programs in `bin`). With `controls` the solution of each task and an episode that does nothing
    are played first, and tasks whose solution gets no more are left out.

    `image` is a root folder with programs and files, such as `docker export` writes, which stands in place of the
    system's, read-only but for a copy of the folders that commands write to. {task} in it is the name of the task's
    folder. What a Dockerfile does beside copying files is taken to be done there.
    """
    name = f"harbor:{folder}"
    check_number("harbor: call_seconds", call_seconds, 0, above=True)
    check_integer("harbor: max_concurrent", max_concurrent, 1)
    tools = HarborTools(AgentSandbox.of(sandbox or {}), call_seconds, max_concurrent, reward_key)
    left_out: dict[str, str] = {}
    if image is not None:
        image = _check_image(image)
    tasks = _read_folder(folder, tools, image or "", controls, left_out)
    held = _read_folder(heldout, tools, image or "", controls, left_out) if isinstance(heldout, str) else heldout
    source = HarborTasks(name, tasks, left_out, held)
    seconds = max(task.agent_seconds for task in [*tasks, *(held if isinstance(held, list) else [])])
    return ToolSource(source, max_turns=max_turns, seconds=seconds, call_seconds=call_seconds, environment=tools)


def _check_image(image: str) -> str:
    """The full path of `image`; ValueError for no root folder, or one that holds what the policy may not read."""
    path = os.path.abspath(os.path.expanduser(image))
    if _TASK in path:
        return path
    if not os.path.isdir(path):
        raise ValueError(
            f"harbor: image: there is no folder {image!r}; give a root folder, as `docker export` writes it"
        )
    for own in (os.getcwd(), os.path.expanduser("~")):
        if f"{os.path.realpath(own)}/".startswith(f"{os.path.realpath(path).rstrip('/')}/"):
            raise ValueError(f"harbor: image: {image!r} holds {own}, which the policy could read; give a folder apart")
    return path


def _read_folder(
    folder: str, tools: HarborTools, image: str, has_controls: bool, left_out: dict[str, str]
) -> list[HarborTask]:
    """The tasks in a folder that can run here, and, where there are controls, pass them; the others get a reason."""
    tasks: list[HarborTask] = []
    tried: dict[str, str] = {}
    for one in find_task_folders(Path(folder).expanduser().resolve()):
        own = image.replace(_TASK, one.name)
        try:
            if own and not os.path.isdir(own):
                raise NeedsImage(f"there is no root folder {own}")
            task = read_task(one, own)
            if own and own not in tried:
                tried[own] = tools.try_image(task)
            if why := tried.get(own):
                raise NeedsImage(why)
            tasks.append(task)
        except NeedsImage as reason:
            left_out[one.name] = str(reason)
    if not has_controls:
        return tasks
    results = run_controls(tools, tasks)
    left_out |= {task.folder.name: one.fault for task, one in zip(tasks, results, strict=True) if one.fault}
    return [task for task, one in zip(tasks, results, strict=True) if not one.fault]
