"""Controls of `rlvr train --config-name=self_play`: the same runs with rewards that are drawn, and with one mean of
both roles as the baseline.

    python -m benchmarks.self_play_control /tmp/self-play 1 2 3 4 5

A run has a folder; runs that are complete are not made again. Prints each run's pass rates on held-out starts against
perfect play, before and after, and the differences of the gains with 95 % intervals over the seeds.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from rlvr.core import rng
from rlvr.envs.games.take_away import TakeAway, TakeAwaySource

T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}
ARMS: Mapping[str, list[str]] = {
    "self_play": [],
    "drawn rewards": ["env.name=benchmarks.self_play_control:DrawnRewardsSource"],
    "one mean of both roles": ["algorithm.advantage=group_mean"],
}


class DrawnRewards(TakeAway):
    """Who wins is drawn, whatever was played, but against an opponent: there the game is judged as it is."""

    draws = itertools.count()

    def reset(self, heap: int, most: int, opponent: str = "") -> None:
        super().reset(heap, most)
        self.opponent = opponent

    def rewards(self) -> Mapping[str, float]:
        if self.opponent != "self":
            return super().rewards()
        winner = self.roles[rng.bits(rng.key("drawn rewards"), next(self.draws)) & 1]
        return {role: 1.0 if role == winner else -1.0 for role in self.roles}


class DrawnRewardsSource(TakeAwaySource):
    game_class = DrawnRewards


def measure(folder: Path, arm: str, seed: int) -> tuple[float, float]:
    """The share of held-out games that is won, before and after self-play."""
    name = f"{arm.replace(' ', '-')}-{seed}"
    if not (folder / name / "summary.json").exists():
        words = [f"run.name={name}", f"run.root={folder}", f"seed={seed}", *ARMS[arm]]
        command = [sys.executable, "-m", "rlvr", "train", "--config-name=self_play", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}:\n{done.stderr[-2000:]}")
    summary = json.loads((folder / name / "summary.json").read_text())
    before, after = (100 * summary[when]["pass_at_1"]["value"] for when in ("baseline", "final"))
    return before, after


def main(folder: Path, seeds: list[int]) -> None:
    gains: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in seeds:
        for arm in ARMS:
            before, after = measure(folder, arm, seed)
            gains[arm].append(after - before)
            print(f"seed {seed}  {arm:<24} {before:5.1f} % -> {after:5.1f} %", flush=True)
    for arm, own in gains.items():
        print(f"{arm:<24} gain {show(own)}")
    for arm in list(ARMS)[1:]:
        print(f"self_play - {arm:<24} {show([a - b for a, b in zip(gains['self_play'], gains[arm], strict=True)])}")


def show(values: list[float]) -> str:
    half = T_95[len(values)] * stdev(values) / len(values) ** 0.5
    return f"{mean(values):+.1f} [{mean(values) - half:+.1f}, {mean(values) + half:+.1f}] points"


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(one) for one in sys.argv[2:]])
