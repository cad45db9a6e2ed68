"""The server's reading and writing of the protocol, against the public SDK's own converters and against garbage."""

from __future__ import annotations

import contextlib
import math
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types as sdk
from tinker.proto import tinker_public_pb2 as sdk_messages
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response
from tinker.types.forward_backward_input import ForwardBackwardInput
from tinker.types.forward_backward_request import ForwardBackwardRequest
from tinker.types.topk_logprobs import topk_to_lists

from rlvr.core.messages import ForwardBackwardOutput, SampledSequence, SampleResponse
from rlvr.core.tensors import TensorData
from rlvr.tinker_server.backend.storage.paths import CheckpointPath
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.wire import (
    BadRequest,
    WireLimits,
    encode_forward_backward,
    encode_samples,
    parse_forward_backward,
)

SMALL = WireLimits(body_bytes=1 << 20, datum_bytes=1 << 19, datums=64, fields=64, tokens=1 << 16, elements=1 << 16)


def sdk_body(
    data: list[sdk.Datum], loss_fn: str = "cross_entropy", config: Any = None, forward_only: bool = False
) -> bytes:
    """What the SDK sends for this batch."""
    given = ForwardBackwardInput(data=data, loss_fn=loss_fn, loss_fn_config=config)  # pyright: ignore
    message = forward_backward_request_to_proto(ForwardBackwardRequest(given, "s:train:0", 3))
    message.forward_only = forward_only
    return message.SerializeToString()


def row(**inputs: Any) -> sdk.Datum:
    tensors = {name: sdk.TensorData.from_numpy(np.asarray(value)) for name, value in inputs.items()}
    return sdk.Datum(model_input=sdk.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=tensors)


def message(**fields: Any) -> Any:
    """A request as the SDK's generated classes write it, to be spoilt."""
    request = sdk_messages.ForwardBackwardRequest(model_id="s:train:0", seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = struct.pack("<3i", 1, 2, 3)
    tensor = datum.loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = sdk_messages.DTYPE_FLOAT32, struct.pack("<3f", 1, 0, 1)
    tensor.shape.append(3)
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def refusal(body: bytes, encoding: str = "", limits: WireLimits = SMALL) -> str:
    with pytest.raises(BadRequest) as error:
        parse_forward_backward(body, encoding, limits)
    return str(error.value)


def test_the_table_of_messages_agrees_with_the_sdks_own():
    """Numbers, types, repetition and presence of every field; `data` differs on purpose, in name only on the wire."""
    checked = 0
    for name in proto.MESSAGE_TYPES:
        theirs = sdk_messages.DESCRIPTOR.message_types_by_name[name].fields_by_name
        for ours in proto.MESSAGE_TYPES[name].DESCRIPTOR.fields:
            there = theirs[ours.name]
            assert (ours.number, ours.is_repeated, ours.has_presence) == (
                there.number, there.is_repeated, there.has_presence
            ), f"{name}.{ours.name}"  # fmt: skip
            assert ours.type == there.type or f"{name}.{ours.name}" == "ForwardBackwardRequest.data"
            checked += 1
    assert checked > 40
    for enum in ("DType", "StopReason"):
        theirs = sdk_messages.DESCRIPTOR.enum_types_by_name[enum].values_by_name
        ours = proto._pool.FindEnumTypeByName(f"tinker_public.{enum}").values_by_name
        assert {n: v.number for n, v in ours.items()} == {n: v.number for n, v in theirs.items()}


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[dict[str, np.ndarray]]]:
    """Rows of tokens, and arrays beside them: of either dtype, of one or two axes, mostly zeros or not."""
    tokens, arrays = [], []
    for _ in range(draw(st.integers(0, 4))):
        tokens.append(draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6)))
        found = {}
        for name in draw(st.lists(st.sampled_from(["target_tokens", "weights", "logprobs", "other"]), unique=True)):
            shape = (len(tokens[-1]), *draw(st.sampled_from([(), (1,), (3,)])))
            whole = name == "target_tokens"
            one = st.just(0) | (st.integers(-(2**63), 2**63 - 1) if whole else numbers)
            values = draw(st.lists(one, min_size=math.prod(shape), max_size=math.prod(shape)))
            found[name] = np.array(values, np.int64 if whole else np.float32).reshape(shape)
        arrays.append(found)
    return tokens, arrays


