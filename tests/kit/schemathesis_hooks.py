"""What schemathesis cannot read from /openapi.json: how to write a text of our own formats."""

import re
from typing import Any

import schemathesis
from hypothesis import strategies as st

# Formulas over numbers alone: no schema can say that a formula names the graders beside it.
numbers = st.integers(0, 9).map(str)
sums = st.lists(numbers, min_size=1, max_size=4).map(" + ".join)
schemathesis.openapi.format("grader-formula", sums | sums.map("max({}, 0.5)".format))

# References that mathematics reads: one that it does not read, or that repeats the prompt, has no verdict.
schemathesis.openapi.format("reference", st.integers().map(str))

# Templates with a place that every answer has: no schema can say that the item has the fields that a template names.
words = st.text(st.characters(codec="utf-8", exclude_characters="{}\0"), min_size=1)
sentences = st.lists(st.sampled_from("abc"), min_size=5, max_size=9).map(" ".join)  # enough words for any metric
schemathesis.openapi.format("grader-template", words | sentences | words.map("{} {{{{ sample.output_text }}}}".format))

# Tests that are Python: one that does not parse has no verdict.
schemathesis.openapi.format("python-assert", st.integers().map("assert f({}) == 1".format))
schemathesis.openapi.format("python-setup", st.integers().map("OFFSET = {}".format))
schemathesis.openapi.format("python-grader", st.integers().map("def grade(sample, item): return {}".format))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Names that answers define are those that the tests use: no schema can say so."""
    body = case.body if isinstance(case.body, dict) else {}
    names, tests = body.get("answer_names"), body.get("tests")
    if names and isinstance(names, list) and all(isinstance(name, str) and name.isidentifier() for name in names):
        texts = [test for test in tests if isinstance(test, str)] if isinstance(tests, list) else []
        body["answer_names"] = re.findall(r"assert (\w+)\(", "\n".join(texts)) or names
