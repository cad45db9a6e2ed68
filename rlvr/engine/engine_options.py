"""The engine's options. No torch here, so a config can be checked without loading it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoraConfig:
    """A low-rank adapter: a layer's output gains (alpha / rank) B A x, A [rank, in], B [out, rank]. arXiv:2106.09685.

    `targets` are names of linear layers (`q_proj`, say); empty for all but the head.
    """

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            all_weights = "; model.lora=null trains all weights" if self.rank == 0 else ""
            raise ValueError(
                f"lora: rank={self.rank}, alpha={self.alpha}; expected a rank of at least 1 and alpha > 0{all_weights}"
            )


@dataclass(frozen=True)
class EngineLimits:
    """Memory and cores. No option changes a result except by rounding.

    `max_rows`: completions sampled at once; one request gets at most the share `one_request` of them. `cache_tokens`:
    tokens whose keys and values are kept, counted as rows times the longest row (its whole budget), plus prompts kept
    for several rows; 0 for as many as the rows need, on a GPU at most as many as fit in 0.7 of its free memory. One row
    always runs. `micro_tokens`: tokens per forward pass in training and prefill, padding included. `logit_elements`:
    tokens x vocabulary held at once when log-probs are computed (4 bytes each, twice in training). `tree`: datums of a
    training call share prefixes, so a group's prompt is computed once. `pack`: datums lie end to end instead of padded
    side by side. Both apply only where the model can and where they save work. `gradient_checkpointing`: keep only the
    input of each layer and recompute the rest in the backward pass, for a third more work (Chen et al. 2016,
    arXiv:1604.06174). `threads`: torch's share of the cores; 0 for OMP_NUM_THREADS, or without that variable all that
    this process may use, or half of them if programs are verified at the same time (`rlvr.core.cpu_budget`). A resumed
    run keeps its bits only with the same number.
    """

    max_rows: int = 512
    one_request: float = 1.0
    cache_tokens: int = 0
    micro_tokens: int = 4096
    logit_elements: int = 1 << 25
    tree: bool = True
    pack: bool = True
    gradient_checkpointing: bool = False
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.one_request <= 1:
            raise ValueError(f"engine.one_request={self.one_request}, expected above 0 and at most 1")
        for name, least in (
            ("max_rows", 1),
            ("cache_tokens", 0),
            ("micro_tokens", 1),
            ("logit_elements", 1),
            ("threads", 0),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"engine.{name}={getattr(self, name)}, expected at least {least}")
