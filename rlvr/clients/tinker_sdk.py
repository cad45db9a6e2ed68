"""Adapter of the public `tinker` SDK: its futures, errors and types translated to ours.

Exercised by tests/test_clients_tinker.py. The SDK is imported when it is first needed (extra: `rlvr[tinker]`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import numpy as np

from rlvr.core.messages import Datum, ForwardBackwardOutput, ModelInput, NonFiniteError
from rlvr.core.tensors import TensorData

T = TypeVar("T")
EXTRA = "pip install 'rlvr[tinker]'"
SETTLE_SECONDS = 0.05  # until the SDK's threads have passed on the last answer


def import_sdk() -> Any:
    """Import the `tinker` SDK; ValueError if it is not installed."""
    try:
        import tinker
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; client=tinker needs the extra: {EXTRA}") from error
    return tinker


def end_session(service: Any) -> None:
    """End a session at the server, so that this process may end at once.

    The thread that passes an answer on (Rust, of the SDK's transport) wants the GIL back after we have the answer. If
    the interpreter is being finalized by then, CPython before 3.14 ends that thread by `pthread_exit`, which cannot
    unwind Rust's frames: the process aborts after its work is done. So give it a moment while nothing else is asked.
    """
    if hasattr(service, "close"):  # with an SDK that has none the session ends when its heartbeats do
        with translate_errors():
            wait_for(service.close("success"))
    time.sleep(SETTLE_SECONDS)


def wait_for(client: Any) -> Any:
    """The client that a call of the SDK makes: newer SDKs return a future of it, those up to 0.29 the client."""
    return client.result() if hasattr(client, "result") else client


class RemoteFuture(Generic[T]):
    """A future of the SDK whose result `read` translates; its errors become ours."""

    def __init__(self, future: Any, read: Callable[[Any], T]) -> None:
        self._future, self._read = future, read

    def result(self, timeout: float | None = None) -> T:
        with translate_errors():
            return self._read(self._future.result(timeout))

    async def result_async(self, timeout: float | None = None) -> T:
        with translate_errors():
            if hasattr(self._future, "result_async"):
                return self._read(await self._future.result_async(timeout))
            # A sampling client of the SDK 0.25 returns a future of `concurrent.futures`.
            return self._read(await asyncio.wait_for(asyncio.wrap_future(self._future), timeout))

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()


@contextlib.contextmanager
def translate_errors() -> Generator[None]:
    """Translate the SDK's errors: ValueError for what the server refuses, RuntimeError for what it could not do."""
    tinker = import_sdk()
    try:
        yield
    except tinker.RequestFailedError as error:
        text = str(error).removeprefix("Request failed: ").partition(" for self.request_id")[0]  # the SDK's frame
        if " is not finite" in text:  # as our own server says it
            raise NonFiniteError(text.partition(" is not finite")[0], []) from error
        kind = ValueError if error.category == "user" else RuntimeError
        raise kind(f"the Tinker server: {text}") from error
    except tinker.APIStatusError as error:
        detail = error.body.get("detail") if isinstance(error.body, dict) else None
        kind = ValueError if error.status_code < 500 else RuntimeError
        raise kind(f"the Tinker server refused ({error.status_code}): {detail or error}") from error
    except tinker.APIConnectionError as error:
        raise RuntimeError(f"the Tinker server cannot be reached: {error}") from error


def check_logprobs(logprobs: Any, length: int, what: str) -> list[Any]:
    """The log-probs [length] a server answered; RuntimeError if it left any out. A prompt's first token has none."""
    values = list(logprobs or [])
    missing = [i for i, value in enumerate(values) if value is None or not math.isfinite(value)]
    if what == "prompt":
        missing = [i for i in missing if i > 0]
    if len(values) != length or missing:
        raise RuntimeError(
            f"the Tinker server gave {len(values) - len(missing)} of {length} log-probs of a {what}; without all "
            "of them a gradient or a KL would be wrong: use a server that returns them"
            + (", or leave out algorithm.kl_coef" if what == "prompt" else "")
        )
    return values


def to_input(prompt: ModelInput) -> Any:
    return import_sdk().types.ModelInput.from_ints(prompt.to_ints())


def to_datum(datum: Datum) -> Any:
    types = import_sdk().types
    inputs = {name: types.TensorData.from_numpy(tensor.data) for name, tensor in datum.loss_fn_inputs.items()}
    return types.Datum(model_input=to_input(datum.model_input), loss_fn_inputs=inputs)


def from_output(output: Any) -> ForwardBackwardOutput:
    rows = [{name: TensorData(t.to_numpy()) for name, t in row.items()} for row in output.loss_fn_outputs]
    bad = [i for i, row in enumerate(rows) if "logprobs" in row and not np.isfinite(row["logprobs"].data).all()]
    metrics = dict(output.metrics)
    if "loss:sum" not in metrics:
        raise ValueError(
            "the Tinker server's answer has no metric loss:sum, which the protocol requires: its losses may be no sums "
            "over tokens, and then its gradient is another one; see docs/other-tinker-servers.md for servers that work"
        )
    if bad or not math.isfinite(metrics["loss:sum"]):
        raise NonFiniteError("a loss on the server", bad)
    return ForwardBackwardOutput(rows, metrics, output.loss_fn_output_type)
