"""The JSON bodies of the protocol, as pydantic models; the protobuf ones are in `wire.py`.

An unknown field is refused by name unless it is empty: a newer SDK sends its new fields with their defaults.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from rlvr.core.messages import AdamParams, ModelInput, SamplingParams
from rlvr.tinker_server.protocol.errors import UserError
from rlvr.tinker_server.protocol.wire import RequestedTargets, read_targets

SDK_VERSION = "0.38"  # of the tinker SDK
MAX_METADATA = 16 << 10  # characters of the user's metadata, and of a session's tags
STOPS, STOP_LENGTH = 1_000, 1_000  # at most; every sampled token is compared with each


def _check_metadata(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """Refuse what is long, since a page of a list has that of a thousand runs, or deep: it is sent back as JSON, whose
    encoder is less deep than its decoder."""
    level, depth, size = [given], 0, 0
    while level := [inner for outer in level for inner in _nested_values(outer)]:
        depth += 1
        if depth > 50:
            raise ValueError("nested more than 50 levels deep")
    level = [given]
    while level:
        for outer in level:
            for part in _parts_of(outer):
                size += 4 + (len(part) if isinstance(part, str) else part.bit_length() if type(part) is int else 8)
                if size > MAX_METADATA:
                    raise ValueError(f"more than {MAX_METADATA:,} characters; give less, and keep the rest elsewhere")
        level = [inner for outer in level for inner in _nested_values(outer)]
    return given


def _parts_of(given: Any) -> Iterator[Any]:
    """The keys and values of an object, or the values of a list."""
    if isinstance(given, dict):
        yield from given
        yield from given.values()
    elif isinstance(given, list):
        yield from given


def _check_tags(given: list[str]) -> list[str]:
    if (size := sum(map(len, given))) > MAX_METADATA:
        raise ValueError(f"{size:,} characters together, expected at most {MAX_METADATA:,}")
    return given


def _nested_values(given: Any) -> list[Any]:
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    return [part for part in parts if isinstance(part, (dict, list))]


UserMetadata = Annotated[dict[str, Any], AfterValidator(_check_metadata)]
Name = Annotated[str, Field(max_length=500)]
MAX_NUMBER = 1e30  # of an optimizer setting: float32 ends a little above
# Numbers are strict: `true` and "1" are none.
Seed = Annotated[int, Field(strict=True)]
Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1, strict=True)]
Seq = Annotated[int, Field(ge=0, le=2**63 - 1, strict=True)]  # copied sampling clients start at a multiple of a billion
Real = Annotated[float, Field(strict=True)]


Flag = Annotated[bool, Field(strict=True)]
EMPTY = (None, False, 0, "", [], {})


def _describe_unknown_fields(schema: dict[str, Any]) -> None:
    schema.setdefault("properties", {}).setdefault("type", {})
    schema["additionalProperties"] = {"enum": list(EMPTY)}


class TinkerRequest(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore", json_schema_extra=_describe_unknown_fields)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {*cls.model_fields, "type"}
            for name, value in given.items():
                if name not in known and value not in EMPTY:
                    raise ValueError(
                        f"{name!r} is not known to this server, which speaks the protocol of tinker {SDK_VERSION}"
                    )
        return given


class IgnoredBody(BaseModel):
    """A body that is not used."""

    model_config = ConfigDict(extra="ignore")


class CreateSessionRequest(TinkerRequest):
    tags: Annotated[list[Name], Field(fail_fast=True), AfterValidator(_check_tags)] = Field(
        default=[], max_length=1_000
    )
    user_metadata: UserMetadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Name | None = None


class HeartbeatRequest(TinkerRequest):
    session_id: Name


class FinishReason(TinkerRequest):
    type: Literal["success", "errored", "interrupted"]


class FinishSessionRequest(TinkerRequest):
    reason: FinishReason
    detail: Annotated[str, Field(max_length=100_000)] | None = None


class LoraFields(TinkerRequest):
    rank: Whole = 32
    seed: Seed | None = None
    train_unembed: Flag = True
    train_mlp: Flag = True
    train_attn: Flag = True


class OptimizerChoice(TinkerRequest):
    """The optimizer of a run; only AdamW is supported."""

    model_config = ConfigDict(extra="allow")
    type: Literal["adamw"] = "adamw"

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, given: Any) -> Any:
        """Before the fields are, which another optimizer has of its own."""
        if isinstance(given, dict) and (kind := given.get("type", "adamw")) != "adamw":
            raise ValueError(f"optimizer {kind!r:.100} is not supported: this server trains adapters with AdamW")
        return given


class CreateModelRequest(TinkerRequest):
    session_id: Name
    model_seq_id: Seq
    base_model: Name
    user_metadata: UserMetadata | None = None
    model_role: Name | None = None
    lora_config: LoraFields | None = None
    optimizer_config: OptimizerChoice | None = None


class GetInfoRequest(TinkerRequest):
    model_id: Name


NO_ACCESS_TOKENS = "this server has no access tokens for weights; a published checkpoint can be read by all"


def _refuse_token(given: Any) -> None:
    if given is not None:
        raise ValueError(NO_ACCESS_TOKENS)


AccessToken = Annotated[None, BeforeValidator(_refuse_token)]


class LoadWeightsRequest(TinkerRequest):
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Seq | None = None
    base_model: Name | None = None
    user_metadata: UserMetadata | None = None
    model_role: Name | None = None
    path: Name
    optimizer: Flag
    optimizer_config: OptimizerChoice | None = None
    weights_access_token: AccessToken = None

    @model_validator(mode="after")
    def _check_address(self) -> LoadWeightsRequest:
        legacy = self.model_id is not None and self.seq_id is not None
        if legacy == (self.session_id is not None and self.model_seq_id is not None):
            raise ValueError("give either model_id and seq_id, or session_id and model_seq_id")
        return self


class RunRequest(TinkerRequest):
    """A request to a training run, executed in the order of `seq_id`."""

    model_id: Name
    seq_id: Seq


class OptimStepRequest(RunRequest):
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    def adam(self) -> AdamParams:
        """The engine's parameters; UserError for an unknown name or a value that is not a finite number."""
        if self.optimizer_params is None and self.adam_params is None:
            raise UserError("an optimizer step needs adam_params (a learning_rate, say)")
        kind = (self.optimizer_params or self.adam_params or {}).get("type", "adamw")
        if self.optimizer_params is not None or self.adam_params is None or kind not in ("adam", "adamw"):
            raise UserError(
                f"optimizer {kind!r:.100} is not supported: this server trains adapters with AdamW; send adam_params"
            )
        known = AdamParams.__dataclass_fields__
        for name, value in self.adam_params.items():
            if name not in known and name != "type":
                raise UserError(f"adam_params: unknown name {name!r}; expected {', '.join(known)}")
            if name in known and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise UserError(f"adam_params: {name}={value!r}, expected a number")
            if name in known and not -MAX_NUMBER <= value <= MAX_NUMBER:
                raise UserError(f"adam_params: {name}={value!r}, expected a finite number, {MAX_NUMBER:g} at most")
        try:
            return AdamParams(**{k: float(v) for k, v in self.adam_params.items() if k in known})
        except ValueError as error:
            raise UserError(str(error)) from error


