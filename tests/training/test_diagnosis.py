"""The signal report names what keeps a policy from learning, each with its numbers, and is silent where one learns."""

from __future__ import annotations

import ast
import math
import random
import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from rlvr.config.choices import full_key
from rlvr.config.schema import RunConfig
from rlvr.training import (
    answer_form,
    baseline,
    diagnosis,
    role_findings,
    run_diagnosis,
    update_findings,
)
from rlvr.training.answer_form import Acceptance, AnswerForm
from rlvr.training.diagnosis import diagnose_steps, format_findings
from rlvr.training.failure_groups import FailureGroup
from rlvr.training.monitor import StallWatch
from rlvr.training.stall import is_stalled

HEALTHY = {
    "reward/min": 0.0,
    "reward/max": 1.0,
    "frac_groups_with_signal": 0.8,
    "completions/clipped_ratio": 0.01,
    "completions/mean_length": 10.0,
    "verifier/no_answer_rate": 0.02,
    "verifier/error_rate": 0.0,
    "verifier/invalid_rate": 0.0,
    "entropy": 0.4,
    "updates": 1.0,
    "rollout/groups": 8.0,
    "rollout/tokens": 640.0,
    "optim/approx_kl": 1e-5,
    "clip_ratio/region_mean": 0.01,
    "sampling/sampling_logp_difference/mean": 1e-7,
}


def rows(steps: int = 40, start: float = 0.3, rise: float = 0.01, noise: float = 0.0, **changed: Any) -> list[Any]:
    """A run whose reward and pass rate rise by `rise` a step; `changed` replaces metrics (`__` for `/`)."""
    draw = random.Random(1)
    other = {name.replace("__", "/"): value for name, value in changed.items()}
    made = []
    for step in range(steps):
        reward = min(1.0, start + rise * step + draw.gauss(0, noise))
        known = {"reward": reward, "env/all/correct": reward, **HEALTHY, **other}
        made.append({"phase": "rl", "step": step, **{k: v for k, v in known.items() if v is not None}})
    return made


def codes(found: Any) -> dict[str, str]:
    return {finding.code: finding.severity for finding in found}


# --- findings ----------------------------------------------------------------------------------------------------


def test_a_run_that_learns_draws_no_finding_at_any_step():
    run = rows(68, noise=0.02)
    for step in range(1, len(run) + 1):
        assert diagnose_steps(run[:step]) == [] and not is_stalled(run[:step])
    assert format_findings([]) == "  nothing stands in the way"


@pytest.mark.parametrize(
    ("changed", "code", "severity", "says", "remedy"),
    [
        (
            {"completions__clipped_ratio": 0.6},
            "truncated",
            "problem",
            "60% of completions ran out",
            "rollout.max_tokens",
        ),
        ({"completions__clipped_ratio": 0.12}, "truncated", "hint", "12%", "rollout.max_tokens"),
        ({"verifier__no_answer_rate": 0.7}, "no_answer", "problem", "70% of judged completions", "sft.steps"),
        (
            {"env__all__calls": 0.0, "verifier__no_answer_rate": 1.0},
            "no_calls",
            "problem",
            "no agent",
            "OPENAI_BASE_URL",
        ),
        ({"env__all__turns__right": 0.0, "env__all__turns__left": 2.0}, "idle_role", "problem", "'right'", "opponent"),
        ({"verifier__error_rate": 0.004}, "errors", "hint", "0.4%", "reward.type"),
        ({"verifier__error_rate": 0.03}, "errors", "problem", "3.0%", "reward.type"),
        ({"verifier__invalid_rate": 0.2}, "invalid_tasks", "problem", "20%", "env.kwargs"),
        ({"env__all__correct": 0.02, "frac_groups_with_signal": 0.1}, "too_hard", "problem", "too hard", "sft.steps"),
        ({"env__all__correct": 0.5, "frac_groups_with_signal": 0.4}, "equal_groups", "hint", "60%", "entropy_coef"),
        (
            {"env__all__correct": 0.85, "frac_groups_with_signal": 0.1},
            "equal_groups",
            "hint",
            "85%",
            "training.dynamic_sampling",
        ),
        ({"env__all__correct": 0.99, "frac_groups_with_signal": 0.1}, "too_easy", "problem", "too easy", "env.kwargs"),
        ({"reward__max": 0.0, "env__all__correct": 0.0}, "one_reward", "problem", "the same reward, 0;", "sft.steps"),
        ({"reward__max": 0.0, "env__all__correct": 0.5}, "one_reward", "problem", "50% pass", "ignores"),
        ({"env__all__correct": 0.0}, "nothing_passes", "hint", "no completion ever passed", "passed_at"),
        ({"updates": 0.0}, "no_update", "problem", "20 of the last 20 steps", "training.dynamic_sampling"),
        ({"optim__approx_kl": 0.3}, "large_update", "hint", "0.3", "training.target_kl"),
        ({"optim__approx_kl": 3.0}, "large_update", "problem", "3", "training.optimizer.learning_rate"),
        ({"clip_ratio__region_mean": 0.4}, "clipped", "hint", "40%", "training.ppo_epochs"),
        ({"sampling__sampling_logp_difference__mean": 0.05}, "gap", "hint", "0.05", "model.dtype"),
    ],
)
def test_each_trouble_is_found_with_its_numbers_and_a_remedy(
    changed: dict[str, float], code: str, severity: str, says: str, remedy: str
):
    found = diagnose_steps(rows(**changed))
    assert codes(found) == {code: severity}
    assert says in format_findings(found) and remedy in found[0].remedy