@settings(max_examples=150, deadline=None)
@given(
    batches(),
    st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False) | st.text(max_size=8), max_size=3),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_the_sdks_encoding_is_parsed_to_the_same_arrays(
    batch: tuple[list[list[int]], list[dict[str, np.ndarray]]],
    config: dict[str, float | str],
    forward_only: bool,
    sparse: bool,
    packed: bool,
):
    import torch

    tokens, arrays = batch

    def tensor(array: np.ndarray) -> sdk.TensorData:
        if sparse and array.ndim == 2:
            return sdk.TensorData.from_torch_sparse(torch.from_numpy(array))  # CSR where that is smaller
        return sdk.TensorData.from_numpy(array)

    data = [
        sdk.Datum(
            model_input=sdk.ModelInput.from_ints(ids), loss_fn_inputs={name: tensor(a) for name, a in found.items()}
        )
        for ids, found in zip(tokens, arrays, strict=True)
    ]
    body = sdk_body(data, "ppo", config, forward_only=forward_only)
    if packed:
        body = zstandard.ZstdCompressor().compress(body)
    read = parse_forward_backward(body, "zstd" if packed else None)
    assert (read.model_id, read.seq_id, read.loss_fn, read.forward_only) == ("s:train:0", 3, "ppo", forward_only)
    assert read.config == config
    assert [datum.model_input.to_ints() for datum in read.data] == tokens
    for datum, expected in zip(read.data, arrays, strict=True):
        assert datum.loss_fn_inputs.keys() == expected.keys()
        for name, array in expected.items():
            found = datum.loss_fn_inputs[name].data
            assert found.dtype == array.dtype and found.flags.writeable
            np.testing.assert_array_equal(found, array)


def test_sparse_rows_become_their_matrix():
    """Absent cells are 0. The SDK sends such rows for 2-D targets."""
    import torch

    matrix = torch.zeros(40, 6, dtype=torch.int64)
    matrix[3, 1], matrix[3, 5], matrix[39, 0] = 7, 8, 9
    tensor = sdk.TensorData.from_torch_sparse(matrix)
    assert tensor.sparse_crow_indices is not None  # or this test shows nothing
    datum = sdk.Datum(model_input=sdk.ModelInput.from_ints([1] * 40), loss_fn_inputs={"target_tokens": tensor})
    read = parse_forward_backward(sdk_body([datum])).data[0].loss_fn_inputs["target_tokens"]
    np.testing.assert_array_equal(read.data, matrix.numpy())


def test_the_narrow_dtypes_of_the_wire_are_widened():
    request = message()
    tensor = request.data[0].loss_fn_inputs["weights"]
    tensor.dtype, tensor.dense = sdk_messages.DTYPE_BFLOAT16, struct.pack("<3H", 0x3F80, 0xC000, 0x0000)
    assert parse_forward_backward(request.SerializeToString()).data[0].loss_fn_inputs["weights"].tolist() == [1, -2, 0]
    tensor.dtype, tensor.dense = sdk_messages.DTYPE_INT32, struct.pack("<3i", 5, -6, 7)
    read = parse_forward_backward(request.SerializeToString()).data[0].loss_fn_inputs["weights"]
    assert (read.dtype, read.tolist()) == ("int64", [5, -6, 7])


def test_the_newer_map_of_settings_takes_precedence():
    request = message()
    request.loss_fn_config["beta"] = 1.0
    assert parse_forward_backward(request.SerializeToString()).config == {"beta": 1.0}
    request.loss_fn_config_v2["beta"].number = 2.0
    request.loss_fn_config_v2["loss_id"].text = "x"
    assert parse_forward_backward(request.SerializeToString()).config == {"beta": 2.0, "loss_id": "x"}


ragged = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([(), (2,), (3,)]), st.booleans(), st.booleans()), max_size=5
)


@settings(max_examples=150, deadline=None)
@given(ragged, st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False), max_size=3))
def test_the_sdk_reads_results_as_they_were_written(shapes: list[Any], metrics: dict[str, float]):
    """Also where rows differ in their inner shape or dtype."""
    rows = []
    for length, inner, whole, both in shapes:
        array = np.arange(length * math.prod(inner)).reshape(length, *inner).astype(np.int64 if whole else np.float32)
        rows.append({"logprobs": TensorData(array)} | ({"other": TensorData.of([length])} if both else {}))
    if len({frozenset(found) for found in rows}) > 1:  # all rows of one result have the same fields
        rows = [{"logprobs": found["logprobs"]} for found in rows]
    read = deserialize_forward_backward_output(encode_forward_backward(ForwardBackwardOutput(rows, metrics)))
    assert read.metrics == metrics
    assert len(read.loss_fn_outputs) == len(rows)
    for found, expected in zip(read.loss_fn_outputs, rows, strict=True):
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            np.testing.assert_array_equal(found[name].to_numpy(), tensor.data)


