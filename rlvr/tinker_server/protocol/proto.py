"""The protobuf messages of the Tinker protocol, built from a table of their fields.

They live in a descriptor pool of their own: a program that runs this server may also import the `tinker` SDK, which
registers the same names in the default pool.
Left out on purpose: sampling parameters, which nothing here reads.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

# enum -> its values in order, from 0
_ENUMS = {
    "StopReason": ("STOP_REASON_STOP", "STOP_REASON_LENGTH"),
    "DType": ("DTYPE_UNSPECIFIED", "DTYPE_FLOAT32", "DTYPE_INT64", "DTYPE_INT32", "DTYPE_BFLOAT16"),
}

# message -> {field: "number type"}: type is a scalar, an enum or a message of these tables, `repeated T` or
# `map V` (its keys are strings); `T?` distinguishes absent from empty, `T |x` is a member of the oneof x.
_MESSAGES: dict[str, dict[str, str]] = {
    "EncodedTextChunk": {"tokens": "1 bytes"},
    "ImageChunk": {"data": "1 bytes", "format": "2 string"},
    "DmelChunk": {"dmel": "1 bytes"},
    "Chunk": {"encoded_text": "1 EncodedTextChunk |kind", "image": "2 ImageChunk |kind", "dmel": "3 DmelChunk |kind"},
    "SparseCsr": {"values": "1 bytes", "crow_indices": "2 bytes", "col_indices": "3 bytes"},
    "Tensor": {
        "dense": "1 bytes |layout",
        "sparse_csr": "2 SparseCsr |layout",
        "dtype": "3 DType",
        "shape": "4 repeated int64",
    },
    "PromptProvenanceSpan": {"sequence_id": "1 string", "offset": "2 int64", "length": "3 int64"},
    "SampledProvenanceSpan": {"sequence_id": "1 string", "offset": "2 int64", "length": "3 int64"},
    "ProvenanceSpan": {
        "prompt_tokens": "1 PromptProvenanceSpan |span",
        "sampled_tokens": "2 SampledProvenanceSpan |span",
    },
    "Datum": {
        "model_input": "1 repeated Chunk",
        "loss_fn_inputs": "2 map Tensor",
        "model_input_spans": "3 repeated ProvenanceSpan",
        "loss_fn_input_spans": "4 repeated ProvenanceSpan",
    },
    "LossConfigValue": {"number": "1 double |value", "text": "2 string |value"},
    # `data` holds Datum messages. Bytes look the same on the wire, and let each row be parsed on its own: an error then
    # names the row, with the request's ids known.
    "ForwardBackwardRequest": {
        "model_id": "1 string",
        "seq_id": "2 int32",
        "data": "3 repeated bytes",
        "loss_fn": "4 string",
        "loss_fn_config": "5 map double",
        "forward_only": "6 bool",
        "loss_fn_config_v2": "7 map LossConfigValue",
    },
    "BatchedTensor": {
        "data": "1 bytes",
        "offsets": "2 bytes",
        "dtype": "3 DType",
        "trailing_shape": "4 repeated int64",
    },
    "ArrayRecord": {"type_tag": "1 string", "fields": "2 map BatchedTensor", "num_datums": "3 int64"},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": "1 string",
        "loss_fn_outputs": "2 repeated ArrayRecord",
        "metrics": "3 map double",
    },
    "TopkLogprobs": {"token_ids": "1 bytes", "logprobs": "2 bytes", "k": "3 uint32", "length": "4 uint32"},
    "SampledSequence": {
        "stop_reason": "1 StopReason",
        "tokens": "2 bytes",
        "logprobs": "3 bytes?",
        "topk_sampled_logprobs": "4 TopkLogprobs?",
    },
    "PromptAltTokens": {"tokens": "1 Tensor", "logprobs": "2 Tensor"},
    "SampleResponse": {
        "sequences": "1 repeated SampledSequence",
        "prompt_logprobs": "2 bytes?",
        "topk_prompt_logprobs": "3 TopkLogprobs?",
        "prompt_cache_hit_tokens": "4 int32",
        "target_prompt_logprobs": "5 Tensor?",
        "prompt_alt_tokens": "6 PromptAltTokens?",
    },
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="rlvr/tinker_public.proto", package=PACKAGE, syntax="proto3")
    for name, values in _ENUMS.items():
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, text in fields.items():
            _add_field(message, field, *text.split())
        # The oneofs that only mark presence come last.
        for field in message.field:
            if field.proto3_optional:
                field.oneof_index = len(message.oneof_decl)
                message.oneof_decl.add(name=f"_{field.name}")
    return file


def _add_field(message: descriptor_pb2.DescriptorProto, name: str, number: str, *words: str) -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    field = message.field.add(name=name, number=int(number), label=kinds.LABEL_OPTIONAL)
    match words:
        case ("repeated", kind):
            field.label = kinds.LABEL_REPEATED
        case ("map", value):
            field.label = kinds.LABEL_REPEATED
            kind = "".join(part.capitalize() for part in name.split("_")) + "Entry"
            entry = message.nested_type.add(name=kind)
            entry.options.map_entry = True
            _add_field(entry, "key", "1", "string")
            _add_field(entry, "value", "2", value)
            kind = f"{message.name}.{kind}"
        case (kind, oneof):
            names = [known.name for known in message.oneof_decl]
            if oneof[1:] not in names:
                message.oneof_decl.add(name=oneof[1:])
                names.append(oneof[1:])
            field.oneof_index = names.index(oneof[1:])
        case _:
            kind = words[0].removesuffix("?")
            field.proto3_optional = words[0].endswith("?")
    if kind in _ENUMS:
        field.type, field.type_name = kinds.TYPE_ENUM, f".{PACKAGE}.{kind}"
    elif kind[0].isupper():
        field.type, field.type_name = kinds.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    else:
        field.type = kinds.Type.Value(f"TYPE_{kind.upper()}")


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_file())
MESSAGE_TYPES = {
    name: message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
}

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32, DTYPE_BFLOAT16 = range(1, 5)
STOP_REASON_STOP, STOP_REASON_LENGTH = range(2)

Tensor: Any = MESSAGE_TYPES["Tensor"]
Datum: Any = MESSAGE_TYPES["Datum"]
ForwardBackwardRequest: Any = MESSAGE_TYPES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = MESSAGE_TYPES["ForwardBackwardOutput"]
SampleResponse: Any = MESSAGE_TYPES["SampleResponse"]
