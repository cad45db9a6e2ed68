"""The training half of the engine: rows in, gradients and log-probs out, optimizer steps.

`forward_backward(data, loss_fn, config)` is the whole surface. Data are taken in micro-batches (`rlvr.engine.rows`);
since every loss is a sum, the split changes nothing but rounding. Log-probs are those of the targets at the temperature
in the config. Where no weight of a loss falls on a token, its log-prob is computed without a gradient.

Legend: B = rows of a micro-batch, T = their length, X = B x T places, N = the tokens of its datums laid end to end,
U = the places that hold any of them: fewer than N where datums share what they begin with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlvr.engine.forest_attention import forest_attention
from rlvr.engine.lora import LoraBank, running
from rlvr.engine.losses import ENTROPY_INPUT, KL_INPUTS, LOSSES, Loss, carried, kl_penalty, token_logprobs
from rlvr.engine.model import LanguageModel
from rlvr.engine.options import EngineLimits
from rlvr.engine.policy import Policy, Snapshot
from rlvr.engine.rows import MicroBatch, planned, width
from rlvr.messages import AdamParams, Datum, ForwardBackwardOutput, NonFiniteError, OptimStepResponse, TensorData


def checked(
    data: Sequence[Datum], loss_fn: str, config: dict[str, float] | None, model: LanguageModel
) -> dict[str, float]:
    """The loss's settings with defaults filled in; ValueError naming the first datum or setting that is wrong."""
    if loss_fn not in LOSSES:
        raise ValueError(f"loss_fn {loss_fn!r} is unknown; known: {', '.join(LOSSES)}, or forward_backward_custom")
    loss = LOSSES[loss_fn]
    kl = {"kl_estimator": 1.0} if data and KL_INPUTS[0] in needed(data, loss) else {}
    known_settings = {"temperature": 1.0, **loss.config, **kl}
    settings = {**known_settings, **(config or {})}
    if unknown := set(settings) - set(known_settings):
        known = ", ".join(known_settings)
        raise ValueError(f"loss_fn_config: {', '.join(sorted(unknown))} has no effect on {loss_fn}; known: {known}")
    if not (math.isfinite(settings["temperature"]) and settings["temperature"] > 0):
        raise ValueError(f"loss_fn_config: temperature {settings['temperature']} must be finite and above 0 to train")
    if not data:
        raise ValueError("data is empty: there is nothing to compute (were all groups filtered out?)")
    if kl and settings["kl_estimator"] not in (1, 2, 3):
        raise ValueError(f"loss_fn_config: kl_estimator {settings['kl_estimator']}, expected 1, 2 or 3 (k1, k2, k3)")
    needs = needed(data, loss)
    wanted = ("target_tokens", *needs)
    for i, datum in enumerate(data):
        length = datum.model_input.length
        if not 1 <= length <= model.context:
            raise ValueError(f"datum {i} has {length} tokens; expected 1 to {model.context} (the model's context)")
        for name in wanted:
            if name not in datum.loss_fn_inputs:
                raise ValueError(f"datum {i} lacks {name!r}, which {loss_fn} needs")
            array = datum.loss_fn_inputs[name].data
            if array.shape != (expected := _shape(datum, name, loss)):
                per = "one per token" if len(expected) == 1 else "as the target_tokens"
                raise ValueError(f"datum {i}: {name} has shape {list(array.shape)}, expected {list(expected)}, {per}")
            if name == "target_tokens" and array.dtype.kind != "i":
                raise ValueError(f"datum {i}: target_tokens are {array.dtype}, expected integers")
        if kl and width(datum):
            raise ValueError(f"datum {i}: a KL needs one target per token, got {width(datum)}: give 1-D target_tokens")
    # All values at once: a call may hold thousands of short rows.

    def first(wrong: np.ndarray, arrays: Sequence[np.ndarray]) -> int:
        return int(np.searchsorted(np.cumsum([a.size for a in arrays]), wrong.argmax(), side="right"))

    for name in needs:
        arrays = [datum.loss_fn_inputs[name].data.reshape(-1) for datum in data]
        if (bad := ~np.isfinite(np.concatenate(arrays))).any():
            raise ValueError(f"datum {first(bad, arrays)}: {name} holds nan or infinity")
    inputs = [np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length) for datum in data]
    for arrays in (inputs, [datum.loss_fn_inputs["target_tokens"].data.reshape(-1) for datum in data]):
        ids = np.concatenate(arrays)
        if (bad := (ids < 0) | (ids >= model.vocabulary)).any():
            which, token = first(bad, arrays), ids[bad.argmax()]
            raise ValueError(f"datum {which} holds token {token}, outside the vocabulary of {model.vocabulary}")
    return settings


def _shape(datum: Datum, name: str, loss: Loss) -> tuple[int, ...]:
    """The shape that input `name` of a datum must have."""
    length, wide = datum.model_input.length, width(datum)
    return (length, wide) if wide and loss.wide and name in ("target_tokens", *loss.needs) else (length,)


