"""The model card of a run: what was trained, on what, with what result, and the settings that repeat it.

Everything is read from the run's folder. The front matter has the keys of the Hugging Face hub. Settings that say where
something is (paths, servers, trackers) stay out of the card or lose their folders: a card may be public.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rlvr import __version__
from rlvr.core.files import read_json
from rlvr.core.weights_place import ADAPTER_CONFIG, find_gguf, is_hub_name
from rlvr.tracking.run_report import comparison_rows, describe_test, duration
from rlvr.tracking.tracker import mask_settings

_SHOWN = ("env", "prompt", "reward", "algorithm", "rollout", "training", "sft", "curriculum", "evaluation")
_WHAT = {
    "rlvr": "reinforcement learning with verifiable rewards",
    "sft": "supervised fine-tuning",
}


@dataclass(frozen=True)
class CardSource:
    """What a card is made from: a run's name and settings, its summary (None before its end), a checkpoint's folder."""

    run: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    checkpoint: Path
    reward: str

    @property
    def weights_sha256(self) -> str:
        """The hash of the weights that the checkpoint records."""
        counters = read_json(self.checkpoint / "policy.json", "the counters of a policy")
        return str(counters.get("weights_sha256", ""))

    @property
    def adapter(self) -> dict[str, Any] | None:
        """The config of the checkpoint's adapter; None for a whole model."""
        path = self.checkpoint / ADAPTER_CONFIG
        return read_json(path, "the config of an adapter") if path.exists() else None

    @property
    def public_adapter(self) -> dict[str, Any] | None:
        """The config of the adapter, in which a base model that is not one of the hub loses its folders."""
        adapter = self.adapter
        base = adapter and adapter.get("base_model_name_or_path")
        if adapter is None or not isinstance(base, str) or is_hub_name(base):
            return adapter
        return {**adapter, "base_model_name_or_path": Path(base).name}

    @property
    def base_model(self) -> str:
        """The name of the model that training started from; '' for random weights."""
        return str(self.settings["model"].get("name") or "")

    @property
    def hub_base(self) -> str | None:
        """The base model, if it is a model of the hub, so that a reader can find it."""
        return self.base_model if is_hub_name(self.base_model) else None


def model_card(source: CardSource, name: str) -> str:
    """The text of `README.md` for a model named `name` (OWNER/REPO, or a folder's name)."""
    parts = [_front_matter(source), f"# {name.rpartition('/')[2]}", _introduction(source), "## Results"]
    parts += [_results(source), "## Training", _training(source), "## Use", _use(source, name)]
    shown = {key: source.settings[key] for key in _SHOWN if source.settings.get(key)}
    settings = yaml.safe_dump(mask_settings(shown), sort_keys=False, allow_unicode=True, width=100).rstrip()
    parts += ["## Settings", f"```yaml\nseed: {source.settings['seed']}\n{settings}\n```"]
    return "\n\n".join(parts) + "\n"


def _front_matter(source: CardSource) -> str:
    mode = source.settings["training"]["mode"]
    tags = (
        ["rlvr", "reinforcement-learning", source.settings["algorithm"]["name"]] if mode == "rlvr" else ["rlvr", mode]
    )
    tags += ["lora"] if source.adapter else []
    matter = {"base_model": source.hub_base} if source.hub_base else {}
    matter |= {"library_name": "peft" if source.adapter else "transformers", "pipeline_tag": "text-generation"}
    return f"---\n{yaml.safe_dump({**matter, 'tags': tags}, sort_keys=False)}---"


