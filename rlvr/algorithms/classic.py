"""`REINFORCE` and `PPO` for hand-written loops: thin classes over algorithm specs.

    algo = REINFORCE(REINFORCEConfig(learning_rate=5e-5))
    batch = sampler.generate_trajectories(prompts)      # then set every trajectory's reward
    result = algo.update(batch, client)                 # any TrainingClient
    save_checkpoint(algo.get_state(), "checkpoint.json")

The state is the algorithm's step, running baseline and count of optimizer steps; weights and moments are saved by
`client.save_state`. With both loaded, training continues to the same bits.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from rlvr.algorithms.registry import resolve_algorithm
from rlvr.algorithms.specs import Algorithm
from rlvr.algorithms.terms.entropy import Entropy
from rlvr.algorithms.terms.kl import Kl
from rlvr.algorithms.update import Passes, UpdateInputs, loss_config, measure_divergence, update
from rlvr.core import rng
from rlvr.core.files import write_atomic
from rlvr.core.messages import AdamParams
from rlvr.core.protocols import TrainingClient
from rlvr.core.types import Trajectory, TrajectoryBatch, mean


@dataclass(frozen=True)
class REINFORCEConfig:
    """The settings of REINFORCE. `use_baseline` subtracts a moving average of the mean reward, with decay
    `baseline_decay`.

    `normalize_advantages` centres the batch and divides by its population deviation plus 1e-6 (a constant batch gets
    zeros); the centring removes any influence of the baseline. `entropy_coef` weighs the sampled entropy bonus.
    """

    learning_rate: float = 1e-5
    use_baseline: bool = True
    baseline_decay: float = 0.99
    normalize_advantages: bool = True
    entropy_coef: float = 0.01

    def __post_init__(self) -> None:
        _check(self)

    def row(self) -> Algorithm:
        """The algorithm spec of this config."""
        if self.normalize_advantages:
            return resolve_algorithm("reinforce_ema", advantage="batch_normalized", entropy_coef=self.entropy_coef)
        if not self.use_baseline:
            return resolve_algorithm("reinforce_ema", advantage="raw", entropy_coef=self.entropy_coef)
        decay = self.baseline_decay
        return resolve_algorithm("reinforce_ema", baseline_decay=decay, entropy_coef=self.entropy_coef)


@dataclass(frozen=True)
class PPOConfig:
    """The settings of PPO. `clip_range` is epsilon: ratios are clipped to 1 - epsilon ... 1 + epsilon. The batch is
    used `ppo_epochs` times.

    An epoch that would begin further than `target_kl` (0: never) from the policy that sampled is not begun. Advantages
    are normalised over the batch.
    """

    learning_rate: float = 1e-5
    clip_range: float = 0.2
    ppo_epochs: int = 4
    entropy_coef: float = 0.01
    target_kl: float = 0.01

    def __post_init__(self) -> None:
        _check(self)

    def row(self) -> Algorithm:
        """The algorithm spec of this config."""
        return resolve_algorithm(
            "ppo",
            advantage="batch_normalized",
            drop_equal_groups=False,
            clip_low=self.clip_range,
            clip_high=self.clip_range,
            entropy_coef=self.entropy_coef,
        )


def _check(config: REINFORCEConfig | PPOConfig) -> None:
    what = type(config).__name__
    for name, value in asdict(config).items():
        if name in ("use_baseline", "normalize_advantages"):
            fits, expected = isinstance(value, bool), "true or false"
        elif name == "ppo_epochs":
            fits, expected = type(value) is int and value >= 1, "an integer of at least 1"
        elif name in ("baseline_decay", "clip_range"):
            fits, expected = _is_number(value) and 0 <= value < 1, "from 0 to below 1"
        else:
            fits, expected = _is_number(value) and value >= 0, "a finite number, at least 0"
        if not fits:
            raise ValueError(f"{what}: {name}={value!r}, expected {expected}")
    if config.learning_rate == 0:
        raise ValueError(f"{what}: learning_rate=0 changes nothing; give a rate above 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shorten(value: Any) -> str:
    """A value for a message, at most 80 characters."""
    if isinstance(value, int) and abs(value) >= 2**63:
        return "an integer beyond 64 bits"
    return repr(value)[:80]


@dataclass(frozen=True)
class UpdateResult:
    """The result of an update. Losses are what was minimised, averaged over its optimizer steps.

    total_loss = policy_loss + entropy_loss + kl_loss, with entropy_loss = -entropy_coef x entropy in the weights of the
    reduction. `entropy` is -mean log-prob of the sampled tokens, `kl_div` the mean of r - 1 - log r after the update (r
    the ratio of the policy now to the one that sampled; one more forward pass), `clipped` the share of tokens whose
    gradient the clip removed, `grad_norm` that of the last step before clipping. Without an optimizer step everything
    is 0.
    """

    policy_loss: float = 0.0
    entropy_loss: float = 0.0
    kl_loss: float = 0.0
    total_loss: float = 0.0
    grad_norm: float = 0.0
    clipped: float = 0.0
    mean_advantage: float = 0.0
    mean_logprob: float = 0.0
    entropy: float = 0.0
    kl_div: float = 0.0
    step: int = 0
    trajectories_used: int = 0

    def to_dict(self) -> dict[str, float | int]:
        return asdict(self)


class _Classic:
    """The part that both classes share."""

    name = ""
    settings: type = object

    def __init__(self, config: REINFORCEConfig | PPOConfig) -> None:
        if type(config) is not self.settings:
            raise ValueError(
                f"{self.name}: the config is of type {type(config).__name__}, expected a {self.settings.__name__}(...)"
            )
        self.config = config
        self.algorithm = config.row()
        self.step = self.updates = 0
        self._baseline = self.algorithm.advantage.start_baseline()
        self._passes = Passes()
        self._adam = AdamParams(config.learning_rate, eps=1e-8, grad_clip_norm=1.0)

    @property
    def baseline(self) -> float:
        """The moving average of the mean reward; 0.0 before the first update."""
        return self._baseline.value or 0.0

    def update(self, batch: TrajectoryBatch | Sequence[Trajectory], client: TrainingClient) -> UpdateResult:
        """Train on a batch: compute its advantages, make one optimizer step. Trajectories without reward are left out.

        ValueError for an empty batch and for trajectories without token ids or log-probs. A batch without signal (all
        rewards equal, no entropy bonus) makes no optimizer step.
        """
        if not callable(getattr(client, "forward_backward", None)):
            raise ValueError(
                f"{self.name}.update: the second argument is of type {type(client).__name__}, expected a training "
                "client, e.g. sampler.training_client()"
            )
        if not isinstance(batch, (TrajectoryBatch, list, tuple)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{self.name}.update: the batch is of type {type(batch).__name__}, expected a TrajectoryBatch"
            )
        trajectories = list(batch)
        for number, t in enumerate(trajectories):
            if t.reward is None:
                continue
            with suppress(TypeError, ValueError, OverflowError):  # anything else is reported below
                t.reward = t.reward if isinstance(t.reward, str) else float(t.reward)  # numpy's and torch's scalars too
            if not _is_number(t.reward):
                raise ValueError(
                    f"{self.name}.update: trajectory {number} has the reward {t.reward!r}, expected a finite number, "
                    "or None if no verifier could judge it"
                )
        if not trajectories:
            raise ValueError(f"{self.name}.update: the batch is empty; generate some trajectories first")
        temperatures = {t.temperature for t in trajectories}
        if len(temperatures) > 1 or min(temperatures) <= 0:
            raise ValueError(
                f"{self.name}.update: the batch was sampled at temperatures {sorted(temperatures)}; expected "
                "one, above 0: the policy that is trained is softmax(logits / temperature)"
            )
        temperature = temperatures.pop()
        longest = max(t.num_action_tokens for t in trajectories)
        done = update(
            client, self.algorithm, trajectories, lambda number: self._adam, self._passes,
            UpdateInputs(self._baseline, max(1, longest), temperature, rng.key("update", self.step)),
        )  # fmt: skip
        self.step += 1
        self.updates += done.updates
        known = [t for t in trajectories if t.reward is not None]
        moved = (
            measure_divergence(client, known, loss_config(self.algorithm, client, temperature)) if done.updates else 0.0
        )
        entropy_loss, kl_loss = (done.term_losses.get(name, 0.0) for name in (Entropy.name, Kl.name))
        acted = [lp for t in trajectories for lp, m in zip(t.logprobs, t.action_mask, strict=True) if m]
        return UpdateResult(
            policy_loss=done.loss - entropy_loss - kl_loss,
            entropy_loss=entropy_loss,
            kl_loss=kl_loss,
            total_loss=done.loss,
            grad_norm=done.grad_norm,
            clipped=done.clipped_share,
            mean_advantage=mean([t.advantage for t in known]),
            mean_logprob=mean(acted),
            entropy=-mean(acted) if acted else 0.0,
            kl_div=moved,
            step=self.step,
            trajectories_used=done.trajectories,
        )

    def get_state(self) -> dict[str, Any]:
        """Step, baseline and optimizer settings as JSON values. The client saves the weights."""
        return {
            "algorithm": self.name,
            "config": asdict(self.config),
            "step": self.step,
            "baseline": self._baseline.value,
            "optimizer": {"name": "AdamW", "updates": self.updates, **asdict(self._adam)},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a state of `get_state`. ValueError if it is another algorithm's, or not a state."""
        if not isinstance(state, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(
                f"{self.name}.load_state: the state is of type {type(state).__name__}; give what get_state() returned"
            )
        missing = [key for key in ("algorithm", "step", "baseline", "optimizer") if key not in state]
        if missing:
            raise ValueError(
                f"{self.name}.load_state: the state lacks {', '.join(missing)}; give what get_state() returned"
            )
        if state["algorithm"] != self.name:
            raise ValueError(
                f"{self.name}.load_state: this is a state of {state['algorithm']!r}; load it into that algorithm, or "
                f"start {self.name} anew"
            )
        step, baseline, optimizer = state["step"], state["baseline"], state["optimizer"]
        updates: Any = cast(dict[str, Any], optimizer).get("updates") if isinstance(optimizer, dict) else None
        for key, value in (("step", step), ("optimizer.updates", updates)):
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"{self.name}.load_state: {key}={_shorten(value)}, expected an integer of at least 0")
        if baseline is not None and not _is_number(baseline):
            raise ValueError(f"{self.name}.load_state: baseline={_shorten(baseline)}, expected a finite number or null")
        saved, mine = cast(dict[str, Any], state.get("config") or asdict(self.config)), asdict(self.config)
        if saved != mine:
            differing = [f"{k}={_shorten(saved.get(k))}" for k in {**mine, **saved} if saved.get(k) != mine.get(k)]
            raise ValueError(
                f"{self.name}.load_state: it was saved with {', '.join(differing)}, other settings than this one has: "
                f"make {self.name} with those, or take 'config' out of the state to go on with new ones"
            )
        self.step, self.updates = step, updates
        self._baseline.value = None if baseline is None else float(baseline)