class SaveWeightsRequest(RunRequest):
    path: Name
    ttl_seconds: Whole | None = None
    overwrite: Flag = False
    user_metadata: UserMetadata | None = None


class SaveForSamplerRequest(RunRequest):
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Name = "snapshot"
    ttl_seconds: Whole | None = None
    user_metadata: UserMetadata | None = None

    @model_validator(mode="after")
    def _check_place(self) -> SaveForSamplerRequest:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path (a name to keep) or sampling_session_seq_id (unnamed weights)")
        return self


class SaveExternalRequest(RunRequest):
    path: Name
    ttl_seconds: Whole | None = None
    age_encryption_recipients: Annotated[list[Name], Field(fail_fast=True)] | None = None


class CreateCustomLossRequest(TinkerRequest):
    """A custom loss to store; `read_loss_graph` checks its inputs and graph."""

    session_id: Name
    custom_loss_seq_id: Seq
    name: Annotated[str, Field(min_length=1, max_length=200)]
    inputs: list[Any]
    graph: dict[str, Any]


class CreateSamplerRequest(TinkerRequest):
    session_id: Name
    sampling_session_seq_id: Seq
    base_model: Name | None = None
    model_path: Name | None = None


class JoinSamplerRequest(TinkerRequest):
    sampling_session_id: Name


