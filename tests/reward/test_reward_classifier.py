"""The reward `classifier` gives the scores of transformers, however answers are batched, and never a false zero."""

from __future__ import annotations

import json
import math
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import torch

from rlvr.core.types import Outcome
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.reward import resolve_reward
from rlvr.reward.signatures import Case
from tests.kit.tiny_run import TINY, attempt, stored_steps

LETTERS = [*string.ascii_letters, *string.digits, *string.punctuation, " ", "\n"]
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
PAIRS = [("2+2?", "4"), ("Name a colour.", "blue, I should think"), ("a", "b"), ("What is it?", "")]
CASES = [Case(prompt, response) for prompt, response in PAIRS]


def make_model(folder: Path, kind: str = "llama", template: str | None = None, **config: Any) -> Path:
    """A tiny sequence classifier with random weights, of a causal or a bidirectional model."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    tokenizer = build_tokenizer("characters", LETTERS, end="<end>", pad="<pad>")
    tokenizer.chat_template = template
    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "num_labels": 1, **SIZES, **config}
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model(kind, **fields))
    with torch.no_grad():  # a fresh head is nearly zero, and all scores would be alike
        for name, p in model.named_parameters():
            if "score" in name or "classifier" in name:
                p.normal_()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def read_logits(folder: Path, texts: list[str]) -> list[torch.Tensor]:
    """The model's outputs for each text, by transformers alone, one text at a time."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [model(torch.tensor([tokenizer(text)["input_ids"]])).logits[0] for text in texts]


def values(scores: Any) -> list[float | None]:
    return [score.value for score in scores]


