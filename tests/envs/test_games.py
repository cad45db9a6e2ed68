"""Games of several roles: a conversation and rewards for each role, opponents, and every way a game can be wrong."""

from __future__ import annotations

from typing import Any

import pytest

from rlvr.algorithms import resolve_algorithm
from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.clients.mock.tabular_policy import WordTokenizer
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs import resolve_environment
from rlvr.envs.games.take_away import TakeAway
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from rlvr.training.compatibility import check_roles

GAMES = "tests.kit.games_of_tests"


def script(tokenizer: Any, *said: str) -> ScriptedSamplingClient:
    """A sampler that says these texts, each with the end token."""
    turns = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in said]
    return ScriptedSamplingClient(tokenizer, lambda index: turns[index % len(turns)])


def play(source: Any, tasks: list[Any], *said: str, tokenizer: Any = None, size: int = 1) -> list[Trajectory]:
    tokenizer = tokenizer or WordTokenizer(source.vocabulary or ["say", *said])
    groups = open_groups(source, tasks, size, tokenizer, "g")
    played = rollout(groups, script(tokenizer, *said), SamplingParams(8), seed=1)
    score(played, resolve_reward(source.reward))
    return played


def start(source: Any, heap: int, most: int, opponent: str = "self", role: str = "first") -> Any:
    task = next(source.train(0, i, "") for i in range(source.size("")))
    meta = {**task.meta, "heap": heap, "most": most, "opponent": opponent, "role": role}
    return type(task)("own", "", meta)


def sampled(t: Trajectory, tokenizer: Any) -> list[str]:
    """What the mask covers, turn by turn."""
    ends = [*t.turn_starts[1:], len(t.response_tokens)]
    spans = zip(t.turn_starts, ends, strict=True)
    return [
        tokenizer.decode([x for x, m in list(zip(t.response_tokens, t.action_mask, strict=True))[a:b] if m])
        for a, b in spans
    ]


def test_each_role_has_a_row_of_its_own_turns_and_its_own_reward() -> None:
    source = resolve_environment("take_away", heap=9, most=[3])
    tokenizer = WordTokenizer(source.vocabulary)
    first, second = sorted(play(source, [start(source, 9, 3)], "1", "2", "3", "3"), key=lambda t: t.role)
    assert (first.role, second.role) == ("first", "second")
    assert tokenizer.decode(first.prompt_tokens) == "first left 9 most 3 :"
    assert tokenizer.decode(first.response_tokens) == "1 <end> left 6 most 3 : 3 <end>"
    assert tokenizer.decode(second.prompt_tokens) == "second left 8 most 3 :"
    assert tokenizer.decode(second.response_tokens) == "2 <end> left 3 most 3 : 3 <end>"
    assert sampled(first, tokenizer) == ["1 <end>", "3 <end>"] and sampled(second, tokenizer) == ["2 <end>", "3 <end>"]
    assert (first.reward, second.reward) == (-1.0, 1.0) and (first.turn_credits, second.turn_credits) == (
        [-1.0] * 2,
        [1.0] * 2,
    )
    assert first.rollout_id == second.rollout_id and {b.role: b.reward for b in first.branches or second.branches} == {
        "first": -1.0, "second": 1.0
    }  # fmt: skip
    judged = next(t for t in (first, second) if t.scores)
    assert judged is first and judged.scores["environment"].outcome is Outcome.FAILED
    assert first.metadata["reward/second"] == 1.0 and first.metadata["turns/first"] == 2.0
    assert first.reports[-1]["turns"] == 4.0 and not any(second.reports), "a value of the episode counts once"
    assert [m["role"] for m in second.messages] == ["user", "assistant", "user", "assistant"]


def test_roles_that_read_the_same_do_not_go_on_from_each_other() -> None:
    """`right` reads what `left` read and said, token for token: it is still a conversation of its own."""
    tokenizer = WordTokenizer(["say", "a", "b"], end="a")  # the end token is a word, so histories are equal
    source = resolve_environment(f"{GAMES}:Pair", inner_kwargs={"heldout": 1})
    rows = play(source, source.heldout(1), "a", "b", tokenizer=tokenizer)
    assert sorted(t.role for t in rows) == ["left", "right"]
    assert all(len(t.turn_starts) == 2 for t in rows), "each has its two turns"


