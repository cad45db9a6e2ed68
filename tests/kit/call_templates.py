"""Chat templates of our own that write calls of tools in the forms of well-known models, each in a few lines."""

from __future__ import annotations

_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _template(calls: str, result: str = "{{ message.content }}") -> str:
    """A template whose assistant writes `calls` after what it says, and whose tools answer by `result`."""
    return (
        f"{_TOOLS}{{% for message in messages %}}<|im_start|>{{{{ message.role }}}}\n"
        f"{{% if message.role == 'tool' %}}{result}{{% else %}}{{{{ message.content }}}}{{% endif %}}"
        f"{{% if message.tool_calls %}}{calls}{{% endif %}}<|im_end|>\n{{% endfor %}}{_ASK}"
    )


# Each argument is text between tags. Lists and objects are JSON; other values are what Python writes: True, None.
QWEN_CODER = _template(
    "{% for call in message.tool_calls %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments.items() %}<parameter={{ key }}>\n"
    "{{ value | tojson if value is mapping or (value is sequence and value is not string) else value | string }}"
    "\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "<tool_response>\n{{ message.content }}\n</tool_response>",
)
_PAIRS = (
    "{% for key, value in call.function.arguments.items() %}<arg_key>{{ key }}</arg_key>LINE"
    "<arg_value>{{ value if value is string else value | tojson }}</arg_value>LINE{% endfor %}</tool_call>{% endfor %}"
)
GLM = _template(
    "{% for call in message.tool_calls %}\n<tool_call>{{ call.function.name }}\n" + _PAIRS.replace("LINE", "\n")
)
GLM_DENSE = _template(
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}" + _PAIRS.replace("LINE", "")
)
MINIMAX = _template(
    '\n<minimax:tool_call>\n{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">\n'
    '{% for key, value in call.function.arguments.items() %}<parameter name="{{ key }}">'
    "{{ value if value is string else value | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}"
    "</minimax:tool_call>",
    "{% if not messages | selectattr('tool_calls', 'defined') | list %}"
    "{{ raise_exception('a result without a call before it') }}{% endif %}{{ message.content }}",
)
# The id stands in place of the name.
KIMI = _template(
    "<|tool_calls_section_begin|>{% for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}"
    "<|tool_call_argument_begin|>{% if call.function.arguments is string %}{{ call.function.arguments }}{% else %}"
    "{{ call.function.arguments | tojson }}{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "## Return of {{ message.tool_call_id }}\n{{ message.content }}",
)
# Arguments are text for the template, and an object is an error.
DEEPSEEK = _template(
    "{% for call in message.tool_calls %}{% if loop.first %}{{ '<｜tool▁calls▁begin｜>' }}{% endif %}"
    "{{ '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments "
    "+ '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
)
DEEPSEEK_FENCED = _template(
    "<｜tool▁calls▁begin｜>{% for call in message.tool_calls %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' "
    "+ call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜>"
)
MISTRAL_NAMED = _template(
    "{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[ARGS]"
    "{{ call.function.arguments | tojson }}{% endfor %}"
)
# gpt-oss: one call in a turn, and a result only after a call.
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% set last = namespace(name=none) %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}{% set call = message.tool_calls[0].function %}"
    "{% set last.name = call.name %}"
    "{% if message.content %}<|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif message.role == 'assistant' %}"
    "<|start|>assistant<|channel|>final<|message|>{{ message.content }}{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% elif message.role == 'tool' %}"
    "{% if last.name is none %}{{ raise_exception('a result without a call before it') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ message.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
TAGGED = {
    "qwen-coder": QWEN_CODER, "glm": GLM, "glm-dense": GLM_DENSE, "minimax": MINIMAX, "kimi": KIMI,
    "deepseek": DEEPSEEK, "deepseek-fenced": DEEPSEEK_FENCED, "mistral-named": MISTRAL_NAMED,
}  # fmt: skip
