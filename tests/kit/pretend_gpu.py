"""A GPU that is pretended: tensors are computed on the CPU and say that they lie on `cuda:0`, and what a real device
would refuse is refused: an operation over tensors of both places, `numpy()` of a tensor that lies on the device.

    with pretend_gpu() as gpu:
        model = build_model(config, tokenizer, seed=1, device="cuda", dtype="float32")
        ...
    gpu.waits      # how often the host read a value from the device, by the operation

Unlike fake tensors these have values, so the whole engine runs, by the paths that it takes on a device, and its results
can be compared. Needs no CUDA build of torch. It says nothing about kernels, streams and memory: what these compute,
how fast, and how they fail is what a card is for.

What lies on the device is known by storage: views share one, and operations hand the place on. Left out on purpose:
more than one device, and moving a tensor within a graph (its gradient would lie on the wrong side).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
aten: Any = torch.ops.aten
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
# The host waits for what these give: a number, or a tensor whose size depends on values.
WAITING = {aten.item, aten.is_nonzero, aten._local_scalar_dense, aten.nonzero, aten.equal, aten.masked_select,
           aten._unique2, aten.unique_dim}  # fmt: skip
FLAGS = {Tensor.is_cuda.__get__: True, Tensor.is_cpu.__get__: False}  # pyright: ignore[reportAttributeAccessIssue]
PARSE_TO: Any = torch._C._nn._parse_to  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
DEVICE = Tensor.device.__get__  # pyright: ignore[reportAttributeAccessIssue]


class Placement:
    """Which storages lie on the device, and how often the host waited."""

    def __init__(self) -> None:
        self.storages: dict[int, StorageWeakRef] = {}  # weak, and while it is held no other storage has its address
        self.waits: Counter[str] = Counter()
        self.free_bytes = 1 << 30
        self.in_backward = False

    def is_on_device(self, tensor: Tensor) -> bool:
        if not _has_storage(tensor):
            return False
        found = self.storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()

    def put(self, result: Any, on_device: bool) -> Any:
        """Let all tensors of a result lie on the device, or on the host."""
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _has_storage(tensor):
                storage = tensor.untyped_storage()
                if on_device:
                    self.storages[storage._cdata] = StorageWeakRef(storage)
                else:
                    self.storages.pop(storage._cdata, None)
        if len(self.storages) > 20_000:
            self.storages = {key: ref for key, ref in self.storages.items() if not ref.expired()}
        return result

    def move(self, tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
        """What `Tensor.to` gives."""
        is_there, goes_there = self.is_on_device(tensor), device.type != "cpu"
        if is_there == goes_there:
            return tensor if dtype is None else tensor.to(dtype)
        if is_there:
            self.waits["copy to the host"] += 1
        return self.put(tensor.clone() if dtype is None else tensor.to(dtype, copy=True), goes_there)


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


class _CheckOperations(TorchDispatchMode):
    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, kwargs = self.placement, kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        there = [x for x in tensors if place.is_on_device(x)]
        if not there:  # the gradient of what has none is a zero that no Python function makes
            result = func(*args, **kwargs)
            return place.put(result, True) if place.in_backward and not tensors else result
        if func.overloadpacket in WAITING:
            place.waits[func.overloadpacket.__name__] += 1
        if func is aten.copy_.default:  # of a tensor of either place
            return func(*args, **kwargs)
        # An index may lie on the host, and a tensor without dimensions counts as a number.
        indices = [id(x) for x in args[1] if x is not None] if func in INDEXING and there[0] is args[0] else []
        is_strict = func.overloadpacket.__name__.startswith("_fused_")  # the optimizer's, which reads by address
        on_host = [x for x in tensors if not place.is_on_device(x) and id(x) not in indices and (x.dim() or is_strict)]
        if on_host:
            shapes = ", ".join(f"{list(x.shape)} on {'cuda:0' if place.is_on_device(x) else 'cpu'}" for x in tensors)
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {shapes}")
        return place.put(func(*args, **kwargs), True)


class _SpeakOfDevices(TorchFunctionMode):
    """What Python sees of a tensor's device, and what it says about one to torch."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place, kwargs = self.placement, dict(kwargs or {})
        is_there = bool(args) and isinstance(args[0], Tensor) and place.is_on_device(args[0])
        if func == DEVICE and is_there:
            return GPU
        if func in FLAGS and is_there:
            return FLAGS[func]
        if func is PARSE_TO:
            return func(*args, **kwargs)
        if func is Tensor.to:
            copied = {name: kwargs.pop(name) for name in ("copy",) if name in kwargs}
            device, dtype, *_ = PARSE_TO(*self._replace_tensor(args[1:]), **kwargs)
            return func(*args, **kwargs, **copied) if device is None else place.move(args[0], device, dtype)
        if func in (Tensor.cpu, Tensor.cuda):
            return place.move(args[0], CPU if func is Tensor.cpu else GPU)
        if func in (Tensor.numpy, Tensor.__array__) and is_there:
            raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")
        if func is Tensor.tolist and is_there:
            return place.move(args[0].detach(), CPU).tolist()
        if func is Tensor.backward:  # whose recomputed parts make tensors on the device
            place.in_backward = is_there
            try:
                with self:
                    return torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
            finally:
                place.in_backward = False
        if (device := kwargs.get("device")) is not None:
            goes_there = torch.device(device).type != "cpu"
            return place.put(func(*args, **{**kwargs, "device": CPU}), goes_there)
        return func(*args, **kwargs)

    def _replace_tensor(self, args: Any) -> Any:
        """The arguments of `to(other)` as those of `to(device, dtype)`."""
        if args and isinstance(args[0], Tensor):
            return (GPU if self.placement.is_on_device(args[0]) else CPU, args[0].dtype, *args[1:])
        return args


@contextmanager
def pretend_gpu() -> Iterator[Placement]:
    """In this context torch has one CUDA device, which supports bf16."""
    placement = Placement()
    answers = {"is_available": True, "is_bf16_supported": True, "device_count": 1, "current_device": 0,
               "get_device_name": "a pretended GPU", "memory_reserved": 0, "memory_allocated": 0}  # fmt: skip
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, lambda *_, _answer=answer: _answer))
        stack.enter_context(mock.patch.object(torch.cuda, "mem_get_info", lambda *_: (placement.free_bytes, 1 << 30)))
        stack.enter_context(_CheckOperations(placement))
        stack.enter_context(_SpeakOfDevices(placement))
        yield placement