def test_answers_of_one_token_are_not_cut_off():
    assert diagnose_steps(rows(completions__clipped_ratio=1.0, completions__mean_length=1.0)) == []


REFUSED = "env__all__proposals__refused"


@pytest.mark.parametrize(
    ("reason", "share", "severity", "remedy"),
    [
        ("unreadable", 1.0, "problem", "env.kwargs.proposal_share"),
        ("size", 0.97, "problem", "inner_kwargs"),
        ("heldout", 0.6, "hint", "hold fewer tasks out"),
        ("copied", 0.6, "hint", "env.kwargs.instruction"),
        ("repeated", 0.6, "hint", "rollout.temperature"),
    ],
)
def test_proposals_that_are_refused_are_counted_by_reason(reason: str, share: float, severity: str, remedy: str):
    """A solver without a task takes no turn: one cause, one finding."""
    idle = {"env__all__turns__solver": 0.0, "frac_groups_with_signal": 0.0} if severity == "problem" else {}
    rare = "size" if reason != "size" else "heldout"  # the remedy is that of the most frequent reason
    found = diagnose_steps(
        rows(**{REFUSED: share, f"{REFUSED}__{rare}": 0.1, f"{REFUSED}__{reason}": share - 0.1, **idle})
    )
    assert codes(found) == {"proposals_refused": severity} and remedy in found[0].remedy and reason in found[0].fact
    assert diagnose_steps(rows(**{REFUSED: 0.2, f"{REFUSED}__{reason}": 0.2})) == [], "some always are"


def test_a_proposer_that_writes_the_same_tasks_is_found():
    for last, expected in ((0.9, {}), (0.3, {"proposer_collapsed": "hint"}), (0.02, {"proposer_collapsed": "problem"})):
        run = rows(**{REFUSED: 0.1, "env__all__distinct__proposer": 0.95})
        for row in run[20:]:
            row["env/all/distinct/proposer"] = last
        assert codes(diagnose_steps(run)) == expected


WRITTEN = "env__all__tests"


@pytest.mark.parametrize(
    ("reason", "share", "severity", "remedy"),
    [
        ("unreadable", 1.0, "problem", "env.kwargs.test_share"),
        ("size", 0.6, "hint", "env.kwargs.max_characters"),
        ("many", 0.97, "problem", "env.kwargs.tests"),
        ("copied", 0.6, "hint", "inner_kwargs"),
        ("repeated", 0.6, "hint", "rollout.temperature"),
    ],
)
def test_written_tests_that_are_refused_are_counted_by_reason(reason: str, share: float, severity: str, remedy: str):
    found = diagnose_steps(rows(**{f"{WRITTEN}__refused": share, f"{WRITTEN}__refused__{reason}": share}))
    assert codes(found) == {"tests_refused": severity} and remedy in found[0].remedy and reason in found[0].fact
    assert diagnose_steps(rows(**{f"{WRITTEN}__refused": 0.2, f"{WRITTEN}__refused__{reason}": 0.2})) == []


