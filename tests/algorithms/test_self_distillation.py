"""Self-distillation: its advantages by hand, its gradient against the divergence and against TRL, what it refuses."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.advantages import RunningBaseline
from rlvr.algorithms.terms.self_distillation import INFORMATION, SelfDistillation
from rlvr.algorithms.terms.term import Preparation
from rlvr.algorithms.update import Passes, UpdateInputs, update
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.core import rng
from rlvr.core.messages import AdamParams
from rlvr.core.protocols import TaskSource
from rlvr.core.types import Outcome, Score, Task, Trajectory
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.envs.prompt import PromptEnv
from rlvr.envs.registry import register_environment
from rlvr.training.compatibility import check_temperatures
from rlvr.training.informed_prompts import InformedPrompts
from tests.kit.rounding import assert_gradients_close
from tests.kit.table_trainer import Letters, make_trainer
from tests.kit.tiny import END_ID, gradients
from tests.kit.tiny_run import TINY, RunKilled, attempt, stored_steps
from tests.kit.trl_losses import difference, gradients_of, pad, perturb, plain_logprobs, remember

WORDS = {"template": "{information} {prompt}", "sibling_template": "{text}", "answer_template": "= {text}"}


def spelled(**options: Any) -> SelfDistillation:
    """The term with templates that a vocabulary of words can write."""
    return SelfDistillation(**{"coef": 1.0, **WORDS, "feedback_template": "- {text}", **options})


def group(
    *completions: tuple[list[int], float], name: str = "g", prompt: tuple[int, ...] = (3, 10, 4), **more: Any
) -> list[Trajectory]:
    """A group of "3 + 4": (tokens, reward) of each completion, with log-probs of -1."""
    text = " ".join(str(t) if t < 10 else "+" for t in prompt)
    task = Task(name, text, {"answer": "7"})
    return [
        Trajectory(
            text, list(prompt), "", tokens, [-1.0] * len(tokens), reward=reward, group_id=name,
            rollout_id=f"{name}.{i}", task=task, **more,
        )
        for i, (tokens, reward) in enumerate(completions)
    ]  # fmt: skip


def prepare(tokenizer: Any, asked: list[list[int]], **more: Any) -> Preparation:
    """A trainer whose log-prob of every token is -0.25, as a table over the prompts that it is asked for."""

    def compute(rows: Sequence[Trajectory]) -> list[list[float]]:
        asked.extend(t.prompt_tokens for t in rows)
        return [[-0.25] * t.num_response_tokens for t in rows]

    return Preparation(compute_logprobs=compute, prompts=InformedPrompts(tokenizer), **more)


def adjust(term: SelfDistillation, batch: list[Trajectory], prepared: Preparation) -> None:
    term.prepare(batch, prepared)
    term.adjust(batch, prepared)


def test_advantages_by_hand(tokenizer: Any) -> None:
    """Policy -1, teacher -0.25: the advantage gains 0.75 x coefficient, where a sibling passed and nowhere else."""
    right, wrong = [7, END_ID], [6, END_ID]
    batch = [*group((wrong, 0.0), (right, 1.0), (wrong, 0.0)), *group((wrong, 0.0), (wrong, 0.0), name="h")]
    for t in batch:
        t.advantage, t.policy_fingerprint = 0.5, "now"
    asked: list[list[int]] = []
    term = spelled(coef=2.0)
    adjust(term, batch, prepare(tokenizer, asked, fingerprint="now"))
    assert asked == [[7, 3, 10, 4]] * 2, "the first passing completion, before the prompt of text"
    assert [t.token_advantages for t in batch] == [[2.0, 2.0], [], [2.0, 2.0], [], []]
    measured = term.measure_batch(batch)
    assert measured == {"teacher/kl": pytest.approx(-0.75), "teacher/share": 2 / 5, "teacher/groups": 1 / 2}
    adjust(term, batch[3:], prepare(tokenizer, asked, fingerprint="now"))
    assert len(asked) == 2 and term.measure_batch(batch[3:])["teacher/share"] == 0.0


def test_a_policy_that_did_not_sample_scores_its_completions_itself(tokenizer: Any) -> None:
    """Stale completions: log policy is the trainer's -0.25 and not the sampler's -1, so nothing is to be learned."""
    batch, asked = group(([6], 0.0), ([7], 1.0)), list[list[int]]()
    batch[0].policy_fingerprint = "earlier"
    adjust(spelled(), batch, prepare(tokenizer, asked, fingerprint="now"))
    assert asked == [[7, 3, 10, 4], [3, 10, 4]] and batch[0].token_advantages == [0.0]


@pytest.mark.parametrize("information", INFORMATION)
def test_what_the_teacher_reads(information: str, tokenizer: Any) -> None:
    """Right, wrong, wrong: feedback is for the wrong ones alone, the answer for all, a sibling never oneself."""
    batch = group(([7], 1.0), ([6], 0.0), ([5], 0.0))
    for t in batch:
        t.policy_fingerprint = "now"
        t.scores = {"exact": Score(t.reward, Outcome.PASSED if t.reward else Outcome.FAILED, "-")}
    asked: list[list[int]] = []
    term = spelled(information=information, feedback_template="* {text}")
    adjust(term, batch, prepare(tokenizer, asked, fingerprint="now"))
    sibling, feedback, answer = (kind in information for kind in ("sibling", "feedback", "answer"))
    for_wrong = [*[7] * sibling, *[12, 11] * feedback, *[13, 7] * answer, 3, 10, 4]
    assert asked == [*[[13, 7, 3, 10, 4]] * answer, for_wrong, for_wrong]


def test_feedback_is_what_the_runs_verifier_said_in_words() -> None:
    class Tokenizer:
        all_special_tokens = ("<end>",)

    t = group(([6], 0.0))[0]
    t.scores = {
        "math": Score(0.0, Outcome.FAILED, "wrong_value", detail="got 6 <end>\nexpected 7"),
        "style": Score(0.0, Outcome.FAILED, "too_long"),
    }
    assert InformedPrompts(Tokenizer(), "math").read_feedback(t) == "wrong value: got 6 expected 7"
    assert InformedPrompts(Tokenizer()).read_feedback(t) == "wrong value: got 6 expected 7\ntoo long"
    t.scores = {"math": Score(None, Outcome.ERROR, "sandbox", detail="a traceback")}
    assert InformedPrompts(Tokenizer(), "math").read_feedback(t) == ""


def test_a_chat_holds_the_information_in_its_last_message_and_no_special_tokens_of_a_completion() -> None:
    class Chat:
        eos_token_id, all_special_tokens, chat_template = 0, ("<|end|>",), "yes"
        seen: Any = None

        def apply_chat_template(self, messages: Any, **arguments: Any) -> list[int]:
            self.seen = messages
            return [1, 2, 3]

    chat, task = Chat(), Task("1", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4?"}])
    prompts = InformedPrompts(chat)
    assert prompts.encode(task, None, "It is {prompt}.", 1) == [1, 2, 3]
    assert chat.seen[0] == task.prompt[0]
    assert chat.seen[1]["content"].startswith("3 + 4?\n\nIt is {prompt}.\n\n"), "places in a text stay as they are"
    t = replace(group(([6], 0.0))[0], answer="<think>5 or 6?</think> 7<|end|>")
    assert prompts.read_completion(t) == "7"


def test_a_prompt_without_room_in_the_context_has_no_teacher(tokenizer: Any) -> None:
    short, batch, asked = copy.copy(tokenizer), group(([6, 6], 0.0), ([7], 1.0)), list[list[int]]()
    short.model_max_length = 5  # 1 + 3 of the teacher's prompt, 2 of the completion
    adjust(spelled(), batch, prepare(short, asked))
    assert asked == [] and batch[0].token_advantages == []
    short.model_max_length = 6
    adjust(spelled(), batch, prepare(short, asked))
    assert asked[0] == [7, 3, 10, 4]


def rollouts() -> list[Trajectory]:
    """Groups of four, one of them without a completion that passes; the completions differ in length."""
    return [
        *group(([1, 10, 2, END_ID], 1.0), ([7, END_ID], 1.0), ([12, 12, 5, 0, 0], 0.0), ([END_ID], 0.0)),
        *group(
            ([5, END_ID], 0.0), ([6, END_ID], 0.0), ([2, 2, 2, END_ID], 0.0), ([9], 0.0), name="h", prompt=(1, 10, 2)
        ),
        *group(
            ([8, 11], 0.0), ([8, 11], 0.0), ([4, END_ID], 0.0), ([5, 13, 5, END_ID], 1.0), name="i", prompt=(2, 10, 3)
        ),
    ]


def first_gradient(trainer: Any, batch: list[Trajectory], **options: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    spec = replace(resolve_algorithm("sdpo"), terms=(spelled(**options),))
    update(
        trainer, spec, batch, lambda n: AdamParams(), Passes(),
        UpdateInputs(RunningBaseline(), 5, prompts=InformedPrompts(trainer.get_tokenizer())),
        check=lambda _: found.update(gradients(trainer)),
    )  # fmt: skip
    return found


def test_the_expected_gradient_is_that_of_the_divergence(client: Callable[..., Any]) -> None:
    """Each token of the vocabulary as often as the policy samples it: d KL(policy || sg teacher), of one token."""
    trainer = client("qwen3")
    module = copy.deepcopy(trainer._engine.model.module)

    def next_token(prompt: list[int]) -> torch.Tensor:
        return module(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].float().log_softmax(-1)

    log_p = next_token([3, 10, 4])
    with torch.no_grad():
        log_teacher = next_token([7, 3, 10, 4])
    (log_p.exp() * (log_p - log_teacher)).sum().backward()
    expected = gradients_of(module)
    found = {name: torch.zeros_like(g) for name, g in expected.items()}
    for token, logprob in enumerate(log_p.tolist()):
        batch = group(([token], 0.0), ([7], 1.0))
        for t in batch:
            t.logprobs = [log_p[t.response_tokens[0]].item()]
        gradient = first_gradient(client("qwen3", name=f"p{token}"), batch)
        for name, g in gradient.items():  # the mean of two completions, one of which has no teacher
            found[name] += 2 * math.exp(logprob) * g
    assert_gradients_close(found, expected)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: pip install trl")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("stale", [False, True])
def test_the_gradient_is_that_of_trl(
    stale: bool, client: Callable[..., Any], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's SDPOTrainer on the same completions: its choice of siblings, its teacher's prompts and its loss."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl.experimental.sdpo import SDPOConfig, SDPOTrainer

    trainer = client("qwen3")
    module = copy.deepcopy(trainer._engine.model.module)
    batch = rollouts()
    remember(perturb(module, 0.1) if stale else module, batch, 1.0)

    class Given(SDPOTrainer):
        def _generate(self, prompt_ids: Any) -> Any:
            return [t.prompt_tokens for t in batch], [t.response_tokens for t in batch]

    config = SDPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=len(batch), num_generations=4, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], disable_tqdm=True, teacher_model_kind="live", temperature=1.0,
        max_completion_length=5, reprompt_template="{solution}{prompt}",
        solution_template="{successful_previous_attempt} ", dont_reprompt_on_self_success=True,
    )  # fmt: skip
    theirs = Given(
        module, lambda prompts, **_: [t.reward for t in batch], args=config, processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": t.prompt} for t in batch]),
    )  # fmt: skip
    theirs.current_gradient_accumulation_steps = 1
    theirs.model.train()  # no tiny model has dropout
    inputs = theirs._prepare_training_batch([{"prompt": t.prompt} for t in batch])
    assert inputs["self_distillation_mask"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0]
    inputs["old_per_token_logps"] = pad(batch)["old_per_token_logps"]
    if stale:
        ratios = torch.exp(plain_logprobs(module, batch, 1.0) - inputs["old_per_token_logps"])
        assert ratios.max() > 2 > ratios.min(), "the bound on the ratio is reached"
    theirs.compute_loss(theirs.model, inputs).backward()
    expected = gradients_of(theirs.model)
    whole, worst = difference(first_gradient(trainer, batch), expected)
    assert whole <= 1e-5 and worst <= 1e-5
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3


def test_the_initial_weights_teach_at_the_temperature_of_sampling(client: Callable[..., Any], tokenizer: Any) -> None:
    trainer, batch = client("qwen3"), group(([6, END_ID], 0.0), ([7, END_ID], 1.0))
    module = trainer._engine.model.module
    expected = plain_logprobs(module, [replace(batch[0], prompt_tokens=[7, 3, 10, 4], attention_mask=[])], 0.5)[0]
    spec = replace(resolve_algorithm("sdpo"), terms=(spelled(weights="initial"),))
    assert spec.needs_reference
    update(
        trainer, spec, batch, lambda n: AdamParams(), Passes(),
        UpdateInputs(
            RunningBaseline(), 5, 0.5, reference=trainer.create_sampling_client(), prompts=InformedPrompts(tokenizer)
        ),
    )  # fmt: skip
    assert batch[0].teacher_logprobs == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"information": "siblings"}, r"self_distillation.information='siblings' is unknown .did you mean 'sibling'"),
        ({"template": "{prompt}"}, r"self_distillation.template='{prompt}' lacks {information}; add it"),
        ({"sibling_template": "look"}, r"self_distillation.sibling_template='look' lacks {text}; add it"),
        ({"coef": -1.0}, r"algorithm.self_distillation_coef=-1.0, expected at least 0"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SelfDistillation(**{"coef": 1.0, **options})


class Turns(Letters):
    max_turns = 3


class TwoAnswers(Letters):
    def env(self, task: Task, tokenizer: Any) -> Any:
        return object()


def test_what_cannot_work_is_refused(tokenizer: Any) -> None:
    sdpo = {"algorithm": "sdpo", "cells": {f"terms.self_distillation.{key}": value for key, value in WORDS.items()}}
    make_trainer(**sdpo)
    answer = {**sdpo["cells"], "terms.self_distillation.information": "answer"}  # type: ignore[dict-item]
    feedback = {**sdpo["cells"], "terms.self_distillation.information": "feedback"}  # type: ignore[dict-item]
    for settings, message in (
        ({"source": TwoAnswers()}, r"self_distillation_coef: the episodes of this environment are not one prompt"),
        ({"group_size": 1}, r"group_size=1 has no signal with algorithm.self_distillation_coef=1, which compares 2"),
        ({"cells": answer, "control": "random_reward"}, r"training.control has no effect"),
        ({"cells": feedback, "control": "random_reward"}, r"control with .*would learn what the verifier says"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(**{**sdpo, **settings})
    t = make_trainer(**{**sdpo, "control": "random_reward"})
    narrow, params = (
        replace(t.parts.client.capabilities, scores_at_temperature=False),
        replace(t.parts.params, temperature=0.5),
    )
    with pytest.raises(ValueError, match=r"temperature=0.5 with algorithm.self_distillation_coef=1 .*client=mock"):
        check_temperatures(t.parts.algorithm, params, t.options, narrow)
    term = spelled()
    with pytest.raises(ValueError, match=r"have up to 3 turns, and the teacher reads one prompt"):
        term.check_turns(Turns.max_turns)
    with pytest.raises(ValueError, match=r"has several turns"):
        adjust(term, group(([7, 7], 1.0), ([7], 1.0), action_mask=[]) + group(([7, 7], 1.0), turn_starts=[0, 1]),
               prepare(tokenizer, []))  # fmt: skip
    with pytest.raises(ValueError, match=r"without prompts for the teacher: give UpdateInputs\(prompts="):
        update(
            MockTrainingClient(TablePolicy(["a"])), resolve_algorithm("sdpo"), group(([0], 1.0)),
            lambda n: AdamParams(1.0), Passes(), UpdateInputs(RunningBaseline(), 1),
        )  # fmt: skip
    with pytest.raises(ValueError, match=r"algorithm.self_distillation_coef=1 with algorithm.teacher_coef=1: .*one"):
        resolve_algorithm("distillation", self_distillation_coef=1.0)
    assert not resolve_algorithm("grpo", self_distillation_coef=0.5).drop_equal_groups
    with pytest.raises(ValueError, match=r"self_distillation_coef compares with the policy before the first"):
        make_trainer(**{**sdpo, "num_minibatches": 2, "num_substeps": 2, "prompts_per_step": 8})


def test_words_that_a_vocabulary_lacks_are_named_with_the_key() -> None:
    words = build_tokenizer("words", ["a", "b"], end="<end>", pad="<pad>")
    with pytest.raises(ValueError, match=r"algorithm.terms.self_distillation.template and .*answer_template: .*cannot"):
        spelled(information="answer").check_prompts(InformedPrompts(words), Task("1", "a b"))


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both teachers, with completions of earlier weights: the policy as it is now, and as RL began."""
    monkeypatch.chdir(tmp_path)
    section = {"self_distillation": {"template": "{information} {prompt}", "sibling_template": "{text}"}}
    (tmp_path / "tiny.yaml").write_text(f"{TINY}algorithm: {{name: sdpo, terms: {json.dumps(section)}}}\n")
    words = ["sft.steps=60", "sft.batch_size=32", "sft.optimizer.learning_rate=0.01", "training.steps=6"]
    stale = ["training.max_steps_off_policy=1", "training.optimizer.learning_rate=0.003"]
    for weights in ("current", "initial"):
        own = [*words, *stale, f"algorithm.terms.self_distillation.weights={weights}"]
        attempt("tiny.yaml", *own, f"run.name={weights}")
        with pytest.raises(RunKilled):
            attempt("tiny.yaml", *own, f"run.name=killed-{weights}", killed_at=3)
        attempt("tiny.yaml", *own, f"run.name=killed-{weights}")
        rows = stored_steps(tmp_path / "runs" / weights)
        assert stored_steps(tmp_path / "runs" / f"killed-{weights}") == rows
        taught = [row for row in rows if row["phase"] == "rl" and row["teacher/share"]]
        assert taught and all(row["teacher/kl"] for row in taught)


