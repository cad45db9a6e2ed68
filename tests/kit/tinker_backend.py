"""Shared by the tests of `TinkerBackend`: a tiny engine and a client that calls the backend as HTTP would.

As a script (`python tinker_backend.py STATE STEPS LIFE...`) it lives several times: each life is a server and its
client in one process, which goes on where the last one was. A life is the seconds after which it is killed, `step3`
for one that dies within its third optimizer step, or `whole`; the hash of the final weights is printed.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from rlvr.core.files import write_atomic
from rlvr.core.messages import AdamParams, Datum
from rlvr.engine.engine import Engine
from rlvr.engine.engine_options import EngineLimits
from rlvr.engine.model_loading import build_model
from rlvr.engine.tokenizer import build_tokenizer
from rlvr.tinker_server.backend.request_futures import JsonResult, Outcome, Pending, ProtoResult, RequestFailure
from rlvr.tinker_server.backend.runs.run_operations import (
    ForwardBackward,
    OptimStep,
    RunOperation,
    SaveForSampler,
    SaveWeights,
)
from rlvr.tinker_server.backend.tinker_backend import TinkerBackend
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.server_limits import ServerLimits
from rlvr.tinker_server.protocol.wire import parse_forward_backward
from tests.kit.tiny import CONFIGS, END, PAD, WORDS, data

MODEL = "tiny/model"
ADAM = AdamParams(learning_rate=1e-2)


def tiny_engine(**limits: Any) -> Engine:
    tokenizer = build_tokenizer("words", WORDS, end=END, pad=PAD)
    model = build_model(
        {**CONFIGS["qwen3"], "initializer_range": 0.2}, tokenizer, seed=1, device="cpu", dtype="float32"
    )
    return Engine(model, EngineLimits(**limits))


def forward_backward(
    model: str,
    seq: int,
    rows: list[Datum],
    loss_fn: str = "cross_entropy",
    *,
    forward_only: bool = False,
    **config: float,
) -> ForwardBackward:
    """As it comes from the wire: encoded, and read again."""
    message = proto.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn=loss_fn, forward_only=forward_only)
    for row in rows:
        datum = proto.Datum()
        datum.model_input.add().encoded_text.tokens = np.asarray(row.model_input.tokens, "<i4").tobytes()
        for name, tensor in row.loss_fn_inputs.items():
            kind = proto.DTYPE_INT64 if tensor.dtype == "int64" else proto.DTYPE_FLOAT32
            field = datum.loss_fn_inputs[name]
            field.dense, field.dtype = tensor.data.tobytes(), kind
            field.shape.extend(tensor.shape)
        message.data.append(datum.SerializeToString())
    for key, value in config.items():
        message.loss_fn_config_v2[key].number = value
    raw = message.SerializeToString()
    asked = parse_forward_backward(raw)
    return ForwardBackward(asked.data, asked.loss_fn, asked.config, asked.forward_only, raw)


class BackendClient:
    """One owner's session; `run` is the id of its training run."""

    def __init__(self, backend: TinkerBackend, owner: str = "anna", session: str | None = None) -> None:
        self.backend, self.owner = backend, owner
        self.session = session or backend.sessions.create(owner)
        self.run = f"{self.session}:train:0"

    def make(self, rank: int = 4, seed: int = 1) -> Outcome:
        return self.wait(
            self.backend.runs.create_model(self.owner, self.session, 0, MODEL, {"rank": rank, "seed": seed})
        )

    def send(self, seq: int, operation: RunOperation) -> str:
        return self.backend.runs.submit(self.owner, self.run, seq, operation)

    def gradients(self, seq: int, seed: int = 0, loss_fn: str = "cross_entropy", **how: Any) -> str:
        return self.send(seq, forward_backward(self.run, seq, data(seed=seed), loss_fn, **how))

    def step(self, seq: int) -> str:
        return self.send(seq, OptimStep(ADAM))

    def wait(self, request_id: str, timeout: float = 30.0) -> Outcome:
        outcome = asyncio.run(self.backend.result(self.owner, request_id, timeout))
        assert not isinstance(outcome, Pending), f"{request_id}: no answer after {timeout} s"
        return outcome

    def do(self, seq: int, operation: RunOperation) -> Outcome:
        return self.wait(self.send(seq, operation))

    def save_weights(self, seq: int, name: str) -> str:
        """The hash of the weights as they are, by saving them."""
        outcome = self.do(seq, SaveWeights(name))
        assert isinstance(outcome, JsonResult), outcome
        return outcome.value["path"]


