"""The parts of `client=sharded` that need no second process: options, messages, how data and weights are cut."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlvr.clients.sharded.rank_channel import RankChannel, RankCommand
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.clients.sharded.split_call import run_split, split_data
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.config.unused_keys import find_unused
from rlvr.core.messages import Datum, ForwardBackwardOutput, ModelInput, TensorData
from rlvr.engine.learner import make_filler
from rlvr.engine.sharding import Ranks, take_part
from rlvr.runs.assembly import check_cluster_use
from rlvr.runs.run_folder import open_run
from rlvr.runs.run_plan import describe_memory
from tests.kit.tiny import data

BASE = ["env.name=rpn_arithmetic", "rollout.max_tokens=8"]


def rows_of(*tokens: list[int]) -> list[Datum]:
    return [Datum(ModelInput(row), {"target_tokens": row}) for row in tokens]


@pytest.mark.parametrize(
    "wrong",
    [
        {"ranks": 0}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"timeout_s": float("inf")}, {"port": -1},
        {"port": 65536}, {"ray": ""}, {"ray": "nonsense"}, {"cpus_per_rank": 2}, {"gpus_per_rank": 1}, {"wait_s": 60.0},
        {"cpus_per_rank": 0, "ray": "auto"}, {"gpus_per_rank": -1, "ray": "auto"},
        {"wait_s": float("inf"), "ray": "auto"},
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"sharding\.{next(iter(wrong))}( has no effect|=)"):
        ShardingOptions(**wrong)


def test_ray_gives_the_ranks_the_device_that_they_need() -> None:
    options = ShardingOptions(ray="auto")
    options.check_device("auto")
    ShardingOptions().check_device("cuda")
    with pytest.raises(ValueError, match=r"device cuda needs sharding.gpus_per_rank=1"):
        options.check_device("cuda")
    with pytest.raises(ValueError, match=r"sharding.gpus_per_rank=2 has no effect on the device cpu"):
        ShardingOptions(ray="auto", gpus_per_rank=2).check_device("cpu")


def test_rows_are_cut_into_shares_of_equal_tokens_and_groups_stay_together() -> None:
    rows = rows_of([9, 9, 9], [1, 2, 3, 4], [9, 9, 8], [1, 2, 3, 5], [1, 2, 3, 6], [9, 9, 7], [9, 9, 6])
    assert split_data(rows, 1) == [[1, 3, 4, 6, 5, 2, 0]]
    assert split_data(rows, 2) == [[1, 3, 4], [6, 5, 2, 0]]  # 4 + 1 + 1 and 3 + 1 + 1 + 1 tokens


def test_a_long_row_is_a_share_of_its_own() -> None:
    rows = rows_of([5] * 100, [1], [2], [3])
    assert split_data(rows, 2) == [[1, 2, 3], [0]]


def test_fewer_rows_than_ranks_leave_ranks_without_any() -> None:
    shares = split_data(rows_of([1, 2], [3, 4]), 5)
    assert sorted(i for share in shares for i in share) == [0, 1] and len(shares) == 5
    assert max(map(len, shares)) == 1


def test_every_row_has_one_rank_and_the_order_of_the_rows_does_not_matter() -> None:
    rows = data([3, 9, 1, 30, 2, 7, 7, 12], seed=3)
    shares = split_data(rows, 3)
    assert sorted(i for share in shares for i in share) == list(range(8))
    turned = split_data(rows[::-1], 3)
    assert [[7 - i for i in share] for share in turned] == shares


class EchoRanks:
    """Stands for two ranks: the log-probs of a row are its tokens, the loss is 1 for each."""

    size = 2

    def call_each(self, name: str, calls: list[dict[str, Any]], meanwhile: Any = None) -> list[ForwardBackwardOutput]:
        return [
            ForwardBackwardOutput(
                [
                    {"logprobs": TensorData.of([float(token) for token in row.model_input.tokens])}
                    for row in call["data"]
                ],
                {"loss:sum": float(len(call["data"]))},
            )
            for call in calls
        ]


def test_outputs_come_back_in_the_order_of_the_rows() -> None:
    tokens = [[9, 9, 9], [1, 2, 3, 4], [9, 9, 8], [1, 2, 3, 5], [1, 2, 3, 6], [9, 9, 7], [9, 9, 6]]
    ranks: Any = EchoRanks()
    output = run_split(ranks, rows_of(*tokens), "cross_entropy", None, backward=True)
    assert [row["logprobs"].data.tolist() for row in output.loss_fn_outputs] == tokens
    assert output.metrics == {"loss:sum": 7.0}


def test_a_filler_weighs_nothing_in_any_loss() -> None:
    filler = make_filler(data([4])[0])
    assert filler.model_input.length == 1
    assert all(not given.data.any() and given.data.shape == (1,) for given in filler.loss_fn_inputs.values())


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_parts_are_those_that_torch_cuts(length: int) -> None:
    """`fully_shard` cuts as `torch.chunk` does: ranks at the end may have less, or nothing."""

    class Like:
        def __init__(self, rank: int) -> None:
            self.device_mesh = self
            self.rank = rank

        def to_local(self) -> None: ...

        def size(self) -> int:
            return 3

        def get_local_rank(self) -> int:
            return self.rank

    whole = torch.arange(2 * length).view(length, 2)
    chunks = [*whole.chunk(3), *[whole[:0]] * 3][:3]
    for rank in range(3):
        assert torch.equal(take_part(whole, Like(rank)), chunks[rank])


def test_one_process_alone_needs_no_collective() -> None:
    ranks = Ranks()
    assert (ranks.reduce_max(3), ranks.reduce_all(False), ranks.reduce_all(True)) == (3, False, True)
    assert torch.equal(ranks.reduce_sum(torch.ones(2)), torch.ones(2)) and ranks.waited == 0


def test_arrays_arrive_as_they_were_sent_and_can_be_written() -> None:
    one, other = socket.socketpair()
    sender, receiver = RankChannel(one.detach()), RankChannel(other.detach())
    sent = RankCommand("call", {"large": np.arange(1 << 18), "none": np.zeros((0, 3)), "text": "x"})
    thread = threading.Thread(target=sender.send, args=(sent,))
    thread.start()
    found = receiver.receive()
    thread.join()
    assert found.name == "call" and found.arguments["text"] == "x"
    assert np.array_equal(found.arguments["large"], sent.arguments["large"])
    assert found.arguments["none"].shape == (0, 3)
    found.arguments["large"][0] = 7
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive()
    receiver.close()


def test_options_without_effect_are_refused() -> None:
    config = build_config(load(None, None, [*BASE, "model.name=x", "client=local"]))
    assert "client.ranks" in dict(find_unused(config))
    config = build_config(load(None, None, [*BASE, "model.name=x", "client=sharded", "sharding.ranks=3"]))
    assert config.client.ranks == 3 and "client.ranks" not in dict(find_unused(config))


@pytest.mark.parametrize(
    "words", [["client=sharded"], ["client=sharded", "model.name=x", "model.config.hidden_size=4"]]
)
def test_a_sharded_run_names_one_model(words: list[str]) -> None:
    with pytest.raises(ValueError, match="model: "):
        build_config(load(None, None, [*BASE, *words]))


def test_a_run_goes_on_with_other_ranks_only_if_that_is_asked_for(tmp_path: Path) -> None:
    words = [*BASE, "model.name=x", "client=sharded", f"run.root={tmp_path}", "run.name=run"]

    def resume(*more: str) -> tuple[Path, bool]:
        loaded = load(None, None, [*words, *more])
        return open_run(loaded, build_config(loaded))

    folder, _ = resume("sharding.ranks=2")
    (folder / "metrics.jsonl").write_text("{}\n")  # it has made a step
    assert resume("sharding.ranks=2", "sharding.timeout_s=60", "sharding.port=29500") == (folder, False)
    assert resume("sharding.ranks=2", "sharding.ray=auto", "sharding.wait_s=60") == (folder, False)
    with pytest.raises(ValueError, match=r"it differs in client.cpus_per_rank"):  # other threads round otherwise
        resume("sharding.ranks=2", "sharding.ray=auto", "sharding.cpus_per_rank=4")
    with pytest.raises(ValueError, match=r"sharding.ranks=3: .* rounded otherwise.*sharding.allow_other_ranks=true"):
        resume("sharding.ranks=3")
    assert resume("sharding.ranks=3", "sharding.allow_other_ranks=true") == (folder, False)
    with pytest.raises(ValueError, match=r"it differs in seed"):
        resume("sharding.ranks=3", "sharding.allow_other_ranks=true", "seed=9")


def test_verifiers_leave_the_ranks_cpus_of_the_cluster() -> None:
    def check(sandbox: str, *more: str) -> None:
        words = ["env.name=dataset", "model.name=x", "rollout.max_tokens=8", "reward.type=code"]
        words += [f"reward.kwargs.sandbox={sandbox}", *more]
        check_cluster_use(build_config(load(None, None, words)))

    on_ray = ["client=sharded", "sharding.ray=auto"]
    check("{ray: auto, workers: 3}", *on_ray)
    check("{ray: auto}", "client=sharded")
    check("{workers: 3}", *on_ray)
    with pytest.raises(ValueError, match=r"reward.kwargs.sandbox has no workers.*leaves CPUs to the ranks"):
        check("{ray: auto}", *on_ray)


def test_the_plan_says_what_a_rank_and_the_driver_hold(tmp_path: Path) -> None:
    sizes = {"vocab_size": 16000, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12}
    shape = {"model_type": "qwen3", **sizes, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**shape, "tie_word_embeddings": True}))

    def plan(*more: str) -> str:
        words = [*BASE, f"model.name={tmp_path}", "client=sharded", "model.dtype=float32", "model.device=cpu", *more]
        return describe_memory(build_config(load(None, None, words)))

    # 95 million weights with gradients and two moments, 16 bytes each, are 1.41 GiB.
    assert "a rank, 0.7 of it its part" in plan("sharding.ranks=2") and "driver's sampler" in plan()
    assert "a rank, 0.4 of it its part" in plan("sharding.ranks=4")
    assert "driver" not in plan("sampler.name=vllm", "sampler.urls=[http://127.0.0.1:1]")
