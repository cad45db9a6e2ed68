"""What stands between two turns of a policy, token for token: environments append it and never write history anew.

The policy's own tokens stay as it sampled them. Only what its chat template adds after them is rendered, encoded and
appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlvr.chat.chat_template import render_chat
from rlvr.core.types import Task

_TURN = "\u2063turn\u2063"  # stands for what the policy said while a chat template is rendered; no template holds it


def join_turns(demonstration: str | list[str], end_word: str | None) -> str:
    """A demonstration as one text, with the end word after each turn of the model but the last."""
    if isinstance(demonstration, str):
        return demonstration
    last, end = len(demonstration) - 1, f" {end_word}" if end_word else ""
    return " ".join(
        f"{turn}{end if place % 2 == 0 and place < last else ''}" for place, turn in enumerate(demonstration)
    )


def decode_turn(action: Sequence[int], tokenizer: Any) -> str:
    """The text of a completion, special tokens included, without its end token."""
    tokens = list(action[:-1]) if list(action[-1:]) == [tokenizer.eos_token_id] else list(action)
    return tokenizer.decode(tokens, skip_special_tokens=False)


def render_between(
    task: Task, tokenizer: Any, action: Sequence[int], messages: Sequence[dict[str, Any]], called: str = ""
) -> str:
    """What the chat template writes after the policy's turn: its end, these messages, and the opening of the next.

    `called` is the tool that the turn called first, if messages are results of tools.
    """
    assert not isinstance(task.model_prompt, str)
    try:
        return render_after(task.model_prompt, messages, tokenizer, task.template_arguments, action, called)
    except LostTurn as error:
        raise ValueError(
            f"task {task.id!r}: {error}, so an episode can have one turn only; use max_turns=1, or another template"
        ) from error


class LostTurn(ValueError):
    """A chat template that leaves out what the assistant said before."""


def render_after(
    before: Sequence[Mapping[str, Any]],
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    arguments: Mapping[str, Any],
    action: Sequence[int],
    called: str = "",
) -> str:
    """What the chat template writes between the policy's turn `action`, which answered the messages `before`, and its
    next one, if `messages` come in between. LostTurn for a template that leaves the turn out."""
    said: dict[str, Any] = {"role": "assistant", "content": _TURN}
    told = [{**message, "content": str(message.get("content") or "").replace(_TURN, "")} for message in messages]
    has_results = bool(told) and told[0].get("role") == "tool"
    try:
        if has_results and any(message.get("tool_calls") for message in before):
            # A template that takes results only after a call would take these for those of an earlier call.
            render_chat([{"role": "user", "content": "?"}, said, *told], tokenizer, arguments)
        rendered = render_chat([*before, said, *told], tokenizer, arguments)
    except Exception:  # a template may raise any error of its own
        if not has_results:
            raise
        return _render_results(before, told, tokenizer, arguments, action, called)
    _, found, after = rendered.rpartition(_TURN)
    if not found:
        raise LostTurn("the tokenizer's chat template leaves out earlier assistant messages")
    end = getattr(tokenizer, "eos_token", None) or ""
    if end and list(action[-1:]) == [tokenizer.eos_token_id]:  # the policy ended its turn itself
        after = after.removeprefix(end)
    return after


def _render_results(
    before: Sequence[Mapping[str, Any]],
    results: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    arguments: Mapping[str, Any],
    action: Sequence[int],
    called: str,
) -> str:
    """`render_after` for results of tools, if the template takes them only after a call (gpt-oss, MiniMax M2).

    LostTurn for a template that does not write the call before them.
    """
    function = {"name": called or "unknown", "arguments": {"turn": _TURN}}
    call = {"id": "call00001", "type": "function", "function": function}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    alone = render_chat([*before, said], tokenizer, {**arguments, "add_generation_prompt": False})
    whole = render_chat([*before, said, *results], tokenizer, arguments)
    if _TURN not in alone or not whole.startswith(alone):
        raise LostTurn("the tokenizer's chat template does not write a call of a tool before its results")
    tail, eos = alone.rpartition(_TURN)[2], getattr(tokenizer, "eos_token", None) or ""
    # The turn ends with its end token, or with a token of its own after the JSON of the call.
    end = tail[tail.rindex(eos) :] if eos and eos in tail else tail.partition("}")[2]
    if list(action[-1:]) == [tokenizer.eos_token_id]:  # the policy ended its turn itself
        end = end.removeprefix(eos) if eos and end.startswith(eos) else ""
    elif end and tokenizer.decode(list(action), skip_special_tokens=False).endswith(end):
        end = ""
    return end + whole[len(alone) :]


def encode_between(task: Task, tokenizer: Any, text: str) -> list[int]:
    """The tokens of a text that an environment adds; ValueError if the tokenizer has no words for it."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # a word-level vocabulary without such a word; each library has its own error
        raise ValueError(
            f"task {task.id!r}: the tokenizer cannot encode {text[:80]!r} ({error}); use words of its vocabulary in "
            "what the environment says, or another tokenizer"
        ) from error


def has_room(tokenizer: Any, prompt: Sequence[int], turn: Sequence[int]) -> bool:
    """Whether the context has room for another turn as long as the last after this prompt."""
    longest = getattr(tokenizer, "model_max_length", None)
    return not longest or len(prompt) + len(turn) <= longest
