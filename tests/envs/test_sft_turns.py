"""Supervised fine-tuning on episodes of several turns: the tokens of an episode, with loss on the model's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import Datum, SamplingParams
from rlvr.core.types import Task
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs.prompt import PromptOptions
from rlvr.envs.prompted_source import apply_prompt_options
from rlvr.envs.registry import resolve_environment
from rlvr.envs.tools.tool_arithmetic import ToolArithmetic
from rlvr.rollout import open_groups, rollout
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.sft import SftOptions, sft_step
from tests.kit.code_rows import chat_tokenizer
from tests.kit.open_server import TOOLS_TEMPLATE
from tests.kit.prompt_cases import Recorder


class Problem(ToolArithmetic):
    """57 * 83 + 12 = 87 (mod 97), always."""

    def train(self, seed: int, index: int, level: str) -> Task:
        return self._task("57 * 83 + 12", "2")


def imitate(source: Any, tokenizer: Any) -> tuple[Datum, dict[str, float]]:
    client: Any = Recorder(tokenizer)
    metrics = sft_step(client, source, Curriculum(source, CurriculumOptions(), 0), SftOptions(1, batch_size=1), 0, 0)
    (datum,) = client.data
    return datum, metrics


def test_results_of_tools_have_no_loss() -> None:
    source = Problem(flaw=0.0)
    words = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    datum, metrics = imitate(source, words)
    targets, weights = (datum.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    said = [word for word, weight in zip(words.decode(targets).split(), weights, strict=True) if weight]
    assert " ".join(said) == (
        "<call> calculate 57 * 83 </call> <eoe> <call> calculate 75 + 12 </call> <eoe> = 87 <eoe>"
    )
    # The prompt has 6 tokens; the results, of 3 tokens each, come after calls of 7.
    assert [place for place, weight in enumerate(weights) if not weight] == [*range(5), 12, 13, 14, 22, 23, 24]
    assert weights[weights > 0].tolist() == pytest.approx([1 / 17] * 17)
    assert (metrics["tokens_trained"], metrics["completions/mean_length"]) == (17, 17)


def test_a_demonstration_has_the_tokens_and_the_mask_of_its_episode() -> None:
    source = Problem(flaw=0.0)
    words = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    datum, _ = imitate(source, words)
    task = source.train(0, 0, "2")
    script = iter(source.demonstration(task, 0)[::2])
    sampler = ScriptedSamplingClient(words, lambda i: words.encode(f"{next(script)} <eoe>", add_special_tokens=False))
    (played,) = rollout(open_groups(source, [task], 1, words, "g"), sampler, SamplingParams(max_tokens=16), seed=1)
    assert datum.model_input.to_ints() == played.full_tokens[:-1]
    mask = [0] * (len(played.prompt_tokens) - 1) + list(played.action_mask)
    assert (datum.loss_fn_inputs["weights"].to_numpy() > 0).tolist() == [bool(one) for one in mask]


@pytest.mark.parametrize("chat", ["auto", "off"])
def test_a_demonstration_follows_the_prompt_that_episodes_begin_with(chat: str, tmp_path: Path) -> None:
    """The list of tools stands in it, in the chat template's form and in words."""
    text = chat_tokenizer()
    text.chat_template = TOOLS_TEMPLATE
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?", "answer": "4"}) + "\n" for n in "234"))
    inner = {"path": str(tmp_path / "rows.jsonl"), "heldout_fraction": 0}
    made = resolve_environment(
        "tools",
        inner="dataset",
        inner_kwargs=inner,
        tools=["tools_of_tests:add"],
        **({"calls": {}} if chat == "off" else {}),
    )
    source = apply_prompt_options(made, text, PromptOptions(chat))
    datum, _ = imitate(source, text)
    task = Curriculum(source, CurriculumOptions(), 0).tasks(1, 0)[0]
    sampler = ScriptedSamplingClient(text, lambda i: [text.eos_token_id])
    (played,) = rollout(open_groups(source, [task], 1, text, "g"), sampler, SamplingParams(max_tokens=4), seed=1)
    assert datum.model_input.to_ints()[: len(played.prompt_tokens)] == played.prompt_tokens
    assert "add" in text.decode(played.prompt_tokens)


def test_an_episode_that_ends_with_the_environment_is_refused() -> None:
    class Cut(Problem):
        def demonstration(self, task: Task, key: int) -> list[str]:
            return ["= 87", "<result> 87 </result>"]

    source = Cut()
    words = build_tokenizer("words", source.vocabulary, end=source.end_word, pad=source.pad_word)
    with pytest.raises(ValueError, match="2 turns, expected an odd number"):
        imitate(source, words)