class REINFORCE(_Classic):
    """Policy gradient with a running baseline, Williams 1992. Groups of equal rewards are not filtered."""

    name = "REINFORCE"
    settings = REINFORCEConfig

    def __init__(self, config: REINFORCEConfig | None = None) -> None:
        config = config or REINFORCEConfig()
        super().__init__(config)
        self._baseline.decay = config.baseline_decay


class PPO(_Classic):
    """The clipped objective over several epochs, arXiv:1707.06347, with advantages normalised over the batch."""

    name = "PPO"
    settings = PPOConfig

    def __init__(self, config: PPOConfig | None = None) -> None:
        config = config or PPOConfig()
        super().__init__(config)
        self._passes = Passes(epochs=config.ppo_epochs, target_kl=config.target_kl)


def save_checkpoint(state: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write a state as JSON, atomically. ValueError for an impossible path; OSError for a full disk."""
    file = _check_path(path)
    try:
        text = json.dumps(state, indent=2, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"save_checkpoint: the state is not JSON ({error}); give what get_state() returned") from None
    if file.is_dir():
        raise ValueError(f"checkpoint {file} is a folder; give the name of a file in it")
    if not file.parent.is_dir():
        raise ValueError(f"checkpoint {file}: there is no folder {file.parent}; make it first")
    write_atomic(file, text)


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a state. ValueError if the file is missing or holds none."""
    file = _check_path(path)
    if file.is_dir():
        raise ValueError(f"checkpoint {file} is a folder, expected the file of save_checkpoint")
    if not file.exists():
        raise ValueError(f"checkpoint {file} does not exist; give the path that save_checkpoint was given")
    if not file.is_file():
        raise ValueError(f"checkpoint {file} is not an ordinary file, expected the file of save_checkpoint")
    try:
        state = json.loads(file.read_bytes(), parse_constant=_refuse, parse_float=_finite)
    except OSError as error:
        raise ValueError(f"checkpoint {file} cannot be read ({error.strerror}); make it readable") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"checkpoint {file} is not JSON ({error}); the file is damaged, or no checkpoint: give another one"
        ) from None
    if not isinstance(state, dict):
        raise ValueError(f"checkpoint {file} holds a {type(state).__name__}, expected a state (an object)")
    return cast(dict[str, Any], state)


def _check_path(path: str | os.PathLike[str]) -> Path:
    """The path; ValueError if the system does not allow it."""
    place, longest = Path(path), 255 - len("..01234567.tmp")  # room for the name that is written beside it
    sizes = [len(os.fsencode(part)) for part in (place.name, *place.parts)]
    if "\0" in str(place) or len(os.fsencode(place)) > 4000 or max(sizes) > 255 or sizes[0] > longest:
        raise ValueError(
            f"checkpoint {str(place)[:80]!r}... is not allowed by the system ({len(str(place))} characters); "
            f"give a name of at most {longest} bytes without zero bytes"
        )
    return place


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is beyond every finite number")
    return number
