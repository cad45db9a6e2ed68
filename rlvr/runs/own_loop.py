"""A loop that a program writes itself, and what a run has besides: a folder, metrics, checkpoints, resume, evaluations.

    with Loop("runs/own", source, reward, model="./my-model", params=SamplingParams(max_tokens=64)) as loop:
        loop.evaluate("baseline", tasks=100)
        for step in loop.steps(50):
            batch = ...                                   # sample and score by `loop.client.create_sampling_client()`
            result = update(loop.client, "grpo", batch, learning_rate=1e-4)
            loop.log(result.metrics())
        loop.evaluate("final", tasks=100)

The same program goes on after the newest checkpoint, with the bits of an undisturbed run if its draws depend on the
step alone (`rlvr.core.rng`). `rlvr.load_run` reads its folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlvr.algorithms import Algorithm, resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.optimizers import AdamW, Optimizer
from rlvr.algorithms.reductions import needs_budget
from rlvr.algorithms.update import Passes, UpdateInputs
from rlvr.algorithms.update import update as update_in_full
from rlvr.algorithms.update_statistics import UpdateStatistics
from rlvr.clients.client_options import ModelOptions
from rlvr.clients.client_spec import ClientRequest
from rlvr.clients.registry import close_client, make_options, resolve_client
from rlvr.config.choices import ClientSection
from rlvr.core import rng
from rlvr.core.cpu_budget import available_cores, limit_spinning, split_by_settings
from rlvr.core.files import check_name, write_atomic
from rlvr.core.messages import AdamParams, SamplingParams
from rlvr.core.protocols import SamplingClient, TaskSource, TrainingClient
from rlvr.core.types import Trajectory
from rlvr.core.weights_place import CHECKPOINTS
from rlvr.engine.engine_options import EngineLimits, LoraConfig
from rlvr.reward import Reward, resolve_reward
from rlvr.runs.program_settings import read_data
from rlvr.runs.run_tasks import hash_tasks
from rlvr.runs.user_messages import print_message
from rlvr.tracking.metrics_log import MetricsLog
from rlvr.tracking.trackers import Trackers, TrackingOptions
from rlvr.training.callbacks import check_metrics
from rlvr.training.evaluate import (
    Evaluation,
    EvaluationOptions,
    compare_evaluations,
    evaluation_params,
    heldout_split,
    stored_evaluation,
)
from rlvr.training.evaluate import evaluate as evaluate_tasks
from rlvr.training.informed_prompts import InformedPrompts
from rlvr.training.initial_weights import resolve_start
from rlvr.training.journal import PARTS, Checkpoint, Journal, Position, store_remote_path, weights_path
from rlvr.training.stop_request import StopRequest

LOOP_SETTINGS = "loop.json"
PHASE = "rl"
BASELINE, FINAL = "baseline", "final"
_OPTION = "env.kwargs."  # begins the key of an environment's option
_BEGUN = {"journal.jsonl", "metrics.jsonl", *PARTS}  # what may lie in a folder whose loop was killed as it began


def update(
    client: TrainingClient,
    algorithm: Algorithm | str,
    batch: Sequence[Trajectory],
    *,
    learning_rate: float | None = None,
    optimizer: Optimizer | None = None,
    passes: Passes = Passes(),
    max_tokens: int | None = None,
    step: int | None = None,
    steps: int | None = None,
    baseline: RunningBaseline | None = None,
    reference: SamplingClient | None = None,
    teacher: SamplingClient | None = None,
) -> UpdateStatistics:
    """Update the policy from a scored batch, by advantages, gradient and optimizer steps; the statistics of it.

    AdamW with a constant `learning_rate` (1e-5), or an `optimizer`, with a warm-up or decay at `step` of `steps`. The
    temperature is that of the batch.
    `max_tokens`, the budget of a completion, is needed by algorithms that divide by it or penalize long completions;
    a `baseline` that outlives the step by those with a moving one; `reference` by a KL, `teacher` by distillation.
    ValueError for one that is missing.
    """
    spec, batch = resolve_algorithm(algorithm) if isinstance(algorithm, str) else algorithm, list(batch)
    if optimizer is not None and learning_rate is not None:
        raise ValueError("update: learning_rate and optimizer are given; the optimizer has a rate of its own: give one")
    chosen = optimizer or AdamW(learning_rate=1e-5 if learning_rate is None else learning_rate)
    if (chosen.warmup_steps or chosen.decay != Optimizer.decay) and (step is None or steps is None):
        raise ValueError(f"update: the rate of {chosen} changes from step to step: give step and steps")
    if step is not None and not 0 <= step < (step + 1 if steps is None else steps):
        raise ValueError(f"update: step={step} of steps={steps}, expected 0 to {(steps or 1) - 1}")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"update: max_tokens={max_tokens}, expected at least 1")
    if spec.advantage.takes_critic:
        raise ValueError(
            f"update: the algorithm {spec.name!r} has a critic, which rlvr.update does not train; use rlvr.train, or "
            "rlvr.algorithms.update.update with UpdateInputs(critic=...)"
        )
    if spec.needs_reference and reference is None:
        raise ValueError(
            f"update: the algorithm {spec.name!r} compares with a reference: give reference=, a sampling client of the "
            "initial weights"
        )
    temperatures = {trajectory.temperature for trajectory in batch}
    if len(temperatures) > 1:
        raise ValueError(
            f"update: the batch was sampled at the temperatures {sorted(temperatures)}; expected one for all "
            "completions"
        )
    if max_tokens is None and (needs_budget(spec.reduction) or any(term.needs_budget for term in spec.terms)):
        raise ValueError(
            f"update: the algorithm {spec.name!r} needs max_tokens, the most tokens of a completion: give "
            "max_tokens=params.max_tokens"
        )
    if baseline is None and spec.advantage.keeps_baseline:
        raise ValueError(
            f"update: the advantage {spec.advantage.name!r} has a baseline that moves from step to step: give "
            "baseline=algorithm.advantage.start_baseline(), the same in each step"
        )
    per_step = passes.epochs * passes.substeps

    def parameters(number: int) -> AdamParams:
        return chosen.at((step or 0) * per_step + number, (steps or (step or 0) + 1) * per_step)

    inputs = UpdateInputs(
        baseline or spec.advantage.start_baseline(),
        max_tokens or 0,
        temperatures.pop() if temperatures else 1.0,
        rng.key("update", step or 0),
        reference,
        teacher,
        prompts=InformedPrompts(client.get_tokenizer()),
    )
    return update_in_full(client, spec, batch, parameters, passes, inputs)


class Loop:
    """The folder, client, checkpoints and evaluations of a training loop that you write; use it in a `with` statement.

    - `source`: a task source, or what the argument `data` of `rlvr.train` may be: rows, a file, the name of an
      environment. `reward`: a reward, its name, or a function.
    - `model`, `lora`, `tokenizer`, `device`, `dtype`, `client`, `threads`, `seed`, `checkpoint_every`,
      `keep_checkpoints`: as the settings of the same names; `model` may be a mapping, `model.config`, for
      random weights. Without `lora` all weights are trained.
    - `params`: how completions are sampled. Evaluations take its tokens and stops, at temperature 1 and without top_p,
      top_k and min_p.
    - `settings`: what else the program depends on, as JSON: a resumed loop must have the same, and the same tasks.
    - `trackers`: further destinations of the metrics, as the setting `tracking.trackers`.

    `client` learns and samples, `tokenizer` is its tokenizer; `state` is a dictionary of the program's that checkpoints
    keep, as JSON.
    """

    def __init__(
        self,
        folder: str | Path,
        source: Any,
        reward: Reward | Callable[..., Any] | str,
        *,
        params: SamplingParams,
        model: str | Path | Mapping[str, Any] | None = None,
        lora: LoraConfig | None = None,
        tokenizer: str | None = None,
        device: str = "auto",
        dtype: str = "auto",
        client: str | None = None,
        threads: int = 0,
        seed: int = 42,
        settings: Mapping[str, Any] | None = None,
        checkpoint_every: int = 20,
        keep_checkpoints: int = 2,
        trackers: Sequence[Any] = (),
    ) -> None:
        self.folder, self.params, self.seed = Path(folder), params, seed
        self.source: TaskSource = source
        if not (hasattr(source, "train") and hasattr(source, "heldout")):
            self.source = _open_source(source, self.folder.parent)
        self.reward = reward if isinstance(reward, Reward) else resolve_reward(reward)
        self.state: dict[str, Any] = {}
        self.step = 0
        self._client_name, self._threads = client or ClientSection().name, threads
        if checkpoint_every < 1:
            raise ValueError(f"Loop: checkpoint_every={checkpoint_every}, expected at least 1")
        if keep_checkpoints < 2:
            raise ValueError(f"Loop: keep_checkpoints={keep_checkpoints}, expected at least 2: the last may be damaged")
        config = dict(model) if isinstance(model, Mapping) else {}
        self._model = ModelOptions(str(model) if model and not config else None, config, tokenizer, device, dtype, lora)
        self._every, self._keep = checkpoint_every, keep_checkpoints
        self._tracking = TrackingOptions(trackers=list(trackers))
        self._settings = {
            "model": config or self._model.name, "lora": lora and asdict(lora), "tokenizer": tokenizer,
            "dtype": dtype, "client": self._client_name, "seed": seed, "params": asdict(params),
            "reward": self.reward.name, "tasks": hash_tasks(self.source) or type(self.source).__qualname__,
            "settings": _plain_json("settings", dict(settings or {})),
        }  # fmt: skip
        self._settings = _lists(self._settings)
        self._row: dict[str, float] | None = None  # of the step in progress
        self._left: tuple[int, float] | None = None  # a step that the program left by `break`, and when it began
        self._stop_request = StopRequest(print_message)

    def __enter__(self) -> Loop:
        limit_spinning()
        self._stack = ExitStack()
        try:
            self._open()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _open(self) -> None:
        check_settings(self.folder, self._settings)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.folder / LOOP_SETTINGS, json.dumps(self._settings, indent=2))
        self.journal = self._stack.enter_context(Journal(self.folder))
        self.reward.start()
        cores = split_by_settings(available_cores(), self._threads, concurrent=self.reward.waits_for == "processes")
        request = ClientRequest(
            self._model, self.source, "", self.seed, EngineLimits(threads=self._threads),
            make_options(self._client_name, {}, {}), resolve_start, cores, self.folder / CHECKPOINTS, warn=_warn,
        )  # fmt: skip
        spec = resolve_client(self._client_name)
        request.options.check_model(self._model)
        spec.check(request)
        self.client: TrainingClient = spec.build(request)
        self._stack.callback(close_client, self.client)
        self.tokenizer = self.client.get_tokenizer()
        self.journal.attempt(self.client.describe_environment(), _warn)
        self.metrics = self._stack.enter_context(MetricsLog(self.folder / "metrics.jsonl"))
        self._restore()
        trackers = Trackers(self._tracking, self.folder, self.folder.name, self._settings, _warn)
        self._trackers = self._stack.enter_context(trackers.running(self.metrics.rows()))

    def _restore(self) -> None:
        checkpoint = self.journal.last_good(_warn)
        if checkpoint is not None:
            self.step = checkpoint.position.step
            self.state = dict(checkpoint.state)
            self.client.load_state_with_optimizer(weights_path(self.journal.resolve(checkpoint.path))).result()
        self.metrics.keep(lambda row: row["step"] < self.step)
        for event in self._list_evaluations():
            if event["step"] > self.step:
                self._file(event["name"]).unlink(missing_ok=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self._settle()
                self._summarize()
        finally:
            self._stack.__exit__(kind, error, trace)

    def steps(self, count: int) -> Iterator[int]:
        """The numbers of the steps that are left of `count`.

        After each step its metrics are written, and a checkpoint every `checkpoint_every` steps and after the last one.
        A step in which the program leaves by `break` is the last one, if it logged something. Ctrl-C or SIGTERM ends
        the loop after the step, which is saved; KeyboardInterrupt then.
        """
        self._settle()
        if self.step >= count:
            return
        (self.folder / "summary.json").unlink(missing_ok=True)
        with self._stop_request.handle_signals():
            for step in range(self.step, count):
                began, self._row = time.perf_counter(), {}
                try:
                    yield step
                except GeneratorExit:  # `break`, or an exception, after which nothing is done any more
                    self._left = (step, began)
                    raise
                self._write(step, began)
                if (step + 1) % self._every == 0 or step + 1 == count or self._stop_request.is_set:
                    self._save()
                if self._stop_request.is_set:
                    raise KeyboardInterrupt(
                        f"stopped after step {step + 1} of {count}; the same program goes on from there"
                    )

    def log(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Add metrics, numbers by name, to those of the step in progress."""
        if self._row is None:
            raise ValueError("Loop.log: there is no step in progress; call it within `for step in loop.steps(...)`")
        try:
            self._row |= check_metrics({**(metrics or {}), **more}, {})
        except ValueError as error:
            raise ValueError(f"Loop.log: {str(error).replace('it returned', 'given')}") from None

    def evaluate(self, name: str, *, tasks: int = 100, samples: int = 4, k: int | None = None) -> Evaluation:
        """Evaluate the weights as they are on held-out tasks, or return what is stored of the same weights.

        `baseline` is made once, when it is first asked for, and compared with `final` in `summary.json` when the loop
        ends. ValueError for a baseline with other sizes than the stored one.
        """
        check_name(name, "Loop.evaluate: name")
        self._settle()
        sampler = self.client.save_weights_and_get_sampling_client()
        size = [tasks, samples, k]
        event = next((e for e in reversed(self._list_evaluations()) if e["name"] == name), None)
        if event is not None and self._file(name).exists():
            is_same = event["size"] == size
            if name == BASELINE and not is_same:
                raise ValueError(
                    f"Loop.evaluate: the stored baseline has tasks, samples, k = {event['size']}, asked for {size}; "
                    "give the same, or choose another folder"
                )
            if name == BASELINE or (is_same and event["weights"] == sampler.fingerprint):
                return stored_evaluation(self._file(name))
        options = EvaluationOptions(tasks=tasks, samples=samples, k=k)
        heldout, _ = heldout_split(self.source, options, has_interim=False)
        found = evaluate_tasks(
            self.source, heldout, sampler, self.reward, evaluation_params(self.params, options),
            samples=samples, k=k or samples, seed=self.seed, error_budget=0.1,
        )  # fmt: skip
        write_atomic(self._file(name), json.dumps(found.to_json()))
        self.journal.write("evaluation", name=name, step=self.step, size=size, weights=sampler.fingerprint)
        return found

    def _settle(self) -> None:
        """Finish a step that the program left by `break`; one in which it logged nothing does not count."""
        left, self._left = self._left, None
        if left is not None and self._row:
            self._write(*left)
            self._save()

    def _write(self, step: int, began: float) -> None:
        row = {"phase": PHASE, "step": step, **(self._row or {}), "time/step": time.perf_counter() - began}
        self._row = None
        self.metrics.append(row)
        self._trackers.log(PHASE, step, row)
        self.step = step + 1

    def _save(self) -> None:
        state = _plain_json("state", self.state)
        self.metrics.sync()
        name = f"{PHASE}-{self.step:06d}"
        path = self.client.save_state(name).result().path
        if "://" in path:
            store_remote_path(self.folder / CHECKPOINTS / name, path)
        checkpoint = Checkpoint(Position(0, self.step), f"{CHECKPOINTS}/{name}", state)
        self.journal.checkpoint(checkpoint, self._keep)

    def _summarize(self) -> None:
        """Compare the evaluations before and after, if there are both."""
        files = [self._file(name) for name in (BASELINE, FINAL)]
        if not all(file.exists() for file in files):
            return
        before, after = map(stored_evaluation, files)
        summary = {
            **compare_evaluations(before, after),
            "steps": self.step,
            "weights_sha256": self.client.weights_sha256(),
        }
        self._trackers.finish(summary)
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=2))

    def _list_evaluations(self) -> list[dict[str, Any]]:
        return [event for event in self.journal.events if event["event"] == "evaluation"]

    def _file(self, name: str) -> Path:
        return self.folder / "evaluations" / f"{name}.json"


