"""The terms of algorithms. A new one is a class in a file of this folder and its entry in `TERMS`.

Their order is that in which an update applies them, whatever the order in which they were given.
"""

from __future__ import annotations

from rlvr.algorithms.terms.covariance import ClipCovariance
from rlvr.algorithms.terms.distillation import Teacher
from rlvr.algorithms.terms.entropy import Entropy
from rlvr.algorithms.terms.importance import Importance
from rlvr.algorithms.terms.kl import Kl
from rlvr.algorithms.terms.observation import ObservationLoss
from rlvr.algorithms.terms.overlong import Overlong
from rlvr.algorithms.terms.self_distillation import SelfDistillation
from rlvr.algorithms.terms.term import Term
from rlvr.core.variants import Variants

TERMS = Variants(
    "algorithm.terms", Term,
    Kl, Entropy, Teacher, SelfDistillation, Importance, ClipCovariance, Overlong, ObservationLoss,
)  # fmt: skip
