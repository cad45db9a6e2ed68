"""/openapi.json of the Tinker server: what its routes say, and what FastAPI cannot know of them.

    app.openapi = lambda: build_openapi(app)

FastAPI knows neither the errors of the protocol, nor the bodies that a route reads itself, nor the API keys, and
pydantic's schemas have no rule that the backend checks. Calls that the server refuses by name are left out.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from rlvr.tinker_server.backend.storage.checkpoints import MAX_TTL, MIN_TTL
from rlvr.tinker_server.backend.storage.paths import KINDS
from rlvr.tinker_server.http.tinker_middleware import TinkerMiddleware
from rlvr.tinker_server.protocol.wire import PROTOBUF
from rlvr.web.openapi_route import declare_keys

Schema = dict[str, Any]
OBJECT: Schema = {"type": "object"}
TEXT: Schema = {"type": "string", "minLength": 1}
ERROR: Schema = {
    "title": "Error",
    "description": "The Tinker SDK reads `detail` and `category`, the clients of the open endpoints `error`.",
    "type": "object",
    "properties": {
        "detail": {"type": "string"},
        "category": {"enum": ["user", "server"]},
        "request_id": {"type": "string"},
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
            "required": ["message"],
        },
    },
    "required": ["error"],
}
REFUSALS = {
    "4XX": "The request is refused; `detail` says why and what to do.",
    "503": "The models are being loaded; `Retry-After` says when to ask again.",
}
TRY_AGAIN: Schema = {
    "type": "object",
    "properties": {"type": {"const": "try_again"}, "request_id": {"type": "string"}, "queue_state": {}},
    "required": ["type", "request_id"],
}

_RUN, _NAME = "[A-Za-z0-9._:-]{1,200}", "[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
_MODEL_PATH: Schema = {"type": "string", "pattern": f"^tinker://{_RUN}/({'|'.join(KINDS)})/{_NAME}$"}
_PATH_PARAMETERS: Schema = {"kind": {"enum": list(KINDS)}, "name": {"type": "string", "pattern": f"^{_NAME}$"}}
_PAGE: dict[str, int] = {"limit": 1, "offset": 0}  # the least values

# Fields of bodies whose rules the backend checks, by the body's title.
_CHUNK: Schema = {
    "type": "object",
    "properties": {"type": {"const": "encoded_text"}, "tokens": {"type": "array", "items": {"type": "integer"}}},
    "required": ["tokens"],
}
_PROMPT: Schema = {
    "type": "object",
    "properties": {"chunks": {"type": "array", "items": _CHUNK, "minItems": 1}},
    "required": ["chunks"],
}
_TTL: Schema = {"anyOf": [{"type": "integer", "minimum": MIN_TTL, "maximum": MAX_TTL}, {"type": "null"}]}
_ROLE: Schema = {"enum": [None, "policy", "critic"]}
_SEQ: Schema = {"type": "integer", "minimum": 1, "maximum": 2**63 - 1}
_FIELDS: dict[str, Schema] = {
    "CreateModelRequest": {"lora_config": {"$ref": "#/components/schemas/LoraFields"}, "model_role": _ROLE},
    "LoadWeightsRequest": {"model_role": _ROLE},
    "SamplingFields": {
        "max_tokens": {"anyOf": [_SEQ, {"type": "null"}]},
        "temperature": {"type": "number", "minimum": 0},
        "top_k": {"anyOf": [{"const": -1}, _SEQ]},
        "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "min_p": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    },
    "OptimStepRequest": {"seq_id": _SEQ},
    "SaveWeightsRequest": {"seq_id": _SEQ, "ttl_seconds": _TTL},
    "SaveForSamplerRequest": {"seq_id": _SEQ, "ttl_seconds": _TTL},
    "SaveExternalRequest": {"seq_id": _SEQ, "ttl_seconds": _TTL},
    "CopyWeightsRequest": {"ttl_seconds": _TTL, "source_path": _MODEL_PATH},
    "SetTtlRequest": {"ttl_seconds": _TTL},
    "SampleRequest": {
        "sampling_session_id": {"type": "string", "maxLength": 500},
        "seq_id": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        "prompt": _PROMPT,
        "prompt_alt_tokens_k": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1, "default": 0},
    },
    "WeightsInfoRequest": {"tinker_path": _MODEL_PATH},
}
_REQUIRED = {
    "SampleRequest": ["sampling_session_id", "seq_id"],
    "CreateModelRequest": ["lora_config"],
}  # beside those that pydantic names

# Bodies that a route reads itself, by the end of its path. Those of a vendor's API have the vendor's other fields too.
_MESSAGE: Schema = {
    "type": "object",
    "properties": {"role": {"const": "user"}, "content": TEXT},
    "required": ["role", "content"],
}
_CONVERSATION: Schema = {
    "type": "object",
    "properties": {
        "model": {**TEXT, "maxLength": 500},
        "messages": {"type": "array", "items": OBJECT, "minItems": 1, "contains": _MESSAGE},
    },
    "required": ["model", "messages"],
}
_RESPONSES: Schema = {
    "type": "object",
    "properties": {"model": {**TEXT, "maxLength": 500}, "input": {"anyOf": [TEXT, {"type": "array"}]}},
    "required": ["model", "input"],
}
_REWARD: Schema = {
    "type": "object",
    "properties": {"reward": {"type": ["number", "boolean"]}, "call": {"type": "string"}, "source": {"type": "string"}},
    "required": ["reward"],
}
_BODIES: dict[str, tuple[str, Schema]] = {
    "/api/v1/forward_backward": (PROTOBUF, {"type": "string", "format": "binary"}),
    "/v1/messages": ("application/json", _CONVERSATION),
    "/v1/responses": ("application/json", _RESPONSES),
    "/r/{token}/v1/chat/completions": ("application/json", _CONVERSATION),
    "/reward": ("application/json", _REWARD),
}
_ANSWERS: dict[str, Schema] = {  # content of the answer 200; the other routes send JSON objects
    "/metrics": {"text/plain": {}, "application/openmetrics-text": {}},
    "/rollouts/{name}": {"application/x-ndjson": {}},
    "/api/v1/external/{signed}/{until}/{owner}/{run}/{name}/{file}": {"*/*": {}},
    "/api/v1/retrieve_future": {"application/json": {}, PROTOBUF: {}},
    "/v1/completions": {"application/json": {}, "text/event-stream": {}},
    "/chat/completions": {"application/json": {}, "text/event-stream": {}},
    "/v1/responses": {"application/json": {}, "text/event-stream": {}},
    "/v1/messages": {"application/json": {}, "text/event-stream": {}},
}


def build_openapi(app: FastAPI) -> Schema:
    """The document of this server; the same at every call."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
        schemas: Schema = {"Error": ERROR}
        for path, methods in document["paths"].items():
            for method, operation in methods.items():
                _describe_parameters(path, operation)
                _describe_body(path, operation, schemas)
                _describe_answers(path, method, operation)
        middleware: TinkerMiddleware = app.state.middleware
        schemas["LoraFields"]["properties"]["rank"] |= {"minimum": 1, "maximum": middleware.limits.max_rank}
        document["components"] = {"schemas": schemas}
        if middleware.has_keys:
            declare_keys(document, middleware.is_open)
        app.openapi_schema = document
    return app.openapi_schema


