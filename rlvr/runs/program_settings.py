"""Turns what a Python program gives (a model, rows, a reward, objects with options) into settings of a config.

    settings_of(model="./my-model", data=rows, reward=close, steps=100)     # {"model.name": "./my-model", ...}

Rows are written into `.inputs` beside the run folders, under a name that is a hash of them, and so is a model that is
an object: the run folder can then be resumed and evaluated like any other. Functions and objects that no import leads
to are named by `rlvr.core.registry.name_object`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from rlvr.algorithms import Algorithm
from rlvr.config.aliases import ALIASES_BY_WORD
from rlvr.config.choices import FLAT
from rlvr.config.foreign_words import FOREIGN
from rlvr.config.interpolate import CALLER
from rlvr.config.schema import RunConfig
from rlvr.core.files import new_folder, write_atomic
from rlvr.core.plugins import import_modules
from rlvr.core.registry import name_object
from rlvr.core.variants import Variant
from rlvr.envs.dataset import ANSWERS, find_value
from rlvr.envs.registry import known_environments, options_of
from rlvr.reward import Reward

INPUTS = ".inputs"
# Arguments that stand for a key of the config; every section is one too (`training={"gap_stop": 0}`), and so are the
# words of TRL and verl (`num_generations`).
ARGUMENTS = {
    "steps": "training.steps",
    "epochs": "training.epochs",
    "prompts_per_step": "training.prompts_per_step",
    "group_size": "training.group_size",
    "learning_rate": "training.optimizer.learning_rate",
    "optimizer": "training.optimizer",
    "schedule": "training.schedule",
    "max_tokens": "rollout.max_tokens",
    "temperature": "rollout.temperature",
    "lora": "model.lora",
    "tokenizer": "model.tokenizer",
    "device": "model.device",
    "dtype": "model.dtype",
    "advantage": "algorithm.advantage",
    "loss": "algorithm.loss",
    "threads": "engine.threads",
    "trackers": "tracking.trackers",
    "samples": "evaluation.samples",
    "tasks": "evaluation.tasks",
    "evaluate_every": "evaluation.every",
    "checkpoint_every": "run.checkpoint_every",
    "name": "run.name",
    "resume": "run.resume",
}
# Arguments of other trainers' constructors, and ours.
_OTHER_ARGUMENTS = {
    "lr": "learning_rate",
    "reward_func": "reward",
    "reward_funcs": "reward",
    "train_dataset": "data",
    "eval_dataset": "heldout",
    "processing_class": "tokenizer",
    "peft_config": "lora",
}
_SECTIONS = {one.name for one in fields(RunConfig)}
_HELDOUT = ("test", "validation", "heldout")  # the names of a held-out split, in the order of preference


def settings_of(
    root: Path,
    model: Any = None,
    data: Any = None,
    reward: Any = None,
    heldout: Any = None,
    *,
    function: str = "train",
    **settings: Any,
) -> dict[str, Any]:
    """Values by dotted key. ValueError for an unknown argument, or an object of a type that is not expected.

    Of an object with options every field counts, but what a short name or a mapping gives comes before it. Files are
    written in `root`, the folder of the runs. `function` is the caller's name, for messages.
    """
    of_objects, given = dict[str, Any](), dict[str, Any]()
    agent = settings.pop("agent", None)
    for name, value in settings.items():
        for key, inner, is_default in flatten(_find_key(name, function), value):
            held = of_objects if is_default else given
            if held is given and key in given and given[key] != inner:
                raise ValueError(f"{function}: {key} is given twice, as {given[key]!r} and {inner!r}; leave one out")
            held[key] = inner
    values = {"run.root": str(root), **of_objects, **given}
    if not values.get("run.name", "run"):
        raise ValueError(f"{function}: name={values['run.name']!r}, expected text; leave it out for one made of a hash")
    try:
        if model is not None:
            values |= read_model(model, values, root)
        import_modules(values.get("imports", ()))  # which may register what `data` names
        if data is not None:
            values |= read_data(data, heldout, root, reward is not None)
        elif heldout is not None:
            raise argument_error("heldout without data; give both, or data alone, of which a tenth is held out")
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        raise ValueError(
            f"{function}: root={str(root)!r}: {error.strerror} ({error.filename}); give another root"
        ) from error
    if agent is not None:
        values = _give_to_agent(values, agent)
    if reward is not None:
        values |= read_reward(reward)
    return values


def _give_to_agent(values: dict[str, Any], agent: Any) -> dict[str, Any]:
    """The values with the environment's episodes played by an agent: a function, a path of one, an address, the words
    of a command, or the options of the environment `agent`."""
    inner = values.get("env.name")
    if inner is None:
        raise argument_error("agent without data; give the tasks that it plays: rows, a file or an environment")
    if isinstance(agent, str):
        options: dict[str, Any] = {"url" if "://" in agent else "function": agent}
    elif isinstance(agent, Mapping):
        options = dict(agent)
    elif isinstance(agent, (list, tuple)):
        options = {"command": list(agent)}
    elif callable(agent):
        options = {"function": agent}
    else:
        raise argument_error(
            f"agent is of type {type(agent).__name__}; expected a function, a command (a list of words), an address "
            "(http://...), or a mapping of the options of the environment agent"
        )
    others = {key: value for key, value in values.items() if not key.startswith("env.")}
    of_inner = {key.removeprefix("env.kwargs."): v for key, v in values.items() if key.startswith("env.kwargs.")}
    named = {key: value for key, value, _ in flatten("env.kwargs", options)}
    return {**others, "env.name": "agent", "env.kwargs.inner": inner, "env.kwargs.inner_kwargs": of_inner, **named}


def argument_error(text: str) -> ValueError:
    """The error of a mistake in a call, which begins with the name of the function that was called."""
    found = re.fullmatch(r"(?:rlvr|Run)\.(\w+)\(\.\.\.\)", CALLER.get())
    return ValueError(f"{found[1] if found else 'train'}: {text}")


def name_arguments(message: str, known: Iterable[str]) -> str:
    """The message, and which of the `known` arguments stand for the keys that it names."""
    named = {key: name for name, key in ARGUMENTS.items() if name in known}
    said = [key for key in named if re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", message)]
    return message + "".join(f" ({key} is the argument {named[key]})" for key in said)


def name_options(text: str, names: Mapping[str, str]) -> str:
    """The text with the options of a command as arguments of a function: `--max-errors 2` is `max_errors=2`.

    `names` has the arguments that are called otherwise, by the option.
    """
    option = r"--([a-z][a-z-]*)(?: (?=[A-Z0-9'\"]))?"
    return re.sub(option, lambda found: _name_option(found, names), text)


def _name_option(found: re.Match[str], names: Mapping[str, str]) -> str:
    return names.get(found[1], found[1].replace("-", "_")) + "=" * found[0].endswith(" ")


def _find_key(name: str, function: str) -> str:
    if name in ARGUMENTS or name in _SECTIONS:
        return ARGUMENTS.get(name, name)
    if name not in _OTHER_ARGUMENTS and (name in FLAT or name in ALIASES_BY_WORD or name in FOREIGN):
        return name
    if name.partition(".")[0] in _SECTIONS:
        return name
    known = [*ARGUMENTS, *_SECTIONS, *ALIASES_BY_WORD]
    near = [_OTHER_ARGUMENTS[name]] if name in _OTHER_ARGUMENTS else difflib.get_close_matches(name, known, n=1)
    raise ValueError(
        f"{function}: unknown argument {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; arguments are model, "
        f"data, reward, heldout, agent, {', '.join(ARGUMENTS)}, the sections of a config "
        f"({', '.join(sorted(_SECTIONS))}), and the words of TRL and verl"
    )


def flatten(key: str, value: Any, is_object: bool = False) -> Iterator[tuple[str, Any, bool]]:
    """(dotted key, plain value, whether it is the default of an object) of an argument."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if key.endswith("kwargs"):
                yield f"{key}.{name}", _name_inner(inner, key), False
            else:
                yield from flatten(f"{key}.{name}", inner, is_object)
    elif isinstance(value, Algorithm):
        yield f"{key}.name", name_object(value), False
    elif isinstance(value, Variant):
        yield f"{key}.{_tag_of(key)}", _name_variant(value), False
        is_own = not type(value).__module__.startswith("rlvr.")
        for name, inner, is_default in _list_fields(value):
            yield f"{key}.kwargs.{name}" if is_own else f"{key}.{name}", _name_inner(inner, key), is_default
    elif is_dataclass(value) and not isinstance(value, type):
        for name, inner, is_default in _list_fields(value):
            for place, plain, inner_default in flatten(f"{key}.{name}", inner, True):
                yield place, plain, is_default or inner_default
    elif key in ("callbacks", "imports") and not isinstance(value, (list, tuple)):
        yield key, [_plain(value, key)], False
    elif isinstance(value, (list, tuple)):
        yield key, [_plain_entry(item, key) for item in value], is_object
    elif key in ("algorithm", "reward", "env", "curriculum") and isinstance(value, str):
        yield f"{key}.{_tag_of(key)}", value, False
    else:
        yield key, _plain(value, key), False