logprobs = st.floats(max_value=0, allow_nan=False, allow_infinity=False, width=32)
cells = st.lists(st.tuples(st.integers(1, 2**31 - 1), logprobs), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 2**31 - 1), logprobs, cells), min_size=1)),
        max_size=3,
    ),
    st.none() | st.lists(st.none() | logprobs, min_size=1, max_size=4),
    st.none() | st.lists(st.none() | cells, min_size=1, max_size=4).filter(any),
)
def test_the_sdk_reads_samples_as_they_were_written(sequences: list[Any], prompt: Any, prompt_topk: Any):
    answers = [
        SampledSequence(
            "length" if cut else "stop",
            [t for t, _, _ in steps],
            [p for _, p, _ in steps],
            None,
            [k for *_, k in steps],
        )
        for cut, steps in sequences
    ]
    read = deserialize_sample_response(encode_samples(SampleResponse(answers, prompt, "", prompt_topk)))
    for found, expected in zip(read.sequences, answers, strict=True):
        assert (found.stop_reason, found.tokens, found.logprobs) == (
            expected.stop_reason, expected.tokens, expected.logprobs
        )  # fmt: skip
        assert topk_to_lists(found.topk_logprobs_np) == expected.topk_logprobs
    assert read.prompt_logprobs == prompt
    topk = read.topk_prompt_logprobs_np
    assert (None if topk is None else topk_to_lists(topk)) == prompt_topk


def test_samples_without_log_probs_have_none_for_the_sdk():
    read = deserialize_sample_response(encode_samples(SampleResponse([SampledSequence("stop", [4])])))
    assert read.sequences[0].logprobs is None and read.prompt_logprobs is None
    assert read.sequences[0].topk_logprobs_np is None and read.topk_prompt_logprobs_np is None


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda r: setattr(r, "model_id", ""), "model_id ''"),
        (lambda r: setattr(r, "seq_id", 0), "seq_id 0"),
        (lambda r: setattr(r.data[0].model_input[0].encoded_text, "tokens", b"abc"), "3 bytes are not a whole number"),
        (lambda r: setattr(r.data[0].model_input.add().image, "format", "x"), "model_input[1]: a chunk of kind image"),
        (lambda r: setattr(r.data[0].model_input.add().dmel, "dmel", b"x"), "model_input[1]: a chunk of kind dmel"),
        (lambda r: r.data[0].model_input.add(), "an empty chunk"),
        (lambda r: setattr(r.data[0].loss_fn_inputs["weights"], "dtype", 0), "data[0].weights: dtype 0"),
        (lambda r: setattr(r.data[0].loss_fn_inputs["weights"], "dtype", 77), "data[0].weights: dtype 77"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].ClearField("dense"), "neither dense values nor sparse"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].shape.append(2), "3 values do not fill the shape [3, 2]"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].shape.append(-1), "shape [3, -1]"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].shape.extend([1, 1]), "one or two axes"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].shape.append(2**31), "more than 65,536 elements"),
        (lambda r: r.data[0].loss_fn_inputs["weights"].shape.append(2**62), "expected one or two axes"),
        (lambda r: [r.data.add() for _ in range(64)], "65 datums: at most 64"),
        (lambda r: [r.data[0].model_input.add() for _ in range(99)], "data[0]: more than 64 fields"),
        (lambda r: r.loss_fn_config_v2["x"].ClearField("number"), "neither a number nor a text"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused_with_its_fault_and_ids(spoil: Any, told: str):
    request = message()
    spoil(request)
    with pytest.raises(BadRequest) as error:
        parse_forward_backward(request.SerializeToString(), "", SMALL)
    assert told in str(error.value)
    assert (error.value.model_id, error.value.seq_id) == (request.model_id or None, request.seq_id or None)


def csr(values: list[float], starts: list[int], columns: list[int], shape: list[int]) -> bytes:
    request = message()
    tensor = request.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values = struct.pack(f"<{len(values)}f", *values)
    tensor.sparse_csr.crow_indices = struct.pack(f"<{len(starts)}q", *starts)
    tensor.sparse_csr.col_indices = struct.pack(f"<{len(columns)}q", *columns)
    tensor.ClearField("shape")
    tensor.shape.extend(shape)
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (([1], [0, 1], [0], [3]), "no sparse matrix of shape [3]"),
        (([1], [0, 1], [0], [2, 2]), "no sparse matrix of shape [2, 2]"),
        (([1], [0, 1], [0, 1], [1, 2]), "2 columns and 1 values"),
        (([1, 2], [1, 2], [0, 1], [1, 2]), "expected to rise from 0 to 2"),
        (([1, 2], [0, 2, 1], [0, 1], [2, 2]), "expected to rise from 0 to 2"),
        (([1, 2], [0, -(2**63), 2], [0, 1], [2, 2]), "expected to rise from 0 to 2"),
        (([1, 2], [0, 2**63 - 1, 2], [0, 1], [2, 2]), "expected to rise from 0 to 2"),
        (([1], [0, 1], [2], [1, 2]), "col_indices: expected 0 to 1"),
        (([1], [0, 1], [-1], [1, 2]), "col_indices: expected 0 to 1"),
        (([1, 2], [0, 2], [1, 1], [1, 2]), "the same element is given twice"),
        (([1], [0, 1], [0], [1, 2**31]), "more than 65,536 elements"),
        (([], [0], [], [0, 2**40]), "expected one or two axes of at most"),
    ],
)
def test_sparse_rows_that_do_not_fit_are_refused(rows: Any, told: str):
    assert told in refusal(csr(*rows))


