"""What the probes at load find out about a model, and what a broken config is told."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.messages import Datum, ModelInput
from rlvr.engine.engine import Engine
from rlvr.engine.model_loading import build_model, load_model, pick_device, pick_dtype
from tests.kit.rounding import close_logprobs
from tests.kit.tiny import CONFIGS, LLAMA_LIKE, PROMPTS, params, plain_logprobs

MLA = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "first_k_dense_replace": 2, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "splits", "shares"),
    [
        ("qwen3", True, True),
        ("llama", True, True),
        ("gpt2", True, True),
        ("mistral", True, False),  # a window of 6
        ("gemma2", False, False),  # a cap on the logits, windows in every second layer
    ],
)
@pytest.mark.parametrize("spread", [0.2, 0.02])
def test_the_probes_find_what_a_model_allows(
    kind: str, splits: bool, shares: bool, spread: float, tokenizer: Any
) -> None:
    """Also at the small initial weights of a model from scratch, whose tiny logits a cap would hardly touch."""
    config = {**CONFIGS[kind], "initializer_range": spread}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    assert (model.has_plain_head, model.can_share_prompts) == (splits, shares)
    assert model.can_cache and model.can_pack
    assert len(model.notes) == (not splits)


@pytest.mark.parametrize(
    ("kind", "more", "shares", "can_pack"),
    [
        ("mixtral", {"num_local_experts": 4}, True, True),
        ("deepseek_v3", MLA, False, True),  # keys and values of different widths
        ("diffllama", {}, False, True),  # splits keys and values after the cache has them
        ("jetmoe", {"num_experts_per_tok": 2, "num_local_experts": 4, "kv_channels": 8}, False, True),  # repeats them
        ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, False, False),  # a running state
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, False, False),  # a short convolution between layers
        # Has no base model.
        ("llama4_text", {"num_local_experts": 2, "intermediate_size_mlp": 32}, True, True),
    ],
)
def test_allowed_features_give_the_numbers_of_the_model_itself(
    kind: str, more: dict[str, Any], shares: bool, can_pack: bool, tokenizer: Any
) -> None:
    """Sampling four answers to one long prompt and training on them give the log-probs of a plain pass, whatever the
    probes said; and they say no where it would not."""
    fields = {**LLAMA_LIKE, "num_key_value_heads": 2, "initializer_range": 0.2, **more}
    if kind == "mamba2":
        fields = {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2, **more}
    model = build_model({"model_type": kind, **fields}, tokenizer, seed=1, device="cpu", dtype="float32")
    engine = Engine(model)
    policy = engine.create_policy("policy")
    prompt = [t % 14 for t in range(40)]
    answers = engine.sample(policy.snapshot(), ModelInput(prompt), 4, params(tokens=8)).result().sequences
    data = [Datum.from_completion(prompt, answer.tokens) for answer in answers]
    trained = engine.forward_backward(policy, data, "cross_entropy", None, backward=False).loss_fn_outputs
    for answer, row in zip(answers, trained, strict=True):
        wanted = plain_logprobs(model.module, prompt, answer.tokens)
        assert answer.logprobs == close_logprobs(wanted)
        assert row["logprobs"].data[-len(wanted) :].tolist() == close_logprobs(wanted)
    assert (model.can_share_prompts, model.can_pack) == (shares, can_pack)


@pytest.mark.parametrize(("window", "sees"), [(40, 40), (1500, 1500), (2048, 0)])
def test_a_long_window_is_shortened_for_the_trial_alone(window: int, sees: int, tokenizer: Any) -> None:
    """The model's window is as before; one that spans the whole context is none."""
    config = {**CONFIGS["mistral"], "sliding_window": window, "max_position_embeddings": 2048}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    assert (model.window, model.can_cache, model.can_pack) == (sees, True, True)
    assert model.module.config.sliding_window == window
    prompt = [t % 14 for t in range(60)]
    engine = Engine(model)
    answer = engine.sample(engine.create_policy("p").snapshot(), ModelInput(prompt), 1, params()).result().sequences[0]
    assert answer.logprobs == close_logprobs(plain_logprobs(model.module, prompt, answer.tokens))


