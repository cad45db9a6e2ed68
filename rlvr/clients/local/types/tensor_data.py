"""`TensorData` at the place where loops written for the SDK import it from."""

from rlvr.core.tensors import TensorData

__all__ = ["TensorData"]
