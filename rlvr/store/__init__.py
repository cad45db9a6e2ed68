"""Experiences in SQL: what was asked, answered, verified and learned, by whom and with which weights.

    store = open_store("sqlite:///rlvr.db")        # or postgresql://user@host/database, shared by several instances
    store.add_session(Session(id="s1", task_id="code_fibonacci", prompt="Write fib(n)"))
    store.add_experiences([Experience("s1", "code_fibonacci", iteration=1, prompt="...", generated_output="...")])
    store.task_analysis("code_fibonacci")

Everything is synchronous and safe to call from any thread. Two errors are worth telling apart: ValueError is the
caller's mistake, `StoreDown` says that the database is away, locked or full, and that nothing was half written.
"""

from rlvr.store.connections import StoreDown
from rlvr.store.records import Experience, Session, Status
from rlvr.store.retention import Retention
from rlvr.store.store import Store, open_store

__all__ = ["Experience", "Retention", "Session", "Status", "Store", "StoreDown", "open_store"]