def check_stops(given: Any) -> Any:
    """The stops as they were given; ValueError for too many, too long ones, and text that is not Unicode."""
    stops = given if isinstance(given, list) else [given]
    for stop in stops:
        if isinstance(stop, str):
            stop.encode()  # raises ValueError for half a surrogate pair, before sampling
    if len(stops) > STOPS or any(len(stop) > STOP_LENGTH for stop in stops if isinstance(stop, str)):
        raise ValueError(f"expected at most {STOPS} stops, of at most {STOP_LENGTH} characters")
    return given


class SamplingFields(TinkerRequest):
    """Sampling parameters as sent; `SamplingParams` checks their values."""

    max_tokens: Whole | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[Whole], Field(fail_fast=True)] | Annotated[list[str], Field(fail_fast=True)] | None = (
        None
    )
    temperature: Real = 1.0
    top_k: Whole = -1
    top_p: Real = 1.0
    min_p: Real = 0.0

    @field_validator("stop")
    @classmethod
    def _check_stops(cls, given: Any) -> Any:
        return check_stops(given)

    def params(self) -> SamplingParams:
        try:
            return SamplingParams(**self.model_dump())
        except ValueError as error:
            raise UserError(str(error)) from error


def _read_prompt(given: Any) -> Any:
    """Join the chunks' tokens. Checked by hand, because pydantic is slow on lists of 100,000 integers."""
    chunks = given.get("chunks") if isinstance(given, dict) else None
    if not isinstance(chunks, list):
        raise ValueError('expected {"chunks": [...]}')
    tokens: list[int] = []
    for chunk in chunks:
        kind = chunk.get("type", "encoded_text") if isinstance(chunk, dict) else type(chunk).__name__
        if kind != "encoded_text":
            raise ValueError(f"a chunk of type {kind!r}: this server reads text (encoded_text) only")
        part = chunk.get("tokens")
        if not isinstance(part, list) or not all(type(token) is int for token in part):
            raise ValueError("an encoded_text chunk needs `tokens`, a list of integers")
        tokens += part
    return ModelInput(tokens)


