"""What schemathesis cannot read from /openapi.json of the Tinker server: its key, messages of protobuf, and rules over
several fields of a body or over the model."""

import os
from typing import Any

import schemathesis
from hypothesis import strategies as st

from rlvr.tinker_server.protocol import proto

CONVERSATIONS = ("/v1/responses", "/v1/messages", "/v1/chat/completions")


@schemathesis.auth()
class Key:
    def get(self, case: Any, context: Any) -> str:
        return os.environ["RLVR_TEST_KEY"]

    def set(self, case: Any, data: str, context: Any) -> None:
        case.headers = {**(case.headers or {}), "X-API-Key": data, "Authorization": f"Bearer {data}"}


def write_message(seq_id: int) -> bytes:
    return proto.ForwardBackwardRequest(model_id="unknown", seq_id=seq_id, loss_fn="cross_entropy").SerializeToString()


schemathesis.openapi.media_type("application/x-protobuf", st.integers(1, 1_000).map(write_message))


def with_whole_numbers(value: Any) -> Any:
    """schemathesis compares whole numbers as floats, so it takes some above 2**63 - 1 for smaller ones. It also writes
    some with a fraction of 0, which the server takes for no whole number."""
    if isinstance(value, dict):
        return {name: with_whole_numbers(part) for name, part in value.items()}
    if isinstance(value, list):
        return [with_whole_numbers(part) for part in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return max(-(2**63), min(value, 2**63 - 1)) if type(value) is int else value


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    body, path = case.body, case.operation.path
    is_positive = case.meta is None or case.meta.generation.mode.is_positive
    if not isinstance(body, dict) or not is_positive:
        return
    body.update(with_whole_numbers(body))
    if path.endswith("/asample"):  # these two depend on the number of the prompt's tokens
        body.update(prompt_logprobs_last_n=None, target_prompt_logprobs=None)
    if path.endswith("/load_weights"):  # a run by its id, or by its session
        body.update(model_id="unknown", seq_id=1, session_id=None, model_seq_id=None)
    if path.endswith("/save_weights_for_sampler"):  # a name to keep, or a number
        body.update(path="named", sampling_session_seq_id=None)
    if path.endswith("/copy_weights"):  # to a project, or to a session
        body.update(destination_project_id="mine", session_id=None, model_seq_id=None)
    if path.endswith("/optim_step"):  # the names are those of AdamW
        body.update(adam_params={"learning_rate": 0.1}, optimizer_params=None)
    if path.endswith("/sessions/search"):  # owner_urns belong to one of the types
        body.pop("owner", None)
    if path == "/v1/completions":  # what is streamed is not echoed with log-probs, and best_of is n
        body.update(stream=False, best_of=None)
    if path == "/v1/chat/completions":  # these need log-probs
        body.update(top_logprobs=None)
    if path == "/inference/v1/generate":  # the model's vocabulary and context
        body.update(token_ids=[1, 2], sampling_params={"max_tokens": 3})
    if any(path.endswith(one) for one in CONVERSATIONS) and path != "/v1/chat/completions":
        for name in set(body) - {"model", "messages", "input"}:  # a vendor's document has the other fields
            del body[name]
        if "messages" in body:
            body["messages"] = [{"role": "user", "content": "Say something."}]
        if isinstance(body.get("input"), list):
            body["input"] = "Say something."
