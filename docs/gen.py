"""Writes what the code knows best into the pages: tables of settings and words, formulas, the API reference.

    python docs/gen.py              # after a change of a spec, a setting, a signature or a docstring
    python docs/gen.py --check      # changes nothing; exit code 1, and the names of the pages that are out of date

What stands between `<!-- filled: NAME -->` and `<!-- end: NAME -->` in a page is written here: by the function of that
name in `PARTS`, or of the part before a colon, which is given the part after it (`api:rlvr.train`). The same on every
machine: nothing is read from the environment, and what has no order of its own is sorted.

`tests/project/test_docs.py` holds every page current.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import itertools
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stubs import ROOT, find_home, make_stub, read_docstring

sys.path.insert(0, str(ROOT))  # the package beside this file, not an installed one
import published_runs

_FILLED = re.compile(r"^<!-- filled: (\S+) -->\n.*?^<!-- end: \1 -->$", re.MULTILINE | re.DOTALL)

# Of the known models, those in the table of memory: they train on one GPU, in one of the two ways.
MODELS = (
    "Qwen2.5-0.5B", "Llama-3.2-1B", "Qwen2.5-1.5B", "Qwen2.5-3B", "Qwen3-4B", "Qwen2.5-7B", "Llama-3.1-8B",
)  # fmt: skip
GPUS = (8, 16, 24, 40, 48, 80, 141)  # GB, usual sizes

REQUIRED = ("rollout.max_tokens",)  # null where an answer is sampled by hand; a run refuses it

# What else the keys of open lists take.
_OPEN = {"algorithm.name": "`module:ROW`", "algorithm.advantage": "one that you registered"}

# Keys that take one of a few words, where no table of the code lists them. A test tries every word.
_CHOICES: dict[str, tuple[str, ...]] = {
    "prompt.chat": ("auto", "on", "off"),
    "training.mode": ("rlvr", "sft"),
    "training.completions": ("sampled", "given"),
    "training.control": ("none", "random_reward", "equal_rewards"),
    "evaluation.report": ("last", "best"),
    "training.long_prompts": ("filter", "truncate_left", "error"),
}


def choices() -> dict[str, tuple[str, ...]]:
    """The words that a key takes, for every key that takes only some."""
    from rlvr.algorithms import ALGORITHMS
    from rlvr.algorithms.advantages import ADVANTAGES
    from rlvr.algorithms.losses import LOSSES
    from rlvr.algorithms.reductions import REDUCTIONS
    from rlvr.algorithms.terms import TERMS
    from rlvr.clients.registry import CLIENTS
    from rlvr.clients.samplers import SAMPLERS
    from rlvr.core.variants import Variant, setting_of
    from rlvr.training.curriculum import CURRICULA

    tables: dict[str, tuple[str, ...]] = {
        "name": tuple(ALGORITHMS),
        "advantage": tuple(ADVANTAGES),
        "loss": tuple(LOSSES),
        "reduction": tuple(REDUCTIONS),
    }
    variants: list[type[Variant]] = [*LOSSES.classes(), *ADVANTAGES.classes(), *TERMS.classes()]
    for variant in variants:
        for option in dataclasses.fields(variant):
            if words := setting_of(option).choices:
                tables[variant.flat_names()[option.name]] = words
    return {
        "client": tuple(CLIENTS),
        "sampler.name": tuple(SAMPLERS),
        "sft.curriculum.by": tuple(way.name for way in CURRICULA.classes() if not way.learns_from_verdicts),
        **_CHOICES,
        **{f"algorithm.{cell}": table for cell, table in tables.items()},
    }


def results() -> str:
    """The table of the run `arithmetic`, as the README shows it."""
    blocks = re.findall(r"^```text\n.*?^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    return next(block for block in blocks if "FINAL RESULTS" in block)


def algorithms() -> str:
    """The specs by name, in two tables: the six fields that all have, then the others and the source."""
    from rlvr.algorithms import ALGORITHMS, Algorithm

    named = ("advantage", "loss", "reduction", "clip_low", "clip_high", "drop_equal_groups")
    plain = {"equal_by": Algorithm.equal_by, "mask_truncated": Algorithm.mask_truncated}
    rows: list[list[str]] = []
    sources: list[list[str]] = []
    for spec in ALGORITHMS.values():
        bounds = [f"{bound:.6g}" for name, bound in spec.loss.config().items() if name.startswith("clip_")]
        clip = " ... ".join(bounds)
        of_terms = {
            term.flat_names()[one.name]: one.default
            for term in spec.terms
            for one in dataclasses.fields(term)
            if one.name != term.switch
        }
        more = [
            f"`{key}={_yaml(value)}`"
            for key, value in spec.flat.items()
            if key not in named and value is not None and value != (plain | of_terms).get(key, ...)
        ]
        groups = "dropped" if spec.drop_equal_groups else "kept"
        words = [f"`{word}`" for word in (spec.name, spec.advantage.name, spec.loss.name, spec.reduction)]
        rows.append([*words, clip, groups])
        sources.append([f"`{spec.name}`", _text(", ".join([*more, spec.source]))])
    fields = _table(["name", "advantage", "loss", "reduction", "ratio clip", "equal groups"], rows)
    return f"{fields}\n\n{_table(['name', 'source and other fields'], sources)}"


def advantages() -> str:
    from rlvr.algorithms.advantages import ADVANTAGES

    return _formulas({variant.name: variant for variant in ADVANTAGES.classes()})


def reductions() -> str:
    from rlvr.algorithms.reductions import REDUCTIONS

    return _formulas(REDUCTIONS)


def losses() -> str:
    """Every loss that is a sum over tokens."""
    from rlvr.algorithms.loss_specs import LOSS_SPECS

    return "\n\n".join(f"### `{name}`\n\n{_describe_loss(name, spec)}" for name, spec in LOSS_SPECS.items())


def _describe_loss(name: str, spec: Any) -> str:
    """One named loss: formula, inputs, settings, and the algorithms that use it."""
    from rlvr.algorithms import ALGORITHMS

    shape = "[T], or [T, K] with K targets per token" if spec.allows_many_targets else "[T]"
    users = [f"`{algorithm.name}`" for algorithm in ALGORITHMS.values() if algorithm.loss.name == name]
    facts = {
        "Term of a token": _text(spec.formula),
        "Inputs": ", ".join(f"`{i}`" for i in ("target_tokens", *spec.required)) + f", each {shape}",
        "Optional input": ", ".join(f"`{i}` [T]" for i in spec.weight_inputs),
        "Settings": ", ".join(f"`{key}` ({value:g})" for key, value in spec.config.items()),
        "Algorithms": ", ".join(users),
    }
    return "\n".join(f"- {what}: {fact}" for what, fact in facts.items() if fact)


def preferences() -> str:
    """The losses of preferred completions."""
    from rlvr.algorithms.losses import LOSSES

    losses = [loss for loss in LOSSES.classes() if loss.compares_completions]
    rows = [[f"`{loss.name}`", _text(loss.spec.formula), f"{loss.spec.config['beta']:g}"] for loss in losses]
    return _table(["loss", "of a pair, or of a completion", "`algorithm.beta`"], rows)


def gae() -> str:
    """The advantages of a critic."""
    return _text(read_docstring("rlvr.algorithms.advantages.GaeAdvantage"))


def critic_loss() -> str:
    """The loss of a critic: formula, inputs, settings."""
    from rlvr.algorithms.loss_specs import VALUE_SPEC

    inputs = ", ".join(f"`{name}`" for name in VALUE_SPEC.required)
    return f"- Term of a token: {_text(VALUE_SPEC.formula)}\n- Inputs: {inputs}, each [T]\n- Setting: `value_clip`"


def kl_penalty() -> str:
    """The KL term that any loss may have beside its own."""
    return _text(read_docstring("rlvr.engine.losses.kl_penalty"))


def options() -> str:
    """What can be set on any spec, in the words of `Algorithm` and of the variants that have options."""
    from rlvr.algorithms import Algorithm
    from rlvr.algorithms.advantages import ADVANTAGES
    from rlvr.algorithms.losses import LOSSES
    from rlvr.algorithms.terms import TERMS

    variants = [*TERMS.classes(), *LOSSES.classes(), *ADVANTAGES.classes()]
    rows = [
        [
            f"{variant.kind} `{variant.name}`",
            ", ".join(f"`{key}`" for key in variant.flat_names().values()),
            _cell(variant),
        ]
        for variant in variants
        if variant.flat_names()
    ]
    return f"{_paragraphs(Algorithm)}\n\n{_table(['of', 'keys', 'what they do'], rows)}"


def capabilities() -> str:
    """Which option works on which client."""
    from rlvr.algorithms.capabilities import support_table
    from rlvr.clients.registry import CLIENTS, resolve_client

    head, *rows = support_table(resolve_client(name).capabilities for name in CLIENTS)
    return _table(head, [[f"`{key}`", *cells] for key, *cells in rows])


def rewards() -> str:
    """Every reward that comes with the package, with its exact formula."""
    from rlvr.reward import known_rewards
    from rlvr.reward.registry import RewardSpec, _rewards  # the functions behind the names

    parts: list[str] = []
    for name in known_rewards():
        spec: RewardSpec = _rewards.get(name)
        if not spec.function.__module__.startswith("rlvr."):
            continue
        parameters = inspect.signature(spec.options or spec.function).parameters.values()
        taken = _list_options(p for p in parameters if spec.options or p.kind is p.KEYWORD_ONLY)
        parts.append(f"### `{name}`\n\n{_paragraphs(spec.function)}{taken}")
    return "\n\n".join(parts)


def environments() -> str:
    """Every environment that comes with the package, with its options."""
    from rlvr.envs.registry import _environments, known_environments

    parts: list[str] = []
    names: dict[Callable[..., Any], list[str]] = {}
    for name in known_environments():
        names.setdefault(_environments.get(name), []).append(f"`{name}`")
    for factory, called in names.items():
        if not factory.__module__.startswith("rlvr."):
            continue
        taken = _list_options(inspect.signature(factory).parameters.values())
        parts.append(f"### {' or '.join(called)}\n\n{_paragraphs(factory)}{taken}")
    return "\n\n".join(parts)


def settings() -> str:
    """Every key of a config, with its default and what its dataclass says of it."""
    from rlvr.config.schema import RunConfig

    return "\n\n".join(_section(RunConfig, "", "The top of a config"))


def spellings() -> str:
    """The words of other systems."""
    from rlvr.config.aliases import ALIASES

    return _table(["word", "our key", "meaning"], [[f"`{s.word}`", f"`{s.key}`", s.meaning] for s in ALIASES])


def foreign_words(system: str) -> str:
    """Words of `TRL` or `VERL` that set keys of ours."""
    rows = [
        [f"`{a.word}`", ", ".join(f"`{k}`" for k in a.key.split(", ")), a.meaning]
        for a in _list_foreign(system)
        if a.targets
    ]
    return _table(["word", "our key", "meaning"], rows)


def refused_words(system: str) -> str:
    """Words of `TRL` or `VERL` without a counterpart, those with the same remedy together."""
    by_reason: dict[str, list[str]] = {}
    for alias in _list_foreign(system):
        if not alias.targets:
            by_reason.setdefault(alias.meaning, []).append(f"`{alias.word}`")
    return _table(["words", "instead"], [[", ".join(words), reason] for reason, words in by_reason.items()])


def _list_foreign(system: str) -> Iterable[Any]:
    from rlvr.config import foreign_words

    return getattr(foreign_words, system)


def models() -> str:
    """The families of models, as `tests/engine/test_families.py` finds them."""
    found = json.loads((ROOT / "tests" / "kit" / "families.json").read_text(encoding="utf-8"))
    head = ["`model_type`", "models", "sampling", "training", "logits", "LoRA on", "LoRA not on"]
    return _table(
        head,
        [
            [
                f"`{name}`",
                f["models"],
                f["sampling"],
                f["training"],
                f["logits"],
                _names(f["lora"]),
                _names(f["without_lora"]),
            ]
            for name, f in found.items()
        ],
    )


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def memory() -> str:
    """What known models take, and the smallest usual GPU for each, under the conditions of docs/scale/capacity.md."""
    from rlvr.algorithms.optimizers import AdamW, Muon
    from rlvr.engine.capacity import KNOWN_MODELS
    from rlvr.engine.engine_options import EngineLimits, LoraConfig
    from rlvr.engine.memory import GIB, estimate_memory, read_shape

    limits = EngineLimits(gradient_checkpointing=True)
    rows: list[list[str]] = []
    for name in MODELS:
        shape = read_shape(KNOWN_MODELS[name])
        assert shape is not None
        adapter, adamw, muon = (
            estimate_memory(shape, limits, dtype="bfloat16", row_tokens=1024, rows=64, lora=lora, optimizer=optimizer)
            for lora, optimizer in ((LoraConfig(32), AdamW()), (None, AdamW()), (None, Muon(matrix_learning_rate=0.02)))
        )
        cells = [name, f"{shape.parameters / 1e9:.2f} B"]
        for total in (estimate.total / GIB for estimate in (adapter, adamw, muon)):
            fitting = [size for size in GPUS if total * 1.1 + 1 <= size]
            cells.append(f"{total:.1f} ({fitting[0] if fitting else f'above {GPUS[-1]}'})")
        parts = (adapter.weights, adapter.cache, adapter.activations, adapter.logits)
        rows.append([*cells, *(f"{part / GIB:.1f}" for part in parts)])
    head = ["model", "size", "adapter", "all weights, AdamW", "all weights, Muon"]
    return _table([*head, "weights", "KV cache", "activations", "logits"], rows)


def known_models() -> str:
    """The names of the known shapes."""
    from rlvr.engine.capacity import KNOWN_MODELS

    return _names(KNOWN_MODELS)


def published() -> str:
    """What others published beside the plan's figures."""
    runs = published_runs
    rows: list[list[str]] = []

    def add(what: str, unit: str, measured: float, planned: float) -> None:
        shown = [f"{number:,.{0 if measured > 1000 else 1}f} {unit}" for number in (measured, planned)]
        rows.append([what, *shown, f"{planned / measured:.2f}"])

    for name, row, gpus, has_adapter, rate in runs.TRAINING:
        kind = "adapter of rank 16" if has_adapter else "all weights"
        what = f"train {name}, {kind}, rows of {row:,}, {gpus} H100 (prime-rl)"
        add(what, "tokens/s", rate, runs.predict_training(name, row, gpus, has_adapter))
    for at_once, rate in runs.SAMPLING:
        add(f"sample Qwen3-4B, {at_once} at once, 1 B200 (vLLM)", "tokens/s", rate, runs.predict_sampling(at_once))
    for name, gpus, wide, mean, seconds in runs.STEPS:
        what = f"a step of {name}, {gpus} H100 (NeMo RL)"
        add(what, "s", seconds, runs.predict_step(name, gpus, wide, mean))
    return _table(["what", "published", "planned", "planned / published"], rows)


