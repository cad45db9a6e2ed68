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
from rlvr.envs.agent.agent_run import AddressRun, AgentRun, Assignment, CommandRun, FunctionRun, SandboxedRun
from rlvr.envs.agent.agent_sandbox import ADDRESS, AgentSandbox, SandboxLauncher, resolve_command
from rlvr.envs.registry import register_environment
from rlvr.envs.wrapped_source import NestedSource
from rlvr.recorder.local_server import LocalRecorder
from rlvr.reward.reward_options import check_mapping

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
        check_mapping("agent: template_arguments", template_arguments, "its options")
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
    check_mapping("agent: budget", budget, "its options")
    check_mapping("agent: rules", rules, "its options")
    check_kwargs("agent: budget", AgentBudget, dict(budget or {}))
    if "budget" in (rules or {}):
        raise ValueError("agent: rules.budget is not supported; budget is an option of its own, beside rules")
    check_kwargs("agent: rules", AgentRules, dict(rules or {}), supplied=("budget", "needs_reward"))
    return AgentRules(budget=AgentBudget(**(budget or {})), needs_reward=needs_reward, **(rules or {}))


@register_environment("agent")
class AgentSource(PlayedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`, played by an agent whose model is the policy.

    The agent is a `command` (a list of words; each episode has a folder of its own), a `function` (the path
    `package.module:function`, sync or async), or the `url` of a service. A command and a service get the address of
    their model as `OPENAI_BASE_URL` and `ANTHROPIC_BASE_URL`, or in the task's JSON; a function in its argument.
    `result` says what of a command is judged: `answer` (the policy's last turn), `output` (what it printed) or `reward`
    (the last word that it printed is the reward). `budget` bounds an episode: {calls, sampled_tokens, tool_calls,
    seconds, call_seconds}. `rules` say what is shown, run and trained: {fields, branches, keep_retried,
    judges_failures, parallel, max_concurrent}. `template_arguments` go to the model's chat template. `sandbox` keeps a
    command from files, network and processes outside: {readable, memory, processes, scratch}, {} for the defaults. The
    page about agents has the defaults.
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
        sandbox: Mapping[str, Any] | None = None,
    ) -> None:
        own = read_rules(budget, rules, needs_reward=result == "reward")
        self._make_agent = _make_agent(command, function, url, result)
        if inner == "agent":
            raise ValueError("agent: inner=agent is not supported; name the environment of the tasks, such as dataset")
        super().__init__("agent", inner, inner_kwargs, own, template_arguments)
        if sandbox is not None:
            self._recorder, self._make_agent = _build_sandbox(command, result, AgentSandbox.of(sandbox))
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


def _build_sandbox(
    command: Sequence[str] | None, result: str, sandbox: AgentSandbox
) -> tuple[LocalRecorder, Callable[[], AgentRun]]:
    if command is None:
        raise ValueError(
            "agent: sandbox is for a command; a function or a url runs outside of it. Leave sandbox out, or give "
            "command=[python, my_agent.py]"
        )
    launcher, recorder = SandboxLauncher(resolve_command(command), sandbox), LocalRecorder(seen_at=ADDRESS)
    launcher.check()
    return recorder, lambda: SandboxedRun(launcher, recorder, result)


def _make_agent(
    command: Sequence[str] | None,
    function: str | Callable[[Assignment], Any] | None,
    url: str | None,
    result: str,
) -> Callable[[], AgentRun]:
    given = [name for name, value in (("command", command), ("function", function), ("url", url)) if value is not None]
    if len(given) != 1:
        raise ValueError(
            f"agent: {' and '.join(given) or 'no agent'} given; expected exactly one of command=[python, my_agent.py], "
            "function=my_agent:play, url=http://..."
        )
    if result not in RESULTS:
        raise ValueError(f"agent: result={result!r}, expected one of {', '.join(RESULTS)}")
    if command is not None:
        if isinstance(command, str) or not command:
            raise ValueError(
                f"agent: command={command!r:.200}; expected a list of words, such as [python, my_agent.py]"
            )
        if wrong := [word for word in command if not isinstance(word, str)]:
            raise ValueError(
                f"agent: command={list(command)!r:.200}: the word {wrong[0]!r} is not text; quote it, since YAML reads "
                "no, on and 5 as other types"
            )
        resolved = resolve_command(command)
        return lambda: CommandRun(resolved, result)
    if result != "answer":
        raise ValueError(
            f"agent: result={result} needs a command; a function or a url returns its result. Leave result out"
        )
    if url is not None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ValueError(f"agent: url={url!r:.200}, expected http://... or https://...")
        return lambda: AddressRun(url)
    called = load_path("agent", function) if isinstance(function, str) else function
    if not callable(called):
        raise ValueError(
            f"agent: function={function!r:.200} cannot be called; expected the path package.module:function"
        )
    return lambda: FunctionRun(called)