def test_episodes_of_a_group_begin_alike_and_an_opponent_follows_from_the_turns() -> None:
    source = resolve_environment("take_away", heap=9, most=[3], opponent="random")
    tokenizer = WordTokenizer(source.vocabulary)
    task = start(source, 9, 3, "random", "second")
    rows = play(source, [task], "1", size=4)
    assert len({tuple(t.prompt_tokens) for t in rows}) == 1 and {t.role for t in rows} == {"second"}
    assert len({tuple(t.response_tokens) for t in rows}) == 1, "the same turns, the same replies"
    seen = {
        tokenizer.decode(play(source, [type(task)("own", task.prompt, {**task.meta, "draw": n})], "1")[0].prompt_tokens)
        for n in range(20)
    }
    assert seen == {f"second left {left} most 3 :" for left in (8, 7, 6)}


def test_an_illegal_turn_loses_at_once_and_the_other_role_may_have_no_row() -> None:
    source = resolve_environment("take_away", heap=9, most=[3])
    (row,) = play(source, [start(source, 9, 3)], "4")
    assert row.role == "first" and row.reward == -1.0 and row.metadata["illegal"] == 1.0
    first, second = sorted(play(source, [start(source, 9, 3)], "1", "first"), key=lambda t: t.role)
    assert (first.reward, second.reward) == (1.0, -1.0)


def test_perfect_play_wins_every_won_start_and_no_lost_one() -> None:
    """Against every reply: exhaustive over all starts, by the rule and not by a search."""

    def wins(heap: int, most: int, by_rule: bool) -> bool:
        """Whether the role to move wins, if it follows the rule or the other does."""
        game = TakeAway()
        game.reset(heap, most)
        if not heap:
            return False
        own = game.moves("perfect" if by_rule else "random")
        return (
            all(not wins(heap - int(m), most, not by_rule) for m in own)
            if by_rule
            else any(not wins(heap - int(m), most, not by_rule) for m in own)
        )

    for most in (2, 3):
        for heap in range(1, 13):
            assert wins(heap, most, True) == (heap % (most + 1) != 0)
            assert wins(heap, most, False) == (heap % (most + 1) != 0), "no reply beats the rule"


def test_a_demonstration_is_one_roles_part_of_random_play_in_the_words_of_an_episode() -> None:
    """Its prompt is what an episode of that role begins with, its turns are legal, and both roles come."""
    source = resolve_environment("take_away", heap=9, most=[3])
    tokenizer = WordTokenizer(source.vocabulary)
    seen: set[str] = set()
    for index in range(40):
        task = source.train(0, index, "")
        prompt, shown = source.complete_prompt(task, tokenizer).model_prompt, source.demonstration(task, 0)
        words = str(prompt).split()
        role, left = words[-6], int(words[-4])
        assert (role, left) == ("first", task.meta["heap"]) or (role == "second" and left < task.meta["heap"])
        assert shown == source.demonstration(task, 1)
        seen.add(role)
        for place, text in enumerate(shown):
            if place % 2 == 0:
                assert 1 <= int(text) <= min(3, left)
            else:
                left = int(text.split()[1])
    assert seen == {"first", "second"}
    pair = resolve_environment(f"{GAMES}:Pair")
    assert pair.demonstration(pair.train(0, 0, ""), 0) is None, "without an opponent there is nothing to imitate"


def test_heldout_starts_are_never_trained_on_and_are_played_as_the_role_that_wins() -> None:
    source = resolve_environment("take_away", heap=13, most=[2, 3, 4, 5])
    heldout, train = source.heldout(None), [source.train(0, i, "") for i in range(source.size(""))]
    assert len({t.id for t in heldout} | {t.id for t in train}) == 52 == len(heldout) + len({t.id for t in train})
    assert all(t.meta["opponent"] == "self" and "role" not in t.meta for t in train)
    for task in heldout:
        assert task.meta["opponent"] == "perfect"
        assert task.meta["role"] == ("second" if task.meta["heap"] % (task.meta["most"] + 1) == 0 else "first")
    ((name, extra),) = source.extra_heldout(3).items()
    assert name == "against random" and {t.meta["opponent"] for t in extra} == {"random"}


