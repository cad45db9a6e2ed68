"""DPO from pairs and KTO from labels that the data bring along: what is read, learned, skipped and refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.optimizers import OptimizerSection
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Task
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.runs.run_tasks import fit_prompts
from rlvr.training.given_completions import check_contents, check_lengths, read_completions
from rlvr.training.schedules.sync import Synchronous
from tests.kit.table_trainer import Letters, make_trainer, table
from tests.kit.tiny_run import attempt, stored_steps


class Pairs(Letters):
    """Tasks that prefer `a` to `b`; every third brings the same word twice."""

    def train(self, seed: int, index: int, level: str) -> Task:
        return Task(f"{index}", "say", {"answer": "a", "chosen": "a", "rejected": "a" if index % 3 == 2 else "b"})


def learn_from_given(
    algorithm: str, source: Letters, group_size: int
) -> tuple[dict[str, Any], dict[str, Any], Any, Any]:
    """The metrics of the first and the last of 20 steps, the first step's batch, and the client."""
    trainer = make_trainer(
        algorithm=algorithm, source=source, group_size=group_size, completions="given", steps=20,
        optimizer=OptimizerSection(learning_rate=0.1), sampling={"max_tokens": 4},
    )  # fmt: skip
    client: Any = trainer.parts.client
    trainer.reference = client.save_weights_and_get_sampling_client()
    rows = [Synchronous(trainer).learn(step) for step in range(20)]
    return rows[0][0], rows[-1][0], rows[0][1].batch, client


def test_a_policy_learns_to_prefer_and_equal_pairs_are_counted() -> None:
    """Six pairs a step, two of them equal: the preferred word's log-prob rises above the other's."""
    first, last, batch, client = learn_from_given("dpo", Pairs(), group_size=2)
    assert (first["loss/pairs"], first["equal_pairs"]) == (4.0, 2.0)
    assert first["frac_groups_with_signal"] == pytest.approx(4 / 6)
    of_data = {"reward", "env/all/correct", "entropy", "optim/entropy", "verifier/error_rate"}
    assert not of_data & set(first)
    assert first["loss/margin"] == pytest.approx(0.0, abs=1e-5) and last["loss/margin"] > 1.5
    assert last["loss/accuracy"] == 1.0 and last["loss"] < first["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert first["sampling/sampling_logp_difference/max"] < 1e-6
    ids, after = client.get_tokenizer().ids, client.policy.logprobs()
    assert after[ids["a"]] - after[ids["b"]] > 1.5
    pair = batch[:2]
    assert [(t.response, t.response_tokens[-1], t.reward) for t in pair] == [("a", 0, 1.0), ("b", 0, 0.0)]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({"rejected": "b"}, r"task 't' has None as its 'chosen', expected a text"),
        ({"chosen": "a", "rejected": 3}, r"has 3 as its 'rejected'"),
        ({"chosen": "a", "rejected": []}, r"has \[\] as its 'rejected'"),
    ],
)
def test_a_task_without_a_pair_is_named(meta: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_completions(Task("t", "p", meta), is_paired=True)


@pytest.mark.parametrize("label", [None, 1, "true"])
def test_a_task_without_a_label_is_named(label: Any) -> None:
    with pytest.raises(ValueError, match=r"task 't' has .* as its 'label', expected true or false; give the rows the"):
        read_completions(Task("t", "p", {"completion": "a", "label": label}), is_paired=False)
    with pytest.raises(ValueError, match="None as its 'completion'"):
        read_completions(Task("t", "p", {"label": True}), is_paired=False)


def test_a_chat_counts_by_its_last_message() -> None:
    chat = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "yes"}]
    pair = Task("t", "p", {"chosen": chat, "rejected": "no"})
    assert read_completions(pair, is_paired=True) == [("yes", True), ("no", False)]
    labelled = Task("t", "p", {"completion": chat, "label": False})
    assert read_completions(labelled, is_paired=False) == [("yes", False)]


def test_a_completion_beyond_the_context_is_named_with_its_tokens() -> None:
    """Three words, two words and the end token are six tokens; the task before them has three."""
    words = build_tokenizer("words", ["a", "b"], end="<end>", pad="<pad>")
    tasks = [Task("short", "a", {"completion": "b", "label": True})]
    tasks += [Task("t", "a a a", {"completion": "b b", "label": False})]
    check_lengths(tasks, words, None, 6, is_paired=False)
    check_lengths(tasks, words, 2, 5, is_paired=False)  # a prompt is cut to two tokens
    with pytest.raises(ValueError, match=r"task 't' has 6 tokens, 3 of its prompt and 3 .* context of 5; shorten"):
        check_lengths(tasks, words, None, 5, is_paired=False)


