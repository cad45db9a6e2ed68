"""Adapter of the public `tinker` SDK: its futures, errors and types translated to ours.

The SDK is imported when it is first needed (extra: `rlvr[tinker]`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import Future as ThreadFuture
from typing import Any, Generic, TypeVar

import numpy as np

from rlvr.core.messages import Datum, ForwardBackwardOutput, ModelInput, NonFiniteError
from rlvr.core.tensors import TensorData

T = TypeVar("T")
EXTRA = "pip install 'rlvr[tinker]'"
SETTLE_SECONDS = 0.05  # until the SDK's threads have passed on the last answer
FAREWELL_SECONDS = 10.0  # for the end of a session at a server that may hang
JSON_ONLY = (
    "this server may speak JSON only, which the SDK does up to 0.24: pip install tinker==0.24.1 in an environment of "
    "its own, or use a newer server; see docs/tinker/other-servers.md"
)
LOST = "it no longer has this training run or session; start the same command again to go on from the last checkpoint"


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
            wait_for(lambda: service.close("success"), FAREWELL_SECONDS)
    time.sleep(SETTLE_SECONDS)


def expire_weights(path: str, seconds: int, timeout_s: float) -> None:
    """Let the server of TINKER_BASE_URL delete what was saved at `path` after some time, an hour at least. With an SDK
    that asks for a training session to do it, the weights stay."""
    tinker = import_sdk()
    if hasattr(tinker, "RestClient") and hasattr(tinker.RestClient, "get_server_capabilities"):
        with translate_errors():
            wait_for(lambda: tinker.RestClient().set_checkpoint_ttl_from_tinker_path(path, seconds), timeout_s)


def wait_for(call: Callable[[], Any], seconds: float) -> Any:
    """The result of a call of the SDK that blocks, as those up to 0.29 do, or returns a future; RuntimeError when late.

    The call has a thread of its own: the SDK repeats what failed for minutes, and cannot be stopped.
    """
    answer: ThreadFuture[Any] = ThreadFuture()

    def run() -> None:
        try:
            made = call()
            answer.set_result(made.result() if hasattr(made, "result") else made)
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise _late(seconds) from None


class RemoteFuture(Generic[T]):
    """A future of the SDK whose result `read` translates; its errors become ours. RuntimeError after `seconds`."""

    def __init__(self, future: Any, read: Callable[[Any], T], seconds: float) -> None:
        self._future, self._read, self._seconds = future, read, seconds

    def result(self, timeout: float | None = None) -> T:
        with translate_errors(of_run=True), self._deadline(timeout):
            answer = self._future.result(self._seconds if timeout is None else timeout)
        return self._translate(answer)

    async def result_async(self, timeout: float | None = None) -> T:
        wait = self._seconds if timeout is None else timeout
        with translate_errors(of_run=True), self._deadline(timeout):
            if hasattr(self._future, "result_async"):
                answer = await self._future.result_async(wait)
            else:  # a sampling client of the SDK 0.25 returns a future of `concurrent.futures`
                answer = await asyncio.wait_for(asyncio.wrap_future(self._future), wait)
        return self._translate(answer)

    def __await__(self) -> Generator[Any, None, T]:
        return self.result_async().__await__()

    def _translate(self, answer: Any) -> T:
        with translate_errors():
            return self._read(answer)

    @contextlib.contextmanager
    def _deadline(self, timeout: float | None) -> Generator[None]:
        """Replace the TimeoutError of a caller that gave none."""
        try:
            yield
        except TimeoutError:
            if timeout is not None:
                raise
            raise _late(self._seconds) from None


def _late(seconds: float) -> RuntimeError:
    return RuntimeError(
        f"the Tinker server gave no answer in {seconds:g} s; see whether it works, then start the same command again "
        "to go on from the last checkpoint, or give a larger model.timeout_s"
    )


@contextlib.contextmanager
def translate_errors(*, of_run: bool = False) -> Generator[None]:
    """Translate the SDK's errors: ValueError for what the server refuses, RuntimeError for what it could not do.

    With `of_run` an unknown model or session is one that the server has lost.
    """
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
        raise _translate_status(error, of_run) from error
    except tinker.APIConnectionError as error:
        raise RuntimeError(f"the Tinker server cannot be reached: {error}") from error
    except ValueError as error:  # the SDK's own, of a result that the server refuses to give
        if isinstance(error.__cause__, tinker.APIStatusError):
            raise _translate_status(error.__cause__, of_run) from error
        if "only supports as proto" in str(error):
            raise ValueError(f"the Tinker server gave JSON where the SDK reads protobuf; {JSON_ONLY}") from error
        raise
    except AssertionError as error:  # the SDK's, of an answer without something that it needs
        if not of_run:
            raise
        raise RuntimeError(
            f"the tinker SDK {tinker.__version__} does not take this server's answer ({error}); try an older SDK, and "
            "see docs/tinker/other-servers.md"
        ) from error
    except Exception as error:
        if type(error).__name__ == "RetryableException":  # status 410: the SDK has no public name for it
            raise RuntimeError(f"the Tinker server: {error}; {LOST}") from error
        raise


def _translate_status(error: Any, of_run: bool) -> Exception:
    detail = error.body.get("detail") if isinstance(error.body, dict) else None
    text = f"the Tinker server refused ({error.status_code}): {detail or error}"
    if of_run and (error.status_code in (404, 410) or "not loaded" in text):
        return RuntimeError(f"{text}; {LOST}")
    if error.status_code == 422 and "protobuf" in str(error.request.headers.get("content-type", "")):
        text += f"; {JSON_ONLY}"
    return (ValueError if error.status_code < 500 else RuntimeError)(text)


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


def from_output(output: Any, own: Mapping[str, float] | None = None) -> ForwardBackwardOutput:
    """The answer to a forward or forward-backward pass; `own` metrics are added to the server's."""
    rows = [{name: TensorData(t.to_numpy()) for name, t in row.items()} for row in output.loss_fn_outputs]
    outputs = [row[name].data for row in rows for name in ("logprobs", "values") if name in row]
    bad = [i for i, output in enumerate(outputs) if not np.isfinite(output).all()]
    metrics = {**(output.metrics or {}), **(own or {})}
    if "loss:sum" not in metrics:
        raise ValueError(
            "the Tinker server's answer has no metric loss:sum, which the protocol requires: its losses may not be "
            "sums over tokens, and then its gradients differ; give client=skyrl for a server of SkyRL, and see "
            "docs/tinker/other-servers.md for others"
        )
    if bad or not math.isfinite(metrics["loss:sum"]):
        raise NonFiniteError("a loss on the server", bad)
    return ForwardBackwardOutput(rows, metrics, output.loss_fn_output_type)