@pytest.mark.parametrize(
    ("game", "message"),
    [
        ("Unpaid", "gave the role 'right' the reward None; expected a finite number for each of left, right"),
        ("Unclear", "gave the role 'right' the reward nan"),
    ],
)
def test_a_game_that_gives_a_role_no_reward_is_an_error_and_no_zero(game: str, message: str) -> None:
    source = resolve_environment(f"{GAMES}:{game}")
    rows = play(source, source.heldout(1), "a", "b", tokenizer=WordTokenizer(["say", "a", "b"]))
    assert [t.reward for t in rows] == [None, None] and not any(t.turn_credits for t in rows)
    verdict = rows[-1].scores["environment"]
    assert verdict.outcome is Outcome.ERROR and message in verdict.detail


def test_a_game_that_does_not_end_gives_every_role_0_and_says_why() -> None:
    source = resolve_environment(f"{GAMES}:Endless", max_turns=5)
    rows = play(source, source.heldout(1), "a", tokenizer=WordTokenizer(["say", "a"]))
    assert [t.reward for t in rows] == [0.0, 0.0]
    assert next(t for t in rows if t.scores).metadata["stop/max_turns"] == 1.0
    assert sorted(len(t.turn_starts) for t in rows) == [2, 3]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "take_away",
            {"opponent": "slef"},
            r"opponent='slef' is unknown.*self.*random, perfect, and the path of a run",
        ),
        ("take_away", {"opponent": "runs/none"}, r"opponent='runs/none' is unknown"),
        (
            "take_away",
            {"heldout_opponent": "best"},
            r"heldout_opponent='best' is unknown; known: self, random, perfect",
        ),
        ("take_away", {"most": 3}, r"most=3, expected a list"),
        ("take_away", {"most": [1]}, r"most=1, expected a whole number from 2"),
        ("take_away", {"heap": 2, "most": [2], "heldout_fraction": 1}, r"leaves 0 to train on and 2 held out"),
        ("take_away", {"heap": 1}, r"heap=1, expected a whole number from 2"),
        (f"{GAMES}:Pair", {"opponent": "random"}, r"opponent='random' is unknown; known: self, and the path"),
        (f"{GAMES}:Nameless", {}, r"roles=\(\), expected different names"),
        (f"{GAMES}:Pair", {"max_turns": 0}, r"max_turns=0, expected a whole number"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_played(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_environment(name, **options)


def test_an_unknown_role_is_named() -> None:
    source = resolve_environment("take_away", heap=9, most=[3])
    with pytest.raises(ValueError, match=r"the role 'third', which is unknown; known: first, second"):
        source.env(start(source, 9, 3, "random", "third"), WordTokenizer(source.vocabulary))
    stranger = resolve_environment(f"{GAMES}:Stranger")
    with pytest.raises(ValueError, match=r"gave \('middle', 'say'\), expected \(role, text\) with one of left, right"):
        stranger.env(stranger.heldout(1)[0], WordTokenizer(["say"]))


def test_an_advantage_and_an_environment_must_agree_on_roles() -> None:
    game, plain = resolve_environment("take_away"), resolve_environment("sorting")
    for name in ("role_group_mean", "role_baseline"):
        with pytest.raises(ValueError, match=rf"advantage={name} has a baseline for each role, and .* have one"):
            check_roles(resolve_algorithm("grpo", advantage=name), plain)
        check_roles(resolve_algorithm("grpo", advantage=name), game)
    with pytest.raises(ValueError, match=r"advantage=pass_at_k takes one reward.*first, second.*use .*role_baseline"):
        check_roles(resolve_algorithm("pass_at_k"), game)
    check_roles(resolve_algorithm("grpo"), plain)


def test_another_sampler_plays_the_other_role_and_is_not_trained() -> None:
    """The other says 3, the policy 1: the row has the policy's turns, and no fingerprint of the other."""
    source: Any = resolve_environment("take_away", heap=9, most=[3], opponent="tests")
    assert source.opponent == "tests"
    tokenizer = WordTokenizer(source.vocabulary)
    task = start(source, 9, 3, "tests", "second")
    other = script(tokenizer, "3")
    other.fingerprint = "other"
    (unseated,) = play(source, [task], "1")
    assert (
        unseated.reward is None
        and "neither the policy nor an opponent plays it" in unseated.scores["environment"].detail
    )
    source.seat(other)
    (row,) = play(source, [task], "1")
    assert tokenizer.decode(row.prompt_tokens) == "second left 6 most 3 :"
    assert sampled(row, tokenizer) == ["1 <end>", "1 <end>"] and row.policy_fingerprint == "script"
    assert tokenizer.decode(row.response_tokens) == "1 <end> left 2 most 3 : 1 <end>" and row.reward == 1.0
    assert len(other.prompts) == 3