def cluster_settings() -> str:
    """The settings that `rlvr plan` adds to a run's."""
    from rlvr.runs.run_plan import PlanOptions

    hints = typing.get_type_hints(PlanOptions)
    return "\n\n".join(_section(hints["cluster"], "cluster.", "`cluster`"))


def sections() -> str:
    """The sections of other systems."""
    from rlvr.config.aliases import SECTIONS

    rows = [[f"`{name}`", ", ".join(f"`{o}`" if o else "the top" for o in ours)] for name, ours in SECTIONS.items()]
    return _table(["section", "its keys belong to"], rows)


def configs() -> str:
    """The configs that come with the package: those that are whole, then the options of every group."""
    from rlvr.config.compose import PACKAGED

    whole: list[list[str]] = []
    options: list[list[str]] = []
    for path in sorted(PACKAGED.rglob("*.yaml"), key=lambda p: (len(p.parts), p)):
        about: list[str] = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            about.append(line.removeprefix("#").strip())
        name = path.relative_to(PACKAGED).with_suffix("")
        row = [f"`{name}`", _text(" ".join(about).replace("<", "&lt;"))]
        (options if len(name.parts) > 1 else whole).append(row)
    return f"{_table(['config', 'what it is'], whole)}\n\n{_table(['group/option', 'what it is'], options)}"


