"""The binary forms of the Tinker protocol: training requests in, results out, and the tensors of target log-probs.

Input is taken as hostile. Its size is bounded before and while it is unpacked, fields are counted before they are
parsed, and lengths, dtypes, shapes and indices are checked before an array is made; every fault is a `BadRequest`.
The engine checks the values (tokens of the vocabulary, finite weights).

Left out on purpose: images and audio. The provenance spans of a datum, which say what sampled its tokens, are checked
and kept in the log with the request; no loss here reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from google.protobuf.message import DecodeError

from rlvr.core.messages import (
    Datum,
    ForwardBackwardOutput,
    LikeliestTokens,
    ModelInput,
    PromptTargets,
    SampleResponse,
)
from rlvr.core.tensors import TensorData
from rlvr.tinker_server.protocol import proto
from rlvr.tinker_server.protocol.server_limits import WireLimits

PROTOBUF = "application/x-protobuf"  # the type of these bodies
_DTYPES: dict[int, np.dtype[Any]] = {
    proto.DTYPE_FLOAT32: np.dtype("<f4"),
    proto.DTYPE_INT64: np.dtype("<i8"),
    proto.DTYPE_INT32: np.dtype("<i4"),
    proto.DTYPE_BFLOAT16: np.dtype("<u2"),
}
_FLOAT, _TOKEN, _INDEX = _DTYPES[proto.DTYPE_FLOAT32], _DTYPES[proto.DTYPE_INT32], _DTYPES[proto.DTYPE_INT64]
_NO_TOKEN, _NO_LOGPROB = 0, -99999.0  # an empty cell of a top-k table
_WINDOW = 8 << 20  # that a decoder must support: RFC 9659, section 3
_STEP = 512  # compressed bytes unpacked at a time: at most 16 MiB, as a block of 4 bytes may hold 128 KiB


class BadRequest(ValueError):
    """A body that cannot be parsed. The ids are set if they could be read."""

    model_id: str | None = None
    seq_id: int | None = None


@dataclass(frozen=True)
class ParsedForwardBackward:
    """A `forward_backward`; with `forward_only` it leaves no gradients."""

    model_id: str
    seq_id: int
    data: list[Datum]
    loss_fn: str
    config: dict[str, float | str]
    forward_only: bool = False


def parse_forward_backward(
    body: bytes, content_encoding: str | None = None, limits: WireLimits | None = None
) -> ParsedForwardBackward:
    """Parse the request in `body`; BadRequest if it is malformed or too large."""
    limits = limits or WireLimits()
    raw = _unpack(body, content_encoding, limits.body_bytes)
    _count_fields(raw, limits.datums + 1_024, "request")
    message = _parse_message(proto.ForwardBackwardRequest, raw, "request")
    try:
        if not message.model_id or len(message.model_id) > 256:
            raise BadRequest(f"model_id {message.model_id[:80]!r}: expected 1 to 256 characters")
        if message.seq_id < 1:
            raise BadRequest(f"seq_id {message.seq_id}: expected a number from 1")
        if len(message.data) > limits.datums:
            raise BadRequest(f"{len(message.data)} datums: at most {limits.datums} in one request; send several")
        budget = _Budget(limits)
        data = [_parse_datum(raw, f"data[{i}]", limits, budget) for i, raw in enumerate(message.data)]
        _check_length(message.loss_fn, "loss_fn")
        return ParsedForwardBackward(
            message.model_id, message.seq_id, data, message.loss_fn, _parse_config(message), message.forward_only
        )
    except BadRequest as error:
        error.model_id, error.seq_id = message.model_id[:256] or None, message.seq_id or None
        raise


def encode_forward_backward(output: ForwardBackwardOutput) -> bytes:
    """Consecutive rows with equal fields, dtypes and inner shapes share one record, which must be rectangular."""
    message = proto.ForwardBackwardOutput(loss_fn_output_type=output.loss_fn_output_type, metrics=dict(output.metrics))
    start, rows = 0, output.loss_fn_outputs
    kinds = [{name: (t.data.dtype.kind, t.data.shape[1:]) for name, t in row.items()} for row in rows]
    for end in range(1, len(rows) + 1):
        if end < len(rows) and kinds[end] == kinds[start]:
            continue
        record = message.loss_fn_outputs.add(type_tag=output.loss_fn_output_type, num_datums=end - start)
        for name, (kind, inner) in kinds[start].items():
            dtype = proto.DTYPE_INT64 if kind == "i" else proto.DTYPE_FLOAT32
            arrays = [np.ascontiguousarray(row[name].data, _DTYPES[dtype]) for row in rows[start:end]]
            assert all(array.ndim for array in arrays), f"{name}: a result per datum has at least one axis"
            offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=_INDEX)
            field = record.fields[name]
            field.data, field.offsets, field.dtype = b"".join(a.tobytes() for a in arrays), offsets.tobytes(), dtype
            field.trailing_shape.extend(inner)
        start = end
    return message.SerializeToString()


def encode_samples(response: SampleResponse, targets: Any = None) -> bytes:
    """`targets`: the `Tensor` message of the prompt's target log-probs."""
    message = proto.SampleResponse(target_prompt_logprobs=targets)
    for sequence in response.sequences:
        ended = proto.STOP_REASON_LENGTH if sequence.stop_reason == "length" else proto.STOP_REASON_STOP
        added = message.sequences.add(stop_reason=ended, tokens=np.asarray(sequence.tokens, _TOKEN).tobytes())
        if sequence.logprobs is not None:
            added.logprobs = np.asarray(sequence.logprobs, _FLOAT).tobytes()
        if sequence.topk_logprobs is not None:
            _write_topk(added.topk_sampled_logprobs, sequence.topk_logprobs)
    if response.prompt_logprobs is not None:
        known = [math.nan if value is None else value for value in response.prompt_logprobs]
        message.prompt_logprobs = np.asarray(known, _FLOAT).tobytes()
    if response.topk_prompt_logprobs is not None:
        _write_topk(message.topk_prompt_logprobs, response.topk_prompt_logprobs)
    if (drawn := response.prompt_alternatives) is not None:
        for field, array, dtype in (
            (message.prompt_alt_tokens.tokens, drawn.tokens_PK, proto.DTYPE_INT64),
            (message.prompt_alt_tokens.logprobs, drawn.logprobs_PK, proto.DTYPE_FLOAT32),
        ):
            field.dense, field.dtype = np.ascontiguousarray(array, _DTYPES[dtype]).tobytes(), dtype
            field.shape.extend(array.shape)
    return message.SerializeToString()


