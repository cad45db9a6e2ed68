"""Runs what a model wrote: `Sandbox` judges code by tests, `Worker` runs our own code on hostile texts.

    from rlvr.sandbox import Sandbox
    with Sandbox() as sandbox:
        sandbox.verify("def add(a, b): return a + b", ["assert add(1, 2) == 3"]).passed   # True

`Worker` guards our own code on a text that a model wrote (a regular expression can take centuries or all memory): a
child with limits, killed when it is late. `Sandbox` runs the text itself, which needs isolation:
`rlvr.sandbox.supervisor`.
"""

from rlvr.sandbox.supervisor import NoTier, Sandbox, shared_sandbox
from rlvr.sandbox.verdict import Limits, TestResult, Verdict
from rlvr.sandbox.worker import Worker, WorkerReply

__all__ = ["Limits", "NoTier", "Sandbox", "TestResult", "Verdict", "Worker", "WorkerReply", "shared_sandbox"]