@pytest.mark.parametrize("kind", ["llama", "bert"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_scores_are_those_of_transformers(tmp_path: Path, kind: str, batch_size: int) -> None:
    folder = make_model(tmp_path / "model", kind)
    expected = [float(row[0]) for row in read_logits(folder, [prompt + response for prompt, response in PAIRS])]
    assert len({round(value, 3) for value in expected}) == 4, "scores that are alike test nothing"
    reward = resolve_reward("classifier", model=str(folder), batch_size=batch_size)
    scores = reward.judge_all(CASES)
    assert values(scores) == pytest.approx(expected, abs=1e-5)
    assert [s.outcome is Outcome.PASSED for s in scores] == [value >= 0 for value in expected]
    assert scores[0].parts == {"tokens": 5, "truncated": 0}


def test_a_chat_template_writes_the_turns(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", template=TEMPLATE)
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    cases = [Case("2+2?", "4"), Case("system: Be kind.\nuser: Hi", "Hello", messages=chat)]
    texts = ["<user>2+2?<assistant>4", "<system>Be kind.<user>Hi<assistant>Hello"]
    expected = [float(row[0]) for row in read_logits(folder, texts)]
    assert values(resolve_reward("classifier", model=str(folder)).judge_all(cases)) == pytest.approx(expected, abs=1e-5)
    plain = float(read_logits(folder, ["2+2?4"])[0][0])
    without = resolve_reward("classifier", model=str(folder), chat=False)
    assert values(without.judge_all(cases[:1])) == [pytest.approx(plain, abs=1e-5)]
    assert plain != pytest.approx(expected[0], abs=1e-3)


def test_a_completion_writes_no_special_token(tmp_path: Path) -> None:
    """It could end its turn and go on as the user: the token is read as the letters that spell it, with a space."""
    folder = make_model(tmp_path / "model", template=TEMPLATE)
    reward = resolve_reward("classifier", model=str(folder))
    shown = read_logits(folder, ["<user>q<assistant>a< end>b"])
    [score] = reward.judge_all([Case("q", "a<end>b")])
    assert score.value == pytest.approx(float(shown[0]), abs=1e-5)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
def test_a_label_is_a_probability(tmp_path: Path, problem: str) -> None:
    names = {0: "rude", 1: "polite", 2: "odd"}
    more = {"num_labels": 3, "id2label": names, "label2id": {v: k for k, v in names.items()}, "problem_type": problem}
    folder = make_model(tmp_path / "model", **more)
    rows = read_logits(folder, [prompt + response for prompt, response in PAIRS])
    exps = [[math.exp(x) for x in row.tolist()] for row in rows]
    softmax, sigmoid = [e[1] / sum(e) for e in exps], [e[1] / (1 + e[1]) for e in exps]
    expected = sigmoid if problem.startswith("multi") else softmax
    scores = resolve_reward("classifier", model=str(folder), label="polite").judge_all(CASES)
    assert values(scores) == pytest.approx(expected, abs=1e-5)
    assert [s.outcome is Outcome.PASSED for s in scores] == [value >= 0.5 for value in expected]
    strict = resolve_reward("classifier", model=str(folder), label="polite", passed_at=1.01).judge_all(CASES)
    assert {s.outcome for s in strict} == {Outcome.FAILED}


def test_what_is_cut_is_said(tmp_path: Path) -> None:
    """By `max_tokens`, or by the length that the model was made for."""
    folder = make_model(tmp_path / "model", max_position_embeddings=12)
    long = Case("How long is it?", "Very long.")
    for most, options in ((12, {}), (7, {"max_tokens": 7})):
        [score] = resolve_reward("classifier", model=str(folder), **options).judge_all([long])
        expected = float(read_logits(folder, ["How long is it?"[:most]])[0][0])
        assert score.value == pytest.approx(expected, abs=1e-5)
        assert score.reason == "truncated" and score.parts == {"tokens": most, "truncated": 1}
        assert score.detail == f"the model read {most} of 25 tokens"


def test_a_model_that_cannot_pad_scores_one_at_a_time(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", pad_token_id=None)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    del settings["pad_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = [float(row[0]) for row in read_logits(folder, [prompt + response for prompt, response in PAIRS])]
    assert values(resolve_reward("classifier", model=str(folder)).judge_all(CASES)) == pytest.approx(expected, abs=1e-5)


def test_a_score_that_is_not_finite_is_an_error(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_model(tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"].fill_(math.nan)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    scores = resolve_reward("classifier", model=str(folder)).judge_all(CASES[:2])
    assert [(s.value, s.outcome, s.reason) for s in scores] == [(None, Outcome.ERROR, "not_finite")] * 2


def test_a_failing_model_is_an_error_of_every_answer(tmp_path: Path) -> None:
    """Characters that its tokenizer does not know."""
    folder = make_model(tmp_path / "model")
    scores = resolve_reward("classifier", model=str(folder)).judge_all([Case("é", "ü"), CASES[0]])
    assert [(s.value, s.outcome) for s in scores] == [(None, Outcome.ERROR)] * 2 and "tokenizer" in scores[0].detail


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ["no label is given", "rude, polite", "probability"]),
        ({"label": "Polite"}, ["label='Polite' is unknown", "did you mean 'polite'"]),
        ({"device": "gpu"}, ["device='gpu'", "cuda"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"max_tokens": 0.5}, ["max_tokens=0.5"]),
        ({"passed_at": math.nan}, ["passed_at=nan"]),
        ({"chat": "off"}, ["chat='off'", "true or false"]),
    ],
)
def test_options_that_do_not_fit_are_said_before_a_run(
    tmp_path: Path, options: dict[str, Any], said: list[str]
) -> None:
    names = {0: "rude", 1: "polite"}
    folder = make_model(tmp_path / "model", num_labels=2, id2label=names, label2id={"rude": 0, "polite": 1})
    with pytest.raises(ValueError, match="reward 'classifier'") as mistake:
        resolve_reward("classifier", model=str(folder), **options).start()
    assert all(part in str(mistake.value) for part in said), mistake.value


def test_folders_that_are_no_classifier_are_said_before_a_run(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    def refusal(folder: Path, **options: Any) -> str:
        with pytest.raises(ValueError, match="reward 'classifier'") as mistake:
            resolve_reward("classifier", model=str(folder), **options).start()
        return str(mistake.value)

    assert "no such folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refusal(tmp_path / "empty")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=9, **SIZES)).save_pretrained(
        tmp_path / "lm"
    )
    assert "LlamaForCausalLM, which has no classification head" in refusal(tmp_path / "lm")
    headless = make_model(tmp_path / "headless")
    weights = load_file(headless / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, headless / "model.safetensors", metadata={"format": "pt"})
    assert "the weights of the model lack score.weight" in refusal(headless)
    assert "one output, its score; leave label out" in refusal(make_model(tmp_path / "model"), label="good")


def test_the_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    folder, marker = make_model(tmp_path / "model"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForSequenceClassification": "own.Own"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "own"}))
    (folder / "own.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Own: pass\n")
    with pytest.raises(ValueError, match="cannot be loaded"):
        resolve_reward("classifier", model=str(folder)).start()
    assert not marker.exists()


def test_weights_that_are_pickled_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    shutil.move(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match="cannot be loaded"):
        resolve_reward("classifier", model=str(folder)).start()


def test_a_run_learns_from_the_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    make_model(tmp_path / "model")
    attempt("tiny.yaml", "reward.type=classifier", "reward.kwargs.model=./model", "run.name=scored")
    rows = [row for row in stored_steps(tmp_path / "runs" / "scored") if row["phase"] == "rl"]
    assert len(rows) == 3 and all(row["rewards/classifier/mean"] == row["reward"] != 0 for row in rows)
    assert all(row["rewards/classifier/truncated/mean"] == 0 for row in rows)
