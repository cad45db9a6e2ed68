"""The tasks of the evaluation suite: each with what decides whether an answer is right, or keeps what was asked for.

Code is run against tests, mathematics and logic are compared with the answer, writing has to keep rules that a program
can check, and designs keep rules and, where the service has one, please a judge with a rubric. Known good and known bad
answers to every task are in tests/evaluation_answers.py, and tests/test_service_evaluation_tasks.py tells them apart.

Left out on purpose: whether a text is well written or a design wise. Rules cannot tell, and the report says who judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlvr.registry import nearest

CODE, SOLVING, WRITING, REASONING = "code_generation", "problem_solving", "creative_writing", "complex_reasoning"
CATEGORIES = (CODE, SOLVING, WRITING, REASONING)
BOXED = "End with the answer alone in \\boxed{}."
PROGRAM = "Answer with the program in one ```python block."


@dataclass(frozen=True)
class EvalTask:
    """One task. `tests`, `answer` and `verifiers` are what the service takes of these names.

    `rubric` is what a judge would look at beside the verifiers, where the service has a judge; `quick` tasks are those
    of a quick run.
    """

    id: str
    category: str
    prompt: str
    context: str = ""
    tests: tuple[str, ...] = ()
    answer: str | None = None
    verifiers: tuple[dict[str, Any], ...] = ()
    rubric: str = ""
    quick: bool = False

    def body(self, judge: bool) -> dict[str, Any]:
        """What is sent of it; with `judge` the rubric, too."""
        body: dict[str, Any] = {"task_id": self.id, "prompt": self.prompt}
        body |= {"context": self.context} if self.context else {}
        body |= {"tests": list(self.tests)} if self.tests else {}
        body |= {"answer": self.answer} if self.answer is not None else {}
        verifiers = list(self.verifiers)
        if judge and self.rubric:
            verifiers.append({"name": "judge", "weight": JUDGE, "options": {"rubric": self.rubric}})
        return body | ({"verifiers": verifiers} if verifiers else {})


# Weights: an answer that breaks one of four rules has 0.75 of the confidence, or 0.83 with a judge's full marks: less
# than the target of 0.85. So does one that keeps all rules and pleases the judge by less than 0.55.
RULE, JUDGE = 2.0, 4.0


def rule(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, "weight": RULE, "options": options}


def text_rules(at_least: int, at_most: int, words: Sequence[str], shape: str) -> tuple[dict[str, Any], ...]:
    """Length, words that have to be there, a shape by pattern, and no repetition."""
    return (
        rule("length", at_least=at_least, at_most=at_most),
        rule("required_words", words=list(words)),
        rule("regex", pattern=shape, match="full"),
        rule("repetition", words=4, at_most=0.05),
    )


PARAGRAPH = r"[^\n]+(?:\n[^\n]+)*"


def sections(*names: str) -> str:
    """A pattern: these headings in this order, each with text below it, and no other."""
    return "\\s*" + "".join(rf"## {name}\n(?:(?!##).*(?:\n|\Z))+" for name in names)


TASKS = (
    EvalTask(
        "code_fibonacci",
        CODE,
        "Write a Python function fibonacci(n) that returns the nth Fibonacci number: fibonacci(0) is 0, fibonacci(1) "
        "is 1. It is called with n up to 1000, and raises ValueError for a negative n. " + PROGRAM,
        "Python programming, should be efficient and handle edge cases",
        tests=(
            "assert fibonacci(0) == 0",
            "assert fibonacci(1) == 1",
            "assert fibonacci(10) == 55",
            "assert fibonacci(90) == 2880067194370816120",
            "assert fibonacci(1000) % 1000000007 == 517691607",
            "try:\n    fibonacci(-1)\nexcept ValueError:\n    pass\nelse:\n    assert False, 'no ValueError'",
        ),
        quick=True,
    ),
    EvalTask(
        "code_sorting",
        CODE,
        "Write a Python function sort_by_length(words) that returns a new list with the shortest words first. Words of "
        "one length keep the order in which they came, and the given list stays as it is. " + PROGRAM,
        tests=(
            "assert sort_by_length([]) == []",
            "assert sort_by_length(['ccc', 'a', 'bb']) == ['a', 'bb', 'ccc']",
            "assert sort_by_length(['bb', 'aa', 'c', 'dd', '']) == ['', 'c', 'bb', 'aa', 'dd']",
            "given = ['bb', 'a']\nassert sort_by_length(given) == ['a', 'bb']\nassert given == ['bb', 'a']",
            "assert sort_by_length(['x' * (i * 7 % 50) for i in range(50)]) == ['x' * i for i in range(50)]",
        ),
    ),
    EvalTask(
        "code_debugging",
        CODE,
        "This function shall return a place of target in the sorted list items, and -1 where it is not there. It does "
        "not always. Correct it and keep its name. " + PROGRAM + "\n\n"
        "def find(items, target):\n"
        "    low, high = 0, len(items)\n"
        "    while low < high:\n"
        "        middle = (low + high) // 2\n"
        "        if items[middle] == target:\n"
        "            return middle\n"
        "        if items[middle] < target:\n"
        "            low = middle\n"
        "        else:\n"
        "            high = middle - 1\n"
        "    return -1",
        tests=(
            "assert find([], 3) == -1",
            "assert find([5], 5) == 0",
            "assert find([1, 2], 1) == 0",
            "assert find([1, 3, 5, 7], 8) == -1",
            "assert all(find(list(range(0, 40, 2)), 2 * i) == i for i in range(20))",
            "assert all(find(list(range(0, 40, 2)), 2 * i + 1) == -1 for i in range(-1, 20))",
        ),
    ),
    EvalTask(
        "code_brackets",
        CODE,
        "Write a Python function balanced(text) that returns whether the brackets (), [] and {} in the text are closed "
        "in the right order; all other characters count for nothing. It returns True or False. " + PROGRAM,
        tests=(
            "assert balanced('') is True",
            "assert balanced('f(a[1]) {x}') is True",
            "assert balanced('([)]') is False",
            "assert balanced('((') is False",
            "assert balanced(')(') is False",
            "assert balanced('(' * 20000 + ')' * 20000) is True",
        ),
    ),
    EvalTask(
        "math_problem",
        SOLVING,
        "A train leaves at 9:40 and arrives at 13:05 on the same day. On its way it stands still three times for 7 "
        "minutes. For how many minutes does it move? " + BOXED,
        answer="184",
        quick=True,
    ),
    EvalTask(
        "math_percentage",
        SOLVING,
        "A shop lowers a price by 20 percent, and later the new price by 25 percent. Now it is 54 euros. How many "
        "euros was it at first? " + BOXED,
        answer="90",
    ),
    EvalTask(
        "logic_puzzle",
        SOLVING,
        "Ann, Ben, Cleo, Dan and Eve stand in a queue. Ben stands directly behind Eve. Cleo stands somewhere before "
        "Ann and is not the first. Dan does not stand next to Cleo. Ann is not the last. Write the places of Ann, Ben, "
        "Cleo, Dan and Eve, in this order, as one number of five digits (1 is the first place). " + BOXED,
        answer="42351",
    ),
    EvalTask(
        "logic_boxes",
        SOLVING,
        "A coin is in one of five boxes. Box 1 says: 'The coin is here.' Box 2 says: 'The coin is not here.' Box 3 "
        "says: 'The coin is not in box 1.' Box 4 says: 'It is in box 1 or in box 5.' Box 5 says: 'It is in a box with "
        "an odd number.' Exactly one of the five sentences is true. In which box is the coin? " + BOXED,
        answer="2",
    ),
    EvalTask(
        "writing_story",
        WRITING,
        "Write a story of 120 to 250 words about a lighthouse, a storm and a letter; use these three words. Begin with "
        "a title in a line '# Title', then an empty line, then at least three paragraphs with an empty line between "
        "them. Do not repeat yourself.",
        verifiers=text_rules(
            120, 260, ["lighthouse", "storm", "letter"], rf"\s*# [^\n]+(?:\n{{2,}}{PARAGRAPH}){{3,}}\s*"
        ),
        quick=True,
    ),
    EvalTask(
        "writing_technical",
        WRITING,
        "Explain to a beginner in programming how a hash table works, in 120 to 300 words of plain prose. Use three "
        "sections with the headings '## Idea', '## Collisions' and '## Cost', in this order and nothing before the "
        "first, and the words 'bucket' and 'key'.",
        verifiers=text_rules(120, 310, ["bucket", "key"], sections("Idea", "Collisions", "Cost")),
    ),
    EvalTask(
        "writing_instructions",
        WRITING,
        "Write down how to make a cup of tea in exactly five steps, numbered '1.' to '5.', a line each and nothing "
        "else, with 30 to 90 words in all. Use the words 'water', 'kettle' and 'leaves'.",
        verifiers=text_rules(
            30, 95, ["water", "kettle", "leaves"], r"\s*" + r"\n".join(rf"{n}\. [^\n]+" for n in range(1, 6)) + r"\s*"
        ),
    ),
    EvalTask(
        "reasoning_system_design",
        REASONING,
        "Design a service that shortens URLs, for 1,000 redirects per second and 10 new links per second. Use the "
        "sections '## Requirements', '## Components', '## Data' and '## Failures', in this order and nothing before "
        "the first, with 150 to 600 "
        "words in all. Say what the database stores, what the cache is for, and how many links there are after a year.",
        verifiers=text_rules(
            150, 610, ["database", "cache", "redirect"], sections("Requirements", "Components", "Data", "Failures")
        ),
        rubric=(
            "Judge a design of a URL shortener for 1,000 redirects and 10 new links per second. Good: codes that "
            "cannot collide, a plausible estimate of about 315 million links a year, a cache for hot links, what "
            "happens when the database or the cache is away. Bad: contradictions, parts without a purpose, no numbers."
        ),
        quick=True,
    ),
    EvalTask(
        "reasoning_architecture",
        REASONING,
        "A team of five runs one application with one database. Releases take a week, because every change waits for "
        "the tests of all parts. Should it be split into services? Use the sections '## Options', '## Trade-offs' and "
        "'## Recommendation', in this order and nothing before the first, with 120 to 500 words in all, and use the "
        "words 'team', 'deployment' and "
        "'database'.",
        verifiers=text_rules(
            120, 510, ["team", "deployment", "database"], sections("Options", "Trade-offs", "Recommendation")
        ),
        rubric=(
            "Judge advice on splitting an application of a team of five whose releases take a week. Good: at least two "
            "options that differ, their costs for so small a team, a recommendation that follows from what was said "
            "and attacks the slow tests. Bad: a list of slogans, no decision, a decision against its own arguments."
        ),
    ),
)


def chosen(ids: Sequence[str], quick: bool) -> list[EvalTask]:
    """The tasks of these ids in the suite's order; all, or the quick ones, where none is named."""
    known = {task.id: task for task in TASKS}
    for name in ids:
        if name not in known:
            raise ValueError(f"task {name!r} is unknown{nearest(name, list(known))}; known: {', '.join(known)}")
    if ids:
        return [task for task in TASKS if task.id in ids]
    return [task for task in TASKS if task.quick or not quick]