def test_written_tests_that_break_right_programs_are_found():
    for share, expected in ((0.3, {}), (0.7, {"tests_wrong": "hint"}), (0.97, {"tests_wrong": "problem"})):
        found = diagnose_steps(rows(**{f"{WRITTEN}__wrong": share}))
        assert codes(found) == expected and all("expected=reference" in finding.remedy for finding in found)


def test_a_tester_that_collapses_is_found_unless_its_tests_break_more():
    for last, broken, expected in (
        (0.9, 0.5, {}),
        (0.3, 0.5, {"tester_collapsed": "hint"}),
        (0.02, 0.4, {"tester_collapsed": "problem"}),
        (0.02, 0.6, {}),  # it found the test that breaks most
    ):
        run = rows(env__all__distinct__tester=0.95, env__all__broken__wrong=0.5)
        for row in run[20:]:
            row |= {"env/all/distinct/tester": last, "env/all/broken/wrong": broken}
        assert codes(diagnose_steps(run)) == expected


def test_entropy_that_fell_to_nothing_and_entropy_that_rose_are_found():
    gone, up = rows(), rows()
    for row in gone[10:]:
        row["entropy"] = 0.01
    for row in up[10:]:
        row["entropy"] = 2.0
    assert codes(diagnose_steps(gone)) == {"entropy_gone": "problem"} and "0.400 to 0.010" in format_findings(
        diagnose_steps(gone)
    )
    assert codes(diagnose_steps(up)) == {"entropy_up": "problem"}
    for row in gone:
        row["env/all/correct"] = 0.94
    assert diagnose_steps(gone) == [], "a policy that solves its tasks may be sure of itself"


@pytest.mark.parametrize(
    ("false_accept", "false_refusal", "silent", "code", "says", "remedy"),
    [
        (
            0.97,
            0.02,
            0.0,
            "verifier_collapsed",
            "97% of the wrong answers, 98% of the right",
            "higher env.kwargs.right",
        ),
        (0.02, 0.96, 0.0, "verifier_collapsed", "2.0% of the wrong answers, 4.0% of", "lower env.kwargs.right_share"),
        (0.60, 0.10, 0.0, "verifier_fooled", "60% of the wrong answers, 90% of the right", "env.kwargs.truth_share"),
        (0.97, None, 0.0, "verifier_fooled", "accepts 97% of the wrong answers:", "env.kwargs.opponent=self"),
        (0.00, 1.00, 0.9, "verdicts_unreadable", "90% of the verdicts", "env.kwargs.verdict_share"),
        (0.20, 0.30, 0.1, None, "", ""),
        (None, 0.00, 0.0, None, "", ""),  # no answer is wrong: accepting all of them is right
        (0.00, None, 0.0, None, "", ""),
    ],
)
def test_a_verifier_that_collapsed_or_is_fooled_is_found(
    false_accept: float | None, false_refusal: float | None, silent: float, code: str | None, says: str, remedy: str
):
    names = {"false_accept": false_accept, "false_refusal": false_refusal, "unreadable": silent}
    found = diagnose_steps(rows(**{f"env__all__verdicts__{name}": value for name, value in names.items()}))
    assert codes(found) == ({code: "problem"} if code else {})
    assert all(says in one.fact and remedy in one.remedy for one in found)


def test_a_collapsed_verifier_explains_that_no_group_has_signal():
    verdicts = {"env__all__verdicts__false_accept": 0.0, "env__all__verdicts__false_refusal": 1.0}
    same = {"reward__max": 0.0, "reward": 0.0, "env__all__correct": 0.0, "frac_groups_with_signal": 0.0, "updates": 0.0}
    assert codes(diagnose_steps(rows(**verdicts, **same))) == {"verifier_collapsed": "problem"}