class SampleRequest(TinkerRequest):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    sampling_session_id: Name | None = None
    seq_id: Seq | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    num_samples: Whole = 1
    prompt: Annotated[ModelInput, BeforeValidator(_read_prompt), WithJsonSchema({"type": "object"})]
    sampling_params: SamplingFields = SamplingFields()
    prompt_logprobs: Flag | None = None
    topk_prompt_logprobs: Whole = 0
    topk_sample_logprobs: Whole = 0
    prompt_logprobs_last_n: Whole | None = None
    target_prompt_logprobs: Annotated[
        RequestedTargets | None, BeforeValidator(read_targets), WithJsonSchema({"type": ["object", "null"]})
    ] = None
    prompt_alt_tokens_k: Whole = 0
    record_stability_info: Flag | None = None

    def session(self) -> tuple[str, int]:
        """The sampling session and seq_id; UserError for options that do not fit the prompt."""
        if self.prompt_alt_tokens_k < 0:
            raise UserError(f"prompt_alt_tokens_k={self.prompt_alt_tokens_k}, expected at least 0")
        if (last := self.prompt_logprobs_last_n) is not None:
            if not self.prompt_logprobs:
                raise UserError("prompt_logprobs_last_n is for prompt_logprobs; set these too, or leave it out")
            if not 1 <= last < self.prompt.length:
                raise UserError(
                    f"prompt_logprobs_last_n={last} for a prompt of {self.prompt.length} tokens, expected 1 to "
                    f"{self.prompt.length - 1}: the first token has no log-prob"
                )
        if (targets := self.target_prompt_logprobs) and targets.shape[0] != self.prompt.length - 1:
            raise UserError(
                f"target_prompt_logprobs has {targets.shape[0]} rows, expected {self.prompt.length - 1}: one for each "
                f"of the prompt's {self.prompt.length} tokens but the first"
            )
        if self.sampling_session_id is None or self.seq_id is None:
            raise UserError("sampling needs sampling_session_id and seq_id (create_sampling_session makes a session)")
        return self.sampling_session_id, self.seq_id


class RetrieveFutureRequest(TinkerRequest):
    request_id: Name
    allow_metadata_only: Flag = False


class SamplingTarget(TinkerRequest):
    sampling_session_id: Name
    cloned_sampler_id: Seq = 0


class RetrieveFuturesRequest(TinkerRequest):
    target: SamplingTarget
    prev_cursor: Whole = 0
    timeout: Real | None = None
    retrieved_request_ids: Annotated[list[Name], Field(fail_fast=True)] = Field(default=[], max_length=100_000)


class CancelFutureRequest(TinkerRequest):
    request_id: Name


class WeightsInfoRequest(TinkerRequest):
    tinker_path: Name


class CopyWeightsRequest(TinkerRequest):
    source_path: Name
    session_id: Name | None = None
    model_seq_id: Seq | None = None
    destination_project_id: Annotated[Name, Field(min_length=1)] | None = None
    ttl_seconds: Whole | None = None
    weights_access_token: AccessToken = None


class SetProjectRequest(TinkerRequest):
    project_id: Annotated[Name, Field(min_length=1)]


class SearchOwner(TinkerRequest):
    type: Literal["own", "accessible", "user"] = "own"
    owner_urns: Annotated[list[Name], Field(min_length=1, max_length=10)] | None = None

    @model_validator(mode="after")
    def _check_owners(self) -> SearchOwner:
        if (self.type == "user") != (self.owner_urns is not None):
            raise ValueError("give owner_urns with the type user, and only then")
        return self


class SearchStatus(TinkerRequest):
    type: Literal["active", "cancelled", "failed", "client_finished"]
    reasons: Annotated[list[Literal["success", "errored", "interrupted"]], Field(min_length=1, max_length=3)] | None = (
        None
    )


def _check_time_text(given: Any) -> Any:
    """Refuse numbers, which pydantic reads as seconds."""
    if not isinstance(given, str):
        raise ValueError(f"{given!r:.100} is not a time; give the one of a session, such as 2026-01-31T12:00:00+00:00")
    return given


class SearchCursor(TinkerRequest):
    last_created_at: Annotated[AwareDatetime, BeforeValidator(_check_time_text)]
    last_session_id: Name


class SearchSessionsRequest(TinkerRequest):
    session_id: Name | None = None
    project_ids: Annotated[list[Name], Field(max_length=100)] | None = None
    user_metadata: Annotated[dict[Name, Name], Field(max_length=100)] = {}
    display_name: Annotated[Name, Field(min_length=1)] | None = None
    owner: SearchOwner = SearchOwner()
    statuses: Annotated[list[SearchStatus], Field(min_length=1, max_length=20)] | None = None
    limit: Annotated[int, Field(ge=1, le=200, strict=True)] = 50
    cursor: SearchCursor | None = None


class SetTtlRequest(TinkerRequest):
    ttl_seconds: Whole | None = None
