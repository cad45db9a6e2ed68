"""Environments of verifiers 0.4, in its own interpreter: lists tasks, and plays episodes whose model is the policy.

Left out on purpose: scores over groups, which verifiers leaves to the trainer, and attempts that are made again, whose
calls would be trained with the reward of another attempt. Needs verifiers; imports nothing of rlvr.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import importlib.metadata
import itertools
import json
import math
import os
import pkgutil
import re
import sys
from contextlib import AsyncExitStack
from typing import Any

from pipe_server import Refusal, describe, serve

try:
    import httpx
    import verifiers
    import verifiers.v1.clients.eval
    import verifiers.v1.tasksets
    from pydantic import ValidationError
    from verifiers.v1.clients import EvalClientConfig, ModelContext
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.harness import Harness
    from verifiers.v1.serve import EnvClient
    from verifiers.v1.types import SamplingConfig, content_text
    from verifiers.v1.utils import loaders

    MISSING = ""
except ImportError as error:
    MISSING = f"{sys.executable} cannot load verifiers ({error})"


SERVER_SECONDS = 10.0  # in which an environment server answers that it is there


class LoadedEnvironment:
    """One environment with its configuration. Its tasks are read as far as they are needed."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.env = load(config)
        self.taskset = self.env.taskset
        self.server = EnvClient(config["server"]) if config.get("server") else None
        self._unread, self._read = iter(self.taskset), list[Any]()
        self._lock = asyncio.Lock()
        self._serving: AsyncExitStack | None = None

    def read_tasks(self, count: int | None) -> list[Any]:
        """The first `count` tasks (None: all)."""
        missing = None if count is None else max(0, count - len(self._read))
        self._read += itertools.islice(self._unread, missing)
        return self._read[:count]

    async def start(self) -> None:
        """Bring up what all episodes share, once; or see that the environment server answers."""
        if self.server is not None:
            if await self.server.health(SERVER_SECONDS):
                return
            raise Refusal(
                f"no environment server of verifiers answers at {self.server.address} within {SERVER_SECONDS:g} s; "
                "start one, or leave server out"
            )
        async with self._lock:
            if self._serving is None:
                stack = AsyncExitStack()
                await stack.enter_async_context(self.env.serving())
                self._serving = stack

    async def run(self, task: Any, client: Any) -> Any:
        """An episode, here or at the environment server, which plays it in roles and harnesses of its own."""
        if self.server is None:
            return await self.env.run_episode(task, ModelContext(model="policy", client=client))
        return await self.server.run(client, "policy", SamplingConfig(), task.data.model_dump(mode="json"))

    async def close(self) -> None:
        if self._serving is not None:
            await self._serving.aclose()
        if self.server is not None:
            await self.server.close()


_loaded: dict[str, LoadedEnvironment] = {}


def share_connections() -> None:
    """Let all clients of verifiers with the same time limits share one pool of connections.

    verifiers keeps a client per address until it ends. Here every episode has an address of its own, and a client with
    a pool and certificates of its own is about 0.9 MB that stay.
    """
    clients = verifiers.v1.clients.eval
    build, built = clients.build_async_httpx, dict[str, httpx.AsyncClient]()

    def build_shared(config: Any) -> httpx.AsyncClient:
        limits = config.timeout.model_dump_json()
        if limits not in built or built[limits].is_closed:
            built[limits] = build(config)
        return built[limits]

    async def keep_open(self: Any) -> None:
        return

    clients.build_async_httpx, clients.EvalClient.close = build_shared, keep_open


def find(config: dict[str, Any]) -> LoadedEnvironment:
    key = json.dumps(config, sort_keys=True)
    if key not in _loaded:
        _loaded[key] = LoadedEnvironment(config)
    return _loaded[key]


