"""The toy task: plain everyday prompts and a small vocabulary, for a policy that is a table of token logits.

There is nothing to understand in it: the policy does not read its prompt. What it shows is a whole run in seconds, with
a reward that needs no answer key, such as `keyword_contains`. `rlvr.training.toy_sampler` is the policy;
"""

from __future__ import annotations

from collections.abc import Sequence

from rlvr.core.types import Task
from rlvr.envs.registry import register_environment
from rlvr.envs.row_source import RowSource

_PROMPTS = """
Explain quantum computing | What is machine learning? | Describe how a bicycle works | How do plants make food? | Give
three tips for better sleep | Why is the sky blue? | Summarize the water cycle | Write a short note of thanks | What
causes the seasons? | Plan a picnic for six people | How does a vaccine work? | Compare trains and planes | Suggest a
name for a small bakery | Explain compound interest | How do I learn a new language? | What makes bread rise? | Describe
a walk along the coast | Why do we dream? | How does the internet work? | Give advice to a new manager | What is a black
hole? | List the parts of a letter | How can a family save water? | Explain the rules of chess
"""
_HELDOUT = """
Explain how a magnet works | What is an algorithm? | How do birds find their way? | Describe a busy market | Why do
leaves change color? | Give two tips for public speaking | What is inflation? | How is paper made? | Suggest a gift for
a teacher | Explain what a budget is | How do earthquakes happen? | Describe a good neighbor | What does a judge do? |
Plan a day in a new city | Why is exercise good for you? | How does a camera work?
"""
_COMMON = """
a about add after again air all also always an and another answer any as ask at back be because before begin best
better between big book build but by call can case change city clear close come common could country day different do
door down earth easy end energy even every example fact family few find first follow for form free from get give go
good great group have help here home house how idea if important in into it keep key kind know last lead learn let
letter life like list little long look make many may mean might more most move much name need new next no not now
number of often old on one only open or order other our out over part people plan point problem question read real
reason right run same school see short should show simple small so solution some sound start step still story study
system take teach than that the then there thing think this three time to together too tree true try two up use very
want water way we well what when where which while who why will with word work world would write year you
"""
PROMPTS, HELDOUT = (tuple(" ".join(text.split()).split(" | ")) for text in (_PROMPTS, _HELDOUT))
WORDS = tuple(_COMMON.split())


class Toy(RowSource):
    """Prompts without an answer key; `vocabulary` is what a table policy can say.

    `prompts` and `heldout_prompts` replace the built-in ones, `words` are added to the vocabulary.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None = None,
        heldout_prompts: Sequence[str] | None = None,
        words: Sequence[str] | None = None,
    ) -> None:
        train = _check_prompts("prompts", prompts) or list(PROMPTS)
        heldout = _check_prompts("heldout_prompts", heldout_prompts)
        if prompts is not None and (both := sorted(set(train) & set(heldout))):
            raise ValueError(f"toy: {both[0]!r} is in prompts and in heldout_prompts; keep it in one of them")
        # Where one list is the user's, the built-in other one gives way.
        heldout = heldout or [prompt for prompt in HELDOUT if prompt not in train]
        super().__init__("toy", _tasks("toy-train", train), _tasks("toy-heldout", heldout), "keyword_contains")
        self.vocabulary = [*dict.fromkeys([*WORDS, *check_words(words or ())])]


register_environment("toy")(Toy)


def check_words(words: Sequence[str]) -> list[str]:
    """Words to add to the vocabulary; ValueError for one that is empty or holds white space."""
    if isinstance(words, str):
        raise ValueError(f"toy: words={words!r}, expected a list of words; write words=[{', '.join(words.split())}]")
    for word in words:
        if not isinstance(word, str) or word.split() != [word]:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"toy: the word {word!r} is not one word; give text without white space")
    return list(words)


def _check_prompts(option: str, given: Sequence[str] | None) -> list[str]:
    """The prompts of an option, without repetitions; ValueError if it is not a list of texts."""
    if given is None:
        return []
    if isinstance(given, str) or not given:
        raise ValueError(f"toy: {option}={given!r}, expected a list of one prompt or more")
    for text in given:
        if not isinstance(text, str) or not text.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"toy: {option} holds {text!r}, expected a text that is not empty")
    return list(dict.fromkeys(given))


def _tasks(name: str, prompts: Sequence[str]) -> list[Task]:
    return [Task(f"{name}-{number}", prompt) for number, prompt in enumerate(prompts, 1)]
