"""Environments of GEM for tests. Run by its own interpreter."""

from __future__ import annotations

import random
from typing import Any

import gem


class Rows(gem.Env):
    """A row of data that is loaded once."""

    loaded = 0

    def __init__(self, dataset: list[int] | None = None) -> None:
        if dataset is None:
            Rows.loaded += 1
            dataset = [random.randint(0, 9) for _ in range(5)]  # draws where it is loaded alone
        self.dataset = dataset

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed)
        self.number = random.randrange(1_000_000)
        return f"{self.number}", {"prefix": "Say ", "suffix": "Now!"}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == "data":
            return self.dataset, 0.0, False, False, {}
        correct = action == str(self.number)
        return "", 0.25, False, True, {"correct": correct, "loaded": Rows.loaded, "word": "hm"}


gem.register("test:Rows", Rows)
