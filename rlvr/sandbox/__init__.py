"""Run what a model wrote: `Sandbox` judges code by tests, `Worker` does our own work on hostile texts.

    from rlvr.sandbox import Sandbox
    with Sandbox() as sandbox:
        sandbox.verify("def add(a, b): return a + b", ["assert add(1, 2) == 3"]).passed   # True

`Worker` guards our own code on a text that a model wrote (a regular expression can take centuries or all memory): a
child with limits, killed when it is late. `Sandbox` runs the text itself, which takes more: `rlvr.sandbox.supervisor`.
"""

from rlvr.sandbox.supervisor import NoTier, Sandbox, shared
from rlvr.sandbox.verdict import Limits, TestResult, Verdict
from rlvr.sandbox.worker import Reply, Worker

__all__ = ["Limits", "NoTier", "Reply", "Sandbox", "TestResult", "Verdict", "Worker", "shared"]