def service_settings() -> str:
    """Every setting of `rlvr serve`: its key in the file, its variable, its default."""
    from rlvr.service import settings as service

    rows = [
        [f"`{key}`", f"`{variable}`", f"`{value}`" if (value := _yaml(service._default_value(key))) else "none"]
        for variable, key in service.environment_names().items()
    ]
    return _table(["in the file", "in the environment", "default"], sorted(rows))


def engine_server_settings() -> str:
    """Every setting of `rlvr serve engine` by its words, with its default; what the limits are follows."""
    from rlvr.tinker_server.protocol.server_limits import ServerLimits, WireLimits
    from rlvr.tinker_server.serve_engine import SETTINGS_OF_RUNS
    from rlvr.tinker_server.server_settings import ServerSamplers, ServerSettings

    rows: list[list[str]] = []
    for section in dataclasses.fields(ServerSettings):
        options = getattr(ServerSettings(), section.name)
        hints = typing.get_type_hints(type(options))
        rows += [
            [f"`{section.name}.{name}`", f"`{_yaml(value)}`", _kind(hints[name])]
            for name, value in vars(options).items()
            if f"{section.name}.{name}" not in SETTINGS_OF_RUNS
        ]
    told = (_paragraphs(part) for part in (ServerLimits, WireLimits, ServerSamplers))
    return "\n\n".join([_table(["key", "default", "takes"], rows), *told])


