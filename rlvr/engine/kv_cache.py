"""The KV cache of the running rows: prefill of prompts, and decoding of one token a row.

A prompt is computed once, however many completions it has. Its keys and values are then copied to its rows, and a row
that forks is copied to the new ones. Rows live in one preallocated cache, each at its own length. A row that ends is
overwritten by the last one, so the running rows are always the front of the buffers and attention reads them as a view.
A long prompt with several completions is not copied: it is kept once, and its rows hold only what follows it
(`rlvr.engine.shared_prompts`).

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

from rlvr.core.machine import free_memory
from rlvr.engine.model import LanguageModel
from rlvr.engine.shared_prompts import (
    MAX_SETS,
    MIN_ROWS,
    MIN_TOKENS,
    SharedPrompts,
    prefers_products,
    use_shared_prompts,
)

KeyValues = list[tuple[Tensor, Tensor]]  # per layer: keys and values [P, H, L, D]


@dataclass(frozen=True)
class NewRow:
    """A row to insert behind prompt `prompt` of a prefill, which has `length` tokens.

    It may fork into `slots` rows, each of which may come to `reach` tokens, prompt included.
    """

    prompt: int
    length: int
    reach: int
    slots: int = 1


@dataclass(frozen=True)
class Slot:
    """A running row's place. Its first `shared_tokens` are prompt `index` of `prompts` and not held by the row itself.

    `own_tokens`: how many it may come to hold itself.
    """

    own_tokens: int
    shared_tokens: int = 0
    prompts: SharedPrompts | None = None
    index: int = 0


class KVLayer(CacheLayerMixin):
    """One layer's keys and values [R, H, L, D]; each row writes at its own position."""

    is_sliding = False

    def __init__(self, owner: KVCache) -> None:
        super().__init__()
        self.owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None and key_states.shape[2] == 1
        rows, at, length = self.owner.rows, self.owner.positions, self.owner.step_length
        self.keys[rows, :, at] = key_states[:, :, 0]
        self.values[rows, :, at] = value_states[:, :, 0]
        step = slice(self.owner.first, self.owner.first + len(key_states))
        return self.keys[step, :, :length], self.values[step, :, :length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.step_length, 0

    def get_seq_length(self) -> int:
        return self.owner.step_length - 1

    def get_max_length(self) -> int:
        return -1


class KVCache(Cache):
    """Keys and values of the running rows. Grows by doubling, within `max_tokens`; shrinks only in `shrink`.

    `max_tokens` bounds rows x length plus shared prompts, unless the rows need more; 0 means no bound.
    """

    layers: Any  # of `KVLayer`, all with keys and values once there are any

    def __init__(self, max_tokens: int = 0) -> None:
        super().__init__(layers=[])
        self.max_tokens = max_tokens
        self.length = 0  # of the longest row
        # Of the rows of one step: the first, all of them, where they write, and the longest.
        self.first = 0
        self.rows = torch.empty(0, dtype=torch.long)
        self.positions = torch.empty(0, dtype=torch.long)
        self.step_length = 0
        self.shape = (0, 0)  # rows and length there is room for
        self.slots: list[Slot] = []  # of the running rows
        self.shared: list[SharedPrompts] = []  # those of the running rows

    @property
    def shared_tokens(self) -> int:
        """The number of tokens of shared prompts, which are kept once and not in the rows."""
        return sum(prompts.tokens for prompts in self.shared)

    def insert(
        self, prompts: KeyValues, new: Sequence[NewRow], *, capacity: int, length: int, share: bool = False
    ) -> None:
        """Append rows behind the running ones, with room for `capacity` rows of `length` tokens, prompts included.

        A prompt is copied to its row. With `share` it is kept once for all its rows, where that pays and fits.
        """
        shared = self._choose_shared(new, capacity) if share else []
        own = [i for i, row in enumerate(new) if row.prompt not in shared]
        lengths = {row.prompt: row.length for row in new}
        block = SharedPrompts(prompts, shared, [lengths[prompt] for prompt in shared]) if shared else None
        shared_tokens = self.shared_tokens + (block.tokens if block else 0)
        if not own:
            length -= max(lengths.values())
        self._reserve(prompts, capacity, max(self.length, length, 1), shared_tokens)
        if own:
            device, longest, first = prompts[0][0].device, max(new[i].length for i in own), len(self.slots)
            source = torch.tensor([new[i].prompt for i in own], device=device)
            target = torch.tensor([first + i for i in own], device=device)
            for layer, (keys, values) in zip(self.layers, prompts, strict=True):
                layer.keys[target, :, :longest] = keys[source, :, :longest]
                layer.values[target, :, :longest] = values[source, :, :longest]
            self.length = max(self.length, longest)  # what a copy of a row must carry, until the next decoding step
        self.slots += [
            Slot(row.reach - row.length, row.length, block, shared.index(row.prompt))
            if row.prompt in shared
            else Slot(row.reach)
            for row in new
        ]
        self._assign_shared_prompts()

    def _choose_shared(self, new: Sequence[NewRow], capacity: int) -> list[int]:
        """The prompts to keep once: long ones with several rows, if all fits within `max_tokens`."""
        slots = Counter[int]()
        for row in new:
            slots[row.prompt] += row.slots
        shared = {
            row.prompt
            for row in new
            if slots[row.prompt] >= MIN_ROWS and row.length >= MIN_TOKENS and len(self.shared) < MAX_SETS
        }
        if shared and self.max_tokens:
            shared_lengths = [row.length if row.prompt in shared else 0 for row in new]
            widest = max(row.reach - n for row, n in zip(new, shared_lengths, strict=True))
            widest = max(widest, *(slot.own_tokens for slot in self.slots), 0)
            if capacity * widest + self.shared_tokens + len(shared) * max(shared_lengths) > self.max_tokens:
                return []
        return sorted(shared)

    def fork(self, source: Sequence[int]) -> None:
        """Append copies of the rows `source`. There is room: it was made for every completion in `insert`."""
        first = len(self.slots)
        rows = torch.tensor(source, device=self.layers[0].keys.device)
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[first : first + len(source), :, : self.length] = states[rows, :, : self.length]
        self.slots += [self.slots[row] for row in source]
        if self.shared:
            self._assign_shared_prompts()

    def _assign_shared_prompts(self) -> None:
        """Update which rows each shared prompt has; drop those without any."""
        self.shared = assign_rows(self.slots)

    def _reserve(self, like: KeyValues, rows: int, length: int, shared_tokens: int) -> None:
        """Make room for `rows` rows of `length` (running and to come) beside the shared prompts."""
        most = self.max_tokens - shared_tokens if self.max_tokens else math.inf
        if rows <= self.shape[0] and length <= self.shape[1] and self.shape[0] * self.shape[1] <= most:
            return
        sizes = zip((rows, length), self.shape, strict=True)
        room = [max(need, have if need <= have else 2 * have) for need, have in sizes]
        if room[0] * room[1] > most:
            room = [rows, max(length if rows > 1 else room[1], int(most // rows))]
        if tuple(room) == self.shape:  # one row, which may have all that it needs
            return
        rows, length = room
        if not self.layers:
            self.layers = [KVLayer(self) for _ in like]
        for layer, (keys, values) in zip(self.layers, like, strict=True):
            for name, example in (("keys", keys), ("values", values)):
                grown = example.new_zeros(rows, example.shape[1], length, example.shape[3])
                if (old := getattr(layer, name)) is not None:
                    used = old[:rows, :, : self.length]
                    grown[: used.shape[0], :, : used.shape[2]] = used
                setattr(layer, name, grown)
        self.shape = (rows, length)

    def shrink(self, lengths: Sequence[int], capacity: int) -> None:
        """Keep room for at most `capacity` rows of the running rows' `lengths`; give the rest back."""
        length = max(n - slot.shared_tokens for n, slot in zip(lengths, self.slots, strict=True))
        smaller = (min(capacity, self.shape[0]), min(length, self.shape[1]))
        if smaller == self.shape:
            return
        self.shape = smaller
        self.length = min(self.length, length)
        for layer in self.layers:
            for name in ("keys", "values"):
                setattr(layer, name, getattr(layer, name)[: self.shape[0], :, : self.shape[1]].clone())

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Zero rows that may hold nan: attention gives a masked place the weight 0, and 0 x nan is nan."""
        at = torch.tensor(rows)
        for layer in self.layers:
            layer.keys[at], layer.values[at] = 0, 0

    def compact(self, source: Sequence[int], target: Sequence[int], lengths: Sequence[int]) -> None:
        """Overwrite rows `target` by rows `source` (disjoint). The rows left come to `lengths` tokens next."""
        if source:
            device = self.layers[0].keys.device
            of, to = torch.tensor(source, device=device), torch.tensor(target, device=device)
            for layer in self.layers:
                layer.keys[to, :, : self.length] = layer.keys[of, :, : self.length]
                layer.values[to, :, : self.length] = layer.values[of, :, : self.length]
            for of_row, to_row in zip(source, target, strict=True):
                self.slots[to_row] = self.slots[of_row]
        if len(self.slots) > len(lengths):
            del self.slots[len(lengths) :]
            left = zip(lengths, self.slots, strict=True)
            self.length = max((n - 1 - slot.shared_tokens for n, slot in left), default=0)
            if self.shared:
                self._assign_shared_prompts()

    def swap(self, some: Sequence[int], others: Sequence[int]) -> None:
        """Swap two equally long lists of rows."""
        device = self.layers[0].keys.device
        to, of = torch.tensor([*some, *others], device=device), torch.tensor([*others, *some], device=device)
        for layer in self.layers:
            for states in (layer.keys, layer.values):
                states[to, :, : self.length] = states[of, :, : self.length]
        for i, j in zip(some, others, strict=True):
            self.slots[i], self.slots[j] = self.slots[j], self.slots[i]
        if self.shared:
            self._assign_shared_prompts()

    def decode(
        self, model: LanguageModel, tokens_R: Tensor, positions_R: Tensor, capacity: int = 0, first: int = 0
    ) -> Tensor:
        """Feed each of R rows, from the row `first` on, one token at its position; return its hidden state, [R, D].

        Keeps room for `capacity` rows (those that all may fork into), by default as many as run.
        """
        last = first + len(tokens_R)
        slots = self.slots[first:last]
        own_R = positions_R - torch.tensor([slot.shared_tokens for slot in slots]) if self.shared else positions_R
        self.first, self.rows = first, torch.arange(first, last, device=model.device)
        self.positions, self.step_length = own_R.to(model.device), int(own_R.max()) + 1
        are_all = len(slots) == len(self.slots)
        self.length = self.step_length if are_all else max(self.length, self.step_length)
        like = [(layer.keys, layer.values) for layer in self.layers]
        self._reserve(like, max(capacity, len(self.slots)), self.length, self.shared_tokens)
        shared = self.shared if are_all or not self.shared else assign_rows(slots)
        own_attention = model.can_share_prompts and prefers_products(model.device, model.dtype, self.step_length)
        adds_masks = model.adds_masks or bool(shared) or own_attention
        with use_shared_prompts(model.module, shared, always=own_attention):
            hidden_RD = model.hidden_states(
                tokens_R[:, None].to(model.device),
                attention_mask=self._make_mask(model, adds_masks),
                position_ids=positions_R.to(model.device)[:, None],
                past_key_values=self,
            )[:, 0]
        if shared and not are_all:
            self._assign_shared_prompts()
        return hidden_RD

    def _make_mask(self, model: LanguageModel, adds_masks: bool) -> Tensor | dict[str, Tensor]:
        """Which keys each row's token sees [R, 1, 1, L], to add or as booleans; by kind of layer if there are two."""
        columns, positions = torch.arange(self.step_length, device=model.device), self.positions[:, None]

        def form(seen_RL: Tensor) -> Tensor:
            seen = seen_RL[:, None, None]
            if not adds_masks:
                return seen
            return torch.zeros_like(seen, dtype=model.dtype).masked_fill(~seen, torch.finfo(model.dtype).min)

        seen_RL = columns <= positions
        if not model.window:
            return form(seen_RL)
        near = form(seen_RL & (columns > positions - model.window))
        return {"full_attention": form(seen_RL), "sliding_attention": near} if model.mixes_windows else near


def assign_rows(slots: Sequence[Slot]) -> list[SharedPrompts]:
    """The shared prompts of the rows in `slots`, each told which these are."""
    shared = list(dict.fromkeys(slot.prompts for slot in slots if slot.prompts is not None))
    for prompts in shared:
        rows = [i for i, slot in enumerate(slots) if slot.prompts is prompts]
        prompts.assign_rows([slots[i].index for i in rows], rows)
    return shared


def count_cache_tokens(model: LanguageModel, share: float, held: int = 0) -> int:
    """How many tokens a KV cache holds in a share of the device's free memory, once `held` tokens are given back.

    Without such a limit long completions use up all memory. 0, unlimited, if the share is 0 or the model's config does
    not give the size of a token's keys and values.
    """
    if share == 0:
        return 0
    config = model.module.config.get_text_config()
    try:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize
    except AttributeError:
        return 0
    return max(model.context, int(share * (free_bytes(model.device) / size + held)))


def free_bytes(device: torch.device) -> int:
    """The free memory of a device: of a GPU also what torch has reserved there and does not use."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def prefill(model: LanguageModel, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, KeyValues]:
    """Compute the hidden states of all prompts [P, L, D], and their keys and values.

    Prompts are padded on the right, where a causal model's real tokens cannot see.
    """
    cache = DynamicCache()
    hidden_PLD = model.hidden_states(pad_right(prompts, model.device), past_key_values=cache)
    layers: Any = cache.layers
    return hidden_PLD, [(layer.keys, layer.values) for layer in layers]


def recompute(model: LanguageModel, rows: Sequence[Sequence[int]]) -> Tensor:
    """The hidden states of all rows [R, L, D] without any cache: for models that ours does not fit."""
    return model.hidden_states(pad_right(rows, model.device))


def last_hidden(hidden_RLD: Tensor, rows: Sequence[Sequence[int]]) -> Tensor:
    """The hidden state of each row's last token [R, D]."""
    device = hidden_RLD.device
    last = torch.tensor([len(row) - 1 for row in rows], device=device)
    return hidden_RLD[torch.arange(len(rows), device=device), last]


def pad_right(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Token ids [rows, longest], filled with 0 on the right."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
