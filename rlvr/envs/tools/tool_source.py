"""Environment `tools`: the tasks and the reward of another environment, in episodes in which tools may be called.

In a config:

    env: {name: tools, kwargs: {inner: gsm8k, inner_kwargs: {path: ./gsm8k}, tools: [python], max_turns: 4}}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr.chat.call_parts import TemplateCallFormat
from rlvr.chat.special_tokens import special_token_texts, strip_special
from rlvr.chat.tool_calls import ToolCallFormat, WordCallFormat
from rlvr.chat.turns import render_after
from rlvr.core.futures import run_to_end
from rlvr.core.protocols import TaskSource
from rlvr.core.registry import check_kwargs
from rlvr.core.types import Task
from rlvr.envs.limited_calls import EpisodeError
from rlvr.envs.prompt import append_text
from rlvr.envs.registry import register_environment
from rlvr.envs.tools.builtin_tools import TOOL_FORMS, resolve_tools
from rlvr.envs.tools.environment_class import EnvironmentClass, ToolEnvironment
from rlvr.envs.tools.tool import Toolbox
from rlvr.envs.tools.tool_env import ToolBudget, ToolEnv
from rlvr.envs.wrapped_source import NestedSource
from rlvr.reward.environment import NAME as ENVIRONMENT

_PROBE = "\u2063result\u2063"


def find_call_format(tokenizer: Any, toolbox: Toolbox) -> TemplateCallFormat:
    """How the chat template writes calls; ValueError for one that writes none, or has no place for their results."""
    try:
        found = ToolCallFormat.of_template(tokenizer)
        user = {"role": "user", "content": "?"}
        result = {"role": "tool", "name": "probe", "tool_call_id": "call00001", "content": _PROBE}
        tools = {"tools": [tool.schema for tool in toolbox.tools]}
        shown = render_after([user], [result], tokenizer, tools, (), "probe")
    except Exception as error:  # a template may raise any error of its own
        raise ValueError(f"tools: {error!s:.300}; use a model whose chat template has tools") from error
    if _PROBE not in shown:
        raise ValueError(
            "tools: the chat template leaves out the results of tools; use a model whose chat template has tools"
        )
    return found


@register_environment("tools")
class ToolSource(NestedSource):
    """The tasks of the environment `inner`, made with `inner_kwargs`; its reward judges the last turn.

    `tools` are names (`python`, `search`, `mcp`), paths `package.module:function`, or {name, kwargs}; by default
    `python`, or none with an `environment`: the path of a class whose public methods are tools with a state. A call may
    take `call_seconds` and its result `most_characters`; an episode has `max_turns` turns of the policy, of at most
    `most_calls` calls each, and its tools have `seconds` in all. A model with a chat template calls tools as that
    template writes calls. For prompts that are text `calls` are the words around a call, `{}` for <call> name arguments
    </call> and <result> ... </result>, and `instruction` comes before each prompt; {tools} in it is the list of tools.
    """

    def __init__(
        self,
        inner: str | TaskSource = "seeds",
        inner_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[str | Mapping[str, Any]] | None = None,
        max_turns: int = 4,
        seconds: float = 60.0,
        call_seconds: float = 10.0,
        most_calls: int = 8,
        most_characters: int = 4_000,
        calls: Mapping[str, str] | None = None,
        environment: str | ToolEnvironment | None = None,
        instruction: str = "You may call these tools, by {call}; their results come in {result}.\n{tools}\n\n",
    ) -> None:
        given = ([] if environment else ["python"]) if tools is None else tools
        if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
            raise ValueError(
                f"tools={given!r:.200} is of type {type(given).__name__}; expected a list, such as [python], each "
                f"entry {TOOL_FORMS}"
            )
        if calls is not None and not isinstance(calls, Mapping):
            raise ValueError(f"tools: calls={calls!r:.80}; expected {{}} or a mapping with the words around a call")
        self._environment = EnvironmentClass(environment) if isinstance(environment, str) else environment
        self._is_tried = False
        own = self._environment.tools if self._environment else []
        self.toolbox = Toolbox(
            [*(tool for one in given for tool in resolve_tools(one)), *own], call_seconds, most_characters
        )
        self._budget, self.max_turns = ToolBudget(max_turns, seconds, most_calls), max_turns
        check_kwargs("tools: calls", WordCallFormat, dict(calls or {}))
        self._words = None if calls is None else WordCallFormat(**calls)
        super().__init__("tools", inner, inner_kwargs)
        if self._environment and self._environment.has_reward and self.inner.reward != ENVIRONMENT:
            self.environment_weight = 1.0
        self.vocabulary, self.prompt_limit = self.inner.vocabulary, self.inner.prompt_limit
        self._formats: dict[
            int, tuple[Any, TemplateCallFormat]
        ] = {}  # with the tokenizer, so that no other gets its id
        self._instruction = instruction

    def env(self, task: Task, tokenizer: Any) -> ToolEnv:
        super().env(task, tokenizer)
        calls = self._call_format(task, tokenizer)
        session = self._environment.open() if self._environment else None
        if not self._is_tried and self._environment:  # its faults are found before a model is loaded
            self._reset_once(task)
            self._is_tried = True
        return ToolEnv(self._add_tools(task, calls), tokenizer, self.toolbox, calls, self._budget, session)

    def complete_prompt(self, task: Task, tokenizer: Any) -> Task:
        if self._environment:
            task = append_text(task, strip_special(self._reset_once(task), special_token_texts(tokenizer)))
        return self._add_tools(task, self._call_format(task, tokenizer))

    def _reset_once(self, task: Task) -> str:
        """What an episode of the task begins with; ValueError if it cannot begin."""
        assert self._environment
        session = self._environment.open()

        async def reset() -> str:
            try:
                return await session.reset(task)
            finally:
                await session.close()

        try:
            return run_to_end(reset())
        except EpisodeError as failure:
            raise ValueError(str(failure)) from failure

    def _add_tools(self, task: Task, calls: TemplateCallFormat | WordCallFormat) -> Task:
        """The task with its tools: in the chat template's form, or in words before a prompt of text."""
        if isinstance(calls, WordCallFormat):
            return replace(task, shown_prompt=self._describe_tools(calls) + str(task.model_prompt))
        return self.toolbox.add_to(task)

    def _call_format(self, task: Task, tokenizer: Any) -> TemplateCallFormat | WordCallFormat:
        if isinstance(task.model_prompt, str):
            if self._words is None:
                raise ValueError(
                    f"tools: the prompt of task {task.id!r} is text, which has no form for calls; use a model with a "
                    "chat template (and prompt.chat=auto), or give the words around a call: env.kwargs.calls={}"
                )
            return self._words
        if self._words is not None:
            raise ValueError(
                "tools: calls has no effect, since the chat template writes calls its own way; leave it out, or set "
                "prompt.chat=off"
            )
        if id(tokenizer) not in self._formats:
            self._formats[id(tokenizer)] = tokenizer, find_call_format(tokenizer, self.toolbox)
        return self._formats[id(tokenizer)][1]

    def _describe_tools(self, calls: WordCallFormat) -> str:
        lines = [f"{tool.name} {' '.join(tool.names)}: {tool.description}" for tool in self.toolbox.tools]
        call, result = f"{calls.begin} name arguments {calls.end}", f"{calls.result_begin} ... {calls.result_end}"
        text = self._instruction
        for place, words in (("{call}", call), ("{result}", result), ("{tools}", "\n".join(lines))):
            text = text.replace(place, words)
        return text
