"""A tool: a typed Python function that a policy may call.

    def weather(city: str, days: Annotated[int, Field(description="1 to 7")] = 1) -> str:
        "The forecast for a city."

    Tool.of(weather).schema                     # as a chat template takes it
    Tool.of(weather).check({"days": "2"})       # raises: city is missing

The annotations are the schema that the model reads and the check of what it wrote: pydantic reads both off them. A tool
is the user's code and runs in this process, on a thread of its own; what must not trust its arguments runs them
elsewhere, as the built-in `python` does.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, PydanticUserError, ValidationError, create_model

from rlvr.core.registry import did_you_mean
from rlvr.core.types import Task
from rlvr.envs.limited_calls import (
    MOST_STUCK,
    CallError,
    count_stuck,
    run_ending_call,
    run_in_thread,
    wait_for_result,
)
from rlvr.reward.reward_options import check_integer, check_number


class ToolProblem(Exception):
    """Why a call has no result, in words for the policy."""


class ToolOutage(Exception):
    """A tool cannot work any more, through no fault of its calls: the run ends."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy can call: `function` takes the fields of `arguments`. It may be a coroutine function.

    A tool that `has_own_limit` ends its calls itself, by a time that does not count what they wait for: they are not
    late, whatever else the machine does, and take nothing from the seconds of their episode. Late calls of one that
    `ends_late_calls` are given up here, and end by themselves soon.
    """

    name: str
    description: str
    function: Callable[..., Any]
    arguments: type[BaseModel]
    has_own_limit: bool = False
    ends_late_calls: bool = False

    @classmethod
    def of(cls, function: Callable[..., Any], has_own_limit: bool = False) -> Tool:
        """The tool that a function is; ValueError for one whose parameters have no types."""
        name = getattr(function, "__name__", "")
        try:
            hints = get_type_hints(function, include_extras=True)
            parameters = list(inspect.signature(function).parameters.values())
        except (NameError, TypeError, ValueError) as error:
            raise ValueError(f"tool {name or function!r}: its parameters cannot be read ({error})") from error
        fields: dict[str, Any] = {}
        for one in parameters:
            if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) or one.name.startswith("_"):
                raise ValueError(f"tool {name}: parameter {one}: give every argument a name, without _ before it")
            if one.name not in hints:
                raise ValueError(f"tool {name}: parameter {one.name!r} has no type; write {one.name}: str, for example")
            fields[one.name] = (hints[one.name], ... if one.default is one.empty else one.default)
        description = " ".join((inspect.getdoc(function) or "").split())
        if not description:
            raise ValueError(
                f"tool {name}: the function has no docstring, which tells the model what the tool does; write one"
            )
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()
        except PydanticUserError as error:
            raise ValueError(f"tool {name}: a parameter has a type that JSON cannot write ({error})") from error
        return cls(name, description, function, model, has_own_limit)

    @property
    def names(self) -> list[str]:
        """The names of its arguments, in order."""
        return list(self.arguments.model_fields)

    @property
    def schema(self) -> dict[str, Any]:
        """The description of the tool that a chat template takes in `tools`."""
        parameters = {k: v for k, v in self.arguments.model_json_schema().items() if k not in ("title", "description")}
        for property in parameters.get("properties", {}).values():
            property.pop("title", None)
        parameters.pop("additionalProperties", None)
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def check(self, given: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
        """The arguments, by name or in order, with their types; ToolProblem for wrong ones."""
        names = self.names
        try:
            checked = self.arguments.model_validate(self.name_arguments(given))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors()[:3]]
            raise ToolProblem(f"{self.name} takes {', '.join(names) or 'nothing'}; {'; '.join(faults)}") from None
        return {name: getattr(checked, name) for name in names if name in checked.model_fields_set}

    def name_arguments(self, given: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
        """Arguments by name; ToolProblem if there are more of them than names."""
        if isinstance(given, Mapping):
            return dict(given)
        if len(given) > len(self.names):
            takes = ", ".join(self.names) or "nothing"
            raise ToolProblem(f"{self.name} takes {takes}; {len(given)} arguments were given")
        return dict(zip(self.names, given, strict=False))

    async def call(self, given: Mapping[str, Any] | Sequence[str], seconds: float) -> str:
        """The result as text; ToolProblem for wrong arguments, an exception of the tool, or a call that is late."""
        arguments = self.check(given)
        if count_stuck() >= MOST_STUCK and not self.ends_late_calls:
            raise ToolOutage(
                f"tool {self.name}: {count_stuck()} late calls of tools have not ended; give the tools time limits of "
                "their own"
            )
        run = run_ending_call if self.ends_late_calls else run_in_thread
        limit = None if self.has_own_limit else seconds
        try:
            return await run(lambda: _write(self.function(**arguments)), limit, ToolProblem, ToolOutage)
        except TimeoutError:
            raise ToolProblem(f"{self.name} took longer than {seconds:g} s") from None
        except CallError as error:
            raise ToolProblem(str(error)) from None


def _write(result: Any) -> str:
    """A result as text. Called on the tool's thread: the methods of a result are the tool's, too."""
    result = wait_for_result(result)
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def _refuse_call(**arguments: Any) -> str:
    raise ToolProblem("the episode has not begun")


@dataclass(frozen=True)
class ServerTool(Tool):
    """A tool whose arguments are described and checked by its server."""

    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])  # JSON schema

    @classmethod
    def of_environment(cls, given: Mapping[str, Any], parameters: Mapping[str, Any] | None) -> ServerTool:
        """A tool that an environment's server describes. The server limits a call, which only an episode can make."""
        return cls(
            given["name"], given.get("description") or given["name"], _refuse_call, BaseModel, has_own_limit=True,
            ends_late_calls=True, parameters=parameters or {"type": "object", "properties": {}},
        )  # fmt: skip

    def bind(self, call: Callable[[str, dict[str, Any]], str]) -> ServerTool:
        """The tool in an episode, whose `call` gets the name and the arguments."""
        return replace(self, function=lambda **arguments: call(self.name, arguments))

    @property
    def names(self) -> list[str]:
        return list(self.parameters.get("properties") or {})

    @property
    def schema(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}

    def check(self, given: Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
        return self.name_arguments(given)


@dataclass(frozen=True)
class Toolbox:
    """The tools of an episode, and the limits of a call: its seconds, and the characters of its result."""

    tools: Sequence[Tool]
    seconds: float = 10.0
    most_characters: int = 4_000

    def __post_init__(self) -> None:
        names = [tool.name for tool in self.tools]
        if not names or len(set(names)) < len(names):
            raise ValueError(f"tools={names}; give at least one, such as [python], and each name once")
        check_number("tools: call_seconds", self.seconds, 0, above=True)
        check_integer("tools: most_characters", self.most_characters, 1)

    @property
    def own_limits(self) -> set[str]:
        """The names of the tools that limit their own time: the seconds of the toolbox do not count for them."""
        return {tool.name for tool in self.tools if tool.has_own_limit}

    def add_to(self, task: Task) -> Task:
        """The task of a chat, whose template is given the tools."""
        schemas = [tool.schema for tool in self.tools]
        return replace(task, template_arguments={**task.template_arguments, "tools": schemas})

    async def call(self, name: str, arguments: Mapping[str, Any] | Sequence[str], seconds: float) -> tuple[str, bool]:
        """The result of a call, or why it has none, as text; and whether it has one."""
        by_name = {tool.name: tool for tool in self.tools}
        try:
            if name not in by_name:
                nearest, known = did_you_mean(name[:80], by_name), ", ".join(by_name)
                raise ToolProblem(f"there is no tool {name[:80]!r}{nearest}; use {known}")
            return self._truncate(await by_name[name].call(arguments, min(seconds, self.seconds))), True
        except ToolProblem as problem:
            return self._truncate(f"error: {problem}"), False

    def _truncate(self, text: str) -> str:
        most, text = self.most_characters, text.encode("utf-8", "replace").decode()  # a lone surrogate has no token
        return text if len(text) <= most else f"{text[:most]}\n[cut: {len(text):,} characters, {most:,} shown]"
