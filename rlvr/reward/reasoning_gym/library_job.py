"""The job of the guarded workers that run `reasoning_gym`: its families, its tasks, its scores.

An item is `{"do": "warm" | "describe" | "check" | "make" | "score", ...}`. A task is a family, the keys of its
configuration, a level of its curriculum or None, and a number. Its entry is made here, from these alone: the library's
metadata holds objects that JSON would change. An answer is scored in a fork (`rlvr.sandbox.item_forks`). If the fork
fails, the right answer is scored the same way, or plain ones where there is none: if that works, the answer is to
blame.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # Windows lacks what it imports, and this file is imported there
    from rlvr.sandbox.item_forks import ForkReport, ItemForks

BLOCK = 100  # tasks of one data set: some families take long to make one, or choose its tasks together
OURS = ("seed", "size")  # keys of every configuration that are set here
# Where families whose entries have no answer keep one all the same.
EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")
PLAIN = ("0", "{}", "[]", "A")  # answers that a scorer must take where the library gives none
_loaded: list[ItemForks] = []  # at most one
SYSTEM = ("/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache")


def run(setup: dict[str, Any], item: dict[str, Any]) -> dict[str, Any]:
    """What an item asks for. `setup` is `{"paths": where Python finds the library}`."""
    forks = load(setup["paths"])
    match item["do"]:
        case "warm":
            return {"missing": forks.missing}
        case "describe":
            return describe()
        case "check":
            try:
                make_dataset(item["family"], json.dumps(item["config"]), item["level"], 0)
            except (TypeError, ValueError, AssertionError, KeyError) as error:
                return {"refused": f"{type(error).__name__}: {error}"[:500]}
            return {"refused": ""}
        case "make":
            entry = make(item)
            return {"question": str(entry["question"]), "answer": example_answer(entry)}
        case "score":
            return score(forks, item)
        case other:
            raise ValueError(other)


def load(paths: list[str]) -> ItemForks:
    """Import the library, then lock this process out of everything else; once, whatever the paths are later."""
    if not _loaded:
        sys.path.extend(path for path in paths if path not in sys.path)
        os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
        import reasoning_gym  # noqa: F401

        from rlvr.sandbox.item_forks import ItemForks

        folders = [path for name, module in list(sys.modules.items()) if (path := _locate(name, module))]
        readable = {os.path.dirname(os.path.abspath(os.__file__)), *folders, *SYSTEM}
        _loaded.append(ItemForks(sorted(path for path in readable if os.path.exists(path))))
    return _loaded[0]


def _locate(name: str, module: Any) -> str:
    """The folder of a package or the file of a module that stands alone; "" for what lies in a package."""
    file = getattr(module, "__file__", None)
    if "." in name or not file:
        return ""
    return os.path.dirname(file) if hasattr(module, "__path__") else file


def describe() -> dict[str, Any]:
    """By family: the keys of its configuration, how many levels its curriculum has, and the keys that these set."""
    from reasoning_gym import factory

    families: dict[str, Any] = {}
    for name, (_, config) in factory.DATASETS.items():
        if name == "composite":  # several families at once, which the environment does itself
            continue
        keys = [field.name for field in dataclasses.fields(config) if field.name not in OURS]
        attributes = factory.create_curriculum(name).attributes if factory.has_curriculum(name) else {}
        names = ("field_name", "lower_field_name", "upper_field_name")
        by_level = [value for one in attributes.values() for key in names if (value := getattr(one, key, None))]
        levels = max((len(one.levels) for one in attributes.values()), default=0)
        families[name] = {"keys": keys, "levels": levels, "level_keys": by_level}
    return families


def make(item: dict[str, Any]) -> dict[str, Any]:
    """The entry of a task. It is kept, since a group of answers needs it and scorers see it only in forks."""
    return make_once(item["family"], json.dumps(item["config"]), item["level"], item["number"])


@lru_cache(maxsize=64)
def make_once(family: str, config: str, level: int | None, number: int) -> dict[str, Any]:
    import numpy

    data = make_dataset(family, config, level, number - number % BLOCK)
    random.seed(number)  # a few families draw from the global generators
    numpy.random.seed(number)
    return data[number % BLOCK]


@lru_cache(maxsize=16)
def make_dataset(family: str, config: str, level: int | None, seed: int) -> Any:
    from reasoning_gym import factory

    random.seed(seed)
    given = {**json.loads(config), "seed": seed, "size": BLOCK}
    if level is None:
        return factory.create_dataset(family, **given)
    curriculum = factory.create_curriculum(family)
    curriculum.set_global_level(level)
    return factory.DATASETS[family][0](config=curriculum.generate_configuration(given))


def example_answer(entry: dict[str, Any]) -> str | None:
    """An answer that is right, as text; None where the library gives none."""
    answer = entry["answer"]
    if answer is None:
        answer = next((entry["metadata"][key] for key in EXAMPLES if key in entry["metadata"]), None)
    return answer if isinstance(answer, str | None) else json.dumps(answer)


def score(forks: ItemForks, item: dict[str, Any]) -> dict[str, Any]:
    """The library's score of `item["answer"]`, or a failure and whether the answer is to blame for it."""
    entry = make(item)
    if hash_text(str(entry["question"])) != item["question"]:
        return {"failure": "other_task", "detail": "the library makes another question of this task"}
    seed = item["number"] - item["number"] % BLOCK
    data = make_dataset(item["family"], json.dumps(item["config"]), item["level"], seed)
    report = score_in_fork(forks, data, entry, item["answer"], item["seconds"])
    if not report.failure:
        return {"score": report.value}
    gold = example_answer(entry)
    for plain in PLAIN if gold is None else (gold,):
        other = score_in_fork(forks, data, entry, plain, item["seconds"])
        if not other.failure:
            return {"failure": report.failure, "detail": report.detail, "blames_answer": True}
    detail = f"{report.detail}; the right answer: {other.failure} {other.detail}"
    return {"failure": report.failure, "detail": detail, "blames_answer": False}


def score_in_fork(forks: ItemForks, data: Any, entry: dict[str, Any], answer: str, seconds: float) -> ForkReport:
    def work() -> float:
        value = float(data.score_answer(answer, entry))
        if not 0 <= value <= 1:
            raise ValueError(f"the scorer gave {value}, expected a score from 0 to 1")
        return value

    return forks.run(work, seconds, wall_seconds(seconds))


def wall_seconds(seconds: float) -> float:
    """How long a fork may last that has so much processor time: other processes may have the cores."""
    return 10 * seconds + 10


def hash_text(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