def api(dotted: str) -> str:
    """A class or function: where to import it from, its docstring, and a stub of its signature, fields and methods."""
    name = dotted.rpartition(".")[2]
    imported = f"`from {find_home(dotted)} import {name}`"
    code = f"```pyi\n{make_stub(dotted)}\n```"
    return "\n\n".join(filter(None, [f"### `{name}`", imported, _text(read_docstring(dotted)), code]))


def reasoning_gym_audit() -> str:
    """The table of `rlvr audit --env reasoning_gym`, from the file that its `--json` wrote."""
    from rlvr.audits.gym_audit import KINDS, format_count

    report = json.loads((ROOT / "docs" / "audits" / "reasoning-gym.json").read_text(encoding="utf-8"))
    rates: list[list[str]] = []
    for name, rate in report["rates"].items():
        shares = (
            "{:.1f} % [{:.1f}, {:.1f}]".format(*(100 * x for x in rate[by].values())) for by in ("library", "ours")
        )
        rates.append([name, f"{rate['rows']:,}", *shares])
    rows: list[list[str]] = []
    for one in report["families"]:
        counts = [format_count(one[kind], one[f"{kind}_library"]) for kind in KINDS if kind not in ("empty", "long")]
        text, ours, library = one["best_fixed"]
        shown = f"`{text}` {format_count(ours, library)}" if library[0] else ""
        floor = f"{one['floor']:.2f}" if one["floor"] >= 0.005 else ""
        rows.append([f"`{one['family']}`", *counts[:4], shown, floor, *counts[4:]])
    head = ["family", "gold", "changed", "other", "decoy", "fixed text", "floor", "hostile"]
    parts = (
        f"reasoning-gym {report['library']}, {report['samples']} tasks of each of {len(rows)} families; "
        f"{report['seconds']:.0f} s on two cores. How many answers were accepted, with 95 % intervals that take the "
        "families as the sample:",
        _table(["answers", "tried", "accepted by the library's scorers", "by the reward"], rates),
        "By family: accepted by the reward of those tried, in brackets by the library's scorer where that is more.",
        _table(head, rows),
    )
    return "\n\n".join(parts)