def _name_inner(value: Any, key: str) -> Any:
    """The value of an option with the paths of the functions and classes in it, such as tools."""
    if isinstance(value, Mapping):
        return {name: _name_inner(inner, key) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_name_inner(inner, key) for inner in value]
    return _plain(value, key) if isinstance(value, (Reward, Path)) or callable(value) else value


def _plain_entry(item: Any, key: str) -> Any:
    if isinstance(item, Variant):
        return {name.lstrip("."): value for name, value, is_default in flatten("", item) if not is_default}
    return _plain(item, key)


def _plain(value: Any, key: str) -> Any:
    """A value as a config holds it: functions and classes by their path."""
    if isinstance(value, Path):
        return str(value)
    if key == "callbacks":
        return value if isinstance(value, (str, Mapping)) else name_object(value, is_shared=False)
    if key == "imports" and isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, Reward):
        return {"name": _name_reward(value), "kwargs": value.kwargs}
    if hasattr(value, "save_pretrained"):
        raise argument_error(f"{key} is an object; give the folder of it (after `save_pretrained`), or its name")
    if callable(value):
        return name_object(value)
    if hasattr(value, "item") and not hasattr(value, "__len__"):  # a number of numpy
        value = value.item()
    if value is not None and not isinstance(value, (bool, int, float, str, Mapping, list)):
        raise argument_error(
            f"{key} is of type {type(value).__name__}; expected text, a number, a mapping, or an object with "
            "options of that kind"
        )
    return value


