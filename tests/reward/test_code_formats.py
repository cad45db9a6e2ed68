"""Problems as data sets write them, and where in a response the program is."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import pytest

from rlvr.reward.code import CodeProblem, extract
from rlvr.reward.code.program_extraction import MAX_CHARS, extract_requested
from tests.kit.code_rows import REAL, problem

HUMANEVAL = {
    "task_id": "Own/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum of a list.\n    """\n',
    "entry_point": "total",
    "canonical_solution": "    return sum(xs)\n",
    "test": "M = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
}
STDIO = {"question": "Double the number.", "input_output": {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10\n"]}}


# --- formats -----------------------------------------------------------------------------------------------------


def test_both_files_of_mbpp_are_read() -> None:
    full = CodeProblem.of({**problem(7), "test_setup_code": "root = Node(1)\r\n"})
    assert full.tests == problem(7)["test_list"] and full.setup == "root = Node(1)\n" and full.names == {"add_7"}
    assert full.solution == "def add_7(x):\n    return x + 7"  # without the carriage returns of the file
    row = {"prompt": "Add.", "code": "x", "test_imports": ["import math"], "test_list": ["assert f(1) == 2"]}
    sanitized = CodeProblem.of(row)
    assert (sanitized.statement, sanitized.imports, sanitized.setup) == ("Add.", ["import math"], "")


def test_humaneval_is_one_hidden_test_and_a_prefix() -> None:
    made = CodeProblem.of(HUMANEVAL)
    assert made.tests == [HUMANEVAL["test"]] and made.entry_point == "total" and made.prefix == HUMANEVAL["prompt"]
    assert made.solution == HUMANEVAL["prompt"] + HUMANEVAL["canonical_solution"] and made.visible_tests(None) == []


def test_helpers_of_a_humaneval_prompt_belong_to_the_tests() -> None:
    """An answer that goes on from the prompt may define it again."""
    prompt = "import math\n\nSCALE = 2\n\ndef widen(x):\n    return math.floor(SCALE * x)\n\n"
    asked = 'def narrow(x):\n    """Undo widen."""\n'
    made = CodeProblem.of({**HUMANEVAL, "prompt": prompt + asked, "entry_point": "narrow"})
    assert made.setup == "import math\nSCALE = 2\ndef widen(x):\n    return math.floor(SCALE * x)"
    assert CodeProblem.of(HUMANEVAL).setup == ""
    assert CodeProblem.of({**HUMANEVAL, "prompt": "def other(x):\n    ...\n\n" + asked}).setup == ""
    assert CodeProblem.of({**HUMANEVAL, "prompt": "Complete this: def"}).setup == ""


@pytest.mark.parametrize("as_text", [False, True])
def test_a_program_of_apps_reads_input_and_writes_output(as_text: bool) -> None:
    held: Any = STDIO["input_output"]
    made = CodeProblem.of({**STDIO, "input_output": json.dumps(held) if as_text else held, "solutions": '["print(1)"]'})
    assert made.tests == [{"input": "2\n", "output": "4\n"}, {"input": "5\n", "output": "10\n"}]
    assert made.is_program and made.solution == "print(1)" and made.names == set()
    lines = CodeProblem.of({"input_output": {"inputs": [["1", "2"]], "outputs": [["3"]]}})
    assert lines.tests == [{"input": "1\n2", "output": "3"}]


def test_a_function_of_apps_becomes_asserts() -> None:
    held = {"fn_name": "add", "inputs": [[1, 2], ["a", [3]]], "outputs": [3, [4]]}
    made = CodeProblem.of({"question": "q", "input_output": held, "starter_code": "def add(a, b):"})
    assert made.tests == ["assert add(1, 2) == 3", "assert add('a', [3]) in ([4], (4,), 4)"] and made.names == {"add"}
    inside = CodeProblem.of({"input_output": held, "starter_code": "class Solution:\n  def add(self, a, b):"})
    assert inside.tests[0] == "assert Solution().add(1, 2) == 3" and "Solution" in inside.names


def test_the_called_name_is_known_even_if_it_is_a_builtins() -> None:
    assert CodeProblem([f"assert set(f({n})) == set([1])" for n in (1, 2)]).names == {"f"}
    assert CodeProblem(["assert sum(10, 15) == 25"]).names == {"sum"}  # MBPP 126


def test_a_check_function_is_never_a_visible_test() -> None:
    check = "def check(candidate):\n    assert candidate(7) == 8"
    for entry_point in ("f", None):
        assert CodeProblem([check, "assert f(1) == 2", "assert f(2) == 3"], entry_point=entry_point).visible_tests(
            1
        ) == ["assert f(1) == 2"]


@pytest.mark.parametrize("row", [problem(7), HUMANEVAL, STDIO])
def test_our_own_form_reads_back_as_it_was(row: dict[str, Any]) -> None:
    made = CodeProblem.of(row)
    assert CodeProblem.of(json.loads(json.dumps(made.row()))) == made


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "a row with the fields none; expected MBPP's"),
        ({"question": "q", "answer": "a"}, "fields question, answer; expected"),
        ({"tests": []}, "has no tests"),
        ({"tests": 3}, "tests=3 is of type int; expected a list"),
        ({"tests": ["assert f()", {"input": "", "output": ""}]}, "or assert statements alone"),
        ({"tests": [{"input": "1"}]}, "throughout"),
        ({"tests": ["assert f()", 7]}, r"tests\[1\]=7 is of type int; expected an assert statement"),
        ({"test_list": [1]}, r"test_list=\[1\]: expected a list of texts"),
        ({"test_list": ["assert f()"], "test_setup_code": 3}, "test_setup_code=3 is of type int; expected text"),
        ({"test": "def check(c): ...", "entry_point": ""}, "entry_point is empty"),
        ({"tests": ["def check(c): ..."], "entry_point": "f(); g"}, "expected the name of a function"),
        ({"tests": ["assert f()", " \n"]}, "an empty test, which every answer would pass"),
        ({"input_output": "{"}, "input_output: not JSON"),
        ({"input_output": "[" * 100_000}, "input_output: not JSON"),
        ({"input_output": "[]"}, "a list, expected an object"),
        ({"input_output": {"inputs": ["1"], "outputs": []}}, "lists of one length"),
        ({"input_output": {"inputs": [1], "outputs": [1], "fn_name": "f"}}, "list of a call's arguments"),
        ({"input_output": {"inputs": [[1]], "outputs": [1], "fn_name": "f(); g"}}, "expected the name of a function"),
        ({"input_output": ""}, "lists of one length"),
    ],
)
def test_a_bad_row_is_refused_with_the_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeProblem.of(row)