def _write_topk(message: Any, rows: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    most = max((len(row) for row in rows if row), default=0)
    tokens = np.full((len(rows), most), _NO_TOKEN, _TOKEN)
    logprobs = np.full((len(rows), most), _NO_LOGPROB, _FLOAT)
    for i, row in enumerate(rows):
        if isinstance(row, LikeliestTokens):
            tokens[i, : len(row)], logprobs[i, : len(row)] = row.tokens, row.logprobs
        elif row:
            tokens[i, : len(row)], logprobs[i, : len(row)] = zip(*row, strict=True)
    message.token_ids, message.logprobs = tokens.tobytes(), logprobs.tobytes()
    message.k, message.length = most, len(rows)


def _unpack(body: bytes, encoding: str | None, most: int) -> bytes:
    """Undo `Content-Encoding`; never produces more than `most` bytes, whatever the header says."""
    if len(body) > most:
        raise BadRequest(f"body of {len(body):,} bytes, expected at most {most:,}; send fewer datums at a time")
    if encoding in (None, "", "identity"):
        return body
    if encoding != "zstd":
        raise BadRequest(f"Content-Encoding {encoding[:40]!r}: expected zstd, or none")
    reader, rest = zstandard.ZstdDecompressor(max_window_size=_WINDOW).decompressobj(), memoryview(body)
    out: list[bytes] = []
    size = 0
    while rest and not reader.eof:
        try:
            out.append(reader.decompress(rest[:_STEP]))
        except zstandard.ZstdError as error:
            raise BadRequest(f"zstd body: {error}") from None
        rest, size = rest[_STEP:], size + len(out[-1])
        if size > most:
            raise BadRequest(f"body of more than {most:,} bytes once unpacked; send fewer datums at a time")
    if not reader.eof:
        raise BadRequest("zstd body: it ends in the middle of its frame")
    if rest or reader.unused_data:
        raise BadRequest("zstd body: data follows its frame, expected one frame")
    return b"".join(out)


def _count_fields(raw: bytes, most: int, where: str) -> int:
    """Count the fields, BadRequest for more than `most`: parsed fields take many times their bytes."""
    place, count = 0, 0
    while place < len(raw):
        count += 1
        if count > most:
            raise BadRequest(f"{where}: more than {most:,} fields")
        tag, place = _varint(raw, place, where)
        match tag & 7:
            case 0:
                _, place = _varint(raw, place, where)
            case 1:
                place += 8
            case 2:
                length, place = _varint(raw, place, where)
                place += length
            case 5:
                place += 4
            case kind:
                raise BadRequest(f"{where}: not protobuf (wire type {kind})")
    if place != len(raw):
        raise BadRequest(f"{where}: it ends in the middle of a field")
    return count


def _varint(raw: bytes, place: int, where: str) -> tuple[int, int]:
    """A number of 7 bits a byte, least first, and the place behind it."""
    value = 0
    for shift, byte in enumerate(raw[place : place + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, place + shift + 1
    raise BadRequest(f"{where}: not protobuf (a number that does not end)")


def _parse_message(kind: Any, raw: bytes, where: str) -> Any:
    message = kind()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise BadRequest(f"{where}: not a {kind.DESCRIPTOR.name} message ({error})") from None
    return message


def _parse_config(message: Any) -> dict[str, float | str]:
    """The newer map where it is filled: the older one mirrors it, and has no place for texts."""
    if not message.loss_fn_config_v2:
        for name in message.loss_fn_config:
            _check_length(name, "loss_fn_config")
        return dict(message.loss_fn_config)
    config: dict[str, float | str] = {}
    for name, value in message.loss_fn_config_v2.items():
        _check_length(name, "loss_fn_config")
        if (kind := value.WhichOneof("value")) is None:
            raise BadRequest(f"loss_fn_config {name[:80]!r}: neither a number nor a text")
        config[name] = getattr(value, kind)
    return config


def _check_length(name: str, where: str) -> None:
    """Names come back in errors."""
    if len(name) > 200:
        raise BadRequest(f"{where} {name[:80]!r}...: a name of {len(name):,} characters, expected at most 200")


class _Budget:
    """What a request may still hold."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits, self._spent = limits, {"tokens": 0, "elements": 0, "fields": 0}

    def remaining(self, what: str) -> int:
        return getattr(self._limits, what) - self._spent[what]

    def spend(self, what: str, count: int, where: str) -> None:
        self._spent[what] += count
        if self._spent[what] > (most := getattr(self._limits, what)):
            raise BadRequest(f"{where}: more than {most:,} {what} in one request; send fewer datums at a time")


def _parse_datum(raw: bytes, where: str, limits: WireLimits, budget: _Budget) -> Datum:
    if len(raw) > limits.datum_bytes:
        raise BadRequest(f"{where}: {len(raw):,} bytes, at most {limits.datum_bytes:,}")
    budget.spend("fields", _count_fields(raw, budget.remaining("fields"), where), where)
    message = _parse_message(proto.Datum, raw, where)
    tokens: list[int] = []
    for i, chunk in enumerate(message.model_input):
        if (kind := chunk.WhichOneof("kind")) != "encoded_text":
            found = "an empty chunk" if kind is None else f"a chunk of kind {kind}"
            raise BadRequest(f"{where}.model_input[{i}]: {found}; this server reads text only (encoded_text)")
        text = _parse_array(chunk.encoded_text.tokens, _TOKEN, f"{where}.model_input[{i}].tokens")
        budget.spend("tokens", text.size, where)
        tokens += text.tolist()
    inputs = {
        name: _parse_tensor(tensor, f"{where}.{name[:80]}", budget) for name, tensor in message.loss_fn_inputs.items()
    }
    targets = inputs["target_tokens"].data.shape if "target_tokens" in inputs else None
    if message.model_input_spans or message.loss_fn_input_spans:
        _check_spans(message.model_input_spans, len(tokens), f"{where}.model_input_spans")
        _check_spans(message.loss_fn_input_spans, targets[0] if targets else None, f"{where}.loss_fn_input_spans")
    return Datum(ModelInput(tokens), inputs)


def _check_spans(spans: Any, length: int | None, where: str) -> None:
    """Refuse provenance that does not tile its field, of `length` positions (None: not known)."""
    total = 0
    for i, span in enumerate(spans):
        kind = span.WhichOneof("span")
        found = None if kind is None else getattr(span, kind)
        if found is None or not 0 < len(found.sequence_id) <= 500 or found.offset < 0 or found.length < 0:
            raise BadRequest(f"{where}[{i}]: expected a sequence_id, and an offset and a length of at least 0")
        total += found.length
    if length is not None and total != length:
        raise BadRequest(f"{where}: they cover {total:,} positions of {length:,}; together they tile the field")


def _parse_tensor(message: Any, where: str, budget: _Budget) -> TensorData:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise BadRequest(f"{where}: dtype {message.dtype}, expected {', '.join(map(str, _DTYPES))}")
    layout, shape = message.WhichOneof("layout"), list(message.shape[:3])  # of what may be millions
    if layout is None:
        raise BadRequest(f"{where}: neither dense values nor sparse ones")
    values = _parse_array(message.dense if layout == "dense" else message.sparse_csr.values, dtype, where)
    if layout == "dense" and not shape:
        shape = [values.size]
    if len(shape) > 2 or any(not 0 <= size <= 1 << 31 for size in shape):
        raise BadRequest(f"{where}: shape {shape}, expected one or two axes of at most {1 << 31}")
    size = math.prod(shape)
    budget.spend("elements", size, where)  # before anything of that size is made
    if message.dtype == proto.DTYPE_BFLOAT16:  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    if layout == "sparse_csr":
        return TensorData(_expand_sparse(message.sparse_csr, values, shape, where))
    if size != values.size:
        raise BadRequest(f"{where}: {values.size} values do not fill the shape {shape}")
    return TensorData(values.reshape(shape))


def _parse_array(raw: bytes, dtype: np.dtype[Any], where: str) -> np.ndarray:
    """A writable copy of the values."""
    if len(raw) % dtype.itemsize:
        raise BadRequest(f"{where}: {len(raw)} bytes are not a whole number of {dtype.name} values")
    return np.frombuffer(raw, dtype).copy()


def _expand_sparse(message: Any, values_N: np.ndarray, shape: Sequence[int], where: str) -> np.ndarray:
    """A dense matrix from its compressed sparse rows; its other elements are 0."""
    starts = _parse_array(message.crow_indices, _INDEX, f"{where}.crow_indices")
    columns_N = _parse_array(message.col_indices, _INDEX, f"{where}.col_indices")
    matrix = np.zeros(math.prod(shape), values_N.dtype)
    matrix[find_flat_indices(starts, columns_N, values_N.size, shape, where)] = values_N
    return matrix.reshape(shape)


def find_flat_indices(
    starts: np.ndarray, columns_N: np.ndarray, count: int, shape: Sequence[int], where: str
) -> np.ndarray:
    """The row-major indices [N] of the `count` values of a matrix of compressed sparse rows (CSR)."""
    if len(shape) != 2 or starts.size != shape[0] + 1 or columns_N.size != count:
        raise BadRequest(
            f"{where}: {starts.size} row starts, {columns_N.size} columns and {count} values are no sparse "
            f"matrix of shape {list(shape)}"
        )
    # Compared, not subtracted: differences of hostile numbers overflow.
    if starts[0] != 0 or starts[-1] != count or (starts[1:] < starts[:-1]).any():
        raise BadRequest(f"{where}.crow_indices: expected to rise from 0 to {count}, the number of values")
    if ((columns_N < 0) | (columns_N >= shape[1])).any():
        raise BadRequest(f"{where}.col_indices: expected 0 to {shape[1] - 1}")
    flat_indices_N = np.repeat(np.arange(shape[0]), np.diff(starts)) * shape[1] + columns_N
    if np.unique(flat_indices_N).size != flat_indices_N.size:
        raise BadRequest(f"{where}: the same element is given twice")
    return flat_indices_N


# `target_prompt_logprobs`: the tensor of token ids whose log-probs a client asks for, and the tensor of its answer. Row
# i is about place i + 1 of the prompt. Dense or of compressed sparse rows, it is answered in the same shape, and a
# sparse tensor is never expanded.
NOTHING = -1  # asks for nothing and gets 0
_FIELDS = ("data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices")


@dataclass(frozen=True, eq=False)
class RequestedTargets:
    """The token ids [N] whose log-probs a client asks for: the values of a tensor, at its row-major `flat_indices_N`.

    `csr` are the indices (row starts, columns) of a sparse tensor, None for a dense one.
    """

    shape: tuple[int, int]
    ids_N: np.ndarray
    flat_indices_N: np.ndarray
    csr: tuple[np.ndarray, np.ndarray] | None

    @property
    def is_requested_N(self) -> np.ndarray:
        return self.ids_N != NOTHING

    @property
    def targets(self) -> PromptTargets:
        """The token ids that the engine has to score."""
        return PromptTargets(
            self.flat_indices_N[self.is_requested_N] // self.shape[1] + 1, self.ids_N[self.is_requested_N]
        )

    @property
    def content(self) -> bytes:
        """Bytes that are equal for equal tensors."""
        indices = b"".join(part.tobytes() for part in self.csr or ())
        return f"{self.shape} {self.csr is not None}".encode() + self.ids_N.tobytes() + indices

    def encode(self, logprobs: Sequence[float]) -> Any:
        """The answer: a `Tensor` message."""
        values_N = np.zeros(len(self.ids_N), "<f4")
        values_N[self.is_requested_N] = logprobs
        message = proto.Tensor(dtype=proto.DTYPE_FLOAT32, shape=self.shape)
        if self.csr is None:
            message.dense = values_N.tobytes()
        else:
            starts, columns = self.csr
            message.sparse_csr.values = values_N.tobytes()
            message.sparse_csr.crow_indices, message.sparse_csr.col_indices = starts.tobytes(), columns.tobytes()
        return message


def read_targets(given: Any) -> RequestedTargets | None:
    """Check and read the JSON of such a tensor; ValueError if it is none."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"the value is of type {type(given).__name__}, expected a tensor: an object with {', '.join(_FIELDS)}"
        )
    if unknown := sorted(set(given) - {*_FIELDS, "type"}):
        raise ValueError(f"unknown field {unknown[0]!r:.40}, expected a tensor: an object with {', '.join(_FIELDS)}")
    if given.get("dtype") != "int64":
        raise ValueError(f"dtype {given.get('dtype')!r:.40}, expected 'int64'")
    shape, ids_N = _integers(given, "shape").tolist(), _integers(given, "data")
    if len(shape) != 2 or any(not 0 < size <= 1 << 31 for size in shape):
        raise ValueError(f"shape {shape[:3]}, expected [tokens of the prompt - 1, ids per token], each at least 1")
    csr = None
    if given.get("sparse_crow_indices") is None:
        if len(ids_N) != math.prod(shape):
            raise ValueError(f"{len(ids_N)} ids do not fill the shape {shape}")
        flat_indices_N = np.arange(len(ids_N))
    else:
        csr = (_integers(given, "sparse_crow_indices"), _integers(given, "sparse_col_indices"))
        flat_indices_N = find_flat_indices(*csr, len(ids_N), shape, "the tensor")
    if not (ids_N != NOTHING).any():
        raise ValueError(
            f"every id is {NOTHING}, which asks for no log-prob; give at least one token id, or leave the field out"
        )
    return RequestedTargets((shape[0], shape[1]), ids_N, flat_indices_N, csr)


def _integers(given: dict[str, Any], name: str) -> np.ndarray:
    values = given.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name}: expected a list of integers")
    try:
        return np.array(values, dtype="<i8")
    except OverflowError:
        raise ValueError(f"{name}: an integer does not fit into 64 bits") from None
