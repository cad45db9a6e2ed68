"""Requests that are hostile by size and number, not by shape, for benchmarks/hostile_load.py.

A `Hostile` names a request and makes its body. Most of a body is the same each time and made once; what names a session
or a run comes from the `Tenant` that sends it. Left out on purpose: malformed requests, which the tests have.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

BATCH = "/api/v1/forward_backward"
JSON, PROTOBUF = "application/json", "application/x-protobuf"
MIB = 1 << 20


@dataclass
class Tenant:
    """A client with a key: on the engine server, with a session, a sampling session and training runs."""

    key: str
    send: Callable[..., tuple[int, bytes]]  # (method, path, body, content type) -> (status, body)
    session: str = ""
    sampler: str = ""
    _numbers: count[int] = field(default_factory=lambda: count(1))

    def post(self, path: str, body: Any) -> Any:
        """The JSON that answers a call of the set-up, which must succeed."""
        status, answer = self.send("POST", path, json.dumps(body).encode(), JSON)
        assert status < 300, f"{path}: {status} {answer[:300]!r}"
        return json.loads(answer)

    def open_session(self) -> None:
        self.session = self.post("/api/v1/create_session", {"tags": []})["session_id"]
        given = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "model"}
        self.sampler = self.post("/api/v1/create_sampling_session", given)["sampling_session_id"]

    def number(self) -> int:
        return next(self._numbers)

    def open_run(self, rank: int = 8) -> str:
        given = {
            "session_id": self.session, "model_seq_id": self.number(), "base_model": "model",
            "lora_config": {"rank": rank, "seed": 1},
        }  # fmt: skip
        answer = self.post("/api/v1/create_model", given)
        self.wait(answer["request_id"])
        return answer["model_id"]

    def wait(self, request_id: str) -> tuple[int, bytes]:
        """The answer to a future."""
        asked = json.dumps({"request_id": request_id}).encode()
        while (found := self.send("POST", "/api/v1/retrieve_future", asked, JSON))[0] == 408:
            pass
        return found


Make = Callable[[Tenant], bytes]


@dataclass(frozen=True)
class Hostile:
    """`waits`: what answers names a future, whose result is awaited too."""

    name: str
    path: str
    make: Make = lambda tenant: b""
    method: str = "POST"
    content_type: str = JSON
    waits: bool = False


def get(name: str, path: str) -> Hostile:
    return Hostile(name, path, method="GET")


def post(name: str, path: str, body: Callable[[], Any]) -> Hostile:
    """`body`: JSON to encode, or text."""

    @cache
    def encoded() -> bytes:
        made = body()
        return made if isinstance(made, bytes) else json.dumps(made).encode()

    return Hostile(name, path, lambda tenant: encoded())


def sample(name: str, prompt: Callable[[], Any], **more: Any) -> Hostile:
    """An `asample` of the tenant's session. `prompt`: token ids, or the chunks."""

    @cache
    def rest() -> bytes:
        given = prompt()
        chunks = given if given and isinstance(given[0], dict) else [{"type": "encoded_text", "tokens": given}]
        params = {"max_tokens": 2, "stop": [], **more.get("sampling_params", {})}
        found = {name: made() if callable(made) else made for name, made in more.items()}
        return json.dumps({**found, "prompt": {"chunks": chunks}, "sampling_params": params}).encode()[1:]

    def make(tenant: Tenant) -> bytes:
        head = {"sampling_session_id": tenant.sampler, "seq_id": tenant.number()}
        return json.dumps(head).encode()[:-1] + b"," + rest()

    return Hostile(name, "/api/v1/asample", make, waits=True)