def _open_source(data: Any, root: Path) -> TaskSource:
    """The tasks of what a program gives: rows, a file, an environment."""
    from rlvr.envs import resolve_environment

    values = read_data(data, None, root, has_reward=True)
    options = {key.removeprefix(_OPTION): value for key, value in values.items() if key.startswith(_OPTION)}
    return resolve_environment(values["env.name"], **options)


def check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """ValueError if the folder holds a loop with other settings, or something else."""
    stored = folder / LOOP_SETTINGS
    if not stored.exists():
        if folder.exists() and any(e.name not in _BEGUN and not e.name.startswith(".") for e in folder.iterdir()):
            raise ValueError(
                f"{folder} is not empty, and no folder of an rlvr.Loop (no {LOOP_SETTINGS}); choose another one"
            )
        return
    held, wanted = ({**s, **s["settings"]} for s in (json.loads(stored.read_text(encoding="utf-8")), settings))
    changed = [key for key in {**held, **wanted} if key != "settings" and held.get(key) != wanted.get(key)]
    if changed:
        named = ", ".join(
            "other tasks" if key == "tasks" else f"{key}={held.get(key)!r:.60}, not {wanted.get(key)!r:.60}"
            for key in changed[:6]
        )
        raise ValueError(f"{folder} holds a loop with {named}; give the same to resume it, or choose another folder")


def _plain_json(what: str, given: Any) -> dict[str, Any]:
    """What JSON gives back of a dictionary; ValueError if that is something else."""
    try:
        if isinstance(given, dict) and (plain := json.loads(json.dumps(given, allow_nan=False))) == _lists(given):
            return plain
        problem = f"{given!r:.80}"
    except (TypeError, ValueError) as error:
        problem = str(error)
    raise ValueError(f"Loop: {what} has to be a dictionary that JSON can store, its keys text ({problem})")


def _lists(value: Any) -> Any:
    """`value` with lists for tuples."""
    if isinstance(value, Mapping):
        return {key: _lists(one) for key, one in value.items()}
    return [_lists(one) for one in value] if isinstance(value, (list, tuple)) else value


def _warn(text: str) -> None:
    print_message(f"warning: {text}")
