"""A game of two roles with a known solution: take from a heap in turn; the role that takes the last one wins.

    first left 13 most 3 :  ->  1        leaves 12, a multiple of 4: whatever the other takes of it, `first` can win

A heap of n, of which each turn takes 1 to k, is lost for the role whose turn it is exactly if k + 1 divides n, and else
won by taking n mod (k + 1) (Bouton 1901, the subtraction game). So play can be compared with perfect play.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlvr.core import rng
from rlvr.core.types import Task
from rlvr.envs.games.game_session import ClassGame
from rlvr.envs.games.game_source import SELF, GameSource
from rlvr.envs.registry import register_environment
from rlvr.envs.seeds import NumberedSource
from rlvr.reward.reward_options import check_integer, check_number, is_list

MOST_HEAP = 100


class TakeAway:
    """One play. The winner gets 1 and the other -1; a turn that is no legal number loses at once."""

    roles = ("first", "second")
    opponents = ("random", "perfect")

    def __init__(self) -> None:
        self.heap = self.most = self.moves_made = 0
        self.loser = ""
        self._is_illegal = False

    def reset(self, heap: int, most: int) -> None:
        """Begin with a heap, of which a turn takes at most `most`."""
        self.heap, self.most = heap, most

    @property
    def mover(self) -> str:
        return self.roles[self.moves_made % 2]

    def turn(self) -> tuple[str, str] | None:
        """Whose turn it is, and what that role reads; None once a role has lost."""
        if self.loser:
            return None
        begin = self.mover if self.moves_made < 2 else ""
        return self.mover, f"{begin} left {self.heap} most {self.most} :"

    def step(self, action: str) -> None:
        """Take from the heap. The role that finds none left has lost."""
        if action.strip() not in self.moves("random"):
            self.loser, self._is_illegal = self.mover, True
            return
        self.heap -= int(action)
        self.moves_made += 1
        if not self.heap:
            self.loser = self.mover

    def rewards(self) -> Mapping[str, float]:
        return {role: -1.0 if role == self.loser else 1.0 for role in self.roles}

    def metrics(self) -> Mapping[str, float]:
        return {"illegal": float(self._is_illegal)}

    def moves(self, opponent: str) -> list[str]:
        """The legal moves; for the opponent `perfect` those that win, all if none does."""
        best = self.heap % (self.most + 1)
        if opponent == "perfect" and best:
            return [str(best)]
        return [str(count) for count in range(1, min(self.most, self.heap) + 1)]


@register_environment("take_away")
class TakeAwaySource(GameSource):
    """Two roles take 1 to k from a heap in turn, and the one that takes the last wins; k is one of `most`.

    The starts are every heap up to `heap` with every k; a share `heldout_fraction` of them, chosen by a hash, is held
    out. In training the policy plays against `opponent`: `self`, `random`, `perfect`, or the path of a run or one of
    its checkpoints. On held-out starts it has the role that wins if it makes no mistake, against `heldout_opponent`.
    """

    end_word: str = "<end>"
    pad_word: str = "<pad>"

    def __init__(
        self,
        heap: int = 21,
        most: Sequence[int] = (2, 3, 4),
        opponent: str = SELF,
        heldout_opponent: str = "perfect",
        heldout_fraction: float = 0.3,
    ) -> None:
        check_integer("take_away: heap", heap, 2, MOST_HEAP)
        if not is_list(most):
            raise ValueError(f"take_away: most={most!r:.80}, expected a list of whole numbers, such as [2, 3]")
        for one in most:
            check_integer("take_away: most", one, 2, heap)
        check_number("take_away: heldout_fraction", heldout_fraction, 0, 1, above=True)
        train: list[Task] = []
        heldout: list[Task] = []
        for count in range(1, heap + 1):
            for one in most:
                id = f"{count}-{one}"
                winner = TakeAway.roles[count % (one + 1) == 0]
                task = Task(id, "", {"heap": count, "most": one, "role": winner})
                is_heldout = rng.uniform(rng.key("take-away-heldout", id)) < heldout_fraction
                (heldout if is_heldout else train).append(task)
        game = ClassGame(TakeAway, "take_away", {}, None)
        words = [*map(str, range(1, heap + 1)), *game.roles, "left", "most", ":"]
        game.vocabulary = [*words, self.end_word, self.pad_word]
        if not (train and heldout):
            raise ValueError(
                f"take_away: heldout_fraction={heldout_fraction} of {len(train + heldout)} starts leaves "
                f"{len(train)} to train on and {len(heldout)} held out; give another fraction, or a larger heap"
            )
        starts = NumberedSource(train.__getitem__, len(train), heldout.__getitem__, len(heldout))
        super().__init__(game, starts, None, opponent, heldout_opponent, heap + 1)