def test_entropies_at_several_temperatures_are_not_compared():
    """`training.temperature_end`: colder sampling has less entropy and hotter more. A policy without any is found."""
    for entropy, expected in ((0.01, {}), (2.0, {}), (0.0005, {"entropy_gone": "problem"})):
        run = rows(40, rollout__temperature=0.7)
        for row in run[-5:]:
            row["entropy"] = entropy
        assert codes(diagnose_steps(run)) == expected


def test_low_entropy_is_no_alarm_where_the_held_out_tasks_pass_and_a_curriculum_draws_the_hard_ones():
    run = rows(env__all__correct=0.7)
    for row in run[10:]:
        row["entropy"] = 0.01
    assert codes(diagnose_steps(run)) == {"entropy_gone": "problem"} and "only 70% pass" in format_findings(
        diagnose_steps(run)
    )
    run[-5]["test/env/all/correct"] = 0.92
    assert diagnose_steps(run) == []


def test_a_run_with_muon_is_told_of_both_rates():
    """Muon moves the matrices, which are most of the weights."""
    both = "training.optimizer.matrix_learning_rate (and learning_rate)"
    changed = {"optim__approx_kl": 0.3}
    [plain], [muon] = (
        diagnose_steps(rows(**changed)),
        diagnose_steps(rows(**changed, matrix_learning_rate=0.01)),
    )
    assert both not in plain.remedy and muon.remedy == plain.remedy.replace("training.optimizer.learning_rate", both)
    assert both in muon.remedy and muon.fact == plain.fact


# --- kinds of task that are never solved -------------------------------------------------------------------------

SHAPE = FailureGroup("shape n n o n n o o", 85, 0.11, 0.997, 1e-60)


def levelled_off(rate: float, steps: int = 60) -> list[Any]:
    """A run that learned from 40 % and stands at `rate`: equal groups, hardly any entropy, no rise."""
    run = rows(20, start=0.4, rise=(rate - 0.4) / 20) + rows(steps, start=rate, rise=0.0)
    for step, row in enumerate(run):
        row["step"] = step
    for row in run[20:]:
        row |= {"entropy": 0.017, "frac_groups_with_signal": 0.1}
    return run


@pytest.mark.parametrize("rate", [0.82, 0.917])
def test_one_kind_that_is_never_solved_is_the_only_finding(rate: float):
    [found] = diagnose_steps(levelled_off(rate), [SHAPE])
    assert (found.severity, found.code) == ("problem", "unsolved_kind")
    assert found.fact == ("one kind of task is never solved: shape n n o n n o o passes 11% where the others pass 100%")
    assert "sft.until_each" in found.remedy and "give more such tasks" in found.remedy


def test_the_remedy_for_a_level_is_to_draw_it_more_often_and_never_by_pass_rate():
    """`by=pass_rate` draws a level that never passes least."""
    level = FailureGroup("level 4", 40, 0.02, 0.997, 1e-9)
    [found] = diagnose_steps(levelled_off(0.8), [level])
    assert found.remedy.startswith(
        "draw that level more often (curriculum.by=schedule; by=pass_rate gives it the least"
    )
    assert [g.shared_property for g in (SHAPE, level)] == ["shape", "level"]
    names = {'"sort" in the prompt': "word", "prompt of 35 to 44 words": "length"}
    assert {n: FailureGroup(n, 9, 0.0, 1.0, 0.0).shared_property for n in names} == names


def test_a_kind_that_is_being_learned_is_no_problem_and_one_above_chance_is_rarely_solved():
    rising = replace(SHAPE, rate=0.2, rate_before=0.05)
    assert "unsolved_kind" not in codes(diagnose_steps(levelled_off(0.8), [rising]))
    [found] = diagnose_steps(levelled_off(0.8), [replace(rising, rate_before=0.15)])
    assert found.fact.startswith("one kind of task is rarely solved: shape n n o n n o o passes 20%")


def test_a_lost_entropy_is_named_beside_a_kind_if_the_others_are_not_solved_either():
    found = codes(diagnose_steps(levelled_off(0.7), [replace(SHAPE, rate_of_others=0.8)]))
    assert found["unsolved_kind"] == "problem" and "entropy_gone" in found


