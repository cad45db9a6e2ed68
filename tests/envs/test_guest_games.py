"""Unmodified games of TextArena and GEM, by the real packages."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rlvr.clients.mock.mock_client import ScriptedSamplingClient
from rlvr.core.messages import SamplingParams
from rlvr.core.types import Outcome, Trajectory
from rlvr.envs.registry import resolve_environment
from rlvr.reward import resolve_reward
from rlvr.rollout import open_groups, rollout, score
from tests.kit.code_rows import chat_tokenizer
from tests.kit.ecosystems import find_interpreter
from tests.kit.open_server import TOOLS_TEMPLATE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # the imports of the packages take seconds
MODULES = Path(__file__).parents[1] / "kit/ecosystems/game_modules"
TEXT = chat_tokenizer()
TEXT.chat_template = TOOLS_TEMPLATE
CELLS = [f"[{cell}]" for cell in range(9)]
DICE = "Dice-v0@arena_games"


@pytest.fixture(autouse=True)
def in_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(MODULES)  # the same processes for all tests


def arena(name: str, **options: Any) -> Any:
    find_interpreter("textarena")
    return resolve_environment(f"textarena:{name}", **options)


def gem(name: str, **options: Any) -> Any:
    find_interpreter("gem")
    return resolve_environment(f"gem:{name}", **options)


def play(source: Any, *said: str, size: int = 1) -> list[Trajectory]:
    """`size` episodes of the first held-out task, in which the policy says these turns."""
    tokens = [[*TEXT.encode(turn, add_special_tokens=False), TEXT.eos_token_id] for turn in said]
    sampler = ScriptedSamplingClient(TEXT, lambda index: tokens[(index // size) % len(tokens)])
    groups = open_groups(source, source.heldout(1), size, TEXT, "g")
    played = rollout(groups, sampler, SamplingParams(200), seed=1)
    score(played, resolve_reward(source.reward))
    return played


def play_at_once(source: Any, count: int, said: Sequence[str]) -> list[list[Any]]:
    """What `count` episodes say, which take turns."""

    async def run() -> list[list[Any]]:
        sessions = [source.gym.open() for _ in range(count)]
        heard = [[await session.reset(task)] for session, task in zip(sessions, source.heldout(count), strict=True)]
        for turn in said:
            for session, one in zip(sessions, heard, strict=True):
                if not one[-1].done:
                    one.append(await session.step(turn))
        for session in sessions:
            await session.close()
        return heard

    return asyncio.run(run())


def play_alone(source: Any, count: int, said: Sequence[str]) -> list[list[Any]]:
    """The same episodes, one after the other."""

    async def run() -> list[list[Any]]:
        heard: list[list[Any]] = []
        for task in source.heldout(count):
            session = source.gym.open()
            heard.append([await session.reset(task)])
            for turn in said:
                if not heard[-1][-1].done:
                    heard[-1].append(await session.step(turn))
            await session.close()
        return heard

    return asyncio.run(run())


def test_a_game_of_one_player_gives_its_reward_at_the_end() -> None:
    source = arena("GuessTheNumber-v0", options={"min_number": 5, "max_number": 5})
    (t,) = play(source, "I say [6]", "[5]")
    prompt, said = TEXT.decode(t.prompt_tokens), TEXT.decode(t.response_tokens)
    assert t.reward == 1.0 and t.metadata["stop/done"] == 1.0 and t.metadata["turn_count"] == 1.0
    assert prompt.count("You are playing Guess The Number") == 1 and "invalid move" in said
    assert "Guess The Number" not in said and said.count("I say [6]") == 1, "each message is read once"


def test_another_player_makes_legal_moves_from_a_list() -> None:
    source = arena("TicTacToe-v0", opponent=["hm", "[9]", *CELLS], seeds={"heldout": 30})
    played = play_at_once(source, 30, [*CELLS, *CELLS])
    rewards = [heard[-1].reward for heard in played]
    assert all(heard[-1].done for heard in played) and {-1.0, 1.0} <= set(rewards) <= {-1.0, 0.0, 1.0}
    assert len({heard[1].text for heard in played}) > 3, "it moves at random"
    assert not any("hm" in step.text or "[Player 1] [9]" in step.text for heard in played for step in heard)
    (t,) = play(arena("TicTacToe-v0", opponent=["[0]"]), "[0]")
    assert t.reward is None and "none of the texts of `opponent` is a legal move" in str(t.scores["environment"].detail)


def test_a_policy_plays_both_players_of_a_game_against_itself() -> None:
    """Each player's row has its own messages, and the mask covers its own words: the other's are observations."""
    source = arena("TicTacToe-v0", opponent="self")
    rows = play(source, "[0]", "[4]", "[1]", "[5]", "[2]", size=2)
    assert [t.role for t in rows] == ["player_1", "player_0"] * 2 and source.roles == ("player_0", "player_1")
    assert [t.reward for t in rows] == [-1.0, 1.0] * 2
    for t, own, other in zip(rows[:2], (["[4]", "[5]"], ["[0]", "[1]", "[2]"]), ("Player 0", "Player 1"), strict=True):
        mask = [x for x, m in zip(t.response_tokens, t.action_mask, strict=True) if m]
        assert TEXT.decode(mask) == "".join(f"{said}<|im_end|>" for said in own)
        prompt = TEXT.decode(t.prompt_tokens)
        assert f"As {'Player 1' if other == 'Player 0' else 'Player 0'}, you will be" in prompt
        assert f"[{other}] " in prompt + TEXT.decode(t.response_tokens) and "As Player" not in TEXT.decode(
            t.response_tokens
        )
    assert rows[1].metadata["turns/player_1"] == 2.0 and rows[1].metadata["stop/done"] == 1.0


def test_an_invalid_move_is_the_games_matter_and_the_other_player_may_have_no_row() -> None:
    """TicTacToe lets a player try once more, and then it has lost."""
    rows = play(arena("TicTacToe-v0", opponent="self"), "nonsense")
    assert {t.role: t.reward for t in rows} == {"player_0": -1.0} and len(rows[0].turn_starts) == 2
    assert rows[0].metadata["reward/player_1"] in (0.0, 1.0)


def test_held_out_games_are_played_against_random_moves_in_either_seat() -> None:
    source = arena("TicTacToe-v0", opponent="self", moves=CELLS, seeds={"heldout": 8})
    tasks = source.heldout(8)
    assert {t.meta["role"] for t in tasks} == {"player_0", "player_1"} and {t.meta["opponent"] for t in tasks} == {
        "random"
    }
    groups = open_groups(source, tasks, 1, TEXT, "g")
    tokens = [[*TEXT.encode(cell, add_special_tokens=False), TEXT.eos_token_id] for cell in CELLS]
    rows = rollout(groups, ScriptedSamplingClient(TEXT, lambda index: tokens[index % 9]), SamplingParams(200), seed=1)
    assert [t.role for t in rows] == [t.meta["role"] for t in tasks]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opponent": "nobody"}, r"opponent='nobody' is unknown; known: self, and the path"),
        ({"opponent": "random"}, r"opponent='random' is unknown"),
        ({"opponent": "self", "moves": "[0]"}, r"moves='\[0\]', expected a list of texts"),
        ({"opponent": "self", "players": 1}, r"players=1, expected a whole number from 2"),
        ({"opponent": ["[0]"], "players": 3}, r"players has no effect with opponent=\['\[0\]'\]"),
        ({"moves": ["[0]"]}, r"moves has no effect with opponent=None"),
    ],
)
def test_options_of_self_play_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arena("TicTacToe-v0", **options)


def test_a_number_of_players_that_a_game_does_not_take_is_named() -> None:
    source = arena("TicTacToe-v0", opponent="self", players=3)
    with pytest.raises(ValueError, match=r"is no game for 3 .*give another number of `players`"):
        source.env(source.heldout(1)[0], TEXT)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (DICE, "3"),
        ("Blackjack-v0", "hit; stand"),
        ("2048-v0-ultra-easy", "up; left; down; right"),
        ("Minesweeper-v0", "[0 0]; [3 3]; [5 2]"),
    ],
)
def test_episodes_of_textarena_do_not_disturb_each_other(name: str, said: str) -> None:
    turns = said.split("; ") * 5
    alone = play_alone(arena(name, processes=1), 5, turns)
    assert play_at_once(arena(name, processes=1), 5, turns) == alone
    assert play_at_once(arena(name, processes=3), 5, turns) == alone
    assert len({str(heard) for heard in alone}) == 5


@pytest.mark.parametrize(
    "name", ["game:Game2048-v0-easy", "game:Minesweeper-v0-random", "rg:chain_sum", "test:Rows@gem_games"]
)
def test_environments_of_gem_do_not_disturb_each_other(name: str) -> None:
    said = [r"\boxed{up}", r"\boxed{left}", r"\boxed{reveal 1 1}", r"\boxed{right}", r"\boxed{down}"] * 2
    alone = play_alone(gem(name, processes=1), 4, said)
    assert play_at_once(gem(name, processes=1), 4, said) == alone
    assert play_at_once(gem(name, processes=2), 4, said) == alone
    assert len({str(heard) for heard in alone}) == 4


def test_an_environment_of_gem_adds_the_rewards_of_its_steps() -> None:
    source = gem("game:GuessTheNumber-v0-easy", options={"min_number": 4, "max_number": 9})
    task = source.heldout(1)[0]
    (t,) = play(source, *(rf"\boxed{{{n}}}" for n in range(4, 10)))
    assert t.reward is not None and t.reward > 0 and "Enter your first guess" in TEXT.decode(t.prompt_tokens)
    (bad,) = play(source, "hm")
    assert bad.reward == pytest.approx(-0.1) and task.meta["seed"] >= 1 << 30
    rows = gem("test:Rows@gem_games", processes=1)
    (t,) = play(rows, "hm")
    assert t.reward == 0.25 and t.metadata["correct"] == 0.0 and t.metadata["loaded"] == 1.0
    assert re.search(r"Say \d+\nNow!", TEXT.decode(t.prompt_tokens))
    (odd,) = play(rows, "data")
    assert odd.reward is None and "says a list, expected text" in str(odd.scores["environment"].detail)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("raise", r"arena_games\.py:\d+: KeyError: 'lost'"),
        ("nan", "no JSON"),
        ("nothing", "is over, and gave the reward None"),
        ("exit", "ended with exit code 3"),
        ("hang", "took longer than 2 seconds"),
    ],
)
def test_failures_are_errors_and_no_zeros(said: str, words: str) -> None:
    source = arena(DICE, processes=1, seconds=2.0 if said == "hang" else 60.0)
    (t,) = play(source, *["1", "1", said] if said in ("nan", "nothing") else [said])
    verdict = t.scores["environment"]
    assert t.reward is None and verdict.outcome is Outcome.ERROR and re.search(words, verdict.detail or "")
    assert play(source, "1")[0].reward is not None, "another process plays on"


def test_a_process_that_is_ended_takes_its_episodes_with_it() -> None:
    source = arena(DICE, processes=1)

    async def run() -> str:
        sessions = [source.gym.open() for _ in range(2)]
        for session in sessions:
            await session.reset(source.heldout(1)[0])
        for session, turn in zip(sessions, ("exit", "1"), strict=True):
            try:
                await session.step(turn)
            except Exception as error:
                message = str(error)
            finally:
                await session.close()
        return message

    assert "the process of this episode was ended" in asyncio.run(run())


def test_many_episodes_share_the_processes() -> None:
    assert len({t.reward for t in play(arena(DICE), "1", "2", "3", size=24)}) == 1, "of one seed"


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("TicTacToe-v0", {}, "no game for 1 .*; give `opponent`"),
        ("GuessTheNumber-v0", {"opponent": ["1"]}, "leave `opponent` out"),
        ("TicTacToe-v0", {"opponent": []}, "expected a list of texts"),
        ("TicTacTo-v0", {}, "did you mean 'TicTacToe-v0'"),
        ("Dice-v0@no_games", {}, "No module named 'no_games'"),
        (DICE, {"options": {"fault": "words"}}, "`.*python -m nltk.downloader words`"),
        (DICE, {"options": {"side": 6}}, "side"),
        (DICE, {"options": [6]}, "expected a mapping"),
        (DICE, {"processes": 0}, "processes"),
        (DICE, {"python": "/no/such"}, "is no program"),
    ],
)
def test_mistakes_are_named(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        source = arena(name, **options)
        source.env(source.heldout(1)[0], TEXT)


def test_mistakes_with_gem_are_named() -> None:
    source = gem("game:GuessTheNumbr-v0-easy")
    with pytest.raises(ValueError, match="did you mean 'game:GuessTheNumber-v0-easy'"):
        source.env(source.heldout(1)[0], TEXT)
