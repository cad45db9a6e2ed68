"""The RPN process: vocabulary, shapes, chains, held-out problems, flawed demonstrations."""

from __future__ import annotations

from collections import Counter

import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from rlvr.core.types import Task
from rlvr.envs import resolve_environment
from rlvr.envs.rpn_arithmetic import RPNArithmetic, shapes
from rlvr.reward import resolve_reward

SOURCE = RPNArithmetic()


def by_stack(expression: str, p: int = 13) -> int:
    """The value by an ordinary stack machine on Python's integers, reduced at the end."""
    stack: list[int] = []
    for word in expression.split():
        if word in "+-*":
            b, a = stack.pop(), stack.pop()
            stack.append(a + b if word == "+" else a - b if word == "-" else a * b)
        else:
            stack.append(int(word))
    assert len(stack) == 1
    return stack[0] % p


@pytest.mark.parametrize(
    ("expression", "chain"),
    [
        ("3 5 + 7 +", "= 8 7 + = 2"),
        ("3 5 +", "= 8"),
        ("3 7 5 + +", "= 3 12 + = 2"),  # no chaining inside a pass
        ("1 2 + 3 4 + +", "= 3 7 + = 10"),  # two triples in one pass
        ("1 2 3 4 + + +", "= 1 2 7 + + = 1 9 + = 10"),
        ("2 5 -", "= 10"),
        ("5 5 * 4 -", "= 12 4 - = 8"),
    ],
)
def test_golden_chains(expression, chain):
    assert SOURCE.chain(expression) == chain


def test_the_vocabulary_is_in_the_order_of_the_process():
    words = RPNArithmetic(operators=["+"]).vocabulary
    assert len(words) == 18
    assert [words.index(w) for w in ("0", "12", "+", "=", "<boe>", "<eoe>", "<pad>")] == [0, 12, 13, 14, 15, 16, 17]
    assert SOURCE.vocabulary[13:] == ["+", "-", "*", "=", "<boe>", "<eoe>", "<pad>"]
    assert (SOURCE.end_word, SOURCE.pad_word, SOURCE.reward) == ("<eoe>", "<pad>", "combined")


def test_the_longest_sequences_have_7_13_and_21_tokens():
    for k, expected in ((1, 7), (2, 13), (3, 21)):
        source = RPNArithmetic(complexity=[k, k])
        seen = set()
        for i in range(200):
            task = source.train(0, i, str(k))
            seen.add(len(f"{task.prompt} {source.chain(task.id)} <eoe>".split()))
        assert max(seen) == expected == source.longest


def test_a_task_is_the_prompt_up_to_the_first_equals_sign():
    task = SOURCE.train(0, 0, "2")
    assert task == Task(
        task.id,
        "<boe> " + task.id,
        {"answer": str(by_stack(task.id)), "modulus": 13, "expression": task.id},
        "2",
    )
    assert set(task.prompt.split()) <= set(SOURCE.vocabulary) - {"="}


def test_a_task_is_described_by_its_shape_and_operators():
    task = SOURCE.parse_task("5 2 + 3 4 + *")
    assert task is not None
    assert SOURCE.describe_task(task) == {"shape": "n n o n n o o", "operators": "* +"}


@pytest.mark.parametrize(("k", "catalan"), [(1, 1), (2, 2), (3, 5), (4, 14), (5, 42)])
def test_shapes_are_the_dyck_paths(k, catalan):
    assert len(set(shapes(k))) == len(shapes(k)) == catalan
    for shape in shapes(k):
        heights = [sum(1 if up else -1 for up in shape[: i + 1]) for i in range(2 * k + 1)]
        assert shape[0] and min(heights) == 1 == heights[-1] and sum(shape) == k + 1


def test_shapes_operands_and_operators_are_uniform():
    """Chi-square over 20,000 training problems; the draws are fixed, so this cannot flicker."""
    tasks = [SOURCE.train(7, i, "3").id.split() for i in range(20_000)]
    by_shape = Counter(tuple(w.isdigit() for w in words) for words in tasks)
    assert len(by_shape) == 5
    assert scipy.stats.chisquare(list(by_shape.values())).pvalue > 0.01
    for place in range(4):
        operands = Counter([w for w in words if w.isdigit()][place] for words in tasks)
        assert len(operands) == 13 and scipy.stats.chisquare(list(operands.values())).pvalue > 0.001
    for place in range(3):
        operators = Counter([w for w in words if not w.isdigit()][place] for words in tasks)
        assert len(operators) == 3 and scipy.stats.chisquare(list(operators.values())).pvalue > 0.001


def test_the_number_of_problems():
    assert [SOURCE.problems(level) for level in SOURCE.levels] == [507, 39_546, 3_855_735]
    assert len({SOURCE._expression(i, "1") for i in range(507)}) == 507


@given(st.integers(2, 40), st.integers(1, 6), st.integers(0, 10**6))
def test_answers_agree_with_a_stack_machine_and_with_the_chain(p, k, index):
    source = RPNArithmetic(p=p, complexity=[k, k], heldout_fraction=0.1)
    task = source.train(1, index, str(k))
    assert int(task.meta["answer"]) == by_stack(task.id, p)
    chain = source.chain(task.id)
    assert chain.split()[-2:] == ["=", task.meta["answer"]]
    assert resolve_reward("combined")(task.prompt, chain + " <eoe>", task.meta) == 1.0