def _describe_parameters(path: str, operation: Schema) -> None:
    """Add the parameters that a route reads from its path itself, and what the backend checks of the others."""
    parameters = operation.setdefault("parameters", [])
    named = {one["name"] for one in parameters}
    for name in (part[1:-1] for part in path.split("/") if part.startswith("{")):
        if name not in named:
            parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    for one in parameters:
        schema = one["schema"]
        if one["name"] in _PAGE and one["in"] == "query":
            schema["minimum"] = _PAGE[one["name"]]
        elif "/checkpoints/{kind}/" in path and one["name"] in _PATH_PARAMETERS:
            one["schema"] = _PATH_PARAMETERS[one["name"]]
        elif "/checkpoints/{kind}/" in path and one["name"] == "run":
            one["schema"] = {"type": "string", "pattern": f"^(?!\\.{{1,2}}$){_RUN}$"}


def _describe_body(path: str, operation: Schema, schemas: Schema) -> None:
    """Describe a body completely: its definitions go to where its references find them."""
    if found := next((body for end, body in _BODIES.items() if path.endswith(end)), None):
        kind, schema = found
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        inner: Schema = schema.pop("$defs", {})
        schemas |= inner
        for one in (schema, *inner.values()):
            one.get("properties", {}).update(_FIELDS.get(one.get("title", ""), {}))
        title = schema.get("title", "")
        if more := _REQUIRED.get(title):
            schema["required"] = [*schema.get("required", []), *more]


def _describe_answers(path: str, method: str, operation: Schema) -> None:
    answers: Schema = operation["responses"]
    answers.pop("422", None)
    content = next((content for end, content in _ANSWERS.items() if path.endswith(end)), None)
    if content and method != "delete":
        answers["200"]["content"] = content
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    if path.endswith("/retrieve_future"):
        answers["408"] = {
            "description": "There is no result yet; ask again.",
            "content": {"application/json": {"schema": TRY_AGAIN}},
        }
    answers |= {status: {"description": words, **error} for status, words in REFUSALS.items()}