def _tag_of(key: str) -> str:
    return {"curriculum": "by", "reward": "type"}.get(key, "name")


def _name_variant(variant: Variant) -> str:
    kind = type(variant)
    return kind.name if kind.__module__.startswith("rlvr.") else name_object(kind)


def _list_fields(value: Any) -> Iterator[tuple[str, Any, bool]]:
    """(name, value, whether it is the default) of the fields of an object."""
    options: Sequence[Field[Any]] = fields(value)
    for option in options:
        if option.init:
            default = option.default if option.default_factory is MISSING else option.default_factory()
            held = getattr(value, option.name)
            yield option.name, held, held == default


def read_model(model: Any, values: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """The keys of a model as `rlvr.train` takes it; of a run its model, and that training starts from its weights."""
    if isinstance(model, (str, Path)):
        return {"model.name": str(model)}
    if hasattr(model, "is_own_loop"):  # a Run
        if model.is_own_loop:
            raise argument_error(f"model is {model.folder}, a loop of your own; give one of its checkpoints")
        given = {key.split(".")[1] for key in values if key.startswith("model.")}
        of_run = model.settings["model"]
        kept = {f"model.{name}": value for name, value in of_run.items() if value is not None and name not in given}
        return {**kept, "model.start_from": str(model.folder)}
    if isinstance(model, Mapping) or hasattr(model, "to_diff_dict"):  # a configuration: random weights
        config = dict(model) if isinstance(model, Mapping) else {**model.to_diff_dict(), "model_type": model.model_type}
        if "model_type" not in config:
            raise argument_error("model is a mapping without model_type; give a configuration of transformers")
        adapter = {} if any(key.startswith("model.lora") for key in values) else {"model.lora": None}
        return {"model.name": None, "model.config": config, **adapter}
    if hasattr(model, "peft_config"):
        raise argument_error(
            "model is wrapped by peft; give the base model and lora={'rank': 32}, or model.merge_and_unload()"
        )
    if not (hasattr(model, "save_pretrained") and hasattr(model, "state_dict")):
        raise argument_error(
            f"model is of type {type(model).__name__}; expected a name or folder, a transformers model, or a "
            "configuration (a mapping with model_type)"
        )
    if empty := next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None):
        raise argument_error(
            f"model has no weights ({empty} is on the device meta); load them, or give its configuration"
        )
    return {"model.name": str(_save_model(model, values.get("model.tokenizer"), root))}


