"""`TensorData` at the place where loops written for the SDK import it from."""

from rlvr.tensors import TensorData

__all__ = ["TensorData"]