def environment_ranking() -> str:
    """What `rlvr env check` found in each environment: the file of `benchmarks.environment_ranking`."""
    given = json.loads((ROOT / "docs" / "audits" / "environments.json").read_text(encoding="utf-8"))
    rows = [[f"`{one['name']}`", one["version"], *_show_findings(one)] for one in given if not one["reason"]]
    missing = [[f"`{one['name']}`", one["version"], _quote_finding(one["reason"])] for one in given if one["reason"]]
    clean = sum(not one["faults"] and not one["warnings"] for one in given if not one["reason"])
    lead = f"{len(rows)} environments, of which {clean} have neither a fault nor a warning:"
    parts = [lead, _table(["environment", "version", "faults", "warnings", "the worst finding"], rows)]
    if missing:
        parts += ["Not checked:", _table(["environment", "version", "reason"], missing)]
    return "\n\n".join(parts)


def _show_findings(one: dict[str, Any]) -> list[str]:
    found = [*one["faults"].values(), *one["warnings"].values()]
    return [*(", ".join(one[state]) for state in ("faults", "warnings")), _quote_finding(found[0]) if found else ""]


def _quote_finding(text: str, most: int = 150) -> str:
    """A text of a program in a cell of a table."""
    text = " ".join(text.replace("|", "/").replace("`", "'").replace("<", "‹").replace(">", "›").split())
    return text if len(text) <= most else f"{text[:most]}…"


