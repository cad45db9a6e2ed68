"""Starts a group of ranks, splits the data of a training call over them, and gives the result of one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from rlvr.clients.sharded.rank_group import RankGroup, RankLauncher, RankNonFiniteError
from rlvr.clients.sharded.rank_processes import RankProcesses
from rlvr.clients.sharded.rank_worker import PACKAGES
from rlvr.clients.sharded.sharding_options import ShardingOptions
from rlvr.core.machine import describe_code
from rlvr.core.messages import Datum, ForwardBackwardOutput, NonFiniteError
from rlvr.core.ray_cluster import count_gpus, join_cluster
from rlvr.engine.packing import common_prefix


def open_group(
    options: ShardingOptions,
    device: str,
    threads: int,
    start: Callable[[ShardingOptions], RankLauncher] | None = None,
) -> RankGroup:
    """Start the ranks and connect them to each other; they hold no model yet. RankError or RayError if one fails."""
    options.check_device(device)
    launcher = start(options) if start else _launch(options, device)
    group = RankGroup(launcher, options.timeout_s)
    try:
        host, port = group.call_first("listen", port=options.port)
        meeting = {"host": host, "port": port, "device": device, "threads": threads}
        meeting |= {"size": options.ranks, "timeout_s": options.timeout_s}
        group.call_each("join", [{**meeting, "rank": rank} for rank in range(options.ranks)])
    except BaseException:
        group.close()
        raise
    return group


def _launch(options: ShardingOptions, device: str) -> RankLauncher:
    if options.ray is None:
        return RankProcesses(options.ranks)
    from rlvr.clients.sharded.ray_ranks import RayRanks

    join_cluster(options.ray)
    options.check_device(device, count_gpus())
    return RayRanks(options)


def check_equal(codes: Sequence[dict[str, str]]) -> None:
    """ValueError if a rank runs other code than this process, or has loaded other weights than the first rank."""
    ours = describe_code(*PACKAGES)
    for rank, code in enumerate(codes):
        for name, value in code.items():
            other, expected = ("this process", ours[name]) if name in ours else ("rank 0", codes[0][name])
            if value != expected:
                raise ValueError(
                    f"rank {rank} has {name} {value[:30]}, {other} {expected[:30]}; install and load the "
                    "same everywhere"
                )


def run_split(
    group: RankGroup,
    data: Sequence[Datum],
    loss_fn: str,
    config: dict[str, float] | None,
    *,
    backward: bool,
    meanwhile: Callable[[], None] | None = None,
) -> ForwardBackwardOutput:
    """Split checked data over the ranks, and join their outputs. `meanwhile` is called while they compute."""
    from rlvr.engine.learner import make_filler

    shares = split_data(data, group.size)
    idle = [make_filler(data[0])]  # a rank without data takes part in the passes of the others
    calls = [
        {"data": [data[i] for i in share] or idle, "loss_fn": loss_fn, "config": config, "backward": backward}
        for share in shares
    ]
    try:
        outputs: list[ForwardBackwardOutput] = group.call_each("forward_backward", calls, meanwhile)
    except RankNonFiniteError as error:
        rows = [shares[rank][row] for rank, found in error.by_rank.items() for row in found if shares[rank]]
        raise NonFiniteError(error.what, sorted(rows)) from error
    return _join(outputs, shares)


def _join(outputs: Sequence[ForwardBackwardOutput], shares: Sequence[Sequence[int]]) -> ForwardBackwardOutput:
    """One output in the order of the data. The first rank's metrics come first: a sum has one order."""
    by_index = {
        i: part for output, share in zip(outputs, shares, strict=True)
        for i, part in zip(share, output.loss_fn_outputs, strict=bool(share))
    }  # fmt: skip
    metrics = {name: sum(output.metrics[name] for output in outputs) for name in outputs[0].metrics}
    return ForwardBackwardOutput([by_index[i] for i in range(len(by_index))], metrics)


def split_data(data: Sequence[Datum], ranks: int) -> list[list[int]]:
    """The indices into `data` for each rank, a function of the tokens alone; with few datums a rank may get none.

    The datums are sorted by their tokens, which puts those of a group side by side, and split into equal shares of
    tokens. A prefix shared with the datum before counts once, as the learner computes it once.
    """
    tokens = [np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length) for datum in data]
    order = sorted(range(len(data)), key=lambda i: (tokens[i].astype(">u4").tobytes(), i))
    costs: list[int] = []
    for place, i in enumerate(order):
        shared = common_prefix(tokens[order[place - 1]], tokens[i]) if place else 0
        costs.append(max(1, len(tokens[i]) - shared))
    middles = np.cumsum(costs) - np.asarray(costs) / 2
    owners = np.minimum(ranks - 1, (middles * ranks / max(1, sum(costs))).astype(int))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i, owner in zip(order, owners, strict=True):
        shares[owner].append(i)
    return shares
