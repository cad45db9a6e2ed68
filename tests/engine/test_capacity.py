"""`rlvr plan`: each formula by figures worked out by hand, what published runs took, and wrong input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from rlvr.cli.main import app
from rlvr.cli.main import run as run_command
from rlvr.engine.capacity import (
    KNOWN_MODELS,
    ClusterOptions,
    StepEstimate,
    StepWork,
    count_needed,
    count_read,
    estimate_step,
    find_known_config,
    read_planned_shape,
)
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.engine.memory import GIB, ModelShape
from tests.kit.doc_pages import load_gen

runs = load_gen("published_runs")

# 2 layers of width 10, queries 10, keys 4, inner 20, vocabulary 100, untied: a block has 100 + 2 x 40 + 100 + 3 x 200 =
# 880 weights, the head 1,000, so a token is multiplied by 2,760; with the embedding and 5 norms of 10 there are 3,810.
TINY = ModelShape(100, 10, 20, 2, 10, 4, 5, False, False, False)
# Reached: 10^12 FLOP/s, 10^9 bytes/s.
FLAT: dict[str, Any] = {
    "device": "mine", "memory_gib": 16.0, "tflops": 2.0, "compute_efficiency": 0.5, "memory_gb_s": 2.0,
    "memory_efficiency": 0.5, "overhead_ms": 0.0, "network_gb_s": 1.0, "transfer_gb_s": 0.5,
}  # fmt: skip
WORK = StepWork(4, 8, prompt_tokens=50, completion_tokens=100, longest_completion=100)
PLAIN = EngineLimits(tree=False)


def estimate(
    work: StepWork = WORK, limits: EngineLimits = PLAIN, shape: ModelShape = TINY, **options: Any
) -> StepEstimate:
    return estimate_step(shape, work, limits, ClusterOptions(**{**FLAT, **options}))


def part(one: StepEstimate, phase: str, name: str) -> float:
    return next(part.value for part in one.details[phase] if part.name == name)


def test_sampling_is_prefill_then_steps_that_read_the_weights_and_the_cache() -> None:
    one = estimate(samplers=2)
    # 2 prompts for each engine, once for their 8 completions: 2 x 2,760 x 2 x 50 / 10^12
    assert part(one, "sampling", "prefill") == pytest.approx(5.52e-7)
    # 16 rows at a mean of 100 tokens; a token's cache is 2 x 4 x 2 layers x 2 bytes = 32: 2,760 x 2 + 16 x 100 x 32
    assert part(one, "sampling", "decode") == pytest.approx(100 * (5_520 + 51_200) / 1e9)
    assert part(one, "sampling", "longest completion") == 0
    # Two devices an engine: half the time; 10 ms before each of 100 steps.
    assert part(estimate(samplers=2, tensor_parallel=2), "sampling", "decode") == pytest.approx(100 * 28_360 / 1e9)
    assert part(estimate(samplers=2, overhead_ms=10.0), "sampling", "decode") == pytest.approx(1 + 100 * 56_720 / 1e9)
    # A device of 10^6 FLOP/s computes longer than it reads: 2 x 2,760 x 16 / 10^6 a step.
    slow = estimate(samplers=2, tflops=2e-6)
    assert part(slow, "sampling", "decode") == pytest.approx(100 * 0.08832)


def test_completions_take_turns_where_a_limit_or_the_memory_holds_fewer() -> None:
    one = estimate(limits=replace(PLAIN, max_rows=4), samplers=1)
    assert one.rows_at_once == 4
    assert part(one, "sampling", "decode") == pytest.approx(8 * 100 * (5_520 + 4 * 3_200) / 1e9)
    # 3,810 weights are 7,620 bytes, a whole row 150 x 32 = 4,800: (7,620 + 3 x 4,800 + 100) x 1.1 and 1 GiB hold 3 rows
    room = (7_620 + 3 * 4_800 + 100) * 1.1 / GIB + 1
    assert estimate(replace(WORK, prompts=1), samplers=1, memory_gib=room).rows_at_once == 3
    with pytest.raises(ValueError, match=r"cannot hold .* of one completion; give cluster.tensor_parallel=2"):
        estimate(samplers=1, memory_gib=1.000001)


def test_without_samplers_one_device_samples_however_many_train() -> None:
    """As `client=sharded` does: its driver samples."""
    one, four = estimate(), estimate(trainers=4)
    assert four.details["sampling"] == one.details["sampling"]
    held = {part.name: part.value for part in four.trainer}
    assert held["weights to sample"] == TINY.parameters * 2 and held["KV cache"] == 32 * 150 * 32


def test_the_longest_completion_goes_on_alone() -> None:
    one = estimate(replace(WORK, longest_completion=130), samplers=2)
    assert part(one, "sampling", "longest completion") == pytest.approx(30 * (5_520 + 100 * 32) / 1e9)


def test_training_is_six_operations_a_weight_and_attention() -> None:
    # 32 rows x 150 tokens; attention 6 x 2 layers x 10 x 150 = 18,000 a token
    full = 4_800 * (6 * 2_760 + 18_000) / 1e12
    assert part(estimate(), "training", "passes") == pytest.approx(full)
    assert part(estimate(trainers=4), "training", "passes") == pytest.approx(full / 4)
    # The prompt once for its group: 4 x (50 + 800) tokens.
    assert part(estimate(limits=EngineLimits()), "training", "passes") == pytest.approx(full * 3_400 / 4_800)
    again = estimate(limits=replace(PLAIN, gradient_checkpointing=True))
    assert part(again, "training", "passes") == pytest.approx(full * 8 / 6)
    # An adapter of rank 1: (10+10) + 2 (10+4) + (10+10) + 3 (10+20) = 158 weights a layer.
    adapter = estimate(replace(WORK, lora=LoraConfig(1)))
    assert part(adapter, "training", "passes") == pytest.approx(4_800 * (4 * 2_760 + 6 * 316 + 18_000) / 1e12)
    # Two epochs, and a reference pass of 2 x 2,760 + 2 x 2 x 10 x 150.
    more = estimate(replace(WORK, epochs=2, updates=2, references=1))
    assert part(more, "training", "passes") == pytest.approx(2 * full + 4_800 * 11_520 / 1e12)
    assert part(more, "training", "optimizer") == pytest.approx(2 * 28 * TINY.parameters / 1e9)


def test_the_network_counts_as_far_as_the_passes_do_not_hide_it() -> None:
    # 4 trainers, 1,200 tokens each in 2 micro-batches. In each the 1,800 weights of blocks are gathered twice and the
    # 2,010 others once, in 2 bytes, and 3,810 gradients are added up in 4; 3/4 of them travel, at 5 x 10^8 bytes/s.
    limits = replace(PLAIN, micro_tokens=1_000)
    slow: dict[str, Any] = {"limits": limits, "trainers": 4, "network_gb_s": 0.5}
    sent = 2 * (5_610 * 2 + 15_240) * 0.75 / 0.5e9
    passes = 4_800 * 34_560 / 4e12
    one = estimate(**slow)
    assert part(one, "training", "waiting for the network") == pytest.approx(sent - passes)
    processors = estimate(**slow, device="cpu")  # compute or exchange
    assert part(processors, "training", "waiting for the network") == pytest.approx(sent)
    # An adapter's 316 gradients are added up once, to all, after all micro-batches; the base has none.
    adapter = estimate(replace(WORK, lora=LoraConfig(1)), **slow, device="cpu")
    lora_sent = (2 * 5_610 * 2 + 2 * 4 * 316) * 0.75 / 0.5e9
    assert part(adapter, "training", "waiting for the network") == pytest.approx(lora_sent)
    # A second epoch doubles it; a reference gathers each weight for one pass: 3,810 x 2 bytes more, per micro-batch.
    more = estimate(replace(WORK, epochs=2, updates=2, references=1), **slow, device="cpu")
    assert part(more, "training", "waiting for the network") == pytest.approx(2 * sent + 15_240 * 0.75 / 0.5e9)
    fast = estimate(limits=limits, trainers=4, network_gb_s=1e6)
    assert part(fast, "training", "waiting for the network") == 0
    assert part(estimate(limits=limits), "training", "waiting for the network") == 0


def test_new_weights_travel_to_the_samplers() -> None:
    assert estimate(samplers=1).phases["transfer"] == pytest.approx(TINY.parameters * 2 / 0.5e9)
    assert estimate(replace(WORK, lora=LoraConfig(1)), samplers=1).phases["transfer"] == pytest.approx(316 * 4 / 0.5e9)
    assert estimate().phases["transfer"] == 0  # one process
    assert estimate(trainers=4).phases["transfer"] == pytest.approx(TINY.parameters * 2 * 0.75 / 1e9)


def test_verification_runs_beside_sampling_and_a_step_that_samples_ahead_hides_the_shorter() -> None:
    one = estimate(samplers=1, verifiers=4, verify_s=0.5)
    assert one.phases["verification"] == pytest.approx(4.0) and one.bottleneck == "verification"
    assert one.seconds == pytest.approx(4.0 + one.phases["training"] + one.phases["transfer"])
    slow = estimate(replace(WORK, ahead=True), samplers=1, tflops=2e-6)
    assert slow.bottleneck == "training"
    assert slow.seconds == pytest.approx(slow.phases["training"] + slow.phases["transfer"])
    alone = estimate(replace(WORK, ahead=True))
    assert alone.seconds == pytest.approx(sum(alone.phases.values()) - alone.phases["verification"], abs=0.1)


def test_a_trainer_holds_its_share_and_a_sampler_all_weights() -> None:
    one, four = estimate(samplers=1), estimate(samplers=1, trainers=4)
    alone, shared = ({part.name: part.value for part in each.trainer} for each in (one, four))
    assert alone["weights"] == TINY.parameters * 2 and shared["weights"] == TINY.parameters / 2
    assert alone["optimizer state"] == TINY.parameters * 12 and shared["optimizer state"] == TINY.parameters * 3
    # Both tables (2 x 100 x 10) and two blocks of 880; the gradients of the tables and of a block.
    assert alone["gathered layers"] == 0 and shared["gathered layers"] == (2_000 + 1_760 + 2_000 + 880) * 2
    assert [(part.name, part.value) for part in four.sampler] == [("weights", 7_620), ("KV cache", 32 * 150 * 32)]
    adapter = estimate(replace(WORK, lora=LoraConfig(1)), trainers=4, samplers=1)
    held = {part.name: part.value for part in adapter.trainer}
    assert held["weights"] == TINY.parameters / 2 + 316 * 4 and held["optimizer state"] == 316 * 8
    assert held["gathered layers"] == (2_000 + 1_760) * 2  # the base has no gradients


def test_experts_are_all_held_and_a_few_are_multiplied() -> None:
    shape = read_planned_shape(KNOWN_MODELS["Qwen3-30B-A3B"])
    assert shape is not None
    assert shape.parameters == 30_532_122_624  # as published
    # 48 layers of attention 18,874,368, a router of 262,144, and 8 experts of 4,718,592; the head 311,164,928
    assert shape.active_weights == 48 * (18_874_368 + 262_144 + 8 * 4_718_592) + 311_164_928
    one_row = shape.active_weights
    assert count_read(shape, 1) == pytest.approx(one_row)
    assert count_read(shape, 1000) == pytest.approx(shape.parameters - 311_164_928, rel=1e-3)
    assert count_read(TINY, 16) == 2_760
    assert read_planned_shape({**KNOWN_MODELS["Qwen3-30B-A3B"], "num_experts": None}) is None


@pytest.mark.parametrize("row", runs.TRAINING)
def test_training_takes_what_was_published_within_a_factor_of_about_two(row: tuple[str, int, int, bool, int]) -> None:
    """All weights of the 30 B on 8 GPUs took five times as long: the page says so."""
    ratio = runs.predict_training(*row[:4]) / row[4]
    assert (4.5 < ratio < 5.5) if row[0] == "Qwen3-30B-A3B" and not row[3] else (0.6 < ratio < 2.1)


@pytest.mark.parametrize("row", runs.STEPS)
def test_a_whole_step_takes_what_was_published_within_a_fifth(row: tuple[str, int, int, int, float]) -> None:
    assert 0.8 < runs.predict_step(*row[:4]) / row[4] < 1.2


def test_sampling_takes_what_was_published_within_a_factor_of_two() -> None:
    assert all(0.5 < runs.predict_sampling(rows) / published < 2 for rows, published in runs.SAMPLING)


def test_0_5b_fits_one_gpu_and_70b_needs_many() -> None:
    work = StepWork(32, 8, 512, 1_024, 1_024)
    limits = EngineLimits(gradient_checkpointing=True)
    cluster = ClusterOptions()
    assert estimate_step(runs.shape_of("Qwen2.5-0.5B"), work, limits, cluster).fits(cluster)
    for trainers, fits in ((8, False), (64, True), (256, True)):
        cluster = ClusterOptions(trainers=trainers, samplers=4, tensor_parallel=4)
        one = estimate_step(runs.shape_of("Llama-3.1-70B"), work, limits, cluster)
        assert one.fits(cluster) is fits and (count_needed(one.trainer) < cluster.figures.memory) is fits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h1000"}, "cluster.device='h1000': known are a100"),
        ({"device": "mine", "tflops": 3.0}, "give cluster.memory_gib, cluster.tflops and cluster.memory_gb_s"),
        ({"trainers": 0}, "cluster.trainers=0, expected at least 1"),
        ({"samplers": -1}, "cluster.samplers=-1"),
        ({"trainers": 4, "tensor_parallel": 2}, "tensor_parallel=2 has no effect without cluster.samplers"),
        ({"network_gb_s": 0.0}, "cluster.network_gb_s=0.0, expected a finite number above 0"),
        ({"memory_gb_s": float("nan")}, "cluster.memory_gb_s=nan"),
        ({"compute_efficiency": 1.5}, "cluster.compute_efficiency=1.5, expected a share of at most 1"),
        ({"verify_s": -1.0}, "cluster.verify_s=-1.0"),
        ({"overhead_ms": float("inf")}, "cluster.overhead_ms=inf"),
    ],
)
def test_wrong_figures_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterOptions(**options)


# --- the command


def plan(*words: str) -> str:
    result = CliRunner().invoke(app, ["plan", *words])
    assert result.exit_code == 0, result.exception
    return result.output


def test_the_command_plans_a_run_in_the_words_of_train() -> None:
    words = ("model.name=Qwen/Qwen2.5-7B", "training.group_size=16", "rollout.max_tokens=2048", "cluster.trainers=8")
    text = plan(*words, "cluster.samplers=8", "cluster.completion_tokens=700")
    assert "7.62 B weights, 7.07 B multiplied for a token, bfloat16; all weights trained" in text
    assert "32 prompts x 16 completions; prompts of 512 tokens, completions of 700, the longest 2,048" in text
    assert "memory of a trainer" in text and "memory of a sampler" in text and "bottleneck: sampling" in text
    assert "training.schedule=completion" in text
    adapter = plan("--config-name=gsm8k", "model.name=Qwen2.5-0.5B", "model.lora.rank=16")
    assert "an adapter of rank 16 trained" in adapter and "DOES NOT FIT" not in adapter
    large = plan("model.name=llama-3.1-70b", "rollout.max_tokens=1024")
    assert "DOES NOT FIT" in large and "It does not fit: " in large
    advice = plan("model.name=llama-3.1-70b", "rollout.max_tokens=1024", "cluster.trainers=64").splitlines()[-1]
    assert "engine.gradient_checkpointing=true" in advice and "with cluster.tensor_parallel devices each" in advice
    done = (
        "engine.gradient_checkpointing=true",
        "model.lora.rank=8",
        "cluster.samplers=1",
        "cluster.tensor_parallel=8",
    )
    less = plan("model.name=llama-3.1-70b", "rollout.max_tokens=1024", *done).splitlines()[-1]
    assert less == "It does not fit: more cluster.trainers."
    long = ("model.name=Qwen2.5-7B", "rollout.max_tokens=16384", "engine.micro_tokens=2000000")
    advised = [plan(*long, *more).splitlines()[-1] for more in ((), ("engine.gradient_checkpointing=true",))]
    assert all("a lower engine.micro_tokens" in line for line in advised)
    assert ["gradient_checkpointing" in line for line in advised] == [True, False]


def test_the_run_says_how_many_processes_train_and_sample() -> None:
    words = ("model.name=Qwen3-4B", "rollout.max_tokens=9", "client=sharded", "sharding.ranks=8")
    assert "8 trainers, one of which also samples" in (text := plan(*words))
    assert "memory of the trainer that also samples" in text
    servers = "sampler.urls=[http://a:1,http://b:1,http://c:1]"
    assert "8 trainers, 3 samplers of 1" in plan(*words, "sampler.name=vllm", servers)
    assert "8 trainers, 4 samplers of 1" in plan(*words, "cluster.trainers=8", "cluster.samplers=4")
    assert "1 trainer, which also samples" in plan(*words[:2])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.name=Qwen3-4B", "rollout.max_tokens=9", "client=sharded", "cluster.trainers=8"],
            "cluster.trainers=8, and sharding.ranks gives 2: they are the same processes",
        ),
        (
            ["model.name=nowhere/none", "rollout.max_tokens=9"],
            "its shape is not known. Give a folder with a config.json",
        ),
        (["model.name=Qwen3-4B"], "rollout.max_tokens is missing"),
        (["model.name=Qwen3-4B", "cluster.trainer=2"], "did you mean cluster.trainers"),
        (["model.name=Qwen3-4B", "rollout.max_tokens=9", "cluster.completion_tokens=10"], "rollout.max_tokens=9 the"),
        (["model.name=Qwen3-4B", "rollout.max_tokens=9", "model.dtype=float32"], "give cluster.tflops for float32"),
        (["model.name=Qwen3-4B", "rollout.max_tokens=9", "model.dtype=int8"], "expected auto, float32 or bfloat16"),
        (["model.name=Qwen3-4B", "rollout.max_tokens=9", "cluster.trainers=two"], "cluster.trainers"),
    ],
)
def test_words_that_do_not_fit_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["plan", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_known_models_are_found_by_their_names() -> None:
    assert find_known_config("Qwen/Qwen2.5-0.5B") is find_known_config("qwen2.5-0.5b") is not None
    assert find_known_config("Qwen2.5-0.5B-Instruct") is None