def test_an_attention_in_chunks_gets_no_cache_and_no_tree(tokenizer: Any) -> None:
    """Llama 4's chunks: far longer than a trial, so they are shortened for it too."""
    fields = {"num_local_experts": 2, "intermediate_size_mlp": 32, "attention_chunk_size": 100}
    config = {"model_type": "llama4_text", **LLAMA_LIKE, "initializer_range": 0.2, **fields}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    assert (model.can_cache, model.can_pack) == (False, False)
    assert model.module.config.attention_chunk_size == 100


def test_rows_end_where_the_rotary_embedding_would_depend_on_their_neighbours(tokenizer: Any) -> None:
    """Phi 3's longrope takes other frequencies for the whole batch when one row is longer than the original context."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    config = {"model_type": "phi3", **LLAMA_LIKE, "original_max_position_embeddings": 32, "rope_parameters": rope}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    assert model.context == 32 and "limited to 32 tokens of 256" in model.notes[0]


def test_a_model_with_plain_attention_honours_the_mask_of_our_cache(tokenizer: Any, fresh: Callable[..., Any]) -> None:
    """gemma2 adds its masks to the scores: with a window over the whole context its rows can share the cache."""
    config = {**CONFIGS["gemma2"], "sliding_window": 256, "initializer_range": 0.2}
    model = build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")
    assert (model.has_plain_head, model.can_cache, model.adds_masks) == (False, True, True)
    engine = Engine(model)
    snapshot = engine.create_policy("p").snapshot()
    futures = [engine.sample(snapshot, ModelInput(p), 1, params(i)) for i, p in enumerate(PROMPTS)]
    for prompt, future in zip(PROMPTS, futures, strict=True):
        sequence = future.result().sequences[0]
        assert sequence.logprobs == close_logprobs(plain_logprobs(model.module, prompt, sequence.tokens))


def test_the_same_seed_builds_the_same_weights(tokenizer: Any) -> None:
    """A function of the seed alone: torch's own generator neither matters nor moves."""
    import torch

    from rlvr.engine.policy import tensors_sha256

    def weights(seed: int) -> str:
        return tensors_sha256(
            build_model(CONFIGS["qwen3"], tokenizer, seed=seed, device="cpu", dtype="float32").parameters()
        )

    state = torch.random.get_rng_state()
    first = weights(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(99)
    assert weights(1) == first != weights(2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "qwen9"}, "qwen9"),
        ({**CONFIGS["qwen3"], "hidden_sise": 3}, "hidden_sise: not a field of a qwen3 config"),
    ],
)
def test_a_broken_config_is_named(config: dict, message: str, tokenizer: Any) -> None:
    """No type, an unknown type, a misspelled field."""
    with pytest.raises(ValueError, match=message):
        build_model(config, tokenizer, seed=1, device="cpu", dtype="float32")


def test_a_missing_or_empty_model_folder_is_named(tmp_path: Path, tokenizer: Any) -> None:
    """A path that is no model folder is not sent to the hub."""
    with pytest.raises(ValueError, match="no such model folder"):
        load_model(str(tmp_path / "none"), tokenizer, device="cpu", dtype="float32")


def test_device_and_dtype_are_checked() -> None:
    """Unknown words are errors; auto on a CPU means fp32."""
    import torch

    with pytest.raises(ValueError, match=r"model.device"):
        pick_device("tpu9")
    with pytest.raises(ValueError, match=r"model.dtype='fp4'"):
        pick_dtype("fp4", torch.device("cpu"))
    assert pick_dtype("auto", torch.device("cpu")) is torch.float32
    assert pick_dtype("bfloat16", torch.device("cpu")) is torch.bfloat16


def test_models_that_are_built_in_several_threads_have_the_weights_of_their_seeds(tokenizer: Any) -> None:
    """As runs in threads of one program begin; torch's generator is one of the process."""

    def build(seed: int) -> str:
        model = build_model({"model_type": "llama", **LLAMA_LIKE}, tokenizer, seed=seed, device="cpu", dtype="float32")
        return hash_weights(model.module.state_dict().values())

    seeds = [1, 2, 3, 4] * 4
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(build, seeds)) == [build(seed) for seed in seeds]


def hash_weights(tensors: Iterable[Any]) -> str:
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()