def _save_model(model: Any, tokenizer: Any, root: Path) -> Path:
    """The folder of a transformers model and its tokenizer, named by a hash of the weights; written once."""
    described = [model.config.to_dict(), getattr(model, "generation_config", None), type(model).__qualname__]
    digest = hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(dtype=_byte_type()).numpy().tobytes())
    folder = root / INPUTS / f"{type(model).__name__}-{digest.hexdigest()[:12]}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(folder) as new:
            model.save_pretrained(new)
            source = tokenizer or model.config.name_or_path
            if source and Path(str(source)).is_dir() and tokenizer is None:
                from transformers import AutoTokenizer

                AutoTokenizer.from_pretrained(source).save_pretrained(new)
    return folder


def _byte_type() -> Any:
    import torch

    return torch.uint8


def read_data(data: Any, heldout: Any, root: Path, has_reward: bool) -> dict[str, Any]:
    """The environment that a program's data are. Rows need no answer if a reward is given."""
    if isinstance(data, str) and (data in known_environments() or ":" in data):
        section: dict[str, Any] = {"env.name": data}
    elif isinstance(data, (str, Path)) and (Path(data).expanduser().exists() or any(c in str(data) for c in "*?[")):
        section = {"env.name": "dataset", "env.kwargs.path": str(Path(data).expanduser())}
    elif isinstance(data, str) and data.count("/") == 1 and not data.startswith(".") and not Path(data).suffix:
        section = {"env.name": "dataset", "env.kwargs.name": data}
    elif isinstance(data, (str, Path)):
        try:
            options_of(str(data))  # looks among the names of plug-ins too
        except ValueError as error:
            raise argument_error(
                f"data={str(data)!r} is no file or folder here and no environment; give a path, rows, OWNER/NAME of a "
                f"data set of the hub, or an environment ({error})"
            ) from None
        section = {"env.name": str(data)}
    elif hasattr(data, "train") and hasattr(data, "heldout"):
        section = {"env.name": name_object(data, lambda: data)}
    elif isinstance(data, Mapping) and data and set(data) <= {"name", "kwargs"}:
        section = {key: value for key, value, _ in flatten("env", data)}
    else:
        if isinstance(data, Mapping):
            splits: Mapping[str, Any] = data
            if "train" not in splits or (unknown := set(splits) - {"train", *_HELDOUT}):
                raise argument_error(
                    f"data has the parts {', '.join(map(repr, splits)) or 'none'}"
                    f"{f', of which {sorted(unknown)[0]!r} is unknown' if 'train' in splits else ''}; expected 'train' "
                    f"and perhaps one of {', '.join(_HELDOUT)}"
                )
            heldout = heldout if heldout is not None else next((splits[s] for s in _HELDOUT if s in splits), None)
            data = splits["train"]
        path, has_answer = _write_rows(data, "data", root)
        section = {"env.name": "dataset", "env.kwargs.path": str(path)}
        if has_reward and not has_answer:
            section["env.kwargs.answer_field"] = None
    if heldout is not None:
        place = heldout if isinstance(heldout, (str, Path)) else _write_rows(heldout, "heldout", root)[0]
        section["env.kwargs.heldout_path"] = str(place)
    return section


def _write_rows(data: Any, what: str, root: Path) -> tuple[Path, bool]:
    """The JSON-lines file of some rows, named by a hash of them, and whether one has a column that is an answer."""
    rows, lines = _list_lines(data, what)
    text = "".join(lines)
    file = root / INPUTS / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:12]}.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    return file, any(find_value(row, name) is not None for row in rows for name in (*ANSWERS, "messages"))


def list_rows(data: Any, what: str, column: str) -> list[dict[str, Any]]:
    """The rows of a list, a generator, a data set or a DataFrame, as a file of JSON lines would hold them.

    A row that is text has it in `column`. ValueError, which calls the rows `what`, for what is no rows.
    """
    return [json.loads(line) for line in _list_lines(data, what, column)[1]]