class ServerFactory:
    """Servers in one folder; starting another closes the one before it."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._core: TinkerBackend | None = None

    def __call__(self, *, engine: Any = None, aliases: dict[str, str] | None = None, **limits: Any) -> TinkerBackend:
        self.close()
        limit = ServerLimits(**limits)
        self._core = TinkerBackend({MODEL: engine or tiny_engine()}, self._state, aliases=aliases, limits=limit)
        return self._core

    def close(self) -> None:
        if self._core is not None:
            self._core.close()
            self._core = None


def read_logprobs(outcome: Outcome) -> list[list[float]]:
    assert isinstance(outcome, ProtoResult), outcome
    message = proto.ForwardBackwardOutput.FromString(outcome.body)
    rows: list[list[float]] = []
    for record in message.loss_fn_outputs:
        field = record.fields["logprobs"]
        ends = np.frombuffer(field.offsets, "<i8")
        rows += [np.frombuffer(field.data[a:b], "<f4").tolist() for a, b in itertools.pairwise(ends)]
    return rows


def sampled_tokens(outcome: Outcome) -> list[list[int]]:
    assert isinstance(outcome, ProtoResult), outcome
    message = proto.SampleResponse.FromString(outcome.body)
    return [np.frombuffer(s.tokens, "<i4").tolist() for s in message.sequences]


def assert_failed(outcome: Outcome, *words: str, category: str = "user") -> None:
    assert isinstance(outcome, RequestFailure) and outcome.category == category, outcome
    assert all(word in outcome.error for word in words), outcome.error


def train(client: BackendClient, steps: int, seed: int, first: int = 1) -> list[Outcome]:
    """`steps` times gradients of two batches and a step, all under way at once."""
    ids: list[str] = []
    for i in range(steps):
        seq = first + 3 * i
        ids += [client.gradients(seq, seed=seed + i), client.gradients(seq + 1, seed + i, "ppo"), client.step(seq + 2)]
    return [client.wait(i) for i in ids]


def counters(state: Path, run: str, name: str) -> dict[str, Any]:
    """What a saved checkpoint says of itself: `weights_sha256`, `version` (optimizer steps)."""
    [file] = (state / "runs" / run.replace(":", ".") / "weights" / name).glob("*/policy.json")
    return json.loads(file.read_text())


def plan(run: str, steps: int) -> list[RunOperation]:
    """Requests 1, 2, ...: two gradients and a step, again and again; now and then weights are saved."""
    todo: list[RunOperation] = []
    for i in range(steps):
        for half in range(2):
            rows = data(lengths=[4, 9, 2, 7], seed=2 * i + half)
            todo.append(forward_backward(run, len(todo) + 1, rows, "importance_sampling" if half else "cross_entropy"))
        todo.append(OptimStep(ADAM))
        if i % 3 == 2:
            todo.append(SaveWeights(f"step{i}"))
        if i % 3 == 1:
            todo.append(SaveForSampler(None, sampling_session_seq_id=i))
    return [*todo, SaveWeights("final")]


class DyingEngine(Engine):
    """Dies with the whole process right after an optimizer step, before the result is sent."""

    steps_to_live = 0

    def optim_step(self, *what: Any) -> Any:
        done = super().optim_step(*what)
        self.steps_to_live -= 1
        if self.steps_to_live == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return done


def live(state: Path, steps: int, steps_to_live: int) -> None:
    engine = tiny_engine()
    engine.__class__ = DyingEngine
    engine.steps_to_live = steps_to_live  # pyright: ignore[reportAttributeAccessIssue]
    backend = TinkerBackend({MODEL: engine}, state, limits=ServerLimits(snapshot_steps=3, snapshot_share=1e6))
    note = state / "session.txt"
    if not note.exists():
        write_atomic(note, backend.sessions.create("anna"))
    client = BackendClient(backend, session=note.read_text())
    client.make()
    todo = plan(client.run, steps)
    answers = state / "answers.txt"  # what the client was told: it goes on from there
    told = answers.read_text().splitlines() if answers.exists() else []
    with open(answers, "a") as file:
        for start in range(len(told), len(todo), 3):  # three are under way at a time, the first of them sent last
            numbers = range(start + 1, min(start + 3, len(todo)) + 1)
            ids = {seq: client.send(seq, todo[seq - 1]) for seq in reversed(numbers)}
            for seq in numbers:
                outcome = client.wait(ids[seq])
                file.write(f"{seq} {outcome.body.hex()[:60] if isinstance(outcome, ProtoResult) else outcome}\n")
                file.flush()
    found = counters(state, client.run, "final")
    print(json.dumps({"sha256": found["weights_sha256"], "steps": found["version"]}))
    backend.close()


def main(state: Path, steps: int, lives: list[str]) -> None:
    for life in lives:
        child = os.fork()  # torch is imported, nothing of it runs yet
        if child == 0:
            live(state, steps, int(life[4:]) if life.startswith("step") else 0)
            sys.stdout.flush()
            os._exit(0)
        if life[0].isdigit():
            time.sleep(float(life))
            os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or status == 0, f"life {life} ended with {status}"
        print("killed" if os.WIFSIGNALED(status) else "ended", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