def environment_checks() -> str:
    """The checks of `rlvr env check`."""
    from rlvr.audits.environment.check_report import CHECKS

    rows = [
        [spec.group, f"`{name}`", spec.requirement, spec.method, spec.openenv and f"`{spec.openenv}`"]
        for name, spec in CHECKS.items()
    ]
    return _table(["group", "check", "in a sound environment", "tried", "OpenEnv's name"], rows)


def algorithms_study() -> str:
    """The tables and conclusions of `python -m benchmarks.algorithm_study`, from its committed results."""
    from benchmarks.algorithm_report import format_results

    return format_results(_load_study())


def algorithm_rates() -> str:
    """The tables and conclusions of `python -m benchmarks.algorithm_rates`, from its committed results."""
    from benchmarks.rates_report import format_rates, load_rates

    return format_rates(load_rates(ROOT / "benchmarks" / "results" / "algorithm-rates" / "results.json"))


def pretrained_algorithms(of: str = "") -> str:
    """The tables of `python -m benchmarks.pretrained_algorithms`; with `of` that of one evaluation, such as 2."""
    from benchmarks.pretrained_algorithms import format_comparison, format_results
    from rlvr.core.files import read_json

    path = ROOT / "benchmarks" / "results" / "smollm-algorithms" / "results.json"
    results = read_json(path, "the results of a study", "python -m benchmarks.pretrained_algorithms writes it")
    return format_comparison(results, int(of)) if of else format_results(results)


def study_differences(of: str) -> str:
    """What variants of that study differ from `grpo` by; `of` is a measure and their names, separated by commas."""
    from benchmarks.algorithm_report import format_differences

    measure, *names = of.split(",")
    return format_differences(_load_study(), names, measure)


def _load_study() -> dict[str, Any]:
    from benchmarks.algorithm_results import load_results

    return load_results(ROOT / "benchmarks" / "results" / "algorithms-study" / "results.json")


def side_by_side(name: str) -> str:
    """A script of TRL and the same one of ours, line beside line; equal lines are in one row."""
    sides: list[list[str]] = []
    for side in ("trl", "rlvr"):
        text = (ROOT / "examples" / "from_trl" / f"{name}_{side}.py").read_text(encoding="utf-8")
        sides.append([line for line in text.splitlines() if line.strip()])
    rows: list[list[str]] = []
    plain = ([line.strip() for line in side] for side in sides)
    for _, a, b, c, d in difflib.SequenceMatcher(None, *plain, autojunk=False).get_opcodes():
        pairs = itertools.zip_longest(sides[0][a:b], sides[1][c:d], fillvalue="")
        rows += [[_code(line) for line in pair] for pair in pairs]
    return _table([f"TRL, {len(sides[0])} lines", f"rlvr, {len(sides[1])} lines"], rows)