def test_several_kinds_are_one_finding_and_one_that_only_passes_less_often_is_none():
    [found] = diagnose_steps(levelled_off(0.8), [SHAPE, FailureGroup("level 4", 40, 0.02, 0.997, 1e-9)])
    assert "2 kinds of task are never solved: shape n n o n n o o passes 11%, level 4 passes 2.0% where" in found.fact
    for harmless in (FailureGroup("level 3", 85, 0.6, 1.0, 1e-9), FailureGroup("level 3", 85, 0.1, 0.5, 1e-9)):
        assert "unsolved_kind" not in codes(diagnose_steps(levelled_off(0.8), [harmless]))


def test_without_a_step_of_reinforcement_learning_a_kind_is_named_too():
    assert codes(diagnose_steps([{"phase": "sft", "step": 0, "loss": 1.0}], [SHAPE])) == {
        "unsolved_kind": "problem",
        "no_steps": "note",
    }


def test_a_run_at_its_ceiling_gets_a_note_and_a_run_that_solved_its_tasks_another():
    assert codes(diagnose_steps(levelled_off(0.92))) == {"ceiling": "note"}
    solved = diagnose_steps(levelled_off(0.99))
    assert codes(solved) == {"solved": "note", "ceiling": "note"}
    assert format_findings(solved).startswith("  nothing stands in the way\n  note: ")
    assert "nothing stands" not in format_findings(diagnose_steps(levelled_off(0.82)))


def test_demonstrations_that_are_reproduced_and_refused_point_at_the_verifier():
    sft = [{"phase": "sft", "step": i, "loss": 0.05, "completions/mean_length": 10.0} for i in range(20)]
    refused = rows(start=0.0, rise=0.0, reward__max=0.5)
    assert codes(diagnose_steps(sft + refused)) == {"demonstrations_refused": "problem"}
    assert "61%" in diagnose_steps(sft + refused)[0].fact and "rlvr verify" in diagnose_steps(sft + refused)[0].remedy
    for row in sft:
        row["loss"] = 0.2  # e^-2 = 14 %: of ten tokens one is often wrong
    assert codes(diagnose_steps(sft + refused)) == {"nothing_passes": "hint"}


def test_a_large_step_is_no_finding_once_the_tasks_are_solved():
    run = levelled_off(0.99)
    run[-1]["optim/kl_after"] = 0.4
    assert "large_update" not in codes(diagnose_steps(run))
    run = levelled_off(0.8)
    run[-1]["optim/kl_after"] = 0.4
    assert codes(diagnose_steps(run))["large_update"] == "hint"


def test_what_follows_from_another_finding_is_left_out():
    """No step makes an update because every reward is the same; tasks are not too hard if nothing can pass."""
    assert codes(diagnose_steps(rows(reward__max=0.0, env__all__correct=0.0, updates=0.0))) == {"one_reward": "problem"}
    refused = rows(start=0.0, rise=0.0, reward__max=0.5, frac_groups_with_signal=0.1, updates=0.0)
    assert codes(diagnose_steps(refused)) == {"nothing_passes": "hint"}


FORM = AnswerForm(100, 99, 0.05, 90, 80, 1, [Acceptance("reward.type=gsm8k_flexible", 80, 2, 0, 200, 0.7)])


def test_answers_in_another_form_are_not_too_hard():
    """The baseline knew a reward that reads them; once the policy has learned the form, that is no finding any more."""
    few = {"frac_groups_with_signal": 0.02, "verifier/no_answer_rate": 0.9}
    hard = rows(start=0.01, rise=0.0, **{name.replace("/", "__"): value for name, value in few.items()})
    assert codes(diagnose_steps(hard)) == {"too_hard": "problem", "no_answer": "problem"}
    [found] = diagnose_steps(hard, form=FORM)
    assert (found.code, found.severity) == ("answer_form", "problem")
    none = rows(start=0.0, rise=0.0, reward__max=0.0, updates=0.0)
    assert [f.code for f in diagnose_steps(none, form=FORM)] == ["answer_form"]
    assert [f.code for f in diagnose_steps([], form=FORM)] == ["answer_form", "no_steps"]
    assert diagnose_steps(rows(), form=FORM) == [], "a run that learns"
    watch = StallWatch((), read_form=lambda: FORM)
    [reported] = [said for row in none + none if (said := watch.add(row))]
    assert [f.code for f in reported] == ["answer_form"]