@pytest.mark.skipif(not REAL.is_dir(), reason="the MBPP files are not beside the project")
def test_every_published_row_is_read_and_its_reference_is_extracted() -> None:
    rows = [json.loads(line) for line in (REAL / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()]
    rows += json.loads((REAL / "sanitized-mbpp.json").read_text(encoding="utf-8"))
    assert len(rows) == 974 + 427
    for row in rows:
        made = CodeProblem.of(row)
        found = extract(row["code"], made.names)
        assert (found.found_in, found.code) == ("raw", row["code"].strip()), row["task_id"]


# --- extraction --------------------------------------------------------------------------------------------------

F = "def f(x):\n    return x"
ROOT = "def f(x):\n    return math.sqrt(x)"
THINKING = 'def f(x):\n    print("</think>", \'[DONE]\')\n    return x.split(r"</think>")[-1]'
CUTTING = 'def f(x):\n    """Cut\n    </think>\n    """\n    tag = """\n<think>\n"""\n    return tag'
MARKED = "def f(x):\n    '''ends\n[DONE]\n    '''\n    return \"it's [DONE]\""
DOCUMENTED = (
    'def f(x):\n    """As in\n\n    ```\n    f(1)\n    ```\n    ```python\n    f(2)\n    ```\n    """\n    return x'
)


@pytest.mark.parametrize(
    ("response", "code", "where"),
    [
        (F, F, "raw"),
        (
            f"{F}\n[DONE]\n\nYou are an expert ... [BEGIN]\ndef g(): ...\n[DONE]",
            F,
            "raw",
        ),  # the prompt held the [BEGIN]
        (f"Here:\n[BEGIN]\n{F}\n[DONE]\nIt returns x. ```python\nf(1)\n```", F, "tags"),
        (f"[BEGIN]\n{F}", F, "tags"),  # cut short
        (f"[BEGIN]\n```python\n{F}\n```\n[DONE]", F, "tags"),
        (f"Sure!\n```python\n{F}\n```\nDone.", F, "fence"),
        (f"```\n{F}\n```", F, "fence"),
        (f"~~~py\n{F}\n~~~", F, "fence"),
        (f"````python\n{F}\n# ```\n````", f"{F}\n# ```", "fence"),
        (f"```python\n{F}", F, "fence"),  # never closed
        (f"Draft:\n```python\ndef f(): ...\n```\nBetter:\n```python\n{F}\n```", F, "fence"),
        (f"```python\n{F}\n```\nUse it:\n```python\nprint(f(1))\n```\nprints\n```text\n1\n```", F, "fence"),
        (f"1. Write\n\n    ```python\n    {F.replace(chr(10), chr(10) + '    ')}\n    ```", F, "fence"),
        (f"<think>\n```python\ndef f(): wrong\n```\n</think>\n```python\n{F}\n```", F, "fence"),
        (f"so f it is</think>{F}", F, "raw"),  # the prompt held the <think>
        ("  def f(x):\n    return x", "def f(x):\n  return x", "raw"),  # a blank before the first token
        (
            'def f(x):\n    """\n    ```\n    f(1)\n    ```\n    """\n    return x',
            None,
            "raw",
        ),  # a fence in a docstring
        ("```python\nf = lambda x: x\n```\n```python\nf(2)\n```", "f = lambda x: x", "fence"),
        (f"```python\n{DOCUMENTED}\n```\nAs asked.", DOCUMENTED, "fence"),  # the fences inside close nothing
        (f"1. So:\n   ```python\n{textwrap.indent(F, '   ')}\n   ```\n2. Done.", F, "fence"),
        (f"Sure\r\n```python\r\n{F}\r\n```\r\nDone", F, "fence"),
        (f"```{{.python}}\n{F}\n```", F, "fence"),
        (f"```Python3.11\n{F}\n```\n```python\nprint(f(1))\n```", F, "fence"),  # another language, but it defines f
        (f"```python\n{F}```", F, "fence"),
        (f"```python\n{F}\n```\nwhich is\n```pseudocode\ndef f(x): the same\n```", F, "fence"),  # Python first
        (f"```\n{F[:9]}: pass\n```\nno:\n```\n{F}\n```\nIt prints\n```text\n1\n```", F, "fence"),
        ('def f(x):\n    return x.split("<think>")', 'def f(x):\n    return x.split("<think>")', "raw"),
        (f"{F}\n```\n\nIt returns x.", F, "fence"),  # the prompt held the fence that opens
        (f"```python\nimport math\n```\n```python\n{ROOT}\n```", f"import math\n\n\n{ROOT}", "fence"),
        (f"```python\nfrom x import (\n  math,\n)\n```\n```py\n{F}\n```", F, "fence"),  # F does not use it
        (f"```python\nmath = 1\nprint(math)\n```\n```py\n{ROOT}\n```", ROOT, "fence"),  # an example, not a part
        (f"[BEGIN]\n{MARKED}\n[DONE]\n[BEGIN]", MARKED, "tags"),
        (f"{MARKED}\n[DONE]\nand so on", MARKED, "raw"),
        (THINKING, None, "raw"),
        (f"```python\n{THINKING}\n```", THINKING, "fence"),
        (f'I don\'t print "</think>".\n</think>\n{THINKING}', THINKING, "raw"),
        (f"it's f</think>```python\n{THINKING}\n```\nIt's f, cut at `</think>`.", THINKING, "fence"),
        (f'A docstring (`"""`)?\n</think>\n{CUTTING}', CUTTING, "raw"),  # quotes in prose open no string
        ('def f():\n    return "[BEGIN]"', None, "raw"),
        (f"{F}  # it's f\n[DONE] It's f.", f"{F}  # it's f", "raw"),
    ],
)
def test_the_program_is_found_where_the_rules_say(response: str, code: str | None, where: str) -> None:
    found = extract(response, {"f"})
    assert (found.code, found.found_in, found.reason) == (response if code is None else code, where, "")


def test_a_mark_in_a_string_marks_nothing_in_the_form_that_is_asked_for_either() -> None:
    assert extract_requested(f"so</think>{THINKING}\n[DONE]\nmore", is_chat=False).code == f"{THINKING}\n"
    assert extract_requested(f"```python\n{CUTTING}\n```", is_chat=True).code.strip() == CUTTING


def test_a_program_is_distinguished_from_examples_of_its_output() -> None:
    """A program that reads input defines nothing that its tests name."""
    program = "print(2 * int(input()))"
    for answer in (f"```python\n{program}\n```\nFor 2 it prints\n```\n4\n```", f"Put 2:\n```\n{program}\n```"):
        assert extract(answer).code == program


@pytest.mark.parametrize(
    "response", ["", " \n\t", "[BEGIN]\n\n[DONE]", "[DONE]def f(): ...", "```python\n```", "<think>def f"]
)
def test_nothing_to_run_is_no_answer(response: str) -> None:
    assert extract(response, {"f"}).reason == "no_answer"


def test_a_response_beyond_the_cap_is_refused() -> None:
    assert extract("x" * (MAX_CHARS + 1)).reason == "too_large"


@pytest.mark.parametrize(
    "response",
    [
        "    return sum(xs)\n",
        "   return sum(xs)",  # a tokenizer that eats a blank before the first word
        "return sum(xs)",
        "    n = 0\n    for x in xs:\n        n += x\n    return n\n\n\nprint(total([1]))",
        "n = 0\n    for x in xs:\n        n += x\n    return n",
        "n = 0\nfor x in xs:\n    n += x\nreturn n\n# that is all",
        "    return sum(xs)\n\n\ndef other():\n    return (",
        "```python\n    return sum(xs)\n```",
        "```python\nfrom typing import List\n\ndef total(xs: List[int]) -> int:\n    return sum(xs)\n```",
        "def total(xs):\n    return sum(xs)",
        "from __future__ import annotations\n\ndef total(xs: Numbers) -> int:\n    return sum(xs)",
    ],
)
def test_an_answer_to_humaneval_may_be_the_body_or_the_whole(response: str) -> None:
    found = extract(response, {"total"}, str(HUMANEVAL["prompt"]))
    namespace: dict[str, Any] = {}
    exec(compile(found.code, "<answer>", "exec", dont_inherit=True), namespace)
    assert namespace["total"]([1, 2]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    ["~", "a", "```", "```\n", "[BEGIN]", "<think>", "\n", " ", "def f", "\n```python", "~~~~", "def f\t"]
    + ["'\\''", '="""\\', "= '", "</think>"],
)
def test_extraction_of_a_text_made_to_be_slow_ends(part: str) -> None:
    """A rule that is quadratic in the text would take far too long."""
    text = part * ((MAX_CHARS - 99) // len(part))
    for response in (text, f"def f\n{text}", f"[BEGIN]\n```\n{text}", f"{text}`", f"```{text}`", f"~~~ {text}\n`"):
        assert extract(response, {"f", "g"}, "def f():\n").reason in ("", "no_answer")