def _introduction(source: CardSource) -> str:
    model, adapter = source.settings["model"], source.adapter
    what = f"A LoRA adapter of rank {adapter.get('r')}" if adapter else "A language model"
    if source.hub_base:
        base = f"[{source.hub_base}](https://huggingface.co/{source.hub_base})"
    elif file := find_gguf(source.base_model):
        base = f"the quantized weights of `{file.name}`, read into float32"
    elif source.base_model or model.get("start_from"):
        base = f"a local model, `{Path(source.base_model or model['start_from']).name}`"
    else:
        base = f"a {model.get('config', {}).get('model_type', 'model')} with random weights"
    trained = _WHAT[source.settings["training"]["mode"]]
    if source.settings["training"]["mode"] == "rlvr" and source.settings["sft"]["steps"]:
        trained = f"supervised fine-tuning and {trained}"
    return f"{what}, trained from {base} by {trained} with rlvr {__version__}."


def _results(source: CardSource) -> str:
    summary = source.summary
    if summary is None:
        return "The run has not ended: these weights were not evaluated on held-out tasks."
    trained = "SFT" if summary.get("mode") == "sft" else "RLVR"
    rows = [("Metric", "Baseline", trained, "Change"), ("---",) * 4, *comparison_rows(summary)]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    said = [
        f"{summary['tasks']:,} held-out tasks, {summary['samples']} completions each, with 95 % intervals over tasks; "
        f"{describe_test(summary)}."
    ]
    if summary.get("unjudged"):
        said.append(f"{summary['unjudged']:,} completions could not be judged and are left out.")
    if summary.get("control", "none") != "none":
        said.append(f"This is a control run ({summary['control']}): training did not use the verifier's verdicts.")
    chosen = (summary.get("best") or {}).get("checkpoint") if summary.get("report") == "best" else None
    if (source.checkpoint.name != chosen) if chosen else (summary.get("weights_sha256") != source.weights_sha256):
        measured = f"best checkpoint, `{chosen}`" if chosen else "last weights"
        said.append(
            f"**These are the numbers of the run's {measured}. This model is its checkpoint "
            f"`{source.checkpoint.name}`.**"
        )
    return f"{table}\n\n{' '.join(said)}"


def _training(source: CardSource) -> str:
    settings, t, sft = source.settings, source.settings["training"], source.settings["sft"]
    rows = {
        "Environment": f"`{settings['env']['name']}`",
        "Verifier": f"`{source.reward}`" if source.reward else "the environment's own",
    }
    if sft["steps"]:
        rows["Fine-tuning"] = f"at most {sft['steps']} steps of {sft['batch_size']} demonstrations"
    if t["mode"] == "rlvr":
        rows["Algorithm"] = f"`{settings['algorithm']['name']}`"
        rows["Steps"] = (
            f"at most {t['steps']}, of {t['prompts_per_step']} prompts with {t['group_size']} completions each"
        )
        rows["Learning rate"] = f"{t['optimizer']['learning_rate']:g} ({t['optimizer']['name']})"
    rows |= {"Seed": str(settings["seed"]), "Checkpoint": f"`{source.checkpoint.name}`"}
    rows |= {"SHA-256 of the weights": f"`{source.weights_sha256}`", "rlvr": __version__}
    if source.summary and "seconds" in source.summary:
        rows["Working time"] = duration(source.summary["seconds"])
    return "\n".join(["| | |", "| --- | --- |", *(f"| {key} | {value} |" for key, value in rows.items())])


def _use(source: CardSource, name: str) -> str:
    base = source.hub_base or "<the base model>"
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        f'model = AutoModelForCausalLM.from_pretrained("{base if source.adapter else name}")',
    ]
    if source.adapter:
        lines.insert(0, "from peft import PeftModel")
        lines.append(f'model = PeftModel.from_pretrained(model, "{name}")')
    return "\n".join(["```python", *lines, "```"])


def read_reward(folder: Path, settings: Mapping[str, Any]) -> str:
    """The name of the verifier that a run trained with, from its config or else its metrics; '' if neither has it."""
    if settings["reward"].get("type"):
        return str(settings["reward"]["type"])
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    keys: set[str] = {key for line in lines[-1:] for key in json.loads(line)}
    names = {match[1] for key in keys if (match := re.fullmatch(r"rewards/([^/]+)/mean", key))}
    return ", ".join(sorted(names - set(settings["reward"].get("watch") or ())))