GOOD_SPANS = [("sampled_tokens", "a", 0, 2), ("prompt_tokens", "b", 2**40, 1)]


@pytest.mark.parametrize("field", ["model_input_spans", "loss_fn_input_spans"])
@pytest.mark.parametrize(
    ("spans", "told"),
    [
        ([("sampled_tokens", "a", 0, 4)], "they cover 4 positions of 3"),
        ([], "they cover 0 positions of 3"),
        ([*GOOD_SPANS, ("prompt_tokens", "a", 0, 2**62)], "positions of 3"),
        ([("sampled_tokens", "a", 0, -1), ("sampled_tokens", "a", 0, 4)], "[0]: expected a sequence_id"),
        ([("sampled_tokens", "a", -1, 3)], "an offset and a length of at least 0"),
        ([("sampled_tokens", "", 0, 3)], "expected a sequence_id"),
        ([*GOOD_SPANS, ("prompt_tokens", "x" * 501, 0, 0)], "[2]: expected a sequence_id"),
        ([*GOOD_SPANS, ("", "", 0, 0)], "[2]: expected a sequence_id"),
        ([*GOOD_SPANS, *[("prompt_tokens", "a", 0, 0)] * 3_000], "fields"),
    ],
)
def test_provenance_that_does_not_tile_its_field_is_refused(field: str, spans: list[Any], told: str):
    def send(**given: list[Any]) -> bytes:
        request = message()
        datum = request.data[0]
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dtype, tensor.dense = sdk_messages.DTYPE_INT64, struct.pack("<3q", 2, 3, 4)
        for name in ("model_input_spans", "loss_fn_input_spans"):
            for kind, sequence, offset, length in given.get(name, GOOD_SPANS):
                span = getattr(datum, name).add()
                if kind:
                    part = getattr(span, kind)
                    part.sequence_id, part.offset, part.length = sequence, offset, length
        return request.SerializeToString()

    assert parse_forward_backward(send(), "", SMALL).data[0].model_input.length == 3
    assert told in refusal(send(**{field: spans}))


def test_sizes_are_summed_over_a_request():
    """A thousand small claims are as large as one."""
    request = message()
    for _ in range(20):
        request.data.add().CopyFrom(request.data[0])
    body = request.SerializeToString()
    assert len(parse_forward_backward(body, "", WireLimits(tokens=63, elements=63)).data) == 21
    assert "data[20]: more than 62 tokens in one request" in refusal(body, "", WireLimits(tokens=62))
    assert "data[20].weights: more than 62 elements in one" in refusal(body, "", WireLimits(elements=62))
    assert "data[0]: " in refusal(body, "", WireLimits(datum_bytes=10))


def test_compressed_bodies_are_limited_and_must_be_complete():
    pack = zstandard.ZstdCompressor().compress
    body = message().SerializeToString()
    assert parse_forward_backward(pack(body), "zstd").loss_fn == "cross_entropy"
    assert "more than 1,048,576 bytes once unpacked" in refusal(pack(bytes(50 << 20)), "zstd")
    header = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2 << 20))
    assert "more than 1,048,576 bytes once unpacked" in refusal(header, "zstd")
    assert "in the middle of its frame" in refusal(pack(body)[:-1], "zstd")
    assert "follows its frame" in refusal(pack(body) + pack(body), "zstd")
    assert "zstd body" in refusal(body, "zstd")
    assert "expected zstd, or none" in refusal(body, "gzip")
    wide = zstandard.ZstdCompressionParameters(window_log=27)
    window = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    assert "too much memory" in refusal(window.compress(b"x") + window.flush(), "zstd")
    assert "at most 1,048,576" in refusal(bytes((1 << 20) + 1))


