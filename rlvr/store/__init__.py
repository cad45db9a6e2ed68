"""Sessions and experiences in SQL: prompts, completions, verdicts and rewards, with owner and policy version.

    store = open_store("sqlite:///rlvr.db")        # or postgresql://user@host/database, shared by several instances
    store.add_session(Session(id="s1", task_id="code_fibonacci", prompt="Write fib(n)"))
    store.add_experiences([Experience("s1", "code_fibonacci", iteration=1, prompt="...", generated_output="...")])
    store.task_analysis("code_fibonacci")

Every call is synchronous and safe from any thread. ValueError is a mistake of the caller. `StoreDown` means that the
database cannot be reached, is locked or is full, and that nothing of the call was written.
"""

from rlvr.store.connections import StoreDown
from rlvr.store.experience_store import ExperienceStore, open_store
from rlvr.store.records import Experience, Session, Status
from rlvr.store.retention import Retention

__all__ = ["Experience", "ExperienceStore", "Retention", "Session", "Status", "StoreDown", "open_store"]