def test_a_reward_that_rises_without_held_out_tasks_is_a_hint():
    run = rows()
    for row in run[::10]:
        row["test/env/all/correct"] = 0.3
    assert codes(diagnose_steps(run)) == {"reward_only": "hint"}
    run[30]["test/env/all/correct"] = 0.4
    assert diagnose_steps(run) == []


def test_groups_of_equal_rewards_that_have_signal_draw_no_finding():
    """Groups of one, under a critic or reinforce; and every group under a teacher, whatever the reward."""
    assert diagnose_steps(rows(frac_reward_zero_std=1.0, frac_groups_with_signal=1.0)) == []
    taught = {"frac_reward_zero_std": 1.0, "frac_groups_with_signal": 1.0, "reward__max": 0.0, "reward_std": 0.0}
    assert diagnose_steps(rows(start=0.0, rise=0.0, teacher__kl=0.3, **taught)) == []
    assert not is_stalled(rows(start=0.5, rise=0.0, teacher__kl=0.3, **taught))


GIVEN = {name: 1.0 for name in ("frac_groups_with_signal", "updates", "rollout/groups", "completions/mean_length")}


def test_given_completions_are_data_and_draw_no_finding_of_a_policy():
    """No kind of task that fails (a label is no failure), and no advice to sample where nothing is sampled."""
    given = [{"phase": "rl", "step": step, **GIVEN} for step in range(70)]
    assert diagnose_steps(given) == [] and not is_stalled(given)
    watch = StallWatch((), lambda step: [SHAPE])
    silent = [{**row, "updates": 0.0, "frac_groups_with_signal": 0.0} for row in given]
    [found] = [result for row in silent for result in watch.add(row)]
    assert found.code == "no_update" and found.severity == "problem"
    assert "leave out the rows" in found.remedy and "dynamic_sampling" not in found.remedy


def test_a_critic_that_learns_alone_is_no_step_without_an_update():
    alone = rows(updates=0.0, critic__loss=0.1, critic__explained_variance=0.4)
    assert diagnose_steps(alone) == [] and not is_stalled(alone)


@pytest.mark.parametrize(
    ("explained", "changed", "severity"),
    [
        (0.003, {}, "hint"),
        (-0.04, {}, "hint"),
        (-0.5, {"reward_std": 0.4}, "problem"),
        (-0.5, {"reward_std": 0.01}, "hint"),  # the rewards hardly differ: there is little to explain
        (0.3, {}, None),
        (-0.5, {"start": 0.97}, None),  # nearly all pass: nothing to explain
        (0.0, {"steps": 19}, None),  # the values begin at 0
    ],
)
def test_a_critic_that_explains_nothing_is_named(explained: float, changed: dict[str, Any], severity: str | None):
    found = diagnose_steps(rows(critic__explained_variance=explained, **{"reward_std": 0.4, **changed}))
    assert codes(found) == ({"critic_blind": severity} if severity else {})
    if severity:
        assert f"explained_variance is {explained:.2f}" in found[0].fact and "hardly differ" in found[0].remedy
        assert "training.critic.warmup_steps" in found[0].remedy
        assert ("less than a constant" in found[0].fact) == (explained < 0)


def test_a_critic_that_has_learned_since_is_not_named():
    run = rows(40, critic__explained_variance=0.0)
    for row in run[28:]:
        row["critic/explained_variance"] = 0.3
    assert diagnose_steps(run) == []


def test_groups_that_are_equal_level_by_level_name_the_levels():
    run = rows(
        env__all__correct=0.5, frac_groups_with_signal=0.4, env__level_1__correct=0.99, env__level_2__correct=0.04
    )
    [found] = diagnose_steps(run)
    assert "1: 99%, 2: 4.0%" in found.remedy and "curriculum.by=pass_rate" in found.remedy


