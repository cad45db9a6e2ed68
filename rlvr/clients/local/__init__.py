"""The surface of the public `tinker` SDK, on an engine in this process: a loop written for it runs by its imports.

    from rlvr.clients import local as tinker                # import tinker
    from rlvr.clients.local import types                    # from tinker import types
    from rlvr.clients.local.types.tensor_data import TensorData

`clients.py` holds the two clients, which our own loops use too; `service.py` makes them as the SDK's `ServiceClient`
does. Left out on purpose: REST, images, checkpoints that expire.
"""

from rlvr.clients.local import types
from rlvr.clients.local.clients import LocalSamplingClient, LocalTrainingClient
from rlvr.clients.local.service import ServiceClient
from rlvr.clients.local.types import *  # noqa: F403 (`types.__all__` lists them)
from rlvr.core.futures import Future as APIFuture

SamplingClient = LocalSamplingClient
TrainingClient = LocalTrainingClient

__all__ = [
    "APIFuture",
    "LocalSamplingClient",
    "LocalTrainingClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
    "types",
]
__all__ += types.__all__
