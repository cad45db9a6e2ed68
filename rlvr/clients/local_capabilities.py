"""What the engine in this process supports, in a file without torch so that a run can be planned before it is built."""

from rlvr.algorithms.loss_specs import LOSS_SPECS
from rlvr.core.protocols import ClientCapabilities, Feature

LOCAL_CAPABILITIES = ClientCapabilities(
    "local", losses=LOSS_SPECS.keys(), features=frozenset(Feature), scores_at_temperature=True, runs_in_process=True
)
