"""Work on hostile texts in a process that can be killed: `Worker` runs one of this package's jobs there.

What is guarded is our own code on a text that a model wrote (a regular expression can take centuries or all memory).
Running code that a model wrote needs more: namespaces, system-call filters. It does not happen here.
"""

from rlvr.sandbox.worker import Reply, Worker

__all__ = ["Reply", "Worker"]