def custom_loss(name: str, nodes: int) -> Hostile:
    """A `create_custom_loss` of a chain of additions."""

    @cache
    def rest() -> bytes:
        names = ["logprobs", *(f"n{i}" for i in range(nodes - 3)), "sum"]
        graph = [
            {"op": "placeholder", "name": "logprobs", "target": "logprobs"},
            *(
                {"op": "call_function", "name": name, "target": "operator.add", "args": [{"ref": before}, 1.0]}
                for before, name in itertools.pairwise(names[:-1])
            ),
            {"op": "call_method", "name": "sum", "target": "sum", "args": [{"ref": names[-2]}]},
            {"op": "output", "name": "o", "target": "output", "args": [{"tuple": [{"ref": "sum"}, {"dict": {}}]}]},
        ]
        body = {"name": "chain", "inputs": [{"name": "logprobs", "rank": 1}], "graph": {"nodes": graph}}
        return json.dumps(body).encode()[1:]

    def make(tenant: Tenant) -> bytes:
        head = {"session_id": tenant.session, "custom_loss_seq_id": tenant.number()}
        return json.dumps(head).encode()[:-1] + b"," + rest()

    return Hostile(name, "/api/v1/create_custom_loss", make)


def train(name: str, data: Callable[[], Iterable[bytes]], loss: str = "cross_entropy", junk: bytes = b"") -> Hostile:
    """A `forward_backward` of a new run. `data`: serialized datums; `junk` follows the message."""
    from rlvr.tinker_server.protocol import proto

    @cache
    def rest() -> bytes:
        return proto.ForwardBackwardRequest(loss_fn=loss, data=list(data())).SerializeToString() + junk

    def make(tenant: Tenant) -> bytes:  # protobuf messages that follow each other are one
        return proto.ForwardBackwardRequest(model_id=tenant.open_run(), seq_id=1).SerializeToString() + rest()

    return Hostile(name, BATCH, make, content_type=PROTOBUF, waits=True)


def row(length: int, targets: int | None = None, **inputs: int) -> bytes:
    """A datum of `length` tokens with as many targets and weights, or `targets` of them; `inputs`: other tensors."""
    import numpy as np

    from rlvr.tinker_server.protocol import proto

    def tensor(kind: int, dtype: str, size: int) -> Any:
        return proto.Tensor(dense=np.ones(size, dtype).tobytes(), dtype=kind, shape=[size])

    chunk = {"encoded_text": {"tokens": np.ones(length, "<i4").tobytes()}}
    known = {
        "target_tokens": tensor(proto.DTYPE_INT64, "<i8", length if targets is None else targets),
        "weights": tensor(proto.DTYPE_FLOAT32, "<f4", length if targets is None else targets),
    }
    known |= {name: tensor(proto.DTYPE_FLOAT32, "<f4", size) for name, size in inputs.items()}
    return proto.Datum(model_input=[chunk], loss_fn_inputs=known).SerializeToString()


def completion(name: str, prompt: Callable[[], Any], **more: Any) -> Hostile:
    return post(name, "/v1/completions", lambda: {"model": "model", "prompt": prompt(), **_call(more)})


def chat(name: str, messages: Callable[[], Any], **more: Any) -> Hostile:
    return post(name, "/v1/chat/completions", lambda: {"model": "model", "messages": messages(), **_call(more)})


def _call(more: Mapping[str, Any]) -> dict[str, Any]:
    return {name: made() if callable(made) else made for name, made in more.items()}


def ids(length: int) -> Callable[[], list[int]]:
    return lambda: [7 * i % 300 for i in range(length)]


def ask(text: str, times: int = 1) -> Callable[[], list[dict[str, str]]]:
    return lambda: [{"role": "user", "content": text}] * times


def nested(depth: int) -> Any:
    """Objects of twice as many levels."""
    inner: Any = {"type": "object"}
    for _ in range(depth):
        inner = {"properties": {"a": inner}}
    return inner