class Capitals(TaskSource):
    """Each of six countries has a capital. Fine-tuning guesses it, and repeats it where the prompt says it first."""

    levels, reward, end_word = ("asked", "told"), "exact_match", "<end>"
    countries, capitals = [*"uvwxyz"], [*"abcdef"]

    @property
    def vocabulary(self) -> list[str]:
        return [*self.countries, *self.capitals, "<end>", "<pad>"]

    def make(self, name: str, number: int, level: str) -> Task:
        country, capital = self.countries[number % 6], self.capitals[5 * number % 6]
        prompt = f"{capital} {country}" if level == "told" else country
        return Task(f"{name}{number}{level}", prompt, {"answer": capital}, level)

    def train(self, seed: int, index: int, level: str) -> Task:
        return self.make("train", index, level)

    def heldout(self, count: int | None) -> list[Task]:
        return [self.make("held", number, "asked") for number in range(6)][:count]

    def env(self, task: Task, tokenizer: Any) -> PromptEnv:
        return PromptEnv(task, tokenizer)

    def demonstration(self, task: Task, key: int) -> str:
        guess = rng.integer(6, rng.key("guess", key, task.id))
        return task.meta["answer"] if task.level == "told" else self.capitals[guess]


@pytest.mark.slow
def test_a_policy_learns_what_it_can_only_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a sixth of the completions to most, by those of its groups that passed."""
    monkeypatch.chdir(tmp_path)
    register_environment("capitals")(Capitals)
    config = yaml.safe_load(TINY) | {
        "env": {"name": "capitals"},
        "rollout": {"max_tokens": 2},
        "sft": {
            "steps": 150,
            "batch_size": 48,
            "optimizer": {"learning_rate": 0.01},
            "curriculum": {"by": "schedule", "schedule": [[0, {"asked": 1, "told": 1}]]},
        },
        "curriculum": {"by": "schedule", "schedule": [[0, {"asked": 1, "told": 0}]]},
        "training": {
            "steps": 25,
            "prompts_per_step": 6,
            "group_size": 16,
            "optimizer": {"learning_rate": 0.01},
        },
        "evaluation": {"tasks": 6, "samples": 32},
        "algorithm": {
            "name": "sdpo",
            "terms": {"self_distillation": {"template": "{information} {prompt}", "sibling_template": "{text}"}},
        },
    }
    (tmp_path / "told.yaml").write_text(yaml.safe_dump(config))
    summary = attempt("told.yaml", "run.name=told")
    before, after = (summary[when]["pass@1"]["value"] for when in ("baseline", "final"))
    assert before < 0.3 and after > before + 0.2, summary  # 0.14 to 0.48 on one processor, above 0.5 on another
    rows = [row for row in stored_steps(tmp_path / "runs" / "told") if row["phase"] == "rl"]
    assert rows[0]["teacher/kl"] > 0.1 and rows[0]["teacher/share"] > 0.5