def needed(data: Sequence[Datum], loss: Loss) -> tuple[str, ...]:
    """The inputs that a call reads: those the loss needs, and those of the ones it takes that any datum has."""
    given = {name for datum in data for name in datum.loss_fn_inputs}
    extra = [name for name in loss.takes if name in given]
    if "kl_weights" in extra or "reference_logprobs" in extra:
        extra = list(dict.fromkeys([*extra, *KL_INPUTS]))
    return (*loss.needs, *extra)


class Learner:
    """Computes losses and gradients of policies on one model."""

    def __init__(self, model: LanguageModel, bank: LoraBank | None, limits: EngineLimits) -> None:
        self.model = model
        self.bank = bank
        self.limits = limits
        self.chunk = max(1, limits.logit_elements // model.vocabulary)

    def _batches(self, data: Sequence[Datum]) -> list[MicroBatch]:
        """Forests only where the model takes them."""
        able, limits, model = self.model.forests, self.limits, self.model
        return planned(
            data, limits.micro_tokens, model.device,
            tree=able and limits.tree, pack=able and limits.pack, linear=model.linear_work,
        )  # fmt: skip

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None = None,
        *,
        backward: bool = True,
        between: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Add d(sum of token losses) / d(weights) to the policy's gradients; log-probs of every target come back.

        `between` is called after each micro-batch: it may sample, and must leave policies alone.
        """
        settings = checked(data, loss_fn, config, self.model)
        kept = {name: master.grad for name, master in policy.masters.items()}
        policy.clear_gradients()
        outputs: list[dict[str, TensorData]] = [{} for _ in data]
        total = bonus = 0.0
        try:
            for batch in self._batches(data):
                with (
                    torch.set_grad_enabled(backward),
                    self.model.checkpointed(backward and self.limits.gradient_checkpointing),
                    self._running(policy.snapshot(), batch, data, loss_fn, settings) as (logprobs_N, terms_N, bonus_N),
                ):
                    good = finite(logprobs_N, terms_N)
                    if good and backward and terms_N.requires_grad:
                        terms_N.sum().backward()
                        policy.widen_gradients()
                if not good:
                    raise NonFiniteError("a loss", self._culprits(policy.snapshot(), batch, data, loss_fn, settings))
                total += float(terms_N.detach().double().sum())
                bonus += float(bonus_N.detach().double().sum())
                pieces = logprobs_N.detach().cpu().split(batch.lengths)
                for i, piece in zip(batch.indices, pieces, strict=True):
                    outputs[i] = {"logprobs": TensorData(piece.numpy())}
                if between is not None:
                    between()
            if backward:
                self._check_gradients(policy)
        except BaseException:
            policy.clear_gradients()
            for name, master in policy.masters.items():
                master.grad = kept[name]
            raise
        for name, master in policy.masters.items():
            if (before := kept[name]) is not None:
                master.grad = before if master.grad is None else before.add_(master.grad)
        if backward and all(master.grad is None for master in policy.masters.values()):
            for master in policy.masters.values():  # no token had a weight: a gradient too, which may be stepped
                master.grad = torch.zeros_like(master)
        metrics = {"loss:sum": total}
        if ENTROPY_INPUT in needed(data, LOSSES[loss_fn]):
            metrics["entropy_loss:sum"] = -bonus
        return ForwardBackwardOutput(outputs, metrics)

    @torch.no_grad()
    def logprobs(self, snapshot: Snapshot, data: Sequence[Datum], temperature: float) -> list[np.ndarray]:
        """Log-probs of every target [T] under a snapshot's weights; no policy and no gradient is touched."""
        data = supervised_view(data)
        settings = checked(data, "cross_entropy", {"temperature": temperature}, self.model)
        found: list[np.ndarray] = [np.empty(0) for _ in data]
        for batch in self._batches(data):
            with self._running(snapshot, batch, data, "cross_entropy", settings) as (logprobs_N, terms_N, _):
                good = finite(logprobs_N, terms_N)
            if not good:
                raise NonFiniteError("a loss", self._culprits(snapshot, batch, data, "cross_entropy", settings))
            for i, piece in zip(batch.indices, logprobs_N.cpu().split(batch.lengths), strict=True):
                found[i] = piece.numpy()
        return found

    @contextmanager
    def _running(
        self,
        source: Snapshot,
        batch: MicroBatch,
        data: Sequence[Datum],
        loss_fn: str,
        settings: dict[str, float],
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Log-probs [N], loss terms [N] and the entropy bonus in them [N] (or one zero) of one micro-batch.

        The backward pass belongs inside the block: layers that compute again must find what they found before.
        """
        device, loss = self.model.device, LOSSES[loss_fn]
        names = needed(data, loss)

        def laid_out(name: str) -> Tensor:
            flat = np.concatenate([data[i].loss_fn_inputs[name].data for i in batch.indices])
            flat = flat if name == "target_tokens" else flat.astype(np.float32, copy=False)
            return torch.from_numpy(flat).to(device)

        inputs = {name: laid_out(name) for name in names}
        targets_N = laid_out("target_tokens")
        positions = {} if batch.positions_BT is None else {"position_ids": batch.positions_BT}
        with (
            running(self.model, self.bank, [source]) as head,
            forest_attention(self.model.module, batch.forest),
        ):
            hidden_BTD = self.model.hidden(batch.tokens_BT, **positions)
            logprobs_N, entropy_N = self._logprobs(
                head, hidden_BTD.flatten(0, 1), batch.at_N, targets_N, settings["temperature"],
                carried(inputs, loss), ENTROPY_INPUT in names,
            )  # fmt: skip
            terms_N = loss.terms(logprobs_N, inputs, settings, batch.row_N)
            if KL_INPUTS[0] in names:
                terms_N = terms_N + kl_penalty(logprobs_N, inputs, settings["kl_estimator"])
            if entropy_N is None:
                yield logprobs_N, terms_N, terms_N.new_zeros(1)
            else:
                bonus_N = inputs[ENTROPY_INPUT] * entropy_N
                yield logprobs_N, terms_N - bonus_N, bonus_N

    def _logprobs(
        self,
        head: Callable[[Tensor], Tensor],
        hidden_XD: Tensor,
        at_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        carried_N: Tensor,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Of every target [N] its log-prob and, if asked for, the entropy: with a gradient where `carried_N`."""
        found: list[tuple[Tensor, Tensor | None]] = []
        parts = [which.nonzero()[:, 0] for which in (carried_N, ~carried_N)]
        for part, grad in zip(parts, (torch.is_grad_enabled(), False), strict=True):
            if not len(part):
                continue
            used_U, of_P = at_N[part].unique(return_inverse=True)
            with torch.set_grad_enabled(grad):
                hidden_UD = hidden_XD[used_U]
                found.append(token_logprobs(head, hidden_UD, targets_N[part], temperature, self.chunk, entropy, of_P))
        back_N = torch.cat(parts).argsort()
        logprobs_N = torch.cat([logprobs for logprobs, _ in found])[back_N]
        if not entropy:
            return logprobs_N, None
        return logprobs_N, torch.cat([e for _, e in found if e is not None])[back_N]

    @torch.no_grad()
    def _culprits(
        self, source: Snapshot, batch: MicroBatch, data: Sequence[Datum], loss_fn: str, settings: dict[str, float]
    ) -> list[int]:
        """Which datums of a micro-batch give numbers that are not finite, each alone: in a forest they spread."""
        found: list[int] = []
        for i in sorted(batch.indices):
            (alone,) = planned(
                [data[i]], self.limits.micro_tokens, self.model.device, tree=False, pack=False, linear=1.0
            )
            with self._running(source, alone, [data[i]], loss_fn, settings) as (logprobs_N, terms_N, _):
                found += [] if finite(logprobs_N, terms_N) else [i]
        return found or sorted(batch.indices)

    def _check_gradients(self, policy: Policy) -> None:
        gradients = {name: p.grad for name, p in policy.masters.items() if p.grad is not None}
        # A sum is finite only where all its terms are, and reads them once; a false alarm (overflow) is looked at.
        if not gradients or bool(torch.stack([g.sum() for g in gradients.values()]).isfinite().all()):
            return
        for name, gradient in gradients.items():
            if not bool(torch.isfinite(gradient).all()):
                raise NonFiniteError(f"the gradient of {name}", [])

    def optim_step(self, policy: Policy, adam: AdamParams) -> OptimStepResponse:
        """One AdamW step (Loshchilov & Hutter, arXiv:1711.05101) on the accumulated gradients, which are then cleared.

        Metrics: `grad_norm`, the global L2 norm before clipping.
        """
        masters = [m for m in policy.masters.values() if m.grad is not None]
        if not masters:
            raise ValueError("optim_step: no gradients were accumulated; call forward_backward first")
        norm_T = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        norm = float(norm_T)
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient norm", [])
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(masters, adam.grad_clip_norm, norm_T)
        policy.about_to_change()
        for group in policy.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        policy.optimizer.step()
        with torch.no_grad():
            for name, p in policy.parameters.items():
                if policy.masters[name] is not p:
                    p.copy_(policy.masters[name])
        policy.clear_gradients()
        policy.version += 1
        return OptimStepResponse({"grad_norm": norm})


def finite(logprobs_N: Tensor, terms_N: Tensor) -> bool:
    return bool(torch.isfinite(logprobs_N).all() and torch.isfinite(terms_N).all())


def supervised_view(data: Sequence[Datum]) -> list[Datum]:
    """The same rows with zero cross-entropy weights: to ask for log-probs alone."""
    zero = [TensorData(np.zeros(d.loss_fn_inputs["target_tokens"].data.shape, dtype=np.float32)) for d in data]
    return [
        replace(d, loss_fn_inputs={"target_tokens": d.loss_fn_inputs["target_tokens"], "weights": z})
        for d, z in zip(data, zero, strict=True)
    ]
