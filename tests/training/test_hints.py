"""Hints: which tokens a task shows, how they grow and shrink, what is judged, and the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.algorithms.update import make_datum
from rlvr.clients.mock.mock_client import MockTrainingClient, TablePolicy
from rlvr.config import load
from rlvr.config.build_config import build_config
from rlvr.core.types import Outcome, Score, Task, Trajectory, TrajectoryBatch
from rlvr.envs import resolve_environment
from rlvr.runs.assembly import assemble
from rlvr.runs.run_plan import plan
from rlvr.training.curriculum import Curriculum, CurriculumOptions
from rlvr.training.hints import HintWriter, make_hint_writer
from rlvr.training.journal import describe_mismatch
from rlvr.training.schedules.sync import Synchronous
from rlvr.training.sft import SftOptions
from tests.kit.next_letters import NextLetters
from tests.kit.table_trainer import Letters, fixed_lag_trainer, make_trainer, run_fixed_lag
from tests.kit.tiny_run import TINY, attempt, stored_steps

SOURCE = NextLetters(length=4)
TOKENIZER = MockTrainingClient(TablePolicy(list(NextLetters.vocabulary))).get_tokenizer()


def curriculum(hint_step: float = 0.25, most: int = 9) -> Curriculum:
    options = CurriculumOptions(replay=0.999999, hint_step=hint_step)
    return Curriculum(SOURCE, options, 1, HintWriter(SOURCE, TOKENIZER, most))


@pytest.mark.parametrize(
    ("share", "most", "count"), [(0.25, 9, 1), (0.3, 9, 2), (0.75, 9, 3), (1.0, 9, 3), (1.0, 2, 2)]
)
def test_a_hint_is_the_beginning_of_the_demonstration(share: float, most: int, count: int) -> None:
    """A share of four tokens, rounded up; the last one is left to the policy, and there may be a limit."""
    task = SOURCE.train(1, 0, "")
    hinted = HintWriter(SOURCE, TOKENIZER, most).write(task, share)
    assert TOKENIZER.decode(list(hinted.hint)).split() == task.meta["answer"].split()[:count]
    assert replace(hinted, hint=()) == task


def hint_lengths(made: Curriculum, verdicts: list[bool]) -> list[int]:
    """The tokens of the hint of one task, asked again and again, with these verdicts."""
    lengths: list[int] = []
    for verdict in verdicts:
        [task] = made.tasks(1, step=len(lengths))
        lengths.append(len(task.hint))
        made.observe_tasks({task.id: [[False, verdict]]})
    return lengths


def test_a_hint_grows_until_the_task_is_solved_then_shrinks_until_it_is_solved_without() -> None:
    made = curriculum()
    found = hint_lengths(made, [False, False, False, True, False, True, True, True, True])
    assert found == [0, 1, 2, 3, 2, 3, 2, 1, 0]
    assert not made.unsolved and not made.hints, "solved without a hint: it does not come back"
    assert hint_lengths(curriculum(hint_step=0.5), [False] * 5) == [0, 2, 3, 3, 3]


def test_without_a_verdict_the_task_comes_back_with_the_same_hint() -> None:
    made = curriculum()
    hint_lengths(made, [False, False])
    [task] = made.tasks(1, step=2)
    made.observe_tasks({task.id: [[]]})
    assert len(task.hint) == 2 and made.tasks(1, step=3) == [task]


def test_the_state_restores_hints_that_wait_and_those_under_way() -> None:
    made, other = curriculum(), curriculum()
    first, second = made.tasks(2, step=0)
    made.observe_tasks({first.id: [[False]], second.id: [[False]]})
    made.observe_tasks({made.tasks(1, step=1)[0].id: [[False]]})
    [under_way] = made.tasks(1, step=2)
    other.restore(made.state())
    assert made.state()["hints"] == [["", 1], ["", 0], ["", 0]] and other.state() == made.state()
    assert other.task("", 1) == under_way and len(under_way.hint) == 1, "as a group on disk is read back"
    [again], [expected] = other.tasks(1, step=3), made.tasks(1, step=3)
    assert again == expected and len(again.hint) == 2
    assert not describe_mismatch(made.state(), curriculum().state())


def with_hints(trainer: Any, source: Any) -> Any:
    writer = make_hint_writer(source, trainer.parts.client.get_tokenizer(), 9)
    made = Curriculum(source, CurriculumOptions(replay=0.5, hint_step=0.5), 1, writer)
    trainer.parts = replace(trainer.parts, curriculum=made)
    trainer.collector.curriculum = made
    return trainer


def hinted_trainer(**options: Any) -> Any:
    """A table of letters answers tasks of two: behind a hint it says the other one and the end by chance."""
    source: Any = NextLetters(length=2)
    client = MockTrainingClient(TablePolicy([*source.vocabulary]))
    return with_hints(make_trainer(client, source=source, sampling={"max_tokens": 3}, **options), source)


def test_the_hint_is_prompt_for_the_policy_and_answer_for_the_verifier() -> None:
    trainer = hinted_trainer(steps=8, group_size=16)
    rows = [Synchronous(trainer).learn(step) for step in range(8)]
    hinted = [t for _, batch in rows for t in batch.all if t.task and t.task.hint]
    assert hinted
    for t in hinted:
        assert t.task is not None and t.prompt_tokens[-1:] == list(t.task.hint) and t.prompt == t.task.prompt
        inputs = make_datum(trainer.parts.algorithm, replace(t, advantage=1.0), 1.0).loss_fn_inputs
        first = len(t.prompt_tokens) - 1
        assert not inputs["advantages"].data[:first].any() and inputs["advantages"].data[first:].all()
        assert t.rendered_prompt.split() == [*t.prompt.split(), *t.task.meta["answer"].split()[:1]]
        assert t.answer is not None and t.answer.split()[:1] == t.task.meta["answer"].split()[:1]
        assert t.answer.split()[1:] == t.response.split()
        assert t.reward == float(t.answer.split() == t.task.meta["answer"].split())
    assert all(t.answer is None for _, batch in rows for t in batch.all if t.task and not t.task.hint)
    assert any(t.reward for t in hinted)


def test_metrics_tell_completions_with_and_without_a_hint_apart() -> None:
    trainer = hinted_trainer(steps=8)
    for step in range(8):
        row, batch = Synchronous(trainer).learn(step)
        marks = [bool(t.task and t.task.hint) for t in batch.all]
        plain = [t.reward for t, mark in zip(batch.all, marks, strict=True) if not mark]
        assert row["curriculum/hinted"] == pytest.approx(sum(marks) / len(marks))
        assert row["curriculum/correct_without_hint"] == pytest.approx(sum(r or 0 for r in plain) / len(plain))
    assert any(marks)


def test_a_pass_behind_a_hint_does_not_raise_the_pass_rate_of_a_level() -> None:
    """Half of the completions without a hint pass: the running rate stays at its 0.5, whatever those with one do."""
    trainer = hinted_trainer(steps=8)
    plain, hinted = SOURCE.train(1, 0, ""), replace(SOURCE.train(1, 1, ""), hint=(3,), level="1")
    plain, curriculum = replace(plain, level="1"), trainer.parts.curriculum
    curriculum.pass_rate = {"1": 0.5}
    right, wrong = Score(1.0, Outcome.PASSED), Score(0.0, Outcome.FAILED)
    batch = [
        Trajectory("p", [1], "r", [2], [-0.5], reward=score.value, task=task, group_id=task.id, rollout_id=f"{i}",
                   scores={trainer.parts.reward.name: score})
        for i, (task, score) in enumerate([(plain, right), (plain, wrong), (hinted, right), (hinted, right)])
    ]  # fmt: skip
    trainer.accept(0, TrajectoryBatch(batch))
    assert curriculum.pass_rate == {"1": 0.5}


def test_a_fixed_lag_repeats(tmp_path: Path) -> None:
    runs = []
    for name in ("a", "b"):
        trainer = with_hints(fixed_lag_trainer(max_steps_off_policy=1), Letters(impossible=True))
        run_fixed_lag(trainer, tmp_path / name)
        runs.append((trainer.parts.curriculum.state(), trainer.parts.client.weights_sha256()))
    assert runs[0] == runs[1]


def test_what_has_no_place_for_a_hint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"curriculum.hint_step=1.5, expected a share"):
        CurriculumOptions(replay=0.5, hint_step=1.5)
    with pytest.raises(ValueError, match=r"no effect without curriculum.replay.*give curriculum.replay=0.5"):
        CurriculumOptions(hint_step=0.5)
    with pytest.raises(ValueError, match=r"sft.curriculum.replay"):
        SftOptions(curriculum=CurriculumOptions(replay=0.5, hint_step=0.5))
    refine = resolve_environment("refine", inner="rpn_arithmetic", max_turns=2)
    with pytest.raises(ValueError, match="they have no place for a hint; leave it out"):
        make_hint_writer(refine, TOKENIZER, 9)
    silent: Any = NextLetters()
    silent.demonstration = lambda task, key: None
    with pytest.raises(ValueError, match="has no demonstration to take a hint from"):
        HintWriter(silent, TOKENIZER, 9).write(Task("t", "a"), 0.5)
    (tmp_path / "toy.yaml").write_text(
        "env: {name: toy}\nclient: mock\nreward: {type: keyword_contains, kwargs: {keywords: [answer]}}\n"
    )
    words = ["curriculum.replay=0.5", "curriculum.hint_step=0.5"]
    config = build_config(load(None, str(tmp_path / "toy.yaml"), words))
    with pytest.raises(
        ValueError, match=r"curriculum.hint_step=0.5: .* has no demonstration .*curriculum.hint_step=0$"
    ):
        plan(assemble(config))


@pytest.mark.parametrize("schedule", [[], ["training.max_steps_off_policy=1"]])
@pytest.mark.slow
def test_a_killed_run_with_hints_ends_with_the_same_bits(
    schedule: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["curriculum.replay=0.5", "curriculum.hint_step=0.5", "training.steps=8", *schedule]
    attempt("tiny.yaml", *words, "run.name=whole")
    with pytest.raises(KeyboardInterrupt):
        attempt("tiny.yaml", *words, "run.name=killed", killed_at=5)
    attempt("tiny.yaml", *words, "run.name=killed")
    rows = stored_steps(tmp_path / "runs" / "whole")
    assert stored_steps(tmp_path / "runs" / "killed") == rows
    assert any(row.get("curriculum/hinted") for row in rows)
