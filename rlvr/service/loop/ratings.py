"""A person's rating of an answer: into its reward, and into what the strategies learn from.

Exercised by tests/test_service_http.py and tests/test_sessions.py. Left out on purpose: weights that are trained here
learn from a session when it ends, on policy; a rating that comes later is kept and teaches them nothing.
"""

from __future__ import annotations

from rlvr.service.loop.credit import regained
from rlvr.store import Store
from rlvr.store.records import Experience

MOST_ANSWERS = 5_000  # experiences of one session


def rate(store: Store, id: int, owner: str, rating: float, comment: str = "") -> Experience | None:
    """The experience as it is rated; None where there is none of that id. Blocks.

    Where a choice was credited with the answer, its gain and its neighbours' follow. Of a session that is under way
    they are not known yet: what it is rated then changes its reward alone.
    """
    rated = store.rate(id, owner, rating, comment)
    if rated is not None and rated.gain is not None:
        rows = store.experiences(session_id=rated.session_id, limit=MOST_ANSWERS, tokens=False)
        store.set_gains(regained(rows))
    return rated
