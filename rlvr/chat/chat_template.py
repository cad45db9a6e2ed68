"""A tokenizer's chat template: the variables that it reads, its switch for thinking, and the text it makes of messages.

A template is a Jinja program that comes with the tokenizer. It is parsed here and never run; `transformers` runs it, in
a sandbox.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

SWITCHES = ("enable_thinking", "thinking")  # Qwen3, GLM-4.5, Gemma 4 | DeepSeek-V3.1, Granite 3.2
BUDGET = "thinking_budget"  # Seed-OSS, in tokens: 0 is no thinking, -1 no limit
# What transformers itself hands to every template.
_BUILT_IN = {"messages", "add_generation_prompt", "raise_exception", "strftime_now"}


def has_template(tokenizer: Any) -> bool:
    return getattr(tokenizer, "chat_template", None) is not None


def render_chat(messages: Sequence[Mapping[str, str]], tokenizer: Any, arguments: Mapping[str, Any]) -> str:
    """The messages as the text that a completion goes on from. A template may raise any error of its own."""
    more = {"add_generation_prompt": True, **arguments}
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **more))


def list_variables(tokenizer: Any) -> set[str]:
    """The variables that the chat template may take from its caller, beside those that transformers always gives.

    Jinja also counts some that a template sets itself in one of its branches.
    """
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        """`{% generation %}`, which marks the assistant's words for transformers."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=["jinja2.ext.loopcontrols", GenerationTag])
    try:
        return meta.find_undeclared_variables(environment.parse(tokenizer.get_chat_template())) - _BUILT_IN
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the tokenizer's chat template is not valid Jinja (line {error.lineno}: {error}); use prompt.chat=off or "
            "another tokenizer (model.tokenizer)"
        ) from error


def thinking_arguments(thinking: str | int, variables: Collection[str]) -> dict[str, Any]:
    """The arguments that turn thinking `on` or `off`, or limit it to a number of tokens.

    ValueError where the template, which reads these variables, has no such switch.
    """
    switches = [name for name in SWITCHES if name in variables]
    if not switches and BUDGET not in variables:
        raise ValueError(
            f"prompt.thinking={thinking}: the tokenizer's chat template has no switch for thinking, none of "
            f"{', '.join(SWITCHES)} and {BUDGET}; leave prompt.thinking out, or set a variable that the template reads "
            f"({', '.join(sorted(variables)) or 'there is none'}) by prompt.template_arguments"
        )
    if isinstance(thinking, int):
        if BUDGET not in variables:
            raise ValueError(
                f"prompt.thinking={thinking}: the tokenizer's chat template takes no budget, its switch {switches[0]} "
                "is only on or off; use prompt.thinking=on, and rollout.max_tokens for the whole completion"
            )
        return {**dict.fromkeys(switches, True), BUDGET: thinking}
    if switches:
        return dict.fromkeys(switches, thinking == "on")
    return {BUDGET: -1 if thinking == "on" else 0}


def no_thinking_arguments(tokenizer: Any) -> dict[str, Any]:
    """The arguments for a completion without thinking; none where the template has no switch."""
    variables = list_variables(tokenizer)
    return thinking_arguments("off", variables) if variables & {*SWITCHES, BUDGET} else {}
