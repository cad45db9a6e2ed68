"""Algorithms as rows: what each sends by hand, the cells that are refused, and one golden file a row.

After a deliberate change: `RLVR_GOLDEN=write python -m pytest tests/algorithms/test_algorithms.py`, then read the
difference.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlvr.algorithms import ALGORITHMS, Algorithm, register_algorithm, registry, resolve_algorithm
from rlvr.algorithms.advantages import RawAdvantage
from rlvr.algorithms.losses import LOSSES
from rlvr.algorithms.losses.policy_gradient import ImportanceSampling
from rlvr.algorithms.reductions import REDUCTIONS
from rlvr.core.types import StopReason, Trajectory
from tests.kit.advantage_batch import MAX_TOKENS, REWARDS, batch, groups_of, trajectory

GOLDEN = Path(__file__).parent / "golden"


GROUP_A = 0.5 / 0.500001
TWO_THIRDS = (2 / 3) / (math.sqrt(2) / 3 + 1e-6)
ROWS_BY_HAND = {
    # (position in the batch, advantage, weight) of what is sent to the loss, and its thresholds
    "reinforce": ([(0, 0.625, 0.25), (1, -0.125, 0.25), (2, -0.375, 0.25), (3, -0.375, 0.25), (5, -0.125, 0.25)], {}),
    # Group b has equal rewards, so no gradient: it is not sent. grpo_original and dr_grpo count it, grpo does not.
    "grpo_original": (
        [(0, GROUP_A, 1 / 8), (2, -GROUP_A, 1 / 16), (3, -GROUP_A, 1 / 16)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "dr_grpo": (
        [(0, 0.5, 1 / 40), (2, -0.5, 1 / 40), (3, -0.5, 1 / 40)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    **dict.fromkeys(
        ("grpo", "ppo"),
        (
            [(0, 0.5, 1 / 6), (2, -0.5, 1 / 6), (3, -0.5, 1 / 6)],
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        ),
    ),
    "importance_sampling": ([(0, 0.5, 1 / 6), (2, -0.5, 1 / 6), (3, -0.5, 1 / 6)], {}),
    "reinforce_ema": (
        [(0, 0.625, 1 / 15), (1, -0.125, 1 / 15), (2, -0.375, 1 / 15), (3, -0.375, 1 / 15), (5, -0.125, 1 / 15)],
        {},
    ),
    "spiral": (
        [(0, 1.0, 0.25), (1, 0.2, 0.25), (2, -0.06, 0.25), (3, -0.06, 0.25), (5, 0.193, 0.25)],
        {},
    ),
    "reinforce_pp": (
        [  # over the 15 tokens, as in tests/algorithms/test_advantages.py
            (i, a / 60 / (math.sqrt(163 / 1800) + 1e-6), 1 / 15)
            for i, a in ((0, 43), (1, -2), (2, -17), (3, -17), (5, -2))
        ],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "rloo": ([(0, 1.0, 0.25), (2, -1.0, 0.25), (3, -1.0, 0.25)], {}),
    "dapo": (
        [(0, GROUP_A, 1 / 6), (2, -GROUP_A, 1 / 6), (3, -GROUP_A, 1 / 6)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
    ),
    # Values of 1/4 and lambda 0.95: the last token has the return less 1/4, each one before it 0.95 of the next. The
    # mean over a trajectory's tokens stands here; a1's four tokens are one episode in two parts.
    "ppo_critic": (
        [
            (0, 0.75 * (1 + 0.95) / 2, 1 / 15),
            (1, 0.0, 1 / 15),
            (2, -0.25 * 0.95**3, 1 / 15),
            (3, -0.25 * (1 + 0.95 + 0.95**2) / 3, 1 / 15),
            (5, 0.0, 1 / 15),
        ],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "gspo": (
        [(0, GROUP_A, 1 / 8), (2, -GROUP_A, 1 / 16), (3, -GROUP_A, 1 / 16)],
        {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004},
    ),
    # x and -x with x = GROUP_A, and twice 0: their std is x / sqrt(2).
    "gdpo": (
        [
            (i, a / (math.sqrt(0.5) * GROUP_A + 1e-6), w)
            for i, a, w in ((0, GROUP_A, 1 / 8), (2, -GROUP_A, 1 / 16), (3, -GROUP_A, 1 / 16))
        ],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    # Rewards teach as in grpo_original; of group a the environment wrote one token, after a1's second part.
    "echo": (
        [(0, GROUP_A, 1 / 8), (2, -GROUP_A, 1 / 16), (3, -GROUP_A, 1 / 16)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "sapo": ([(0, GROUP_A, 1 / 8), (2, -GROUP_A, 1 / 16), (3, -GROUP_A, 1 / 16)], {}),
    "cispo": (
        [(0, GROUP_A, 1 / 15), (2, -GROUP_A, 1 / 15), (3, -GROUP_A, 1 / 15)],
        {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    # Only a0 is above 0.5: the others are in no denominator.
    "raft": ([(0, 1.0, 1 / 2)], {}),
    # Group b has no pair. a1 made two trajectories, which are one completion.
    **dict.fromkeys(("dpo", "ipo"), ([(0, 1.0, 1 / 2), (2, -1.0, 1 / 2), (3, -1.0, 1 / 2)], {})),
    # Group a has two known rewards, too few for the best of 4; b has no difference.
    "pass_at_k": ([], {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}),
    # Turns: a0 earned 1, a1 nothing in two turns (one a trajectory): mean 1/3, std sqrt(2) / 3.
    "grpo_process": (
        [(0, TWO_THIRDS, 1 / 8), (2, -TWO_THIRDS, 1 / 16), (3, -TWO_THIRDS / 2, 1 / 16)],
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    # No advantage of the rewards: what is sent is decided by the teacher, whose advantages `update` adds.
    "distillation": ([], {}),
    "sdpo": ([], {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0}),
    "kto": ([(i, -1.0 if i else 1.0, 1 / 4) for i in (0, 1, 2, 3, 5)], {}),
    # dro's pull towards the sampler is a gradient without any advantage: group b is sent too.
    "dro": ([(0, 0.5, 1 / 15), (1, 0.0, 1 / 15), (2, -0.5, 1 / 15), (3, -0.5, 1 / 15), (5, 0.0, 1 / 15)], {}),
}


@pytest.mark.parametrize("name", sorted(ROWS_BY_HAND))
def test_rows_by_hand(name: str) -> None:
    """What each row sends to its loss: which trajectories, with which advantage and weight, and the thresholds."""
    row, trajectories = resolve_algorithm(name), batch()
    sent = row.weigh(row.select(trajectories), MAX_TOKENS)
    place = {id(t): i for i, t in enumerate(trajectories)}
    found = sorted((place[id(t)], t.advantage, w) for t, w in sent)
    expected, thresholds = ROWS_BY_HAND[name]
    assert [f[0] for f in found] == [e[0] for e in expected]
    assert [x for f in found for x in f[1:]] == pytest.approx([x for e in expected for x in e[1:]], abs=1e-15)
    assert thresholds_of(row) == pytest.approx(thresholds)


def thresholds_of(row: Algorithm) -> dict[str, float]:
    return {name: value for name, value in row.loss.config().items() if name.endswith("threshold")}


def describe(row: Algorithm) -> dict[str, Any]:
    """Everything a row does to the fixed batch, floats as they print (which is exact)."""
    trajectories = batch()
    selected = row.select(trajectories)
    place = {id(t): i for i, t in enumerate(trajectories)}
    return {
        "advantage": row.advantage.name,
        "reduction": row.reduction,
        "loss": row.loss.name,
        "thresholds": thresholds_of(row),
        "beta": row.flat.get("beta"),
        "uses_groups": row.has_group_baseline,
        "selected": [place[id(t)] for t in selected],
        "advantages": [t.advantage for t in trajectories],
        "sent": [[place[id(t)], w] for t, w in row.weigh(selected, MAX_TOKENS)],
    }


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_row_equals_its_golden_file_to_the_bit(name: str) -> None:
    """A refactor changes no advantage, weight, selection or threshold of any row."""
    path = GOLDEN / f"{name}.json"
    found = describe(ALGORITHMS[name])
    if os.environ.get("RLVR_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
    assert path.exists(), f"no golden file for {name}; write it with RLVR_GOLDEN=write and read it"
    assert found == json.loads(path.read_text())


def test_no_golden_file_is_left_over() -> None:
    """One file a row, no more; and the hand-computed rows above are all of them."""
    assert {p.stem for p in GOLDEN.glob("*.json")} == set(ALGORITHMS) == set(ROWS_BY_HAND)


# A baseline for each role moves with every episode, in the order of the batch.
IN_ANY_ORDER = sorted(name for name, spec in ALGORITHMS.items() if not spec.advantage.needs_roles)


@given(st.lists(REWARDS, min_size=1, max_size=3), st.integers(0, 2**32), st.sampled_from(IN_ANY_ORDER))
def test_the_order_of_trajectories_changes_nothing(rewards: list[list[float | None]], seed: int, name: str) -> None:
    """Advantages and weights belong to the trajectory, bit for bit, wherever it stands in the batch."""

    def by_rollout(trajectories: list[Trajectory]) -> dict[str, tuple[float, float]]:
        row = ALGORITHMS[name]
        sent = row.weigh(row.select(trajectories), MAX_TOKENS)
        return {t.rollout_id: (t.advantage, w) for t, w in sent}

    shuffled = groups_of(rewards)
    random.Random(seed).shuffle(shuffled)
    assert by_rollout(shuffled) == by_rollout(groups_of(rewards))


def test_an_example_that_once_takes_long_fails_no_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hypothesis's deadline of 200 ms it does, as "flaky", since the second time it is fast."""
    naps = iter([0.3])
    weigh = Algorithm.weigh
    monkeypatch.setattr(Algorithm, "weigh", lambda *given: time.sleep(next(naps, 0.0)) or weigh(*given))
    test_the_order_of_trajectories_changes_nothing()
    assert next(naps, None) is None