def test_only_recent_steps_count_and_problems_come_first():
    run = rows(40, completions__clipped_ratio=0.9)
    for row in run[20:]:
        row["completions/clipped_ratio"] = 0.0
    assert diagnose_steps(run) == []
    found = diagnose_steps(rows(completions__clipped_ratio=0.2, verifier__no_answer_rate=0.9))
    assert [f.severity for f in found] == ["problem", "hint"]


def test_no_steps_other_phases_and_missing_or_odd_values_are_accepted():
    assert (
        codes(diagnose_steps([]))
        == codes(diagnose_steps([{"phase": "sft", "step": 0, "loss": 1.0}]))
        == {"no_steps": "note"}
    )
    assert diagnose_steps([{"phase": "rl", "step": 0}]) == []
    odd = rows(80, reward=math.nan, entropy=None, updates=None, frac_groups_with_signal="many")
    assert diagnose_steps(odd) == [] and not is_stalled(odd)


@pytest.mark.parametrize("value", [1e308, -1e308, 10**400, math.inf], ids=["large", "low", "huge", "inf"])
def test_numbers_near_the_float_limit_are_accepted(value: Any):
    """Seventy such rows, alone and among others: the sum of a few is beyond a float, and the mean is not."""
    for changed in (value, -value):
        run = rows(70, reward=value, reward__max=value)
        for row in run[1::2]:
            row.update({"reward": changed, "reward/min": changed})
        for step in range(1, len(run) + 1):
            assert isinstance(is_stalled(run[:step]), bool) and format_findings(diagnose_steps(run[:step]))
        assert isinstance(is_stalled([{**row, **dict.fromkeys(row, value), "phase": "rl"} for row in run]), bool)
        assert format_findings(diagnose_steps([{**row, **dict.fromkeys(row, value), "phase": "rl"} for row in run]))


# --- stalls ------------------------------------------------------------------------------------------------------


def test_ten_steps_without_an_update_are_a_stall_and_nine_are_not():
    assert not is_stalled(rows(9, start=0.5, rise=0.0, updates=0.0))
    assert is_stalled(rows(10, start=0.5, rise=0.0, updates=0.0))
    assert not is_stalled(rows(10, start=0.97, rise=0.0, updates=0.0)), "nothing left to learn is no stall"
    assert not is_stalled(rows(10, start=0.98, rise=0.0, updates=0.0, env__all__correct=None)), "rewards near their top"


@pytest.mark.parametrize("rate", [0.0, 0.01])
def test_a_run_of_which_hardly_a_completion_passes_has_fifty_steps_to_begin(rate: float):
    """As the published run from 0.1 %: most groups are equal until it does."""
    still = rows(50, start=rate, rise=0.0, updates=0.0)
    assert is_stalled(still) and not is_stalled(still[:49])
    assert is_stalled([*rows(1, start=0.02, rise=0.0), *still[:10]]), "one that has begun and lost it"


def test_sixty_steps_without_a_rise_are_a_stall():
    flat = rows(60, start=0.5, rise=0.0, noise=0.02)
    assert is_stalled(flat) and not is_stalled(flat[:59])
    assert codes(diagnose_steps(flat)) == {"flat": "hint"}
    assert is_stalled(rows(60, start=0.5, rise=-0.002, noise=0.02))
    assert not is_stalled(rows(60, start=0.91, rise=0.0)), "near its ceiling a run may level off"


@pytest.mark.parametrize("rise", [0.001, 0.002, 0.004])
@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_a_slow_rise_is_no_stall(rise: float, noise: float):
    run = rows(150, start=0.2, rise=rise, noise=noise)
    assert not any(is_stalled(run[:step]) for step in range(1, len(run) + 1))


def test_a_rise_hidden_by_noise_gives_no_finding():
    run = rows(200, start=0.3, rise=0.0, noise=0.15)
    assert not any(is_stalled(run[:step]) for step in range(1, len(run) + 1))