def make_pairs(*pairs: tuple[str, str]) -> list[Task]:
    return [Task(f"row{i}", "p", {"chosen": chosen, "rejected": other}) for i, (chosen, other) in enumerate(pairs)]


def test_equal_pairs_are_refused_if_all_are_and_counted_if_some_are() -> None:
    assert check_contents(make_pairs(("a", "b"), ("c", "d")), is_paired=True) == ""
    said = check_contents(make_pairs(("a", "b"), ("c", "c"), ("d", "d")), is_paired=True)
    assert "the same in 2 of 3 tasks, for example 'row1'" in said and "leave them out" in said
    with pytest.raises(ValueError, match=r"the same in each of the 2 tasks, for example 'row0'.*give pairs that"):
        check_contents(make_pairs(("a", "a"), ("b", "b")), is_paired=True)


def test_labels_of_one_kind_are_warned_of_by_the_one_that_is_missing() -> None:
    both = [Task(f"row{label}", "p", {"completion": "a", "label": label}) for label in (True, False)]
    assert check_contents(both, is_paired=False) == ""
    only_true, only_false = (check_contents([task] * 3, is_paired=False) for task in both)
    assert "no task has the label false, all 3 have true" in only_true and "training.mode=sft" in only_true
    assert "no task has the label true, all 3 have false" in only_false and "learning_rate" in only_false


@pytest.mark.parametrize("label", [True, False])
def test_kto_learns_from_one_label_alone(label: bool) -> None:
    """As in the paper's loss: preferred completions grow likelier, others less likely."""

    class OneKind(Letters):
        def train(self, seed: int, index: int, level: str) -> Task:
            return Task(f"{index}", "say", {"answer": "a", "completion": "ab"[index % 2], "label": label})

    first, last, _, client = learn_from_given("kto", OneKind(), group_size=1)
    assert first["frac_groups_with_signal"] == 1.0 == last["updates"]
    ids, change = client.get_tokenizer().ids, client.policy.logprobs() - table().logprobs()
    likelier = change[ids["<end>"]] + (change[ids["a"]] + change[ids["b"]]) / 2  # the mean of both completions
    assert likelier > 0.5 if label else likelier < -0.5


class Labels(Letters):
    """Tasks that bring `a` as a preferred completion, every third `b` as another one."""

    def train(self, seed: int, index: int, level: str) -> Task:
        is_preferred = index % 3 != 2
        return Task(
            f"{index}", "say", {"answer": "a", "completion": "a" if is_preferred else "b", "label": is_preferred}
        )


def test_kto_learns_from_labels() -> None:
    """Four preferred completions and two others a step: the log-prob of the preferred word rises above the other's."""
    first, last, batch, client = learn_from_given("kto", Labels(), group_size=1)
    assert first["frac_groups_with_signal"] == 1.0 and first["loss"] == pytest.approx(0.5)
    assert last["loss"] < 0.47 and first["loss/divergence"] == 0.0
    ids, after = client.get_tokenizer().ids, client.policy.logprobs()
    assert after[ids["a"]] - after[ids["b"]] > 1.5
    assert [(t.response, t.reward) for t in batch[1:3]] == [("a", 1.0), ("b", 0.0)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "grpo", "group_size": 2}, r"algorithm.name=grpo learns from completions of the policy's own"),
        (
            {"algorithm": "kto", "group_size": 2},
            r"training.group_size=2, and for kto a task brings 1 \(use group_size=1",
        ),
        ({"algorithm": "dpo", "group_size": 1}, r"training.group_size=1, and .* a task brings 2 \(use group_size=2"),
        ({"algorithm": "dpo"}, r"training.group_size=4, and for dpo a task brings 2 \(use group_size=2"),
        ({"algorithm": "dpo", "group_size": 2, "max_steps_off_policy": 1}, "samples ahead, and nothing is sampled"),
        ({"algorithm": "dpo", "group_size": 2, "temperature_end": 2.0}, "temperature_end changes how completions"),
        ({"algorithm": "dpo", "group_size": 2, "completions": "made"}, "expected sampled or given"),
        (
            {"algorithm": "kto", "group_size": 1, "prompts_per_step": 4, "num_substeps": 4},
            r"an optimizer step has 1 \(prompts_per_step=4 / num_substeps=4; use at least 2",
        ),
        (
            {"algorithm": "dpo", "cells": {"overlong_buffer": 2}, "group_size": 2},
            r"algorithm.overlong_buffer=2 lowers the reward .* \(leave it out",
        ),
    ],
)
def test_what_cannot_learn_from_given_pairs_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(**{"completions": "given", **options})


