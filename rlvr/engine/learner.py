"""The training half of the engine: rows in, gradients and log-probs out, optimizer steps.

`forward_backward(data, loss_fn, config)` takes data in micro-batches (`rlvr.engine.packing`). Every loss is a sum, so
the split changes nothing but rounding. Log-probs are those of the targets at the temperature in the config. For a token
on which no weight of the loss falls, the log-prob is computed without a gradient.

Legend: B = rows of a micro-batch, T = their length, X = B x T places, N = the tokens of its datums laid end to end,
U = the places that hold any of them: fewer than N where datums share a prefix, P = the tokens of one part of N.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlvr.algorithms.loss_specs import VALUE_LOSS, check_batch, find_loss_spec, find_row, list_inputs
from rlvr.algorithms.losses.loss import ENTROPY_INPUT
from rlvr.core.messages import (
    AdamParams,
    Datum,
    ForwardBackwardOutput,
    ModelInput,
    NonFiniteError,
    OptimStepResponse,
    TensorData,
)
from rlvr.core.registry import load_path
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.lora import LoraBank, use_weights
from rlvr.engine.losses import TERMS, add_extra_terms, find_gradient_tokens, token_logprobs, value_loss
from rlvr.engine.model import LanguageModel
from rlvr.engine.packing import MicroBatch, make_micro_batches
from rlvr.engine.policy import VALUE_HEAD, Policy, Snapshot
from rlvr.engine.sharding import Ranks, local_part
from rlvr.engine.tree_attention import use_tree_attention


def check_data(
    data: Sequence[Datum], loss_fn: str, config: dict[str, float] | None, context: int, vocabulary: int
) -> dict[str, float]:
    """Return the loss's settings with defaults; ValueError naming the first datum or setting that is wrong."""
    for i, datum in enumerate(data):
        length = datum.model_input.length
        if not 1 <= length <= context:
            raise ValueError(f"datum {i} has {length} tokens; expected 1 to {context} (the model's context)")
    settings = check_batch(data, loss_fn, config)
    inputs = [np.fromiter(datum.model_input.tokens, np.int64, datum.model_input.length) for datum in data]
    for arrays in (inputs, [datum.loss_fn_inputs["target_tokens"].data.reshape(-1) for datum in data]):
        ids = np.concatenate(arrays)
        if (bad := (ids < 0) | (ids >= vocabulary)).any():
            row, token = find_row(bad, arrays), ids[bad.argmax()]
            raise ValueError(f"datum {row} holds token {token}, outside the vocabulary of {vocabulary}")
    return settings


