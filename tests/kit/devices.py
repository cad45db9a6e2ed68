"""The devices that a test runs on: the processor, a pretended GPU, and where `make test-gpu` runs a real one.

    @ON_DEVICES
    def test_gradients(client): ...      # the fixtures `client` and `fresh` build on the device of the test

The pretended one computes on the processor by the paths of a GPU, and finds what would lie on the wrong side.
"""

from __future__ import annotations

import pytest
import torch

GPU_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
REAL_GPU = pytest.param("gpu", marks=GPU_MARKS)
ON_DEVICES = pytest.mark.parametrize("device", ["cpu", "pretended", REAL_GPU], indirect=True)
WITH_A_GPU = pytest.mark.parametrize("device", ["cpu", REAL_GPU], indirect=True)  # where pretending shows nothing new
ON_GPUS = pytest.mark.parametrize("device", ["pretended", REAL_GPU], indirect=True)