CONFIG = """
seed: 3
env: {name: dataset, kwargs: {path: pairs.jsonl, answer_field: chosen, heldout_fraction: 0.2}}
model:
  tokenizer: pieces.json
  device: cpu
  config: {model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2,
           num_key_value_heads: 1, head_dim: 8, max_position_embeddings: 64}
algorithm: {name: dpo}
rollout: {max_tokens: 6}
training: {steps: 6, prompts_per_step: 4, group_size: 2, completions: given, optimizer: {learning_rate: 0.01}}
evaluation: {tasks: 4, samples: 1}
run: {checkpoint_every: 1}
engine: {threads: 1}
"""


def test_a_run_checks_that_its_completions_fit_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kit.tinker_model import tokenizer

    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}?", "chosen": " two" + " three" * 40, "rejected": " acht"} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "pairs.yaml").write_text(CONFIG)
    config, pieces = build_config(load(None, "pairs.yaml", [])), tokenizer()
    pieces.model_max_length = 4096
    fit_prompts(config, assemble(config).source, pieces, print)
    pieces.model_max_length = 40
    with pytest.raises(ValueError, match=r"task .* tokens, .* more than the model's context of 40"):
        fit_prompts(config, assemble(config).source, pieces, print)


@pytest.mark.slow
def test_a_run_on_rows_of_pairs_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chosen` and `rejected` columns of a file; the reference is read back after a kill."""
    from tests.kit.tinker_model import tokenizer

    monkeypatch.chdir(tmp_path)
    words = [("two", "drei"), ("four", "fuenf"), ("six", "acht")]
    rows = [{"prompt": f"{i} {c}?", "chosen": f" {c}", "rejected": f" {r}"} for i in range(10) for c, r in words]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer().save_pretrained(tmp_path / "pieces.json")
    (tmp_path / "pairs.yaml").write_text(CONFIG)
    attempt("pairs.yaml", "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("pairs.yaml", "run.name=killed", killed_at=4)
    attempt("pairs.yaml", "run.name=killed")
    found = stored_steps(tmp_path / "runs" / "whole")
    assert stored_steps(tmp_path / "runs" / "killed") == found
    margins = [row["loss/margin"] for row in found if row["phase"] == "rl"]
    assert margins[0] == pytest.approx(0.0, abs=1e-4) and margins[-1] > 0.1
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": r["prompt"], "chosen": "a"}) + "\n" for r in rows)
    )
    config = build_config(load(None, "pairs.yaml", []))
    with pytest.raises(ValueError, match="give the rows the columns 'chosen' and 'rejected'"):
        plan(assemble(config))


@pytest.mark.slow
def test_a_run_on_labelled_rows_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's columns `prompt`, `completion` and `label`; z is estimated anew at every step."""
    from tests.kit.tinker_model import tokenizer

    monkeypatch.chdir(tmp_path)
    rows = [
        {"prompt": f"{i} {word}?", "completion": f" {word if i % 2 else 'acht'}", "label": bool(i % 2)}
        for i in range(10)
        for word in ("two", "four", "six")
    ]
    (tmp_path / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer().save_pretrained(tmp_path / "pieces.json")
    text = CONFIG.replace("path: pairs.jsonl, answer_field: chosen,", "path: labels.jsonl,")
    (tmp_path / "labels.yaml").write_text(
        text.replace("name: dpo", "name: kto").replace("group_size: 2", "group_size: 1")
    )
    attempt("labels.yaml", "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("labels.yaml", "run.name=killed", killed_at=4)
    attempt("labels.yaml", "run.name=killed")
    found = stored_steps(tmp_path / "runs" / "whole")
    assert stored_steps(tmp_path / "runs" / "killed") == found
    divergences = [row["loss/divergence"] for row in found if row["phase"] == "rl"]
    assert divergences[0] == pytest.approx(0.0, abs=1e-4) and len(set(divergences)) > 1