def tool(name: str, parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def large_bodies(path: str, size: int, label: str, head: bytes = b"{") -> list[Hostile]:
    """Bodies of `size` bytes, each the worst of its kind for a parser. `head`: the first fields, with a comma."""

    def fill(part: bytes) -> bytes:
        return part * (size // len(part))

    def keys() -> bytes:
        return b",".join(b'"k%07d":0' % i for i in range(size // 12))

    made: dict[str, Callable[[], bytes]] = {
        "nested lists": lambda: head + b'"x":' + b"[" * (size // 2) + b"]" * (size // 2) + b"}",
        "many keys": lambda: head + keys() + b"}",
        "one key many times": lambda: head + fill(b'"k":0,') + b'"k":1}',
        "one long whole number": lambda: head + b'"x":' + b"9" * size + b"}",
        "one long fraction": lambda: head + b'"x":0.' + b"9" * size + b"}",
        "one long escaped text": lambda: head + b'"x":"' + fill(rb"\u00e9") + b'"}',
        "one long text of quotes": lambda: head + b'"x":"' + fill(rb"\"[{:,") + b'"}',
        "one long key": lambda: head + b'"' + fill(b"k") + b'":0}',
        "fractions": lambda: head + b'"x":[' + fill(b"0.12345678901234567,") + b"0]}",
        "white space": lambda: head + fill(b" ") + b'"x":0}',
    }
    return [post(f"{label}: {kind}", path, body) for kind, body in made.items()]


def engine_requests() -> list[Hostile]:
    words, api = "fox and hound ", "/api/v1"
    model = b'{"model":"model","prompt":"hi",'
    targets = {"dtype": "int64", "shape": [7_999, 30]}
    stops = [f"{i:04d}" + "x" * 996 for i in range(1_000)]
    return [
        completion("4,000 ids, echo, logprobs=128, n=2", ids(4_000), echo=True, logprobs=128, n=2, max_tokens=1),
        completion("4,000 ids, echo, logprobs=60, n=4", ids(4_000), echo=True, logprobs=60, n=4, max_tokens=1),
        completion("8,000 ids, echo, logprobs=1, n=64", ids(8_000), echo=True, logprobs=1, n=64, max_tokens=1),
        completion("text of 3.8 MB", lambda: words * 270_000),
        completion("text of 3.8 MB without blanks", lambda: "a" * 3_800_000),
        completion("text of 120,000 characters", lambda: words * 8_500, max_tokens=1),
        completion("text of 30,000 characters, echo", lambda: words * 2_100, echo=True, max_tokens=1, logprobs=5),
        completion("9,000 prompts of text", lambda: [words] * 9_000),
        completion("8,000 prompts of text", lambda: [words] * 8_000, max_tokens=1),
        completion("8,192 prompts of an id", lambda: [[5]] * 8_192, max_tokens=1),
        completion("2,000 prompts of 100 ids, logprobs=5", lambda: [ids(100)()] * 2_000, logprobs=5, max_tokens=1),
        completion("n=1,024, logprobs=20", ids(8), n=1_024, logprobs=20, max_tokens=48),
        completion("10,000 stops", ids(8), stop=lambda: [f"s{i}" for i in range(10_000)]),
        completion("1,000 long stops, n=16", ids(8), stop=lambda: stops, n=16, max_tokens=100),
        completion("1,000 long stops, streamed, n=16", ids(8), stop=lambda: stops, n=16, max_tokens=100, stream=True),
        completion("100,000 stop_token_ids", ids(8), stop_token_ids=ids(100_000), max_tokens=4),
        completion("streamed, n=64, logprobs=20", ids(8), stream=True, n=64, logprobs=20, max_tokens=200),
        completion("a million ids of no vocabulary", lambda: [10**9] * 290_000),
        chat("50,000 messages", ask("hi", 50_000)),
        chat("9,000 messages", ask("hi", 9_000)),
        chat("9,000 messages of 100 characters", ask(words * 7, 9_000)),
        chat("message of 3.8 MB", ask(words * 270_000)),
        chat("message of many parts", lambda: [
            {"role": "user", "content": [{"type": "text", "text": "a"}] * 15_000}
        ]),
        chat("tools of 900 levels", ask("hi"), tools=lambda: [tool("t", nested(450))]),
        chat("tools of 100 levels", ask("hi"), tools=lambda: [tool("t", nested(50))]),
        chat("1,000 tools", ask("hi"), tools=lambda: [tool(f"t{i}", {"a": words * 9}) for i in range(1_000)]),
        chat("one tool of 20,000 fields", ask("hi"), tools=lambda: [tool("t", {f"f{i}": 0 for i in range(20_000)})]),
        chat("10,000 calls of tools", lambda: [{
            "role": "assistant", "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}] * 10_000,
        }]),
        chat("arguments of 3 MB", lambda: [{
            "role": "assistant", "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "[" + "1," * 1_500_000 + "1]"}}],
        }]),
        chat("logprobs of 20, n=64", ask("hi"), logprobs=True, top_logprobs=20, n=64, max_tokens=200),
        post("/inference: 8,000 ids, n=64, logprobs=128", "/inference/v1/generate", lambda: {
            "token_ids": ids(8_000)(), "sampling_params": {"n": 64, "logprobs": 128, "max_tokens": 60}
        }),
        post("/inference: 290,000 ids", "/inference/v1/generate", lambda: {"token_ids": ids(290_000)()}),
        sample("asample: 100,000 tokens", ids(100_000)),
        sample("asample: 290,000 tokens", ids(290_000)),
        sample("asample: 8,000 tokens, prompt logprobs", ids(8_000), prompt_logprobs=True),
        sample("asample: 8,000 tokens, topk_prompt_logprobs=128", ids(8_000), topk_prompt_logprobs=128),
        sample("asample: 8,000 tokens, topk_prompt_logprobs=500", ids(8_000), topk_prompt_logprobs=500),
        sample("asample: 10,000 chunks", lambda: [{"type": "encoded_text", "tokens": [1, 2]}] * 10_000),
        sample("asample: num_samples=10**12", ids(8), num_samples=10**12),
        sample("asample: num_samples=1,024, topk 128", ids(8), num_samples=1_024, topk_sample_logprobs=128,
               sampling_params={"max_tokens": 31}),
        sample("asample: 1,000 stops of 1,000 characters", ids(8), sampling_params={"stop": stops, "max_tokens": 100}),
        sample("asample: 240,000 targets", ids(8_000), target_prompt_logprobs=lambda: {
            **targets, "data": [1] * (7_999 * 30)
        }),
        sample("asample: 4,000 alternatives in 1,000 places", ids(1_000), prompt_alt_tokens_k=4_000),
        sample("asample: prompt of fractions", lambda: [0.12345678901234567] * 190_000),
        train("forward_backward: 8,000 rows of 2 tokens", lambda: [row(2)] * 8_000),
        train("forward_backward: 3,000 rows of 9 tokens", lambda: [row(9)] * 3_000),
        train("forward_backward: a row of a million tokens", lambda: [row(1_000_000)]),
        train("forward_backward: 500,000 rows", lambda: [b""] * 500_000),
        train("forward_backward: last row of wrong length", lambda: [row(2_000)] * 1_000 + [row(9, 8)]),
        train("forward_backward: last of 8,000 rows wrong", lambda: [row(2)] * 7_999 + [row(9, 8)]),
        train("forward_backward: 8,000 rows of 16 tensors", lambda: [
            row(1, **{f"t{i}": 1 for i in range(14)})
        ] * 8_000),
        train("forward_backward: 60 MB behind it", lambda: [row(2)], junk=b"\xff" * (60 * MIB)),
        train("forward_backward: unknown loss of 4 MB", lambda: [row(2)], loss="x" * (4 * MIB)),
        Hostile("forward_backward: 60 MB of text", BATCH, lambda tenant: b"[1.5]," * (10 * MIB), content_type=PROTOBUF),
        custom_loss("create_custom_loss: 4,000 nodes", 4_000),
        custom_loss("create_custom_loss: 40,000 nodes", 40_000),
        post("sessions/search: 100 words of metadata", f"{api}/sessions/search", lambda: {
            "user_metadata": {f"k{i}": "v" * 500 for i in range(100)}
        }),
        post("telemetry: 290,000 numbers", f"{api}/telemetry", lambda: {"events": [0.5] * 290_000}),
        post("telemetry: 12,000 events", f"{api}/telemetry", lambda: {"events": [{"a": {"b": [1]}}] * 12_000}),
        post("retrieve_futures: 100,000 ids", f"{api}/retrieve_futures", lambda: {
            "target": {"sampling_session_id": "none"}, "retrieved_request_ids": [f"id{i:06d}" for i in range(100_000)]
        }),
        post("optim_step: 40,000 settings", f"{api}/optim_step", lambda: {
            "model_id": "none", "seq_id": 1, "adam_params": {f"p{i}": 0.5 for i in range(40_000)}
        }),
        post("create_session: tags of 500 characters", f"{api}/create_session", lambda: {"tags": ["t" * 500] * 1_000}),
        post("create_session: a name of 4 MB", f"{api}/create_session", lambda: {"display_name": "n" * 4_000_000}),
        post("create_session: metadata of 3.5 MB", f"{api}/create_session", lambda: {
            "tags": [], "user_metadata": {f"k{i}": "v" * 80 for i in range(40_000)}
        }),
        get("a name of 60 kB in the address", f"/v1/models/{'n' * 60_000}"),
        get("a query of 60 kB", f"{api}/training_runs?project_id={'n' * 60_000}"),
        get("training_runs: limit and offset", f"{api}/training_runs?limit={10**12}&offset={10**12}"),
        get("training_runs: all", f"{api}/training_runs?limit={10**12}&offset=0"),
        get("sessions: all", f"{api}/sessions?limit={10**12}&offset=0"),
        get("checkpoints: all", f"{api}/checkpoints?limit={10**12}&offset=0"),
        get("/v1/models", "/v1/models"),
        get("/openapi.json", "/openapi.json"),
        get("/metrics", "/metrics"),
        *large_bodies(f"{api}/create_session", 10 * MIB, "10 MB"),
        *large_bodies(f"{api}/create_session", 3_900_000, "3.9 MB"),
        *large_bodies("/v1/completions", 3_900_000, "3.9 MB of a completion", model),
    ]  # fmt: skip


def service_requests() -> list[Hostile]:
    words, test = "fox and hound ", "assert f({0}) == {0}"
    code = "def f(n):\n    return n\n"
    loop = "def f(n):\n    while True:\n        pass\n"
    text = {"task_id": "hostile", "prompt": "Say something."}
    item = {"item": {"a": "x" * 200}, "sample": {"output_text": "x" * 200}}
    similar = {
        "type": "text_similarity", "name": "close", "evaluation_metric": "bleu",
        "input": "{{ sample.output_text }}", "reference": "{{ item.a }}",
    }  # fmt: skip
    many = {
        "type": "multi", "calculate_output": " + ".join(f"g{i}" for i in range(16)),
        "graders": {f"g{i}": {**similar, "name": f"g{i}"} for i in range(16)},
    }  # fmt: skip
    formula = "\\boxed{" + "+".join(f"x_{{{i}}}^{{{i % 9}}}" for i in range(4_000)) + "}"

    def pattern(text: str, times: int) -> Callable[[], Any]:
        verifier = {"name": "regex", "options": {"pattern": text}}
        return lambda: {"answers": ["a" * 30_000 + "!"] * times, "verifiers": [verifier]}

    return [
        post("/train: a prompt of a million characters", "/train", lambda: {**text, "prompt": words * 74_000}),
        post("/train: prompt and context of a million", "/train", lambda: {
            **text, "prompt": words * 74_000, "context": words * 74_000, "max_iterations": 8
        }),
        post("/train: 200 tests", "/train", lambda: {**text, "tests": [test.format(i) for i in range(200)]}),
        post("/train: 200 tests of 15,000 characters", "/train", lambda: {
            **text, "tests": [test.format(i) + " # " + "x" * 15_000 for i in range(200)]
        }),
        post("/train: a thousand iterations", "/train", lambda: {**text, "max_iterations": 1_000, "samples": 64}),
        post("/train: an answer of a million characters", "/train", lambda: {**text, "answer": "1+" * 500_000 + "1"}),
        post("/evaluate: a prompt of a million characters", "/evaluate", lambda: {**text, "prompt": words * 74_000}),
        post("/evaluate: 16 verifiers", "/evaluate", lambda: {**text, "answer": "4", "verifiers": ["math"] * 16}),
        post("/grade: 256 answers of 15,000 characters", "/grade", lambda: {"answers": [words * 1_070] * 256}),
        post("/grade: one answer of a million characters", "/grade", lambda: {"answers": [words * 74_000]}),
        post("/grade: mathematics of 256 long answers", "/grade", lambda: {"answers": [formula[:14_000] + "}"] * 256,
                                                                           "answer": "144"}),
        post("/grade: mathematics of one long formula", "/grade", lambda: {"answers": [formula], "answer": formula}),
        post("/grade: powers of powers", "/grade", lambda: {"answers": ["\\boxed{9^{9^{9^{9^9}}}}"] * 64,
                                                             "answer": "9^{9^{9^{9^8}}}"}),
        post("/grade: a number of a million digits", "/grade", lambda: {"answers": ["\\boxed{" + "9" * 900_000 + "}"],
                                                                         "answer": "9" * 900_000}),
        post("/grade: code, 256 answers", "/grade", lambda: {
            "answers": [code + f"# {i}\n" for i in range(256)], "tests": [test.format(i) for i in range(20)]
        }),
        post("/grade: code that never ends, 64 answers", "/grade", lambda: {
            "answers": [loop + f"# {i}\n" for i in range(64)], "tests": [test.format(1)]
        }),
        post("/grade: a program of a million characters", "/grade", lambda: {
            "answers": [code + "x = 1\n" * 160_000], "tests": [test.format(1)]
        }),
        post("/grade: a test of a million characters", "/grade", lambda: {
            "answers": [code], "tests": ["assert " + " and ".join(["f(1) == 1"] * 70_000)]
        }),
        post("/grade: a pattern that backtracks", "/grade", pattern("(a+)+$", 8)),
        post("/grade: a pattern, 100 long answers", "/grade", pattern("(a|aa)*b", 100)),
        post("/grade: grader, 256 items", "/grade", lambda: {"grader": similar, "items": [item] * 256}),
        post("/grade: 16 graders, 256 items", "/grade", lambda: {"grader": many, "items": [item] * 256}),
        post("/grade: grader, texts of 400,000 characters", "/grade", lambda: {
            "grader": similar, "items": [{"item": {"a": "x y " * 100_000}, "sample": {"output_text": "y x " * 100_000}}]
        }),
        post("/grade: grader of 30 levels", "/grade", lambda: {"grader": nested(14), "items": [item]}),
        post("/grade: Python grader that loops", "/grade", lambda: {
            "grader": {"type": "python", "name": "p", "source": "def grade(sample, item):\n    while True: pass\n"},
            "items": [item] * 16,
        }),
        post("/grade: 49,000 values", "/grade", lambda: {
            "grader": similar, "items": [{"item": {"a": ["x"] * 190}, "sample": {"output_text": "x"}}] * 250
        }),
        post("/grade: texts of 60,000 characters of LaTeX", "/grade", lambda: {
            "answers": ["\\frac{" * 10_000 + "1" + "}{2}" * 10_000], "answer": "1"
        }),
        post("/feedback: a comment of a million characters", "/feedback", lambda: {
            "experience_id": 1, "rating": 0.5, "comment": "c" * MIB
        }),
        post("/feedback", "/feedback", lambda: {"experience_id": 1, "rating": 0.5, "comment": "c" * 3_999}),
        get("/experiences", "/experiences/hostile?limit=500"),
        get("/analysis", "/analysis"),
        get("/analysis of a task", "/analysis/hostile"),
        get("/sessions", "/sessions?limit=500"),
        get("/stats", "/stats"),
        get("/metrics", "/metrics"),
        get("/openapi.json", "/openapi.json"),
        get("a task of 60 kB", f"/experiences/{'t' * 60_000}"),
        *large_bodies("/train", 4 * MIB - 4_096, "4 MB", b'{"task_id":"hostile","prompt":"hi",'),
        *large_bodies("/grade", 10 * MIB, "10 MB"),
    ]  # fmt: skip
