"""Environment `agent`: the tasks and the reward of another environment, in episodes that an agent plays.

In a config:

    env: {name: agent, kwargs: {inner: jsonl, inner_kwargs: {path: rows.jsonl}, command: [python, my_agent.py]}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rlvr.chat.conversation import ChatTemplate
from rlvr.core.episode_slots import EpisodeSlots
from rlvr.core.registry import check_kwargs, load_path
from rlvr.core.types import Task
from rlvr.envs.agent.agent_env import AgentBudget, AgentEnv, AgentRules
from rlvr.envs.agent.agent_run import AddressRun, AgentRun, Assignment, CommandRun, FunctionRun, WalledRun
from rlvr.envs.agent.walls import ADDRESS, Walls, WallsLauncher, resolve_command
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.recorder.local_server import LocalRecorder

RESULTS = ("answer", "output", "reward")


class PlayedSource(NestedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`, in episodes that programs play (`open_run`)."""

    owns_prompts = True
    episode: type[AgentEnv] = AgentEnv

    def __init__(
        self,
        name: str,
        inner: str,
        inner_kwargs: Mapping[str, Any] | None,
        rules: AgentRules,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        _check_section("template_arguments", template_arguments)
        self._rules, self._slots = rules, EpisodeSlots(rules.max_concurrent)
        self._recorder = LocalRecorder()
        self._template_arguments = dict(template_arguments or {})
        self._templates: dict[int, ChatTemplate] = {}
        super().__init__(name, inner, inner_kwargs)
        self.vocabulary, self.max_turns = self.inner.vocabulary, rules.budget.calls

    def open_run(self) -> AgentRun:
        """A run for one episode."""
        raise NotImplementedError

    def env(self, task: Task, tokenizer: Any) -> AgentEnv:  # type: ignore[override]
        if missing := [name for name in self._rules.fields if name not in task.meta]:
            raise ValueError(
                f"agent: rules.fields names {missing[0]!r}, which the row of task {task.id!r} does not have; it has "
                f"{', '.join(sorted(task.meta)) or 'no fields'}"
            )
        if id(tokenizer) not in self._templates:
            self._templates[id(tokenizer)] = ChatTemplate(tokenizer, self._template_arguments)
        template = self._templates[id(tokenizer)]
        return self.episode(task, template, self._recorder, self.open_run(), self._rules, self._slots)


def read_rules(
    budget: Mapping[str, Any] | None, rules: Mapping[str, Any] | None, *, needs_reward: bool = False
) -> AgentRules:
    """The rules of the options `budget` and `rules`."""
    _check_section("budget", budget)
    _check_section("rules", rules)
    check_kwargs("agent: budget", AgentBudget, dict(budget or {}))
    if own := {"budget", "needs_reward"} & set(rules or {}):
        raise ValueError(f"agent: rules.{min(own)} is no rule; budget is an option of its own, beside rules")
    check_kwargs("agent: rules", AgentRules, {"budget": None, **(rules or {})})
    return AgentRules(budget=AgentBudget(**(budget or {})), needs_reward=needs_reward, **(rules or {}))


def _check_section(name: str, section: Any) -> None:
    if section is not None and not isinstance(section, Mapping):
        raise ValueError(f"agent: {name}={section!r:.80}, expected a mapping of its options")


@register_environment("agent")
class AgentSource(PlayedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`, played by an agent whose model is the policy.

    The agent is a `command` (a list of words; each run has a folder of its own), a `function` (the path
    `package.module:function`, sync or async), or the `url` of one that is told to begin. Its model is at the address in
    `OPENAI_BASE_URL` or `ANTHROPIC_BASE_URL`; a function finds it in its argument. `result` says what of a command is
    judged: `answer`, the policy's last turn, `output`, what the command printed, or `reward`, the number at its end; a
    file `RLVR_RESULT` of JSON with `answer`, `reward` and `metrics` goes before it. `budget` bounds an episode: {calls,
    sampled_tokens, tool_calls, seconds, call_seconds}. `rules` are {fields, branches, keep_retried, judges_failures,
    max_concurrent}: the fields of a row that the agent is shown, whether `all` branches are trained or the `last`
    alone, whether answers that it asked for again are trained, whether an agent that fails is judged and not left
    out, and how many run at the same time. `template_arguments` go to the model's chat template. `walls` keep a command
    from the files, the network and the processes outside: {readable, memory, processes, scratch}, {} for the defaults.
    """

    def __init__(
        self,
        inner: str,
        inner_kwargs: Mapping[str, Any] | None = None,
        command: Sequence[str] | None = None,
        function: str | Callable[[Assignment], Any] | None = None,
        url: str | None = None,
        result: str = "answer",
        budget: Mapping[str, Any] | None = None,
        rules: Mapping[str, Any] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        walls: Mapping[str, Any] | None = None,
    ) -> None:
        own = read_rules(budget, rules, needs_reward=result == "reward")
        self._make_agent = _make_agent(command, function, url, result)
        if inner == "agent":
            raise ValueError("agent: inner=agent has agents of its own; name the environment of its tasks")
        super().__init__("agent", inner, inner_kwargs, own, template_arguments)
        if walls is not None:
            self._recorder, self._make_agent = _build_walls(command, result, Walls.of(walls))
        if result == "reward":
            self.reward = "environment"

    def open_run(self) -> AgentRun:
        return self._make_agent()

    def advice(self) -> list[str]:
        replaced = (
            f"the environment {self._inner_name!r} has episodes of several turns, which are not played here: the agent "
            "plays its tasks in its own way"
        )
        return [*self.inner.advice(), *([replaced] if self.inner.max_turns > 1 else [])]


def _build_walls(
    command: Sequence[str] | None, result: str, walls: Walls
) -> tuple[LocalRecorder, Callable[[], AgentRun]]:
    if command is None:
        raise ValueError("agent: walls are for a command; a function or an address runs outside of them")
    launcher, recorder = WallsLauncher(resolve_command(command), walls), LocalRecorder(seen_at=ADDRESS)
    launcher.check()
    return recorder, lambda: WalledRun(launcher, recorder, result)


def _make_agent(
    command: Sequence[str] | None,
    function: str | Callable[[Assignment], Any] | None,
    url: str | None,
    result: str,
) -> Callable[[], AgentRun]:
    given = [name for name, value in (("command", command), ("function", function), ("url", url)) if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"agent: {' and '.join(given) or 'none of command, function and url'} given; expected one of "
            "command=[python, my_agent.py], function=my_agent:play and url=http://..."
        )
    if result not in RESULTS:
        raise ValueError(f"agent: result={result!r}, expected {', '.join(RESULTS)}")
    if command is not None:
        if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
            raise ValueError(
                f"agent: command={command!r:.200}; expected a list of words, such as [python, my_agent.py]"
            )
        resolved = resolve_command(command)
        return lambda: CommandRun(resolved, result)
    if result != "answer":
        raise ValueError(f"agent: result={result} is of a command; a function or an address returns its result")
    if url is not None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"agent: url={url!r:.200}, expected http://... or https://...")
        return lambda: AddressRun(url)
    called = load_path("agent", function) if isinstance(function, str) else function
    if not callable(called):
        raise ValueError(f"agent: function={function!r:.200} is no function; expected package.module:function")
    return lambda: FunctionRun(called)