def test_a_wrong_wire_type_is_refused():
    """A field of another wire type is no such field: a model id that is a number is no model id."""
    assert "model_id ''" in refusal(b"\x08\x05\x10\x01")
    assert "wire type 3" in refusal(b"\x1b\x1c")
    assert "in the middle of a field" in refusal(b"\x0a\x7fabc")
    assert "a number that does not end" in refusal(b"\x10" + b"\xff" * 12)
    body = message().SerializeToString()
    assert "data[1]: not protobuf" in refusal(body + b"\x1a\x01\x0b")
    assert "not a ForwardBackwardRequest message" in refusal(b"\x0a\x01\xff")  # no UTF-8


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_garbage_is_a_bad_request_and_nothing_else(data: st.DataObject):
    """Cut anywhere, bytes changed, inserted or repeated: read as some request, or refused."""
    body = data.draw(
        st.sampled_from(
            [message().SerializeToString(), csr([1, 2], [0, 1, 2], [0, 1], [2, 2]), sdk_body([row(w=[1.0])])]
        )
    )
    packed = data.draw(st.booleans())
    if packed:
        body = zstandard.ZstdCompressor().compress(body)
    spoilt = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(spoilt)))
        match data.draw(st.sampled_from(["cut", "change", "insert", "repeat"])):
            case "cut":
                del spoilt[at:]
            case "change" if at < len(spoilt):
                spoilt[at] = data.draw(st.integers(0, 255))
            case "insert":
                spoilt[at:at] = data.draw(st.binary(max_size=12))
            case _:
                spoilt[at:at] = spoilt[: data.draw(st.integers(0, 40))]
    with contextlib.suppress(BadRequest):
        parse_forward_backward(bytes(spoilt), "zstd" if packed else "", SMALL)


BOMBS = """
import resource, time, zstandard
from rlvr.tinker_server.protocol.wire import BadRequest, parse_forward_backward as parse
def length(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])
def field(number, content):
    return bytes([number << 3 | 2]) + length(len(content)) + content
head, size = field(1, b"m") + b"\\x10\\x01", 30 << 20
empty_tensors = b"".join(field(2, field(1, b"%x" % i) + field(2, b"")) for i in range(1 << 18))
shape = field(4, bytes(15 << 20))
bombs = [
    head + field(3, b"") * (size // 2),                          # empty datums
    head + field(3, field(1, b"") * (size // 4)),                # empty chunks
    head + field(3, empty_tensors),                              # empty tensors
    head + field(3, field(2, field(1, b"w") + field(2, shape))), # a shape of 15 million axes
    head + field(5, b"") * (size // 2),                          # empty settings
    b"\\x98\\x06\\x00" * (size // 3),                              # unknown fields
    field(1, b"") * (size // 2),                                 # the same field again and again
]
packed = [zstandard.ZstdCompressor().compress(bytes(1 << 30))]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number, body in enumerate(bombs + packed):
    began = time.perf_counter()
    try:
        parse(body, "zstd" if number == len(bombs) else "")
        print("read", number)
    except BadRequest as error:
        pass
    print(number, f"{time.perf_counter() - began:.2f}")
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print("grown", (after - before) // 1024)
"""


@pytest.mark.slow
def test_an_expanding_body_costs_little_memory():
    """Bodies of 30 MB that would be gigabytes as objects, under the limits a server has."""
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "read" not in done.stdout
    assert int(done.stdout.split()[-1]) < 400, done.stdout


def test_paths_of_checkpoints():
    path = CheckpointPath.parse("tinker://session-1:train:0/sampler_weights/step-10")
    assert path == CheckpointPath("session-1:train:0", "sampler_weights", "step-10")
    assert str(path) == "tinker://session-1:train:0/sampler_weights/step-10"


@pytest.mark.parametrize(
    "text",
    [
        "", "run/weights/name", "tinker://", "tinker://run/weights", "tinker://run/weights/a/b", "tinker://run/other/name",
        "tinker://../weights/name", "tinker://run/weights/..", "tinker://run/weights/", "tinker:///weights/name",
        "tinker://run/weights/a b", "tinker://run\n/weights/a", "tinker://run/weights/a\x00", "file://run/weights/name",
        "tinker://run/weights/%2e%2e", "tinker://run/weights/-rf", "tinker://" + "r" * 300 + "/weights/name",
    ],
)  # fmt: skip
def test_invalid_checkpoint_paths(text: str):
    with pytest.raises(ValueError, match=r"^path .*expected"):
        CheckpointPath.parse(text)