def test_an_empty_response_breaks_no_reduction() -> None:
    """No sampled token: weight 0 per sequence, nothing sent, no division by zero."""
    empty = [trajectory("g", "0", 1.0, 0), trajectory("g", "1", 0.0, 2)]
    assert REDUCTIONS["sequence_mean"](empty, 5) == [0.0, 0.25]
    assert REDUCTIONS["token_mean"](empty[:1], 5) == [0.0]
    row = resolve_algorithm("ppo")
    assert [t.rollout_id for t, _ in row.weigh(row.select(empty), 5)] == ["1"]
    assert row.weigh([], 5) == []


def test_equal_rewards_with_unequal_penalties_teach_unless_filtered() -> None:
    """Two right answers, one further from the reference: the other is better, for a row that keeps such groups."""
    items = groups_of([[1.0, 1.0]])
    items[1].penalty = 0.5
    row = resolve_algorithm("grpo_original", advantage="group_mean")
    assert [(t.rollout_id, t.advantage) for t, _ in row.weigh(row.select(items), 5)] == [
        ("g0/0", 0.25),
        ("g0/1", -0.25),
    ]
    assert resolve_algorithm("ppo").select(items) == [], "a KL alone makes no group worth keeping"
    items[1].length_penalty = 0.5
    assert resolve_algorithm("ppo").select(items) == items, "two right answers, one overlong"
    assert resolve_algorithm("dapo").select(items) == [], "DAPO asks for right and wrong ones"


