"""Computes what the scheduler decided: prompts into keys and values, rows one token further.

A prompt is computed once, however many completions it has; its keys and values are then copied to its rows, and a row
whose completions part is copied to the new ones. Rows live in one preallocated cache, each at its own length: a row
that ends is overwritten by the last one, so the running rows are always the front of the buffers and attention reads
them as a view. A long prompt with several completions is not even copied: its rows hold what they add to it
(`rlvr.engine.prefixes`).

Legend: P = prompts, R = rows, L = longest row, H = key-value heads, D = head width.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from rlvr.engine.model import LanguageModel
from rlvr.engine.prefixes import LEAST_ROWS, LEAST_TOKENS, MOST, SharedPrompts, by_products, one_token_attention

KeyValues = list[tuple[Tensor, Tensor]]  # per layer: keys and values [P, H, L, D]


@dataclass(frozen=True)
class Beginning:
    """What a row begins with and does not hold itself: the first `tokens`, which are prompt `index` of `prompts`.

    `own` is what it may come to hold itself.
    """

    tokens: int = 0
    prompts: SharedPrompts | None = None
    index: int = 0
    own: int = 0


class RowLayer(CacheLayerMixin):
    """One layer's keys and values [R, H, L, D]; each row writes at its own position."""

    is_sliding = False

    def __init__(self, owner: RowCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None and key_states.shape[2] == 1
        rows, at, length = self.owner.rows, self.owner.positions, self.owner.length
        self.keys[rows, :, at] = key_states[:, :, 0]
        self.values[rows, :, at] = value_states[:, :, 0]
        count = key_states.shape[0]
        return self.keys[:count, :, :length], self.values[:count, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.length, 0

    def get_seq_length(self) -> int:
        return self.owner.length - 1

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """Keys and values of the running rows. Grows by doubling, within `most`; shrinks only when told to."""

    layers: Any  # of `RowLayer`, all with keys and values once there are any

    def __init__(self, most: int = 0) -> None:
        super().__init__(layers=[])
        self.most = most  # places, rows x length and shared prompts, unless the rows need more; 0 for any number
        self.rows = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)
        self.length = 0
        self.shape = (0, 0)  # rows and length there is room for
        self.beginnings: list[Beginning] = []  # of each row
        self.shared: list[SharedPrompts] = []  # of the running rows

    @property
    def held(self) -> int:
        """Places of the shared prompts, beside those of the rows."""
        return sum(prompts.places for prompts in self.shared)

    def place(
        self,
        prompts: KeyValues,
        source: Sequence[int],
        lengths: Sequence[int],
        *,
        rows: Sequence[int],
        capacity: int,
        length: int,
        seats: Sequence[int] = (),
        reaches: Sequence[int] = (),
        share: bool = False,
    ) -> None:
        """Seat rows `rows`, which follow those there are, behind prompt `source[i]` of `lengths[i]` tokens.

        A row may part into `seats[i]`, by default stays one. A prompt is copied to its row, or kept for all its rows
        where `share` allows it, it pays, and rows that come to hold `reaches[i]` tokens leave room for it. Room is made
        for capacity x length, prompts included.
        """
        reaches = reaches or lengths
        of_prompt = Counter[int]()
        for prompt, count in zip(source, seats or [1] * len(source), strict=True):
            of_prompt[prompt] += count
        shared = {
            prompt
            for prompt, tokens in zip(source, lengths, strict=True)
            if share and of_prompt[prompt] >= LEAST_ROWS and tokens >= LEAST_TOKENS and len(self.shared) < MOST
        }
        if shared and self.most:
            kept_apart = [n if prompt in shared else 0 for prompt, n in zip(source, lengths, strict=True)]
            widest = max(reach - n for reach, n in zip(reaches, kept_apart, strict=True))
            widest = max(widest, *(beginning.own for beginning in self.beginnings), 0)
            if capacity * widest + self.held + len(shared) * max(kept_apart) > self.most:
                shared = set[int]()
        own = [i for i, prompt in enumerate(source) if prompt not in shared]
        kept = sorted(shared)
        block = SharedPrompts(prompts, kept, [lengths[source.index(prompt)] for prompt in kept]) if kept else None
        held = self.held + (block.places if block else 0)
        self._reserve(prompts, capacity, max(self.length, length if own else length - max(lengths), 1), held)
        if own:
            device, most = prompts[0][0].device, max(lengths[i] for i in own)
            of = torch.tensor([source[i] for i in own], device=device)
            to = torch.tensor([rows[i] for i in own], device=device)
            for layer, (keys, values) in zip(self.layers, prompts, strict=True):
                layer.keys[to, :, :most] = keys[of, :, :most]
                layer.values[to, :, :most] = values[of, :, :most]
            self.length = max(self.length, most)  # what `move` must carry, until the next step says
        self.beginnings += [
            Beginning(n, block, kept.index(prompt), reach - n) if prompt in shared else Beginning(own=reach)
            for prompt, n, reach in zip(source, lengths, reaches, strict=True)
        ]
        self._settle()

    def part(self, source: Sequence[int]) -> None:
        """New rows behind those there are, which hold what rows `source` do."""
        first = len(self.beginnings)  # there is room: every completion's was made when it was seated
        of = torch.tensor(source, device=self.layers[0].keys.device)
        for layer in self.layers:
            for held in (layer.keys, layer.values):
                held[first : first + len(source), :, : self.length] = held[of, :, : self.length]
        self.beginnings += [self.beginnings[row] for row in source]
        if self.shared:
            self._settle()

    def _settle(self) -> None:
        """Tell the shared prompts which rows they have; one without any is given up."""
        self.shared = list(dict.fromkeys(b.prompts for b in self.beginnings if b.prompts is not None))
        for prompts in self.shared:
            rows = [i for i, beginning in enumerate(self.beginnings) if beginning.prompts is prompts]
            prompts.settle([self.beginnings[i].index for i in rows], rows)

    def _reserve(self, like: KeyValues, rows: int, length: int, held: int) -> None:
        """Room for `rows` rows that hold `length`: all there are, running and to come, beside `held` places."""
        most = self.most - held if self.most else math.inf
        if rows <= self.shape[0] and length <= self.shape[1] and self.shape[0] * self.shape[1] <= most:
            return
        wanted = zip((rows, length), self.shape, strict=True)
        room = [max(need, have if need <= have else 2 * have) for need, have in wanted]
        if room[0] * room[1] > most:
            room = [rows, max(length if rows > 1 else room[1], int(most // rows))]
        if tuple(room) == self.shape:  # one row, which may have all that it needs
            return
        rows, length = room
        if not self.layers:
            self.layers = [RowLayer(self) for _ in like]
        for layer, (keys, values) in zip(self.layers, like, strict=True):
            for name, example in (("keys", keys), ("values", values)):
                grown = example.new_zeros(rows, example.shape[1], length, example.shape[3])
                if (old := getattr(layer, name)) is not None:
                    kept = old[:rows, :, : self.length]
                    grown[: kept.shape[0], :, : kept.shape[2]] = kept
                setattr(layer, name, grown)
        self.shape = (rows, length)

    def shrink(self, lengths: Sequence[int], seats: int) -> None:
        """Keep room for no more than the `seats` rows that those there are may part into, `lengths` tokens long."""
        length = max(n - beginning.tokens for n, beginning in zip(lengths, self.beginnings, strict=True))
        self.shape = (min(seats, self.shape[0]), min(length, self.shape[1]))
        self.length = min(self.length, length)
        for layer in self.layers:
            for name in ("keys", "values"):
                setattr(layer, name, getattr(layer, name)[: self.shape[0], :, : self.shape[1]].clone())

    def wipe(self, rows: Sequence[int]) -> None:
        """Clear rows that may hold nan: attention gives a masked place the weight 0, and 0 x nan is nan."""
        at = torch.tensor(rows)
        for layer in self.layers:
            layer.keys[at], layer.values[at] = 0, 0

    def close(self, source: Sequence[int], target: Sequence[int], lengths: Sequence[int]) -> None:
        """Overwrite rows `target` by rows `source` (disjoint); rows are left that come to `lengths` tokens next."""
        if source:
            device = self.layers[0].keys.device
            of, to = torch.tensor(source, device=device), torch.tensor(target, device=device)
            for layer in self.layers:
                layer.keys[to, :, : self.length] = layer.keys[of, :, : self.length]
                layer.values[to, :, : self.length] = layer.values[of, :, : self.length]
            for of_row, to_row in zip(source, target, strict=True):
                self.beginnings[to_row] = self.beginnings[of_row]
        if len(self.beginnings) > len(lengths):
            del self.beginnings[len(lengths) :]
            left = zip(lengths, self.beginnings, strict=True)
            self.length = max((n - 1 - beginning.tokens for n, beginning in left), default=0)
            if self.shared:
                self._settle()

    def decode(self, model: LanguageModel, tokens_R: Tensor, positions_R: Tensor, seats: int = 0) -> Tensor:
        """Feed each of the R rows one token at its position; the hidden state behind it, [R, D].

        There is room for `seats` rows: what they may part into, by default R.
        """
        own_R = positions_R - torch.tensor([b.tokens for b in self.beginnings]) if self.shared else positions_R
        self.rows, self.positions = torch.arange(len(tokens_R), device=model.device), own_R.to(model.device)
        self.length = int(own_R.max()) + 1
        like = [(layer.keys, layer.values) for layer in self.layers]
        self._reserve(like, max(seats, len(tokens_R)), self.length, self.held)
        columns = torch.arange(self.length, device=model.device)
        mask = (columns <= self.positions[:, None])[:, None, None]  # [R, 1, 1, L]
        ours = model.shares and by_products(model.device, model.dtype, self.length)
        if model.adds_masks or self.shared or ours:
            mask = torch.zeros_like(mask, dtype=model.dtype).masked_fill(~mask, torch.finfo(model.dtype).min)
        with one_token_attention(model.module, self.shared, ours):
            return model.hidden(
                tokens_R[:, None].to(model.device),
                attention_mask=mask,
                position_ids=positions_R.to(model.device)[:, None],
                past_key_values=self,
            )[:, 0]


def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, KeyValues]:
    """The hidden states of all prompts [P, L, D], and the keys and values of all of them.

    Prompts are padded on the right, where a causal model's real tokens cannot see.
    """
    cache = DynamicCache()
    hidden_PLD = model.hidden(padded(prompts, model.device), past_key_values=cache)
    stored: Any = cache.layers
    return hidden_PLD, [(layer.keys, layer.values) for layer in stored]


def recompute(model: LanguageModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """The hidden states of all rows [R, L, D] without any cache: for models ours does not fit."""
    return model.hidden(padded(rows, model.device))


def behind(hidden_RLD: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """The hidden state behind each row's last token [R, D]."""
    device = hidden_RLD.device
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return hidden_RLD[torch.arange(len(rows), device=device), last]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [rows, longest], filled with 0 on the right."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
