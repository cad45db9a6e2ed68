"""A person's rating of an answer: it changes the answer's reward and what the strategies learn from.

Left out on purpose: weights learn on policy when a
session ends; a later rating is stored and does not change them.
"""

from __future__ import annotations

from rlvr.service.learning.credit import recompute_gains
from rlvr.service.learning.strategy_policy import revise_gains
from rlvr.store import ExperienceStore
from rlvr.store.records import Experience

MOST_ANSWERS = 5_000  # experiences read of one session


def rate(store: ExperienceStore, id: int, owner: str, rating: float, comment: str = "") -> Experience | None:
    """Store a rating and return the rated experience, None for an unknown id. Blocks.

    If the answer has a gain, its gain and its neighbours' are recomputed. During a session gains are not known yet, and
    a rating changes the reward only.
    """
    experience = store.rate(id, owner, rating, comment)
    if experience is not None and experience.gain is not None:
        rows = store.experiences(session_id=experience.session_id, limit=MOST_ANSWERS, tokens=False)
        gains = recompute_gains(rows)
        store.set_gains(gains)
        revise_gains(store, rows, gains)
    return experience
