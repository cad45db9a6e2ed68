"""Composes one configuration from YAML files and the command line, in the part of Hydra's language that we use.

    defaults:
      - model: tiny                    # group: option        -> configs/model/tiny.yaml under the key `model`
      - training@rlvr_training: small  # group@package: option -> configs/training/small.yaml under `rlvr_training`
      - base                           # another config beside this one, merged in place
      - _self_                         # where this file's own keys go; last if absent, so they override the others

Names are looked for in `./configs`, then in the configs shipped with the package; a folder given by the caller comes
before both. On the command line `key.sub=value` sets a value (typed as in YAML), `group=option` and
`group@package=option` switch a choice, `key=null` empties one. Values may hold `${key}`, `${now:%Y-%m-%d}` and
`${oc.env:NAME,default}`; whatever depends on the environment stays unresolved in `Loaded.raw`, so no secret is written.

Left out on purpose: `override` entries, sweeps, `hydra:` settings, instantiation of classes. The schema, and what to
say of an unknown key, is `rlvr.config.validate`.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlvr.config.document_limits import DEEPEST, TOO_DEEP, check_size, with_text_keys
from rlvr.config.interpolate import CLI, resolve
from rlvr.core.error_text import first_line
from rlvr.core.registry import did_you_mean

PACKAGED = Path(__file__).parents[1] / "configs"
SHIPPED_FILES = "rlvr/configs/"  # how the origins of shipped files begin
# Former names of keys, which older configs and run folders hold.
_RENAMED = {
    "training": {"refill": "dynamic_sampling"},
    "evaluation": {"quick_tasks": "interim_tasks", "quick_samples": "interim_samples"},
}

_OVERRIDE = re.compile(r"\+?(?P<key>[A-Za-z_][\w/-]*(?:@[\w.]+)?(?:\.[\w-]+|\[\d+\])*)=(?P<value>.*)", re.DOTALL)
_CHOICE = re.compile(r"(?:(?P<optional>optional) +)?(?P<group>/?[\w./-]+)(?:@(?P<package>[\w.]+))?")
_PACKAGE = re.compile(r"#\s*@package\s+([\w.]+)")
_REFERENCE = re.compile(r"(?<!\\)\$\{\s*([\w.]+)\s*\}")


@dataclass(frozen=True)
class LoadedConfig:
    """A composed configuration.

    `values` is fully resolved; `raw` keeps what depends on the environment as `${...}` and may be written to disk.
    `origin` says of each dotted key which file set it, or "cli". `timed` are the keys that depend on `${now:...}`.
    `typed` holds the flat key or the alias under which a key was given; `unused` the aliases without effect, with their
    origin and the reason (by `rlvr.config.alias_translation`). `trl_words` are the words of TRL's in it, and `notes`
    what to tell the user of what they mean here.
    """

    values: dict[str, Any]
    raw: dict[str, Any]
    origin: dict[str, str]
    name: str
    timed: tuple[str, ...] = ()
    typed: dict[str, str] = field(default_factory=dict[str, str])
    unused: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    trl_words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def keep_key(key: str) -> str:
    """The key itself: no key stands for another one."""
    return key


def load(
    config_name: str | None = None,
    config_path: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    full_key: Callable[[str], str] = keep_key,
) -> LoadedConfig:
    """Compose the named config, or the file at `config_path`, with overrides: `key=value` words, or values by key,
    in which `${...}` is no reference.

    `full_key` gives the key that another one stands for, in files and overrides (`rlvr.config.choices`).

    A `config_path` that is a folder is searched first. With neither name nor file the overrides alone make the config.
    """
    folders = [Path("configs"), PACKAGED]
    given = overrides.items() if isinstance(overrides, Mapping) else ()
    parsed = [_Override(f"{key}={value!r}", key, _escape(value)) for key, value in given] or [
        _parse(str(text)) for text in overrides
    ]
    composer = _Composer(folders, parsed, full_key)
    if config_path is not None:
        path = Path(config_path)
        if path.is_dir():
            folders.insert(0, path)
            if config_name is None:
                raise ValueError(
                    f"config folder {config_path}: no config given; add --config-name; {_listing(composer.options(''))}"
                )
        elif not path.is_file():
            raise ValueError(f"config file {config_path} does not exist{composer.suggest_file(path)}")
        elif config_name is not None:
            raise ValueError(
                f"both a config file ({config_path}) and a config name ({config_name}) are given; drop one"
            )
        elif path.suffix not in (".yaml", ".yml"):
            raise ValueError(f"config file {config_path} has the suffix {path.suffix!r}; expected .yaml or .yml")
        else:
            folders.insert(0, path.parent)
            config_name = path.name
    name = re.sub(r"\.ya?ml$", "", config_name or "").removeprefix("./")
    if config_path is None and config_name and not composer.find_file(name) and (file := _find_yaml(config_name)):
        raise ValueError(f"config name {config_name}: {file} is a file, not a name; give --config={file}")
    if name:
        composer.add("", name, "")
    composer.apply_overrides()
    values, raw, timed = resolve(composer.config, composer.origin)
    return LoadedConfig(values, raw, composer.origin, Path(name).name, timed, composer.typed)


def read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """One YAML file as a plain dictionary, nothing resolved: also how a run's `resolved.yaml` is read back."""
    return copy.deepcopy(_read(Path(path)))


