"""Games of several roles by their path: `games_of_tests:Guess`."""

from __future__ import annotations

from typing import Any


class Pair:
    """Both roles say two words, in turn, and read all that was said. `pay` is what they get."""

    roles = ("left", "right")
    pay: Any = (1.0, 0.0)

    def reset(self, seed: int) -> None:
        self.words: list[str] = []

    def turn(self) -> tuple[str, str] | None:
        return None if len(self.words) == 4 else (self.roles[len(self.words) % 2], " ".join(["say", *self.words]))

    def step(self, action: str) -> None:
        self.words.append(action)

    def rewards(self) -> Any:
        return dict(zip(self.roles, self.pay, strict=False))


class Unpaid(Pair):
    """It forgets one role."""

    pay = (1.0,)


class Unclear(Pair):
    pay = (1.0, float("nan"))


class Alone(Pair):
    """The role `right` is never asked."""

    def turn(self) -> tuple[str, str] | None:
        return None if len(self.words) == 2 else ("left", "say")


class Stranger(Pair):
    def turn(self) -> Any:
        return "middle", "say"


class Endless(Pair):
    def turn(self) -> tuple[str, str]:
        return self.roles[len(self.words) % 2], "say"


class Nameless(Pair):
    roles = ()  # type: ignore[assignment]


class Higher:
    """Each role says a letter once or twice; the later letter of the alphabet wins. Any turn is legal."""

    roles = ("left", "right")
    opponents = ("random",)

    def __init__(self, letters: str = "abcd", rounds: int = 2) -> None:
        self._letters, self._rounds = letters, rounds
        self.vocabulary = [*letters, "say", "after"]

    def reset(self, seed: int) -> None:
        self.said: list[str] = []

    def turn(self) -> tuple[str, str] | None:
        if len(self.said) == 2 * self._rounds:
            return None
        return self.roles[len(self.said) % 2], f"say after {self.said[-1]}" if self.said else "say"

    def step(self, action: str) -> None:
        first = action.split()[:1]
        self.said.append(first[0] if first and first[0] in self.moves("random") else "a")

    def rewards(self) -> dict[str, float]:
        left, right = ("".join(self.said[place::2]) for place in (0, 1))
        return {"left": float(left > right) - float(left < right), "right": float(right > left) - float(right < left)}

    def moves(self, opponent: str) -> list[str]:
        return list(self._letters)