def _code(line: str) -> str:
    """A line of a program in a cell, with no-break spaces for its indentation; nothing for an empty one."""
    bare = line.lstrip()
    return f"`{chr(160) * (len(line) - len(bare))}{bare}`" if bare else ""


PARTS: dict[str, Callable[..., str]] = {
    part.__name__: part
    for part in (
        results, algorithms, advantages, reductions, losses, preferences, gae, critic_loss, kl_penalty, options,
        capabilities, rewards, environments, settings, service_settings, engine_server_settings, spellings, sections,
        configs, foreign_words, refused_words, models, memory, known_models, published, cluster_settings,
        reasoning_gym_audit, environment_checks, environment_ranking, algorithms_study, algorithm_rates,
        pretrained_algorithms, study_differences, side_by_side, api,
    )
}  # fmt: skip


def fill(markdown: str) -> str:
    """The page with what belongs between its marks. A name that is not in `PARTS` is a KeyError."""

    def write(mark: re.Match[str]) -> str:
        name, _, of = mark[1].partition(":")
        part = PARTS[name](of) if of else PARTS[name]()
        return f"<!-- filled: {mark[1]} -->\n\n{part}\n\n<!-- end: {mark[1]} -->"

    return _FILLED.sub(write, markdown)


def _section(schema: Any, prefix: str, title: str) -> Iterator[str]:
    """A heading, the dataclass's own words, a table of its keys; then the dataclasses inside it."""
    hints = typing.get_type_hints(schema)
    inner: list[tuple[Any, str]] = []
    rows: list[list[str]] = []
    words = choices()
    for field in dataclasses.fields(schema):
        key = f"{prefix}{field.name}"
        parts = [part for part in _alternatives(hints[field.name]) if dataclasses.is_dataclass(part)]
        inner += [(part, key) for part in parts]
        if not parts or _default(field) == "null":
            shown = "a section, or null" if parts else _kind(hints[field.name], words.get(key, ()), _OPEN.get(key))
            rows.append([f"`{key}`", f"`{_default(field)}`" if _default(field) else "has to be given", shown])
            if key in REQUIRED:
                rows[-1][1:] = ["has to be given", shown.removesuffix(" or null")]
    yield f"{'#' * max(3, 2 + prefix.count('.'))} {title}\n\n{_paragraphs(schema)}"
    if rows:
        yield _table(["key", "default", "takes"], rows)
    head = ["key", "other key", "of", "default", "takes"]
    overrides = [(part, key) for part, key in inner if prefix and not hasattr(part, "registry")]
    if options := [row for part, key in overrides for row in _list_variant_options(part, key)]:
        yield _table(head, options)
    for part, key in inner:
        if not (options := _list_variant_options(part, key)):
            yield from _section(part, f"{key}.", f"`{key}`")
        elif (part, key) not in overrides:
            told = "\n".join(f"- `{variant.name}`: {_cell(variant)}" for variant in part.variants)
            base = part.registry.base
            shared = f"{_paragraphs(base)}\n\n" if dataclasses.fields(base) else ""
            yield f"{'#' * max(3, 2 + key.count('.') + 1)} `{key}`\n\n{shared}{told}"
            yield _table(head, options)