@pytest.mark.parametrize(
    ("name", "cells"),
    [
        ("dro", {}), ("grpo_original", {"kl_coef": 0.1, "kl_in": "loss"}), ("grpo_original", {"entropy_coef": 0.1}),
        ("grpo_original", {"entropy_coef": 0.1, "entropy": "exact"}),
    ],
)  # fmt: skip
def test_rows_without_advantage_are_sent_where_they_have_a_gradient(name: str, cells: dict[str, Any]) -> None:
    """dro's pull, a KL in the loss, an entropy bonus: all three answers count, not only two."""
    items = groups_of([[1.0, 0.0, 0.5]])
    row = resolve_algorithm(name, **cells)
    assert len(row.weigh(row.select(items), 5)) == 3
    plain = resolve_algorithm("grpo_original", kl_coef=0.1)  # in the reward: no gradient without advantage
    assert len(plain.weigh(plain.select(items), 5)) == 2


def test_truncated_rollouts_are_masked_whole_and_stay_in_the_baseline() -> None:
    """Rollout 1 was cut in its second part: both parts go; the mean is still over all three rollouts."""
    items = [trajectory("g", r, reward, 1) for r, reward in (("0", 1.0), ("1", 0.0), ("1", 0.0), ("2", 0.0))]
    items[2].stop_reason = StopReason.LENGTH
    selected = resolve_algorithm("ppo", mask_truncated=True).select(items)
    assert [t.rollout_id for t in selected] == ["0", "2"]
    assert [t.advantage for t in selected] == pytest.approx([2 / 3, -1 / 3])
    assert len(resolve_algorithm("ppo").select(items)) == 4


