"""Reward `classifier`: the score that a sequence classification model gives an answer, such as a trained reward model.

    resolve_reward("classifier", model="./reward-model")               # one output: its score
    resolve_reward("classifier", model="./tone", label="polite")       # several labels: the probability of one

The model is a folder or hub name that `AutoModelForSequenceClassification` loads, with safetensors and without the code
of its folder. It is loaded once for all rewards of the process that name it. torch is imported inside the functions.
A batch that fails is an `error` of each of its answers, and so is a score that is not finite.

Left out on purpose: adapters (merge one into its model first) and models that score pairs of answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rlvr.core.cancellation import raise_if_cancelled
from rlvr.core.hub_status import reads_cache_only
from rlvr.core.model_files import find_broken_file
from rlvr.core.registry import did_you_mean
from rlvr.core.types import Outcome, Score
from rlvr.core.weights_place import is_model
from rlvr.reward.registry import register_reward
from rlvr.reward.reward_options import check_flag, check_integer, is_number
from rlvr.reward.signatures import Case

CAUTION = "it is another model's opinion, which a policy learns to please; watch a verifiable reward too (reward.watch)"
KIND = "ForSequenceClassification"


@dataclass(frozen=True)
class ClassifierOptions:
    """The options of `classifier`; `load_classifier` checks those that depend on the model."""

    model: str
    label: str | None = None
    passed_at: float | None = None
    chat: bool = True
    max_tokens: int | None = None
    batch_size: int = 16
    device: str = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(
                f"model={self.model!r}, expected the folder or hub name of a sequence classification model"
            )
        if self.passed_at is not None and not (is_number(self.passed_at) and math.isfinite(self.passed_at)):
            raise ValueError(f"passed_at={self.passed_at!r}, expected a number")
        check_flag("chat", self.chat)
        check_integer("batch_size", self.batch_size, 1, 100_000)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|(cuda|mps|xpu)(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r}, expected auto, cpu, cuda or cuda:N")


@dataclass(frozen=True)
class LoadedClassifier:
    """A model in memory, its tokenizer, the most tokens it reads, and the id it pads with (None: it cannot pad)."""

    module: Any
    tokenizer: Any
    limit: float
    pad: int | None


def load_classifier(options: ClassifierOptions) -> LoadedClassifier:
    """The model of a reward; ValueError if there is none, or if the label does not fit it."""
    place = Path(options.model).expanduser()
    is_path = options.model.startswith((".", "/", "~")) or place.exists()
    loaded = _load(str(place.absolute()) if is_path else options.model, options.device)
    labels = _labels(loaded)
    if len(labels) == 1 and options.label is not None:
        raise ValueError(
            f"reward 'classifier': label={options.label!r}, but {options.model} has one output, its score; leave label "
            "out"
        )
    if len(labels) > 1 and options.label not in labels:
        given = "no label is given" if options.label is None else f"label={options.label!r} is unknown"
        near = did_you_mean(options.label or "", labels)
        raise ValueError(
            f"reward 'classifier': {given}{near}; {options.model} has the labels {', '.join(labels)}: name the one "
            "whose probability is the reward"
        )
    return loaded


@register_reward("classifier", batched=True, options=ClassifierOptions, caution=CAUTION, start=load_classifier)
def classifier(cases: Sequence[Case], options: ClassifierOptions) -> list[Score]:
    """The score of a sequence classification model: its one output, or the probability of `label` among several.

    The model reads the prompt and the answer as messages of its tokenizer's chat template, or, where there is none or
    with `chat=false`, as one text. What is longer than `max_tokens` or than the model's own limit is cut on the side
    that the tokenizer cuts; the reason then is `truncated`. An answer passed from `passed_at` on: by default 0 for a
    score and 0.5 for a probability. `batch_size` answers are computed at once, without a gradient. `device` is auto
    (CUDA where there is one), cpu, cuda or cuda:N.

    Parts: `tokens` that the model read, `truncated` (0 or 1).
    """
    loaded = load_classifier(options)
    rows, lengths = _encode(cases, loaded, options)
    values = _score(rows, loaded, options)
    threshold = options.passed_at
    if threshold is None:
        threshold = 0.0 if options.label is None else 0.5
    return [_verdict(*each, threshold) for each in zip(values, rows, lengths, strict=True)]


def _verdict(value: float, row: list[int], length: int, threshold: float) -> Score:
    cut = length > len(row)
    parts = {"tokens": len(row), "truncated": float(cut)}
    detail = f"the model read {len(row)} of {length} tokens" if cut else ""
    if not math.isfinite(value):
        return Score(None, Outcome.ERROR, "not_finite", parts, f"the model's output is {value}")
    outcome = Outcome.PASSED if value >= threshold else Outcome.FAILED
    return Score(value, outcome, "truncated" if cut else "" if value >= threshold else "low_score", parts, detail)


def _encode(
    cases: Sequence[Case], loaded: LoadedClassifier, options: ClassifierOptions
) -> tuple[list[list[int]], list[int]]:
    """The token ids that the model reads of each case, and how many there were before they were cut."""
    tokenizer = loaded.tokenizer
    template = options.chat and tokenizer.chat_template is not None
    disarmed = [_disarm(case.response, tokenizer) for case in cases]
    texts = [
        _render(case, response, tokenizer) if template else case.prompt + response
        for case, response in zip(cases, disarmed, strict=True)
    ]
    # A template writes the special tokens itself.
    encode = {"add_special_tokens": not template, "verbose": False}
    rows: list[list[int]] = tokenizer(texts, **encode)["input_ids"]
    lengths, most = [len(row) for row in rows], min(loaded.limit, options.max_tokens or math.inf)
    for i, row in enumerate(rows):
        if len(row) > most:
            rows[i] = tokenizer(texts[i], truncation=True, max_length=int(most), **encode)["input_ids"]
        elif not row:
            raise ValueError(
                "the prompt and the answer of a case are empty, so there is no token to judge; leave such rows out"
            )
    return rows, lengths


def _render(case: Case, response: str, tokenizer: Any) -> str:
    before = [
        {**message, "content": _disarm(message["content"], tokenizer)} if message["role"] == "assistant" else message
        for message in case.messages or [{"role": "user", "content": case.prompt}]
    ]
    return tokenizer.apply_chat_template([*before, {"role": "assistant", "content": response}], tokenize=False)


def _disarm(text: str, tokenizer: Any) -> str:
    """The text with a space in every special token it spells: a completion must not open or close turns of a chat."""
    for token in dict.fromkeys([*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()]):
        text = text.replace(token, f"{token[:1]} {token[1:]}") if len(token.strip()) > 1 else text
    return text


def _score(rows: list[list[int]], loaded: LoadedClassifier, options: ClassifierOptions) -> list[float]:
    """The model's score of each row. Rows of similar length are computed together."""
    import torch

    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    size = 1 if loaded.pad is None else options.batch_size
    values = [math.nan] * len(rows)
    for start in range(0, len(order), size):
        raise_if_cancelled()
        chosen = order[start : start + size]
        longest = len(rows[chosen[-1]])
        ids = torch.full((len(chosen), longest), loaded.pad or 0)
        mask = torch.zeros(len(chosen), longest, dtype=torch.long)
        for place, i in enumerate(chosen):
            ids[place, : len(rows[i])] = torch.tensor(rows[i])
            mask[place, : len(rows[i])] = 1
        device = loaded.module.device
        with torch.inference_mode():
            logits_BL = loaded.module(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        for i, value in zip(chosen, _values(logits_BL, loaded, options.label).tolist(), strict=True):
            values[i] = value
    return values


def _values(logits_BL: Any, loaded: LoadedClassifier, label: str | None) -> Any:
    if label is None:
        return logits_BL[:, 0]
    independent = loaded.module.config.problem_type == "multi_label_classification"
    shares = logits_BL.sigmoid() if independent else logits_BL.softmax(-1)
    return shares[:, _labels(loaded).index(label)]


def _labels(loaded: LoadedClassifier) -> list[str]:
    config = loaded.module.config
    return [str(config.id2label[i]) for i in range(config.num_labels)]


@cache
def _load(name: str, device: str) -> LoadedClassifier:
    try:
        import torch
        from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise ValueError(f"reward 'classifier' needs {error.name}: pip install 'rlvr[train]'") from error
    what = f"reward 'classifier': model={name}"
    if Path(name).is_absolute() and not is_model(Path(name)):
        found = "no config.json there" if Path(name).is_dir() else "no such folder"
        raise ValueError(f"{what}: {found}; expected a folder that `save_pretrained` of a {KIND} model wrote")
    if is_model(Path(name)) and (wrong := find_broken_file(Path(name))):
        raise ValueError(f"{what} cannot be loaded: {wrong}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"reward 'classifier': device={device}, but no CUDA device is visible; use device=cpu or auto")
    where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    has_bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would break the live display
    try:
        safe = {"trust_remote_code": False, "local_files_only": reads_cache_only(name)}
        config = AutoConfig.from_pretrained(name, **safe)
        kinds = config.architectures or ["unknown"]
        if not any(KIND in kind for kind in kinds):  # loading it would put a head of random weights on it
            raise ValueError(f"the model is a {', '.join(kinds)}, which has no classification head")
        module, report = AutoModelForSequenceClassification.from_pretrained(
            name, use_safetensors=True, output_loading_info=True, **safe
        )
        if missing := sorted(report["missing_keys"]):
            raise ValueError(f"the weights of the model lack {', '.join(missing[:3])}")
        tokenizer = AutoTokenizer.from_pretrained(name, **safe)
    except Exception as error:  # each kind of model checks its config by its own errors
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{what} cannot be loaded: {first}; expected a {KIND} model of transformers") from error
    finally:
        if has_bar:
            logging.enable_progress_bar()
    text = module.config.get_text_config()
    if text.pad_token_id is None:  # the model finds the end of a row by this id
        text.pad_token_id = tokenizer.pad_token_id
    limit = min(tokenizer.model_max_length, getattr(text, "max_position_embeddings", None) or math.inf)
    return LoadedClassifier(module.to(where).eval(), tokenizer, limit, text.pad_token_id)