def dump(raw: Mapping[str, Any]) -> str:
    """YAML that `read` gives back unchanged."""
    return OmegaConf.to_yaml(OmegaConf.create(dict(raw)))


def difference(a: Mapping[str, Any], b: Mapping[str, Any], ignore: Sequence[str] = ()) -> list[str]:
    """The dotted keys in which two configs differ, those in `ignore` and everything under them left out."""
    left, right = dict(_leaves(a)), dict(_leaves(b))
    skip = tuple(ignore)

    def same(key: str) -> bool:
        if key not in left or key not in right:
            return False
        x, y = left[key], right[key]
        return repr(x) == repr(y) or (x == y and isinstance(x, bool) == isinstance(y, bool))

    keys = [*left, *(key for key in right if key not in left)]
    return [k for k in keys if not same(k) and not any(k == i or k.startswith((f"{i}.", f"{i}[")) for i in skip)]


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, scalar or list or empty mapping). A list is one leaf."""
    if isinstance(value, Mapping) and (value or not prefix):
        for key, child in value.items():
            yield from _leaves(child, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, list(value) if isinstance(value, (list, tuple)) else value


def _find_yaml(name: str) -> Path | None:
    """The file that a name is the path of, perhaps without its suffix."""
    return next((path for suffix in ("", ".yaml", ".yml") if (path := Path(f"{name}{suffix}")).is_file()), None)


def _listing(names: Sequence[str]) -> str:
    return f"there are: {', '.join(names)}" if names else "there are none"


def _display_path(path: Path) -> str:
    """A path for messages: packaged files by their place in the package, others relative to the working folder."""
    if path.is_relative_to(PACKAGED):
        return f"{SHIPPED_FILES}{path.relative_to(PACKAGED)}"
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _with_present_keys(content: Any) -> Any:
    """The content of a file with the present names of keys that had another name when it was written."""
    for section, names in _RENAMED.items():
        if isinstance(content, dict) and isinstance(old := content.get(section), dict):
            content[section] = {names.get(key, key): value for key, value in old.items()}
    return content


def _read(path: Path) -> dict[str, Any]:
    """The content of a file, not to be changed: a run reads its own settings several times, and parsing is slow."""
    try:
        result = _parse_file(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{_display_path(path)}{line}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError, OmegaConfBaseException) as error:
        raise ValueError(f"{_display_path(path)}: cannot be read: {first_line(error)}") from None
    except (ValueError, RecursionError) as error:  # what the limits say; a number of thousands of digits
        raise ValueError(f"{_display_path(path)}: {TOO_DEEP if isinstance(error, RecursionError) else error}") from None
    if result is None:
        raise ValueError(f"{_display_path(path)}: a list; expected `key: value` lines")
    return result


@lru_cache(maxsize=16)
def _parse_file(text: str) -> dict[str, Any] | None:
    """The content of a YAML file with the present names of its keys; None for a list."""
    config = OmegaConf.load(io.StringIO(check_size(text)))
    if not isinstance(config, DictConfig):
        return None
    return _with_present_keys(with_text_keys(OmegaConf.to_container(config)))


@dataclass
class _Override:
    text: str
    key: str
    value: Any
    used: bool = False


def _parse(text: str) -> _Override:
    match = _OVERRIDE.fullmatch(text)
    if not match:
        raise ValueError(
            f"override {_shorten(text)!r}: expected key=value, e.g. seed=1, learning_rate=1e-5, reward.type=correct"
        )
    if len(re.split(r"[.\[]", match["key"])) > DEEPEST:
        raise ValueError(f"override {_shorten(text)!r}: {TOO_DEEP}")
    return _Override(text, match["key"], _parse_value(match["value"].strip(), text))


def _escape(value: Any) -> Any:
    """A value of the caller's program, as a file would have to write it: no text in it is a reference."""
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, Mapping):
        return {key: _escape(inner) for key, inner in value.items()}
    return [_escape(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _parse_value(text: str, override: str) -> Any:
    """The value of an override `key=value`, typed as YAML does.

    Text that YAML would read as structure or a comment (`a: b`, `#1`) stays text unless it begins with `[`, `{` or a
    quote.
    """
    opened = text[:1] in tuple("[{\"'")
    try:
        config = OmegaConf.create(check_size(f"value: {text}"))
        value = with_text_keys(OmegaConf.to_container(config)["value"])  # type: ignore[index, call-overload]
    except (ValueError, RecursionError) as error:  # Unicode errors, and what the limits say
        said = TOO_DEEP if isinstance(error, RecursionError) else error
        raise ValueError(f"override {_shorten(override)!r}: {said}") from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if opened or "${" in text:
            problem = getattr(error, "problem", None) or first_line(error)
            raise ValueError(f"override {override!r}: the value is not YAML: {problem}") from None
        return text
    typed = isinstance(value, (bool, int, float)) and ":" not in text  # YAML 1.1 reads 12:30 in base sixty
    if opened or typed or text in ("null", "~", "Null", "NULL"):
        return value
    return text


def to_word(key: str, value: Any) -> str:
    """`key=value` as a command line has it, for a value of the caller's program: JSON is YAML."""
    if isinstance(value, float) and math.isinf(value):
        return f"{key}={'-' * (value < 0)}.inf"
    return f"{key}={json.dumps(_escape(value), ensure_ascii=False)}"


def _shorten(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."


def move_keys(content: Mapping[str, Any], full_key: Callable[[str], str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of a file with each value at its full key, and the flat key by which each was given.

    `full_key` gives the key that a flat key stands for, "" for a section of flat keys, and other keys as they are.
    References in texts (`${algorithm.clip_low}`) follow. ValueError for a key that is given both ways, unless alike.
    """
    moved: dict[str, tuple[str, Any]] = {}

    def take(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            kept: dict[str, Any] = {}
            for name, inner in value.items():
                inner_key = f"{key}.{name}" if key else str(name)
                place = full_key(inner_key)
                is_section = isinstance(inner, Mapping)
                if place == "" and not inner:
                    continue  # a section that holds flat keys alone, and no key
                if place == "" and not is_section:
                    raise ValueError(f"{inner_key}={inner!r}, expected a section of `key: value` lines")
                if place in ("", inner_key) or (is_section and place.startswith(f"{inner_key}.")):
                    kept[name] = take(inner, inner_key)
                else:
                    moved[place] = inner_key, take(inner, inner_key)
            return {name: inner for name, inner in kept.items() if inner != {} or value[name] == {}}
        if isinstance(value, list):
            return [take(item, f"{key}[{place}]") for place, item in enumerate(value)]
        return _REFERENCE.sub(partial(refer, key), value) if isinstance(value, str) else value

    def refer(key: str, found: re.Match[str]) -> str:
        """A reference to where its key is now; a relative one becomes absolute if one of both has moved."""
        path = found[1].lstrip(".")
        if dots := len(found[1]) - len(path):
            path = ".".join([*key.split(".")[:-dots], path])
            if full_key(path) == path and full_key(key) == key:
                return found[0]
        return f"${{{full_key(path) or path}}}"

    full: dict[str, Any] = take(content, "")
    for key, (flat, value) in moved.items():
        *parents, last = key.split(".")
        holder = full
        for depth, parent in enumerate(parents, start=1):
            if holder.get(parent) is None:
                holder[parent] = {}
            if not isinstance(holder[parent], dict):
                raise ValueError(f"{'.'.join(parents[:depth])}={holder[parent]!r}, expected a section beside {flat}")
            holder = holder[parent]
        if holder.get(last, value) != value:
            raise ValueError(f"{flat} and {key} are the same key, with two values; leave one of them out")
        holder[last] = value
    return full, {key: flat for key, (flat, _) in moved.items()}


def _in_sections(key: str, value: Any) -> dict[str, Any]:
    """A value under its dotted key."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


class _Composer:
    """Merges files in the order of their defaults lists into `config`, and remembers in `origin` who set what."""

    def __init__(self, folders: list[Path], overrides: list[_Override], full_key: Callable[[str], str]) -> None:
        self.folders, self.overrides, self.full_key = folders, overrides, full_key
        self.config: DictConfig = OmegaConf.create({})
        self.origin: dict[str, str] = {}
        self.typed: dict[str, str] = {}  # the flat key by which a key was given
        self.choices: list[str] = []  # what the defaults chose: `group` or `group@package`
        self.stack: list[str] = []

    def options(self, group: str) -> list[str]:
        if ".." in group.split("/"):  # no message lists what lies outside the folders of configs
            return []
        return sorted({p.stem for folder in self.folders for p in (folder / group).glob("*.y*ml")})

    def groups(self) -> list[str]:
        """The folders of options."""
        folders = {p.parent.relative_to(folder) for folder in self.folders for p in folder.glob("*/**/*.y*ml")}
        return sorted(str(path) for path in folders)

    def find_file(self, name: str) -> Path | None:
        """The YAML file of that name in the first folder that has one."""
        for folder in self.folders:
            for suffix in (".yaml", ".yml"):
                if (path := folder / f"{name}{suffix}").is_file():
                    return path
        return None

    def suggest_file(self, path: Path) -> str:
        """The remedy for a file that does not exist: the config of its name, or the file with the nearest name."""
        if path.parent == Path() and self.find_file(path.stem):
            return f"; for the config of that name give --config-name={path.stem}"
        return did_you_mean(path.name, [file.name for file in path.parent.glob("*.y*ml")])

    def add(self, group: str, name: str, package: str, optional: bool = False, asked_by: str = "") -> None:
        """Merge `group/name.yaml`, and first whatever its defaults name, under the dotted key `package`."""
        full = name.lstrip("/") if name.startswith("/") or not group else f"{group}/{name}"
        parent, _, stem = full.rpartition("/")
        path = None if ".." in full.split("/") else self.find_file(full)
        if path is None:
            if optional:
                return
            known = self.options(parent)
            if parent and not known:
                groups = self.groups()
                raise ValueError(
                    f"unknown group {parent!r}{f' ({asked_by})' if asked_by else ''}{did_you_mean(parent, groups)}; "
                    f"{_listing(groups)}"
                )
            what = f"option {stem!r} of group {parent!r}" if parent else f"config {stem!r}"
            asked = f" ({asked_by})" if asked_by else ""
            files = "" if parent or asked_by else ". A config file is given as --config=FILE"
            raise ValueError(f"unknown {what}{asked}{did_you_mean(stem, known)}; {_listing(known)}{files}")
        if full in self.stack:
            raise ValueError(f"{_display_path(path)}: its defaults go in a circle: {' -> '.join([*self.stack, full])}")
        config = OmegaConf.create(_read(path))
        if directive := _PACKAGE.match(path.read_text(encoding="utf-8")):
            package = "" if directive[1] == "_global_" else directive[1]
        if "${" in str(OmegaConf.to_container(config).get("defaults")):  # type: ignore[union-attr]
            raise ValueError(
                f"{_display_path(path)}: defaults are read before any ${{...}} is; name each choice as it is"
            )
        defaults = config.pop("defaults", None) or []
        if not isinstance(defaults, ListConfig) and defaults:
            raise ValueError(f"{_display_path(path)}: defaults has to be a list, e.g. `- model: tiny`")
        entries = list(defaults)
        if "_self_" not in entries:
            entries.append("_self_")
        self.stack.append(full)
        try:
            for entry in entries:
                if entry == "_self_":
                    self.merge(config, package, _display_path(path))
                else:
                    self.follow(entry, parent, package, path)
        except (OmegaConfBaseException, TypeError) as error:  # TypeError: a list where there is a section
            raise ValueError(f"{_display_path(path)}: {first_line(error)}") from None
        self.stack.pop()

    def follow(self, entry: Any, group: str, package: str, path: Path) -> None:
        """One line of a defaults list: `name`, `name@package`, `group: option` or `group@package: option`."""
        key, option = next(iter(entry.items())) if isinstance(entry, DictConfig) and len(entry) == 1 else (entry, "")
        match = _CHOICE.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            shown = OmegaConf.to_container(entry) if OmegaConf.is_config(entry) else entry
            raise ValueError(
                f"{_display_path(path)}: defaults entry {shown!r} is not one of "
                "`_self_`, `name`, `group: option`, `group@package: option`"
            )
        name = match["group"]
        where = match["package"]
        inner = "" if where == "_global_" or not package else f"{package}."
        asked_by = f"in the defaults of {_display_path(path)}"
        if isinstance(entry, str):  # a config, not a choice
            at = package if where in (None, "_here_") else f"{inner}{where}".removesuffix("_global_").rstrip(".")
            self.add(group, name, at, bool(match["optional"]), asked_by)
            return
        chosen = name.lstrip("/") if name.startswith("/") or not group else f"{group}/{name}"
        if where is None:
            at = inner + name.lstrip("/").replace("/", ".")
        else:
            at = package if where == "_here_" else "" if where == "_global_" else inner + where
        label = chosen if where is None else f"{chosen}@{at}"
        self.choices.append(label)
        for override in self.overrides:
            if override.key == label and not isinstance(override.value, dict):
                option, asked_by, override.used = override.value, f"in {override.text!r}", True
        for item in option if isinstance(option, (list, ListConfig)) else [option]:
            if item is not None:
                self.add(chosen, str(item), at, bool(match["optional"]), asked_by)

    def apply_overrides(self) -> None:
        """What the command line says on top: new choices first, then values in the order they were typed."""
        for override in [o for o in self.overrides if not o.used]:
            group, _, package = override.key.partition("@")
            packaged = [label for label in self.choices if label.startswith(f"{group}@")]
            if isinstance(override.value, str) and override.value in self.options(group) and not packaged:
                self.add(group, override.value, package or group.replace("/", "."), asked_by=f"in {override.text!r}")
                override.used = True
            elif "/" in override.key or package or (packaged and isinstance(override.value, str)):
                hint = f"write {packaged[0]}={override.value}; " if packaged else ""
                raise ValueError(
                    f"override {override.text!r}: the config makes no such choice; {hint}"
                    f"choices: {', '.join(self.choices) or 'none'}; "
                    f"options of {group!r}: {', '.join(self.options(group)) or 'none'}"
                )
        for override in [o for o in self.overrides if not o.used]:
            parts = self.full_key(override.key).split(".")
            for parent in (".".join(parts[:n]) for n in range(1, len(parts))):
                held = OmegaConf.select(self.config, parent, throw_on_resolution_failure=False)
                if held is not None and not OmegaConf.is_config(held):
                    raise ValueError(
                        f"override {override.text!r}: {parent} is a single value and holds no keys; give that "
                        f"value by a key of {parent}, too"
                    )
            changes, typed = {override.key: override.value}, dict[str, str]()
            if "[" not in override.key:
                node = _in_sections(override.key, override.value)
                full, typed = move_keys(node, self.full_key)
                changes = changes if full == node else full
            for key, value in changes.items():
                try:
                    OmegaConf.update(self.config, key, value, merge=True, force_add=True)
                except (OmegaConfBaseException, TypeError, IndexError) as error:
                    raise ValueError(f"override {_shorten(override.text)!r}: {first_line(error)}") from None
            self.remember(changes, "", CLI, typed)

    def merge(self, config: DictConfig, package: str, source: str) -> None:
        node = _in_sections(package, OmegaConf.to_container(config)) if package else OmegaConf.to_container(config)
        try:
            full, typed = move_keys(node, self.full_key)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
        merged = OmegaConf.merge(self.config, OmegaConf.create(full))
        assert isinstance(merged, DictConfig)
        self.config = merged
        self.remember(full, "", source, typed)

    def remember(self, value: Any, prefix: str, source: str, typed: Mapping[str, str]) -> None:
        """Note the origin of every key of `value`; `typed` are the flat keys by which some were given."""
        for key, child in value.items():
            dotted = f"{prefix}.{key}" if prefix else str(key)
            if not isinstance(child, dict):
                for old in [k for k in self.origin if k.startswith(f"{dotted}.")]:
                    del self.origin[old]
            self.origin[dotted] = source
            if isinstance(child, dict):
                self.remember(child, dotted, source, typed)
            elif dotted in typed:
                self.typed[dotted] = typed[dotted]
            else:
                self.typed.pop(dotted, None)