def _list_variant_options(section: Any, key: str) -> list[list[str]]:
    """The rows of a section that was made of variants, or of sections that were: one for each option."""
    if not hasattr(section, "variants"):
        inner = {field.name: field.default_factory for field in dataclasses.fields(section)}
        if not all(hasattr(part, "variants") for part in inner.values()):
            return []
        return [row for name, part in inner.items() for row in _list_variant_options(part, f"{key}.{name}")]
    from rlvr.config.choices import SHORTHANDS
    from rlvr.core.variants import setting_of

    rows: list[list[str]] = []
    for field in dataclasses.fields(section):
        having = [one for one in section.variants if field.name in {option.name for option in dataclasses.fields(one)}]
        if not having:
            names = ", ".join(f"`{variant.name}`" for variant in section.variants)
            is_name, default = field.name == getattr(section, "tag", "name"), _default(field)
            has_spec = not hasattr(section, "registry")
            shown = "that of the spec" if has_spec else f"`{default}`" if default else "has to be given"
            rows.append(
                [
                    f"`{key}.{field.name}`",
                    f"`{key}`" if is_name and key in SHORTHANDS else "",
                    "",
                    shown,
                    names if is_name else "mapping",
                ]
            )
            continue
        option = having[0].__dataclass_fields__[field.name]
        declared, hint = setting_of(option), typing.get_type_hints(having[0])[field.name]
        own = [field] if hasattr(section, "registry") else [one.__dataclass_fields__[field.name] for one in having]
        defaults = dict.fromkeys(f"`{_default(one)}`" for one in own)
        takes = ", ".join(f"`{word}`" for word in declared.choices) or declared.expected or _kind(hint)
        shorter = f"`{having[0].full_key(declared.flat)}`" if declared.flat else ""
        of = "all" if len(having) == len(section.variants) > 1 else ", ".join(f"`{one.name}`" for one in having)
        rows.append([f"`{key}.{field.name}`", shorter, of, " or ".join(defaults).replace("``", "none"), takes])
    return rows


def _alternatives(hint: Any) -> list[Any]:
    return list(typing.get_args(hint)) if " | " in str(hint) else [hint]


def _kind(hint: Any, chosen: Iterable[str] = (), more: str | None = None) -> str:
    """What a value may be: a type, or one of the words `chosen`, or `more` than those."""
    words = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", Any: "anything"}
    if chosen:
        words[str] = ", ".join([*(f"`{word}`" for word in chosen if word != "null"), *([more] if more else [])])

    def named(part: Any) -> str:
        return words.get(part) or {dict: "mapping"}.get(typing.get_origin(part), "list")

    return " or ".join(dict.fromkeys(named(part) for part in _alternatives(hint)))


def _list_options(parameters: Iterable[inspect.Parameter]) -> str:
    """A line with the options and their defaults, long ones cut; nothing if there are none."""
    shown: list[str] = []
    for p in parameters:
        value = "" if p.default is p.empty else _yaml(p.default)
        text = p.name if p.default is p.empty else f"{p.name}={value if len(value) < 60 else value[:40] + ' ...'}"
        shown.append(f"`{text}`")
    return f"\n\nOptions: {', '.join(shown)}." if shown else ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _yaml(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return _yaml(field.default_factory())
    return ""


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def _formulas(functions: dict[str, Callable[..., Any]]) -> str:
    return _table(["name", "formula"], [[f"`{name}`", _cell(function)] for name, function in functions.items()])


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _cell(thing: Any) -> str:
    """A docstring on one line."""
    return _text(" ".join((inspect.getdoc(thing) or "").split()))


def _paragraphs(thing: Any) -> str:
    return _text(inspect.getdoc(thing) or "")


def _text(text: str) -> str:
    """Papers and addresses become links."""
    text = re.sub(r"(?<![\[(<])https?://[^\s)>,;]+", r"<\g<0>>", text)
    text = re.sub(r"\((https?://[^\s)]+)\)", r"(<\1>)", text)
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def main(check: bool) -> int:
    """Write the pages that are not as they should be, or only `check`."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    filled = {page: fill(page.read_text(encoding="utf-8")) for page in pages}
    changed = [page for page in pages if filled[page] != page.read_text(encoding="utf-8")]
    for page in changed:
        if not check:
            page.write_text(filled[page], encoding="utf-8")
        print(f"{'out of date, run python docs/gen.py:' if check else 'wrote'} {page.relative_to(ROOT)}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