def test_train_is_a_pure_function_of_seed_index_and_level():
    first = [SOURCE.train(1, i, level) for i in range(50) for level in SOURCE.levels]
    assert [RPNArithmetic().train(1, i, level) for i in range(50) for level in SOURCE.levels] == first
    assert [SOURCE.train(2, i, level) for i in range(50) for level in SOURCE.levels] != first
    with pytest.raises(ValueError, match="level '4'; the levels are 1, 2, 3"):
        SOURCE.train(1, 0, "4")


def test_held_out_problems_are_fixed_distinct_shared_and_never_trained_on():
    held = SOURCE.heldout(None)
    ids = [t.id for t in held]
    assert len(set(ids)) == len(ids) == 1000
    assert held == RPNArithmetic(flaw=0).heldout(1000)
    assert SOURCE.heldout(200) == held[:200]
    levels = Counter(t.level for t in held)
    complete = [i for i in range(507) if SOURCE.is_heldout(SOURCE._expression(i, "1"))]
    assert levels["1"] == len(complete)  # all it has, and the others make up for it
    assert abs(levels["2"] - levels["3"]) <= 1 and 50 < levels["1"] < 110
    assert all(SOURCE.is_heldout(i) for i in ids)
    trained = {SOURCE.train(3, i, level).id for i in range(3000) for level in SOURCE.levels}
    assert not trained & {t.id for t in SOURCE.heldout(6000)}
    assert len({i for i in trained if len(i.split()) == 3}) == 507 - len(complete)


def test_held_out_is_about_its_share_and_ends_where_there_are_no_more():
    small = RPNArithmetic(p=5, complexity=[1, 2], heldout_fraction=0.3)
    n = sum(small.problems(level) for level in small.levels)
    assert 0.25 * n < len(small.heldout(10**6)) < 0.35 * n


def test_a_level_that_is_held_out_whole_says_so():
    with pytest.raises(
        ValueError, match=r"level 1 has no problem left to train on \(4 in all\); lower heldout_fraction"
    ):
        RPNArithmetic(p=2, operators=["+"], complexity=[1, 1], heldout_fraction=0.999999).train(0, 0, "1")


def test_demonstrations_without_flaw_are_correct():
    source = RPNArithmetic(flaw=0)
    reward = resolve_reward("correct")
    for i in range(300):
        task = source.train(0, i, source.levels[i % 3])
        assert reward(task.prompt, source.demonstration(task, i) + " <eoe>", task.meta) == 1.0


def single_reductions(prompt: list[str], chain: str) -> list[tuple[int, int]]:
    """(expected, written) of every reduction in a chain: each step re-derived from the one before it."""
    found: list[tuple[int, int]] = []
    before = prompt
    for step in chain.removeprefix("= ").split(" = "):
        after, i, rebuilt = step.split(), 0, []
        while i < len(before):
            triple = before[i : i + 3]
            if len(triple) == 3 and triple[0].isdigit() and triple[1].isdigit() and not triple[2].isdigit():
                found.append((by_stack(" ".join(triple)), int(after[len(rebuilt)])))
                rebuilt.append(after[len(rebuilt)])
                i += 3
            else:
                rebuilt.append(before[i])
                i += 1
        assert rebuilt == after  # nothing but reductions, and the later steps go on from what was written
        before = after
    assert len(before) == 1
    return found


def test_each_reduction_of_a_demonstration_is_wrong_with_probability_flaw():
    pairs: list[tuple[int, int]] = []
    both = 0
    for i in range(6000):
        task = SOURCE.train(5, i, SOURCE.levels[i % 3])
        chain = SOURCE.demonstration(task, i)
        reductions = single_reductions(task.id.split(), chain)
        assert len(reductions) == int(task.level)
        pairs += reductions
        both += len(reductions) > 1 and all(written != expected for expected, written in reductions[:2])
    wrong = [(written - expected) % 13 for expected, written in pairs if expected != written]
    assert abs(len(wrong) / len(pairs) - 0.3) < 0.015  # 12,000 reductions: 3.6 standard errors
    assert abs(both / 4000 - 0.09) < 0.015  # independent of each other
    offsets = Counter(wrong)
    assert len(offsets) == 12 and scipy.stats.chisquare(list(offsets.values())).pvalue > 0.01


def test_a_demonstration_is_a_function_of_its_key():
    task = SOURCE.train(0, 0, "3")
    assert SOURCE.demonstration(task, 1) == SOURCE.demonstration(task, 1)
    assert len({SOURCE.demonstration(task, key) for key in range(50)}) > 5
    assert "<eoe>" not in SOURCE.demonstration(task, 1)


def test_it_resolves_by_name_with_its_options():
    source = resolve_environment("rpn_arithmetic", p=5, operators=["+", "*"], complexity=[2, 4])
    assert source.levels == ("2", "3", "4")
    assert all(set(t.id.split()) <= set("01234+*") for t in source.heldout(30))