def test_zero_advantage_is_skipped_and_still_counted() -> None:
    """Rows without advantage are not sent; their tokens stay in the denominator."""
    items = batch()
    ppo = resolve_algorithm("ppo", drop_equal_groups=False)
    sent = ppo.weigh(ppo.select(items), MAX_TOKENS)
    assert [(t.rollout_id, w) for t, w in sent] == [("a0", 1 / 15), ("a1", 1 / 15), ("a1", 1 / 15)]


@pytest.mark.parametrize(
    ("name", "cells", "message"),
    [
        ("importance_sampling", {"loss": "ppo"}, "give algorithm.clip_low and algorithm.clip_high"),
        ("reinforce", {"drop_equal_groups": True}, "set it to false"),
        ("reinforce_ema", {"drop_equal_groups": True}, "set it to false"),
        ("ppo", {"beta": 0.1}, "the loss 'ppo' has no beta; leave it out, or use one that has: dpo, dro, ipo, kto"),
        ("dro", {"beta": 0.0}, "algorithm.beta=0.0, expected a number above 0"),
        ("dro", {"beta": math.inf}, "algorithm.beta=inf, expected a number above 0"),
        ("ppo", {"kl_estimator": "k4"}, "known: k1, k2, k3"),
        ("ppo", {"kl_in": "rewards"}, r"did you mean 'reward'\?.*known: reward, loss"),
        ("ppo", {"entropy": "full"}, "known: sampled, exact"),
        ("ppo", {"kl_coeff": 0.1}, r"no field 'kl_coeff' \(did you mean 'kl_coef'\?\); fields: advantage, loss"),
        ("ppo", {"kl_coef": -0.1}, "algorithm.kl_coef=-0.1, expected at least 0"),
        ("ppo", {"kl_coef": math.nan}, "algorithm.kl_coef=nan"),
        ("ppo", {"kl_coef": math.inf}, "algorithm.kl_coef=inf"),
        ("ppo", {"entropy_coef": math.inf}, "algorithm.entropy_coef=inf"),
        ("ppo", {"importance_cap": 0.5}, r"algorithm.importance_cap=0.5, expected at least 1 \(2 is usual\), or null"),
        ("ppo", {"importance_cap": 2.0, "importance_floor": 1.5}, "importance_floor=1.5, expected 0 to 1"),
        ("ppo", {"importance_cap": 2.0, "importance_mode": "mask"}, "known: token_truncate, token_mask, sequence_"),
        ("ppo", {"overlong_buffer": 0}, "algorithm.overlong_buffer=0, expected at least 1 token, or null"),
        ("ppo", {"overlong_penalty": -1.0}, "algorithm.overlong_penalty=-1.0"),
        ("ppo", {"accept_above": 0.5}, "the advantage 'group_mean' has no accept_above; .* acceptance, verdict"),
        ("raft", {"accept_above": math.nan}, "algorithm.accept_above=nan"),
        ("ppo", {"pass_k": 4}, "the advantage 'group_mean' has no pass_k; .* pass_at_k"),
        ("pass_at_k", {"pass_k": 1}, "algorithm.pass_k=1, expected at least 2"),
        ("grpo_process", {"drop_equal_groups": True}, "set it to false"),
        ("raft", {"drop_equal_groups": True}, "set it to false"),
        ("raft", {"kl_coef": 0.1}, "asks only whether a reward is above accept_above: the KL has no gradient; use kl_"),
        ("distillation", {"kl_coef": 0.1}, "reads no reward: the KL has no gradient; use kl_in=loss"),
        ("distillation", {"overlong_buffer": 4}, "algorithm.overlong_buffer=4 has no effect with the advantage 'zero'"),
        ("dpo", {"observation_coef": 0.1}, "algorithm.observation_coef=0.1 has no effect"),
        (
            "gdpo",
            {"kl_coef": 0.1},
            "algorithm.kl_coef=0.1 has no effect with the advantage 'reward_normalized'.*kl_in=loss",
        ),
        ("gdpo", {"overlong_buffer": 4}, "algorithm.overlong_buffer=4 has no effect.*reward.type=composite"),
        ("gdpo", {"drop_equal_groups": True}, "set it to false"),
        ("dpo", {"advantage": "group_mean"}, "use advantage=verdict"),
        ("dpo", {"reduction": "token_mean"}, "sequence_sum.*sequence_mean"),
        ("kto", {"entropy_coef": 0.1}, "algorithm.entropy_coef=0.1 has no effect on the loss 'kto'"),
        ("ipo", {"importance_cap": 2.0}, "algorithm.importance_cap=2.0 has no effect"),
        ("dpo", {"kl_coef": 0.1}, "algorithm.kl_coef=0.1 has no effect"),
        ("dpo", {"clip_low": 0.1}, "the loss 'dpo' has no clip_low; .* cispo, gspo, ppo"),
        ("ppo", {"dual_clip": 1.2}, r"expected a ratio of at least 1 \+ clip_high = 1.28 \(3 is usual\), or null"),
        ("ppo", {"dual_clip": math.inf}, "algorithm.dual_clip=inf, expected"),
        ("cispo", {"dual_clip": 5.0}, "the loss 'cispo' has no dual_clip; leave it out, or .* gspo, ppo"),
        ("rloo", {"dual_clip": 3.0}, "algorithm.dual_clip=3.0 has no effect"),
        ("reinforce_ema", {"baseline_decay": 1.5}, "algorithm.baseline_decay=1.5"),
    ],
)
def test_cells_that_would_compute_something_else_are_refused(name: str, cells: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_algorithm(name, **cells)


def test_an_unknown_algorithm_names_the_nearest() -> None:
    """A misspelling is answered with the likely word and all known ones."""
    with pytest.raises(
        ValueError, match=r"'grp0' is unknown \(did you mean 'grpo'\?\); known: cispo, dapo, distillation"
    ):
        resolve_algorithm("grp0")
    with pytest.raises(ValueError, match=r"algorithm.advantage='group_men' is unknown \(did you mean 'group_mean'\?\)"):
        resolve_algorithm("ppo", advantage="group_men")
    with pytest.raises(ValueError, match=r"algorithm.loss='pppo' is unknown \(did you mean 'ppo'\?\)"):
        resolve_algorithm("ppo", loss="pppo")
    with pytest.raises(ValueError, match=r"unknown algorithm.reduction 'tokens'.*known: .*token_mean"):
        resolve_algorithm("ppo", reduction="tokens")


@pytest.mark.parametrize("bound", ["clip_low", "clip_high"])
def test_a_clip_without_effect_is_an_error(bound: str) -> None:
    """importance_sampling does not clip: saying nothing would leave the user believing it does."""
    with pytest.raises(ValueError, match=f"algorithm.{bound}=0.2 has no effect.*cispo, gspo, ppo"):
        resolve_algorithm("importance_sampling", **{bound: 0.2})


@pytest.mark.parametrize(("bound", "value"), [("clip_low", -0.1), ("clip_low", 1.1), ("clip_high", -0.1)])
def test_a_clip_out_of_range_is_an_error(bound: str, value: float) -> None:
    """A lower epsilon is 0 to 1, an upper one at least 0."""
    with pytest.raises(ValueError, match=f"algorithm.{bound}={value}"):
        resolve_algorithm("ppo", **{bound: value})


def test_cells_can_be_replaced_one_by_one() -> None:
    """A row is the sum of its cells: thresholds are absolute ratios, and the table itself stays."""
    row = resolve_algorithm("ppo", reduction="sequence_mean", clip_low=0.1, clip_high=0.5)
    assert (row.reduction, row.advantage.name) == ("sequence_mean", "group_mean")
    assert row.loss.config() == pytest.approx({"clip_low_threshold": 0.9, "clip_high_threshold": 1.5})
    assert ALGORITHMS["ppo"].reduction == "token_mean"


def test_another_loss_leaves_the_rows_own_clip_behind() -> None:
    """ppo's row with importance_sampling has no thresholds; with cispo it keeps them; asking for both is an error."""
    assert resolve_algorithm("ppo", loss="importance_sampling").loss.config() == {}
    bounds = resolve_algorithm("ppo").loss.config()
    assert resolve_algorithm("ppo", loss="cispo").loss.config() == pytest.approx(bounds)
    with pytest.raises(ValueError, match="has no effect"):
        resolve_algorithm("ppo", loss="importance_sampling", clip_low=0.1)
    assert (
        resolve_algorithm("ppo", loss="dro").flat["beta"] == 0.05
        and "beta" not in resolve_algorithm("dro", loss="cispo", **CLIP).flat
    )
    assert resolve_algorithm("ppo", loss="dro", beta=0.2).flat["beta"] == 0.2
    assert resolve_algorithm("ppo", dual_clip=3.0).loss.config()["dual_clip_threshold"] == 3.0


CLIP = {"clip_low": 1.0, "clip_high": 3.0}


def test_a_batch_baseline_takes_the_filter_of_equal_groups_out() -> None:
    """The ppo spec with a batch baseline keeps every group by default."""
    assert not resolve_algorithm("ppo", advantage="batch_mean").drop_equal_groups
    assert resolve_algorithm("ppo", advantage="leave_one_out").drop_equal_groups


def test_a_name_is_registered_once() -> None:
    """The same row again is nothing new; another one under its name is an error."""
    register_algorithm(ALGORITHMS["ppo"])
    with pytest.raises(ValueError, match="'ppo' is registered already; choose another name"):
        register_algorithm(
            Algorithm("ppo", RawAdvantage(), ImportanceSampling(), "token_mean", drop_equal_groups=False)
        )


def test_every_row_names_a_loss_of_the_engine() -> None:
    """The table and the engine's dictionary agree on names and on which losses clip."""
    from rlvr.engine.losses import TERMS

    assert set(LOSSES) == set(TERMS) | {loss.name for loss in LOSSES.classes() if loss.compares_completions}
    assert {row.loss.name for row in ALGORITHMS.values()} <= set(LOSSES)
    assert LOSSES.flat_options()["clip_low"] == {"ppo", "cispo", "gspo"}
    assert all(row.source for row in ALGORITHMS.values())


@pytest.mark.parametrize("option", [{"kl_coef": 0.1}, {"entropy_coef": 0.1}])
def test_a_row_stops_filtering_where_equal_groups_have_a_gradient(option: dict[str, float]) -> None:
    """A divergence and an entropy bonus give signal in groups of equal rewards too; an explicit filter stays on."""
    for name in ("ppo", "dapo"):
        assert resolve_algorithm(name).drop_equal_groups
        assert not resolve_algorithm(name, **option).drop_equal_groups
        assert resolve_algorithm(name, **option, drop_equal_groups=True).drop_equal_groups


@pytest.mark.parametrize("name", ["orpo", "SimPO"])
def test_an_algorithm_of_preferences_is_not_taken_for_a_typing_error(name: str):
    with pytest.raises(ValueError, match="there are dpo, ipo and kto") as caught:
        registry.find_algorithm(name)
    assert "did you mean" not in str(caught.value)