class Learner:
    """Computes losses and gradients of policies on one model.

    With several `ranks` each calls the same methods with its own share of the data, one datum at least. Losses,
    log-probs and metrics are then those of the share, gradients those of all data.
    """

    def __init__(self, model: LanguageModel, bank: LoraBank, limits: EngineLimits, ranks: Ranks | None = None) -> None:
        self.model = model
        self.bank = bank
        self.limits = limits
        self.ranks = ranks or Ranks()
        self.chunk = max(1, limits.logit_elements // model.vocabulary)

    def _batches(self, data: Sequence[Datum]) -> list[MicroBatch]:
        limits, model = self.limits, self.model
        return make_micro_batches(
            data, limits.micro_tokens, model.device,
            tree=model.can_pack and limits.tree, pack=model.can_pack and limits.pack, linear_work=model.linear_work,
        )  # fmt: skip

    def _plan(self, data: Sequence[Datum]) -> tuple[Sequence[Datum], list[MicroBatch]]:
        """The data and micro-batches of a call, as many micro-batches on every rank: on one that has fewer, a filler
        that weighs nothing is added to the data, and its pass repeated."""
        batches = self._batches(data)
        missing = self.ranks.reduce_max(len(batches)) - len(batches)
        if missing:
            data = [*data, make_filler(data[0])]
            batches += [self._make_batch(data, len(data) - 1)] * missing
        return data, batches

    def _make_batch(self, data: Sequence[Datum], index: int) -> MicroBatch:
        """One datum alone, without a tree."""
        (batch,) = make_micro_batches(
            [data[index]], self.limits.micro_tokens, self.model.device, tree=False, pack=False, linear_work=1.0
        )
        return replace(batch, indices=[index])

    def forward_backward(
        self,
        policy: Policy,
        data: Sequence[Datum],
        loss_fn: str,
        config: dict[str, float] | None = None,
        *,
        backward: bool = True,
        after_batch: Callable[[], None] | None = None,
    ) -> ForwardBackwardOutput:
        """Add d(sum of token losses) / d(weights) to the policy's gradients; returns the log-probs of every target, or
        the values of a critic.

        `after_batch` is called after each micro-batch. It may sample and train other policies, and must not change this
        one.
        """
        if policy.is_critic != (loss_fn == VALUE_LOSS):
            own = f"it is a critic, whose one loss is {VALUE_LOSS}" if policy.is_critic else "it has no value head"
            raise ValueError(f"loss_fn {loss_fn!r} for the policy {policy.name!r}: {own}")
        settings = check_data(data, loss_fn, config, self.model.context, self.model.vocabulary)
        earlier = {name: master.grad for name, master in policy.masters.items()}
        policy.clear_gradients()
        count = len(data)
        data, batches = self._plan(data)
        outputs: list[dict[str, TensorData]] = [{} for _ in data]
        total = bonus = 0.0
        try:
            for batch in batches:
                with (
                    torch.set_grad_enabled(backward),
                    self.model.checkpoint_layers(backward and self.limits.gradient_checkpointing),
                    self._forward(policy.snapshot(), batch, data, loss_fn, settings) as (outputs_N, terms_N, bonus_N),
                ):
                    finite = all_finite(outputs_N, terms_N)
                    good = self.ranks.reduce_all(finite)
                    if good and backward and terms_N.requires_grad:
                        terms_N.sum().backward()
                        policy.widen_gradients()
                if not good:
                    culprits = self._find_nonfinite(policy.snapshot(), batch, data, loss_fn, settings)
                    raise NonFiniteError("a loss", [] if finite else culprits)
                total += float(terms_N.detach().double().sum())
                bonus += float(bonus_N.detach().double().sum())
                pieces = outputs_N.detach().cpu().split(batch.lengths)
                for i, piece in zip(batch.indices, pieces, strict=True):
                    outputs[i] = {"values" if policy.is_critic else "logprobs": TensorData(piece.numpy())}
                if after_batch is not None:
                    after_batch()
            if backward:
                self._add_up_gradients(policy)
                self._check_gradients(policy, earlier)
        except BaseException:
            policy.clear_gradients()
            for name, master in policy.masters.items():
                master.grad = earlier[name]
            raise
        for name, master in policy.masters.items():
            if (before := earlier[name]) is not None:
                master.grad = before if master.grad is None else before.add_(master.grad)
        if backward and all(master.grad is None for master in policy.masters.values()):
            for master in policy.masters.values():  # no token had a weight: the gradient is zero
                master.grad = torch.zeros_like(master)
        metrics = {"loss:sum": total}
        if ENTROPY_INPUT in list_inputs(data, find_loss_spec(loss_fn)):
            metrics["entropy_loss:sum"] = -bonus
        return ForwardBackwardOutput(outputs[:count], metrics)

    @torch.no_grad()
    def logprobs(self, snapshot: Snapshot, data: Sequence[Datum], temperature: float) -> list[np.ndarray]:
        """Log-probs of every target [T] under a snapshot's weights; no policy and no gradient is touched."""
        data = with_zero_weights(data)
        settings = check_data(
            data, "cross_entropy", {"temperature": temperature}, self.model.context, self.model.vocabulary
        )
        results: list[np.ndarray] = [np.empty(0) for _ in data]
        for batch in self._batches(data):
            with self._forward(snapshot, batch, data, "cross_entropy", settings) as (logprobs_N, terms_N, _):
                good = all_finite(logprobs_N, terms_N)
            if not good:
                raise NonFiniteError("a loss", self._find_nonfinite(snapshot, batch, data, "cross_entropy", settings))
            for i, piece in zip(batch.indices, logprobs_N.cpu().split(batch.lengths), strict=True):
                results[i] = piece.numpy()
        return results

    @contextmanager
    def _forward(
        self,
        source: Snapshot,
        batch: MicroBatch,
        data: Sequence[Datum],
        loss_fn: str,
        settings: dict[str, float],
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields the log-probs or values [N], loss terms [N] and the entropy bonus in them [N] (or one zero) of a
        micro-batch.

        The backward pass belongs inside the context: checkpointed layers must recompute under the same conditions.
        """
        device, loss = self.model.device, find_loss_spec(loss_fn)
        names = list_inputs(data, loss)

        def concatenate_input(name: str) -> Tensor:
            flat = np.concatenate([data[i].loss_fn_inputs[name].data for i in batch.indices])
            flat = flat if name == "target_tokens" else flat.astype(np.float32, copy=False)
            return torch.from_numpy(flat).to(device)

        inputs = {name: concatenate_input(name) for name in names}
        targets_N = concatenate_input("target_tokens")
        positions = {} if batch.positions_BT is None else {"position_ids": batch.positions_BT}
        gradient_N = find_gradient_tokens(inputs, loss)
        if self.ranks.size > 1 and not gradient_N.any():
            gradient_N[0] = True  # of zero: this rank takes part in the backward pass of the others
        with (
            use_weights(self.model, self.bank, [source]) as head,
            use_tree_attention(self.model.module, batch.tree),
            self.model.one_pass() as compute,
        ):
            if loss.predicts_values:
                hidden_XD = self.model.backbone(batch.tokens_BT, **positions).flatten(0, 1)
                values_N = (hidden_XD.float() @ source.tensors[VALUE_HEAD][0])[batch.index_N]
                yield values_N, value_loss(values_N, inputs, settings, batch.datum_N), values_N.new_zeros(1)
                return

            def compute_logprobs() -> tuple[Tensor, Tensor | None]:
                hidden_XD = self.model.hidden_states(batch.tokens_BT, **positions).flatten(0, 1)
                temperature, entropy = settings["temperature"], ENTROPY_INPUT in names
                return self._logprobs(head, hidden_XD, batch.index_N, targets_N, temperature, gradient_N, entropy)

            logprobs_N, entropy_N = compute(compute_logprobs)
            terms_N = TERMS[loss_fn](logprobs_N, inputs, settings, batch.datum_N)
            terms_N = add_extra_terms(terms_N, logprobs_N, inputs, settings.get("kl_estimator"))
            if entropy_N is None:
                yield logprobs_N, terms_N, terms_N.new_zeros(1)
            else:
                bonus_N = inputs[ENTROPY_INPUT] * entropy_N
                yield logprobs_N, terms_N - bonus_N, bonus_N

    def _logprobs(
        self,
        head: Callable[[Tensor], Tensor],
        hidden_XD: Tensor,
        index_N: Tensor,
        targets_N: Tensor,
        temperature: float,
        gradient_N: Tensor,
        entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """The log-prob and, with `entropy`, the entropy of every target [N]; with a gradient where `gradient_N`."""
        results: list[tuple[Tensor, Tensor | None]] = []
        parts = [mask_N.nonzero()[:, 0] for mask_N in (gradient_N, ~gradient_N)]
        for part, grad in zip(parts, (torch.is_grad_enabled(), False), strict=True):
            if not len(part):
                continue
            used_U, of_P = index_N[part].unique(return_inverse=True)
            with torch.set_grad_enabled(grad):
                hidden_UD = hidden_XD[used_U]
                results.append(token_logprobs(head, hidden_UD, targets_N[part], temperature, self.chunk, entropy, of_P))
        back_N = torch.cat(parts).argsort()
        logprobs_N = torch.cat([logprobs for logprobs, _ in results])[back_N]
        if not entropy:
            return logprobs_N, None
        return logprobs_N, torch.cat([e for _, e in results if e is not None])[back_N]

    @torch.no_grad()
    def _find_nonfinite(
        self, source: Snapshot, batch: MicroBatch, data: Sequence[Datum], loss_fn: str, settings: dict[str, float]
    ) -> list[int]:
        """The datums that give values that are not finite. Each is run alone: in a tree such values spread."""
        culprits: set[int] = set()
        own = sorted(batch.indices)
        for i in [*own, *[own[-1]] * (self.ranks.reduce_max(len(own)) - len(own))]:  # as many passes on every rank
            alone = self._make_batch(data, i)
            with self._forward(source, alone, data, loss_fn, settings) as (logprobs_N, terms_N, _):
                culprits |= set() if all_finite(logprobs_N, terms_N) else {i}
        return sorted(culprits) or own

    def _add_up_gradients(self, policy: Policy) -> None:
        """Add up the gradients of an adapter, which every rank holds. Those of sharded weights are sums already."""
        if self.ranks.size == 1 or policy.is_sharded:
            return
        masters = list(policy.masters.values())
        flat = torch.cat([(torch.zeros_like(m) if m.grad is None else m.grad).flatten() for m in masters])
        for master, part in zip(masters, self.ranks.reduce_sum(flat).split([m.numel() for m in masters]), strict=True):
            master.grad = part.view_as(master).clone()

    def _check_gradients(self, policy: Policy, earlier: Mapping[str, torch.Tensor | None]) -> None:
        """NonFiniteError if the norm of all gradients, with the earlier ones, is not finite: no step could be taken."""
        gradients = {name: p.grad for name, p in policy.masters.items() if p.grad is not None}
        sums = (g if (before := earlier[name]) is None else before + g for name, g in gradients.items())
        norms = [torch.linalg.vector_norm(total) for total in sums]
        norm_T = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        if policy.is_sharded:
            norm_T = self.ranks.reduce_sum(norm_T.square())
        if self.ranks.reduce_all(bool(norm_T.isfinite())):
            return
        for name, gradient in gradients.items():
            if not self.ranks.reduce_all(bool(torch.isfinite(gradient).all())):
                raise NonFiniteError(f"the gradient of {name}", [])
        raise NonFiniteError("the gradient norm", [])

    def optim_step(self, policy: Policy, adam: AdamParams) -> OptimStepResponse:
        """One AdamW step (Loshchilov & Hutter, arXiv:1711.05101) on the accumulated gradients, which are then cleared.

        Parameters with a `stepper` have some weights stepped by it instead. Metrics: `grad_norm`, the global L2 norm
        before clipping. ValueError where there are no gradients, or the optimizer is none for an adapter.
        """
        if adam.needs_matrices and policy.lora:
            raise ValueError(f"optim_step: {type(adam).__name__} for an adapter; {adam.needs_matrices}: use AdamParams")
        masters = [m for m in policy.masters.values() if m.grad is not None]
        if not masters:
            raise ValueError("optim_step: no gradients were accumulated; call forward_backward first")
        norm_T = torch.nn.utils.get_total_norm([m.grad for m in masters if m.grad is not None])
        if policy.is_sharded:
            norm_T = self.ranks.reduce_sum(norm_T.square()).sqrt()
        norm = float(norm_T)
        if not math.isfinite(norm):
            raise NonFiniteError("the gradient norm", [])
        if adam.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(masters, adam.grad_clip_norm, norm_T)
        policy.preserve_snapshots()
        for group in policy.optimizer.param_groups:
            group.update(
                lr=adam.learning_rate,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        stepped = load_path("AdamParams.stepper", adam.stepper)(policy, adam) if adam.stepper else ()
        for name in stepped:
            policy.masters[name].grad = None  # AdamW skips a weight without a gradient
            policy.optimizer.state.pop(policy.masters[name], None)
        for name in policy.momenta.keys() - set(stepped):
            del policy.momenta[name]
        policy.optimizer.step()
        with torch.no_grad():
            for name, p in policy.parameters.items():
                if policy.masters[name].dtype != p.dtype:
                    local_part(p).copy_(policy.masters[name])
        policy.clear_gradients()
        policy.version += 1
        policy.note_change()
        return OptimStepResponse({"grad_norm": norm})


def all_finite(logprobs_N: Tensor, terms_N: Tensor) -> bool:
    return bool(torch.isfinite(logprobs_N).all() and torch.isfinite(terms_N).all())


def make_filler(datum: Datum) -> Datum:
    """One token with the inputs of `datum`, all zero: it weighs nothing in any loss."""
    inputs = {name: TensorData(np.zeros_like(given.data[:1])) for name, given in datum.loss_fn_inputs.items()}
    return Datum(ModelInput(list(datum.model_input.tokens[:1])), inputs)


def with_zero_weights(data: Sequence[Datum]) -> list[Datum]:
    """The same rows with zero cross-entropy weights, to compute log-probs only."""
    zero = [TensorData(np.zeros(d.loss_fn_inputs["target_tokens"].data.shape, dtype=np.float32)) for d in data]
    return [
        replace(d, loss_fn_inputs={"target_tokens": d.loss_fn_inputs["target_tokens"], "weights": z})
        for d, z in zip(data, zero, strict=True)
    ]