def load(config: dict[str, Any]) -> Any:
    """The environment of {name, taskset, options}, with a chat and this machine for roles that name nothing else."""
    name, options = config["name"], dict(config["options"])
    module = find_module(name)
    raw = {**options, "taskset": {**config["taskset"], "id": name}}
    try:
        kind = loaders.env_config_type(name, options.get("id") or "")
        declared = {
            role: field.default for role, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)
        }
        brings_harness = has_harness(module)
        for role, default in declared.items():
            given = dict(raw.get(role) or {})
            if not given.get("harness") and default.harness is None and not brings_harness:
                given["harness"] = {"id": "rlvr_chat"}
            names_runtime = "runtime" in given or "runtime" in default.model_fields_set
            raw[role] = given if names_runtime else {**given, "runtime": {"type": "subprocess"}}
            raw[role].setdefault("max_turns", config["max_turns"] if default.max_turns is None else default.max_turns)
        env = loaders.load_environment(loaders.resolve_env_config(raw))
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise Refusal(f"the options of {name!r} are wrong: {wrong:.2000}") from error
    except (TypeError, AttributeError, ValueError, ModuleNotFoundError) as error:
        raise Refusal(f"{name!r} cannot be loaded: {error}") from error
    for role, spec in ({} if config.get("server") else agent_config_fields(env.config)).items():
        check_role(name, role, spec, env._harnesses[role], "runtime" in (options.get(role) or {}))
    if env.config.retries.max_retries:
        raise Refusal("options.retries is not supported: an attempt that is made again would be trained; leave it out")
    return env


def has_harness(module: Any) -> bool:
    members = (getattr(module, name, None) for name in getattr(module, "__all__", ()))
    return any(isinstance(member, type) and issubclass(member, Harness) for member in members)


def check_role(name: str, role: str, spec: Any, harness: Any, names_runtime: bool) -> None:
    if spec.retries.max_retries:
        raise Refusal(
            f"options.{role}.retries is not supported: an attempt that is made again would be trained; leave it out"
        )
    if harness.EXECUTES_CODE and spec.runtime.type == "subprocess" and not names_runtime:
        raise Refusal(
            f"{name!r}: the harness {harness.config.id!r} of {role} runs commands of the policy; say where by "
            f"options.{role}.runtime.type: docker, podman or apptainer, or subprocess for this machine, as this user"
        )


def find_module(name: str) -> Any:
    """The module of a taskset. Refusal for one that is not there, or has another version than `name` asks for."""
    package, _, version = name.rsplit("/", 1)[-1].partition("@")
    try:
        module = loaders.import_taskset(name)
    except ModuleNotFoundError as error:
        if "not found (tried to import" in str(error) and is_missing(package):
            raise Refusal(describe_alternatives(name, package)) from error
        raise Refusal(f"{name!r} needs a package that is not installed: {error.__cause__ or error}") from error
    except ImportError as error:
        raise Refusal(f"{name!r} cannot be imported: {error}") from error
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return module
    if version not in ("", "latest", installed):
        raise Refusal(f"{name!r}: version {installed} of {package} is installed; `{write_command(name)}`")
    return module


def is_missing(package: str) -> bool:
    module = package.replace("-", "_").lower()
    return not any(loaders.importlib.util.find_spec(name) for name in (f"verifiers.v1.tasksets.{module}", module))


def describe_alternatives(name: str, package: str) -> str:
    bundled = sorted(one.name for one in pkgutil.iter_modules(verifiers.v1.tasksets.__path__))
    needs_verifiers = (
        one.name for one in importlib.metadata.distributions()
        if any(re.match(r"verifiers\b", need) for need in one.requires or ()) and one.name
    )  # fmt: skip
    installed = sorted(set(needs_verifiers))
    near = difflib.get_close_matches(package, [*bundled, *installed], 1, 0.5)
    meant = f" (did you mean {near[0]!r}?)" if near else ""
    return (
        f"{name!r}: there is no taskset {package!r}{meant}; verifiers has {', '.join(bundled)}, and "
        f"{', '.join(installed) or 'none'} are installed beside it; `{write_command(name)}` installs a package"
    )


def write_command(name: str) -> str:
    return f"rlvr env install verifiers {name if '/' in name else 'OWNER/' + name}"


async def open_taskset(config: dict[str, Any]) -> dict[str, Any]:
    if MISSING:
        raise Refusal(MISSING)
    opened = find(config)
    if opened.server is not None:
        await opened.start()
    return {"infinite": bool(opened.taskset.INFINITE), "version": verifiers.__version__}


async def list_tasks(config: dict[str, Any], count: int | None) -> list[dict[str, Any]]:
    return [describe_task(task.data) for task in find(config).read_tasks(count)]


def describe_task(data: Any) -> dict[str, Any]:
    prompt = data.prompt or ""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [
        {"role": message.role, "content": content_text(message.content)} for message in prompt
    ]  # fmt: skip
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return {"idx": data.idx, "name": data.name or data.id or "", "messages": messages, "hash": compute_hash(data)}


def compute_hash(data: Any) -> str:
    """A hash of a task without its place, to see whether the task changed."""
    fields = data.model_dump(mode="json", exclude={"idx"}, exclude_none=True)
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


