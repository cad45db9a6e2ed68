"""Tasks that are learned through the real SDK with every loss, from rows as clients make them: 0 on the prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

from tinker import types

from rlvr.algorithms.loss_specs import LOSS_SPECS
from tests.kit.tinker_rows import open_service
from tests.kit.tinker_server import TinkerServer
from tests.kit.tinker_toy import save
from tests.kit.tiny import CONFIGS, END, PAD, WORDS

# The SDK leaves its connections to the garbage collector.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.timeout(400),
]
NAME = "tiny"
MODEL = {**CONFIGS["qwen3"], "hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.2}
REPEATED = [WORDS.index(word) for word in 8 * "+-*="]  # a prompt whose own tokens say what follows its last one


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from rlvr.engine.model_loading import build_model
    from rlvr.engine.tokenizer import build_tokenizer

    folder = tmp_path_factory.mktemp("learning")
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    save(build_model(MODEL, tokenizer, seed=1, device="cpu", dtype="float32"), tokenizer, folder / "model")
    with TinkerServer({NAME: folder / "model"}, folder / "state", "--device", "cpu") as server:
        yield from open_service(server.url, server.key)


def row(loss: str, prompt: list[int], token: int, logprob: float, advantage: float, reward: float) -> Any:
    """One sampled token as a client sends it: everything is 0 on the prompt."""

    def on_answer(value: float) -> list[float]:
        return [0.0] * (len(prompt) - 1) + [value]

    values = {
        "logprobs": on_answer(logprob), "advantages": on_answer(advantage), "weights": on_answer(reward),
        "sequence_ratio_mask": on_answer(1.0),
    }  # fmt: skip
    inputs = {"target_tokens": [*prompt[1:], token], **{name: values[name] for name in LOSS_SPECS[loss].required}}
    return types.Datum(model_input=types.ModelInput.from_ints(prompt), loss_fn_inputs=inputs)


def score(sampler: Any, questions: dict[tuple[int, ...], int]) -> float:
    """The mean probability of the right token."""
    asked = [
        sampler.compute_logprobs(types.ModelInput.from_ints([*prompt, right])) for prompt, right in questions.items()
    ]
    return float(np.mean([np.exp(future.result()[-1]) for future in asked]))


def learn(client: Any, loss: str, questions: dict[tuple[int, ...], int], steps: int, samples: int) -> float:
    """A loop of reinforcement learning: group baselines, one step a batch. Returns the score in the end."""
    for step in range(steps):
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=1, temperature=1.0, stop=[], seed=step)
        asked = [sampler.sample(types.ModelInput.from_ints(list(p)), samples, params) for p in questions]
        data: list[Any] = []
        for (prompt, right), future in zip(questions.items(), asked, strict=True):
            sequences = future.result().sequences
            rewards = [float(s.tokens[0] == right) for s in sequences]
            for s, reward in zip(sequences, rewards, strict=True):
                advantage = reward - float(np.mean(rewards))
                data.append(row(loss, list(prompt), s.tokens[0], s.logprobs[0], advantage, reward))
        client.forward_backward(data, loss)
        client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    return score(client.save_weights_and_get_sampling_client().result(), questions)


def test_dro_learns_a_bandit_whose_prompt_has_log_prob_0(service: Any) -> None:
    """Of ten arms and seven other words. Pulled to log-prob 0, the prompt would teach that + follows =."""
    bandit = {tuple(REPEATED): 7}
    client = service.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    before = score(client.save_weights_and_get_sampling_client().result(), bandit)
    after = learn(client, "dro", bandit, steps=10, samples=64)
    assert before < 0.1 and after > 0.95, (before, after)


SHIFTED = {(*REPEATED[:8], digit): digit + 3 for digit in range(5)}  # the right token depends on the prompt


@pytest.fixture(scope="module")
def warm(service: Any) -> tuple[str, float]:
    """Weights that were taught the right digit half of the time and any digit else; their path and score."""
    client = service.create_lora_training_client(base_model=NAME, rank=8, seed=1).result()
    taught = [
        (prompt, digit, 0.5 * (digit == right) + 0.05) for prompt, right in SHIFTED.items() for digit in range(10)
    ]
    data = [row("cross_entropy", list(p), digit, 0.0, 0.0, weight) for p, digit, weight in taught]
    for _ in range(25):
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-8)).result()
    found = score(client.save_weights_and_get_sampling_client().result(), SHIFTED)
    return client.save_state("warm").result().path, found


@pytest.mark.parametrize("loss", LOSS_SPECS)
def test_every_loss_learns_what_depends_on_the_prompt(service: Any, warm: tuple[str, float], loss: str) -> None:
    """From a half right to a right answer to every prompt; cross-entropy imitates the samples that were right."""
    path, before = warm
    client = service.create_training_client_from_state(path).result()
    after = learn(client, loss, SHIFTED, steps=10, samples=16)
    assert 0.4 < before < 0.7 and after > 0.95, (before, after)
