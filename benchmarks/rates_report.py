"""The tables and conclusions of `benchmarks.algorithm_rates`, computed from its `results.json`.

    {"variants": {"grpo 0.0005": [...], ...}, "seeds": [1, 2], "choice": [6, 7], "completions": [7680, 23040], "runs": [
    {"variant": "grpo", "rate": "0.0005", "seed": 1, "pass@1": [0.57, 0.7], "weights_sha256": "...", ...}, ...]}

Lists of two are of the shorter and the longer length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.algorithm_report import (
    SHARES,
    PairedComparison,
    correct_p_values,
    format_p_value,
    format_points,
    format_share,
    list_names,
)
from rlvr.core.files import read_json
from rlvr.core.types import mean
from rlvr.studies.seed_statistics import spread
from rlvr.studies.study_summary import describe_versions

LENGTHS = (0, 1)  # places in the lists of two


def load_rates(path: Path) -> dict[str, Any]:
    """Read the `results.json` of the command."""
    return read_json(path, "the results of a study of rates", "the same command writes it again")


def list_rates(results: Mapping[str, Any]) -> dict[str, list[str]]:
    """The rates of each variant, from the lowest to the highest; the first variant is the reference."""
    rates: dict[str, list[str]] = {}
    for name in results["variants"]:
        variant, _, rate = name.partition(" ")
        rates.setdefault(variant, []).append(rate)
    return {variant: sorted(listed, key=float) for variant, listed in rates.items()}


def choose_rates(results: Mapping[str, Any]) -> dict[str, str]:
    """The best rate of each variant: the highest mean pass@1 over both lengths and the seeds of the choice, the lower
    one of two that are equal. Variants that lack a run of the choice are left out."""
    chosen: dict[str, str] = {}
    for variant, rates in list_rates(results).items():
        tried = {rate: _select(results, variant, rate, results["choice"]) for rate in rates}
        if all(len(found) == len(results["choice"]) for found in tried.values()):
            chosen[variant] = max(rates, key=lambda rate: mean([x for k in LENGTHS for x in _at(tried[rate], k)]))
    return chosen


def _select(results: Mapping[str, Any], variant: str, rate: str, seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """The runs of a variant at a rate, by seed."""
    runs = (run for run in results["runs"] if run["variant"] == variant and run["rate"] == rate)
    return {run["seed"]: run for run in runs if run["seed"] in seeds}


def _at(runs: Mapping[int, Mapping[str, Any]], length: int) -> list[float]:
    return [run["pass@1"][length] for run in runs.values()]


def format_rates(results: Mapping[str, Any]) -> str:
    """The rates that were tried, the comparison at the best ones, and what follows from it, as Markdown."""
    chosen = choose_rates(results)
    compared = _compare(results, chosen)
    correct_p_values(comparison for pair in compared.values() for comparison in pair)
    short, long = results["completions"]
    minutes = sum(run["seconds"] for run in results["runs"]) / 60
    parts = [
        f"{len(results['runs'])} runs of `{results['task']}`, {minutes:.0f} minutes one after another. pass@1 after "
        f"{short:,} and {long:,} completions, of the same {results['tasks']} held-out tasks x {results['samples']} "
        f"samples for every run. Rates are chosen by the seeds {_list_seeds(results['choice'])} and compared over the "
        f"seeds {_list_seeds(results['seeds'])}.",
        _format_choice(results, chosen),
        _format_comparison(results, chosen, compared),
        "\n".join(f"- {sentence}" for sentence in _conclude(results, chosen, compared)),
    ]
    return "\n\n".join(part for part in parts if part)


def _compare(
    results: Mapping[str, Any], chosen: Mapping[str, str]
) -> dict[str, tuple[PairedComparison, PairedComparison]]:
    """Each variant minus the reference at the two lengths, paired by seed, both at their best rates."""
    reference, *others = list_rates(results)
    if reference not in chosen:
        return {}
    rates = {variant: [_by_seed(results, variant, chosen[variant], k) for k in LENGTHS] for variant in chosen}
    return {
        other: (
            PairedComparison(_subtract(rates[other][0], rates[reference][0])),
            PairedComparison(_subtract(rates[other][1], rates[reference][1])),
        )
        for other in others
        if other in chosen
    }


def _by_seed(results: Mapping[str, Any], variant: str, rate: str, length: int) -> dict[int, float]:
    runs = _select(results, variant, rate, results["seeds"])
    return {seed: run["pass@1"][length] for seed, run in runs.items()}


def _subtract(one: Mapping[int, float], other: Mapping[int, float]) -> list[float]:
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def _format_choice(results: Mapping[str, Any], chosen: Mapping[str, str]) -> str:
    """Mean pass@1 of the seeds of the choice at each rate, after either length; the best rate is bold."""
    rates = sorted({rate for listed in list_rates(results).values() for rate in listed}, key=float)
    lines = [["rate", *rates], ["---"] + ["--:"] * len(rates)]
    for variant, best in chosen.items():
        tried = {rate: _select(results, variant, rate, results["choice"]) for rate in rates}
        texts = {rate: ", ".join(f"{100 * mean(_at(tried[rate], k)):.1f}" for k in LENGTHS) for rate in rates}
        lines.append([f"`{variant}`", *(f"**{text}**" if rate == best else text for rate, text in texts.items())])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _format_comparison(
    results: Mapping[str, Any],
    chosen: Mapping[str, str],
    compared: Mapping[str, tuple[PairedComparison, PairedComparison]],
) -> str:
    reference = next(iter(list_rates(results)))
    lines = [["variant", "completions", "rate", "seeds", "pass@1", f"minus `{reference}`", "p", "seconds"]]
    lines.append(["---"] + ["--:"] * (len(lines[0]) - 1))
    for variant, rate in chosen.items():
        for length in LENGTHS:
            found = _by_seed(results, variant, rate, length)
            if not found:
                continue
            runs = _select(results, variant, rate, results["seeds"])
            difference = compared[variant][length] if variant in compared else PairedComparison()
            p = difference.p_value
            lines.append(
                [
                    f"`{variant}`",
                    f"{results['completions'][length]:,}",
                    rate,
                    str(len(found)),
                    format_share(spread(list(found.values()), SHARES)),
                    format_points(spread(difference.differences)),
                    "" if p is None else format_p_value(p),
                    f"{median(run['seconds'] for run in runs.values()):.0f}" if length else "",
                ]
            )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) if len(lines) > 2 else ""


def _conclude(
    results: Mapping[str, Any],
    chosen: Mapping[str, str],
    compared: Mapping[str, tuple[PairedComparison, PairedComparison]],
) -> list[str]:
    sentences: list[str] = []
    reference = next(iter(list_rates(results)))
    for length, completions in zip(LENGTHS, results["completions"], strict=True):
        for word, sign in (("Above", 1), ("Below", -1)):
            names = [
                name
                for name, pair in compared.items()
                if pair[length].is_significant and sign * mean(pair[length].differences) > 0
            ]
            if names:
                sentences.append(
                    f"{word} `{reference}` after {completions:,} completions (p below 0.05, corrected for both "
                    f"lengths): {list_names(names)}."
                )
    tested = {name: pair for name, pair in compared.items() if any(one.p_value is not None for one in pair)}
    open_ones = [name for name, pair in tested.items() if not any(one.is_significant for one in pair)]
    if open_ones:
        sentences.append(f"Not told apart from `{reference}` at either length: {list_names(open_ones)}.")
    for end, word in ((0, "lowest"), (-1, "highest")):
        rates = list_rates(results)
        names = [variant for variant, best in chosen.items() if rates[variant][end] == best]
        if names:
            sentences.append(
                f"The best rate is the {word} one that was tried, so a better one may lie beyond: {list_names(names)}."
            )
    if versions := describe_versions(run["code"] for run in results["runs"]):
        sentences.append(versions)
    return sentences


def _list_seeds(seeds: Sequence[int]) -> str:
    return ", ".join(map(str, seeds))
