"""What schemathesis cannot read from /openapi.json: how to write a text of our own formats."""

import schemathesis
from hypothesis import strategies as st

# Formulas over numbers alone: no schema can say that a formula names the graders beside it.
numbers = st.integers(0, 9).map(str)
sums = st.lists(numbers, min_size=1, max_size=4).map(" + ".join)
schemathesis.openapi.format("grader-formula", sums | sums.map("max({}, 0.5)".format))

# Templates with a place that every answer has: no schema can say that the item has the fields that a template names.
words = st.text(st.characters(codec="utf-8", exclude_characters="{}\0"), min_size=1)
schemathesis.openapi.format("grader-template", words | words.map("{} {{{{ sample.output_text }}}}".format))

# Tests that are Python: one that does not parse has no verdict.
schemathesis.openapi.format("python-assert", st.integers().map("assert f({}) == 1".format))
schemathesis.openapi.format("python-name", st.just("f"))  # no schema can say which names the tests use
schemathesis.openapi.format("python-setup", st.integers().map("OFFSET = {}".format))
schemathesis.openapi.format("python-grader", st.integers().map("def grade(sample, item): return {}".format))