def test_a_curriculum_that_takes_harder_tasks_while_held_out_ones_pass_more_is_no_stall():
    run = rows(60, start=0.5, rise=0.0)
    for i, row in enumerate(run[::10]):
        row["test/env/all/correct"] = 0.3 + 0.02 * i
    assert not is_stalled(run)


def test_the_watch_speaks_once_and_a_resumed_run_repeats_it():
    run = rows(30, start=0.4, rise=0.0, updates=0.0)
    watch = StallWatch()
    assert [i for i, row in enumerate(run) if watch.add(row)] == [9]
    assert [i for i, row in enumerate(run[5:]) if StallWatch(run[: 5 + i]).add(row)] == [4]
    resumed = StallWatch(run[:7])
    assert [i for i, row in enumerate(run[7:], 7) if resumed.add(row)] == [9]
    silent = StallWatch(run[:20])
    assert not any(silent.add(row) for row in run[20:])
    assert StallWatch().add({"phase": "sft", "step": 0, "loss": 1.0}) == []


def test_the_watch_speaks_at_the_ceiling_only_of_a_kind_that_is_never_solved():
    run, asked = levelled_off(0.917, 90), list[int]()

    def read_groups(step: int) -> list[FailureGroup]:
        asked.append(step)
        return [SHAPE] if step >= 95 else []

    watch = StallWatch(run[:30], read_groups)
    reported = {row["step"]: found for row in run[30:] if (found := watch.add(row))}
    assert list(reported) == [99] and codes(reported[99]) == {"unsolved_kind": "problem"}
    assert asked == [79, 89, 99], "files are read every ten steps, and no more once it has spoken"
    assert not any(map(StallWatch(run[:100], read_groups).add, run[100:])), "a resumed run does not repeat it"
    quiet = StallWatch()
    assert not any(map(quiet.add, run)), "a ceiling alone is no alarm"


def test_the_watch_names_the_kind_of_a_run_that_stalls_far_from_the_best():
    watch = StallWatch((), lambda step: [SHAPE])
    [found] = [found for row in levelled_off(0.6, 70) if (found := watch.add(row))]
    assert codes(found) == {"unsolved_kind": "problem"}


# --- remedies ----------------------------------------------------------------------------------------------------


def test_every_setting_that_a_remedy_names_exists():
    """A remedy that cannot be typed is none."""
    modules = (answer_form, baseline, diagnosis, role_findings, run_diagnosis, update_findings)
    trees = [ast.parse(Path(m.__file__).read_text(encoding="utf-8")) for m in modules]
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    source = "\n".join(node.value for node in nodes if isinstance(node.value, str))
    sections = "|".join(field.name for field in fields(RunConfig))
    named = set(re.findall(rf"(?<![\w.])((?:{sections})\.[a-z_]+(?:\.[a-z_]+)*)", source)) - {"rlvr.training"}
    assert len(named) > 15
    known = {re.sub(r"\.kwargs\..*", ".kwargs", key) for key in named}  # what is in kwargs depends on the name beside
    assert [key for key in sorted(known) if not exists(RunConfig, full_key(key).split("."))] == []


def test_the_troubleshooting_page_lists_every_finding_and_no_other():
    modules = (answer_form, diagnosis, role_findings, run_diagnosis, update_findings)
    trees = [ast.parse(Path(module.__file__).read_text(encoding="utf-8")) for module in modules]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = {ast.literal_eval(call.args[1]) for call in calls if getattr(call.func, "id", "") == "Finding"}
    page = (Path(__file__).parents[2] / "docs" / "run" / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.split("## What doctor finds")[1].split("\n## ")[0]
    first_cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    listed = re.findall(r"`([a-z_]+)`", " ".join(first_cells))
    assert sorted(listed) == sorted(made) and len(made) > 20


def exists(kind: Any, parts: list[str]) -> bool:
    if not parts:
        return True
    if not is_dataclass(kind):
        return False
    hints = get_type_hints(kind)
    if parts[0] not in hints:
        return False
    inner = hints[parts[0]]
    return exists(next((a for a in get_args(inner) if is_dataclass(a)), inner), parts[1:])