async def run_episode(config: dict[str, Any], idx: int, hash: str, base_url: str) -> dict[str, Any]:
    """The result of an episode: {reward, metrics}. Whatever went wrong in it is an error."""
    opened = find(config)
    tasks = opened.read_tasks(idx + 1)
    if len(tasks) <= idx or compute_hash(tasks[idx].data) != hash:
        raise Refusal(f"the task {idx} of the taskset has changed; the taskset must load the same tasks every time")
    await opened.start()
    client = EvalClientConfig(base_url=f"{base_url}/v1", api_key_var="RLVR_POLICY_KEY")
    episode = await opened.run(tasks[idx], client)
    return read_episode(episode, client.base_url)


def read_episode(episode: Any, address: str) -> dict[str, Any]:
    traces = episode.traces
    for error in [*episode.errors, *(error for trace in traces for error in trace.errors)]:
        raise Refusal(f"{error.type}: {error.message:.2000}{find_place(error.traceback)}")
    for trace in traces:
        if trace.is_timeout:
            raise Refusal(f"{trace.agent.name}: {trace.stop_condition}: a time limit of the environment was reached")
    if episode.is_timeout or not episode.ok:
        raise Refusal("the episode is not ok, and verifiers gives no reason")
    played = [trace for trace in traces if trace.agent.config.client.base_url == address]
    if odd := [trace.agent.name for trace in played if not trace.agent.trainable]:
        raise Refusal(
            f"{odd[0]} is not trained, and its model is the policy; give it another by options.{odd[0]}.model and "
            f"options.{odd[0]}.client.base_url"
        )
    if not played:
        raise Refusal("the policy plays no role: each has a client of its own (options.ROLE.client); leave one out")
    rewards = [read_reward(trace) for trace in played]
    result: dict[str, Any] = {"reward": sum(rewards) / len(rewards)}
    if len(set(rewards)) > 1:  # each role is trained with its own
        result["branches"] = {
            answer: reward for trace, reward in zip(played, rewards, strict=True) for answer in list_answers(trace)
        }
    metrics = {"turns": float(sum(trace.num_turns for trace in played))}
    for trace in played:
        named = {f"reward/{name}": reward.score for name, reward in trace.rewards.items()}
        values = {**trace.metrics, **(named if len(named) > 1 else {})}
        prefix = f"{trace.agent.name}/" if len(played) > 1 else ""
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                metrics[re.sub(r"[^A-Za-z0-9_./-]", "_", f"{prefix}{name}")[:64]] = float(value)
    return {**result, "metrics": dict(list(metrics.items())[:64])}


def list_answers(trace: Any) -> list[str]:
    """The ids of the policy's answers in a trace."""
    answers = trace.info.get("rlvr_answers", [])
    if len(answers) < trace.num_turns:
        raise Refusal(
            f"{trace.agent.name} has a reward of its own, and its harness, {trace.agent.config.harness.id!r}, does not "
            f"say which answers are its; leave options.{trace.agent.name}.harness out"
        )
    return answers


def read_reward(trace: Any) -> float:
    if not trace.rewards:
        raise Refusal(f"the environment gave {trace.agent.name} no reward")
    for name, reward in trace.rewards.items():
        if reward is None:
            raise Refusal(f"the reward {name} was not computed")
        if not math.isfinite(reward.value):
            raise Refusal(f"the reward {name} is {reward.value}, expected a finite number")
    return trace.reward


def find_place(trace: str | None) -> str:
    """Where the code of the environment failed: the last place in the first exception that is not in a library."""
    first = re.split(r"\n(?:The above exception was|During handling of)", trace or "")[0]
    library = os.path.dirname(os.__file__)
    for path, line, function in reversed(re.findall(r'File "([^"]+)", line (\d+), in (\S+)', first)):
        is_library = path.startswith(library) and "site-packages" not in path
        if not is_library and not path.startswith(os.path.dirname(verifiers.__file__)):
            return f" ({path}:{line} in {function})"
    return ""


async def close() -> None:
    for opened in _loaded.values():
        try:
            await opened.close()
        except Exception as error:
            print(f"closing an environment failed: {describe(error)}", file=sys.stderr)


if __name__ == "__main__":
    sys.path.append("")  # tasksets in the current folder,
    os.environ["PYTHONPATH"] = os.getcwd()  # and their tools, which processes of their own serve
    if not MISSING:
        share_connections()
    serve({"open": open_taskset, "tasks": list_tasks, "run": run_episode}, close)