def _list_lines(data: Any, what: str, column: str = "prompt") -> tuple[list[Any], list[str]]:
    """(the rows, each as a line of JSON)."""
    if hasattr(data, "to_dicts"):  # polars
        data = data.to_dicts()
    elif hasattr(data, "to_dict") and hasattr(data, "columns"):  # pandas
        data = data.to_dict("records")
    if not isinstance(data, Iterable) or isinstance(data, (str, Mapping)):
        raise argument_error(
            f"{what} is of type {type(data).__name__}; expected rows (a list, a generator, a "
            "datasets.Dataset, a DataFrame), a file, or an environment"
        )
    rows = [{column: row} if isinstance(row, str) else row for row in data]
    lines = [_write_row(row, f"row {number} of {what}", column) for number, row in enumerate(rows, 1)]
    if not lines:
        raise argument_error(f"{what} has no rows; a generator gives them once: make it anew for each call")
    return rows, lines


def _write_row(row: Any, where: str, column: str) -> str:
    if not isinstance(row, Mapping):
        raise argument_error(
            f"{where} is of type {type(row).__name__}, expected a mapping of columns, or text, which is a {column}"
        )
    try:
        line = json.dumps({name: _without_nan(value) for name, value in row.items()}, default=_to_json) + "\n"
        json.dumps(json.loads(line), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise argument_error(f"{where}: {error}; expected text, numbers, lists and mappings") from None
    return line


def _without_nan(value: Any) -> Any:
    """None where pandas has no value."""
    is_missing = isinstance(value, float) or type(value).__name__ in ("NaTType", "NAType")
    return None if is_missing and str(value) in ("nan", "NaT", "<NA>") else value


def _to_json(value: Any) -> Any:
    """A value of numpy, or of pandas, as JSON has it."""
    for method in ("tolist", "isoformat"):
        if hasattr(value, method):
            return getattr(value, method)()
    raise TypeError(f"a value of type {type(value).__name__} cannot be written as JSON")


def read_reward(reward: Any) -> dict[str, Any]:
    """The section `reward` of a function, a name, an object, or a list of these."""
    if isinstance(reward, Mapping):
        return {key: value for key, value, _ in flatten("reward", reward)}
    if isinstance(reward, tuple) and len(reward) == 2 and isinstance(reward[1], Real):
        reward = [reward]
    if isinstance(reward, (list, tuple)):
        return {"reward.type": "composite", "reward.kwargs.rewards": [_read_part(part) for part in reward]}
    kwargs = reward.kwargs if isinstance(reward, Reward) else {}
    return {"reward.type": _name_reward(reward), **({"reward.kwargs": kwargs} if kwargs else {})}


def _read_part(part: Any) -> dict[str, Any]:
    """A part of a composite reward: a reward, or a pair of one and its weight."""
    reward, weight = part if isinstance(part, tuple) and len(part) == 2 else (part, 1.0)
    if not isinstance(weight, Real):
        raise argument_error(f"a reward has the weight {weight!r}, expected a number: [(accuracy, 1), (form, 0.2)]")
    kwargs = reward.kwargs if isinstance(reward, Reward) else {}
    return {"name": _name_reward(reward), "weight": float(weight), **({"kwargs": kwargs} if kwargs else {})}


def _name_reward(reward: Any) -> str:
    if isinstance(reward, str):
        return reward
    if isinstance(reward, Reward):
        return reward.name if reward.spec.function is None or ":" in reward.name else _name_of_spec(reward)
    if isinstance(reward, type):
        raise argument_error(f"the reward {reward.__name__} is a class; give an object of it: {reward.__name__}()")
    if not callable(reward):
        raise argument_error(
            f"a reward is of type {type(reward).__name__}; expected a function, a name, or a list of them"
        )
    return name_object(reward)


def _name_of_spec(reward: Reward) -> str:
    """The name of a registered reward, else the path of its function, which may be called as one."""
    from rlvr.reward.registry import known_rewards, reward_spec

    is_registered = reward.name in known_rewards() and reward_spec(reward.name) is reward.spec
    return reward.name if is_registered else name_object(reward.spec.function)
