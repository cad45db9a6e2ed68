"""The JSON bodies of the protocol, as pydantic models that FastAPI reads; the protobuf ones are in `wire.py`.

A field that is not known here is refused, with its name, unless it is empty: a newer SDK sends its new fields with
their defaults, which ask for nothing. Exercised by tests/test_tinker_http.py and tests/test_tinker_sdk.py.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rlvr.messages import AdamParams, ModelInput, SamplingParams
from rlvr.service.tinker_api.errors import UserError

SPOKEN = "0.38"  # of the tinker SDK
STOPS, STOP_LENGTH = 1_000, 1_000  # at most; every token sampled is held against each


def _plain(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """It is given back as JSON, which cannot be written as deep as it can be read."""
    level, depth = [given], 0
    while level := [inner for outer in level for inner in _parts(outer)]:
        depth += 1
        if depth > 50:
            raise ValueError("nested more than 50 levels deep")
    return given


def _parts(given: Any) -> list[Any]:
    parts = given.values() if isinstance(given, dict) else given if isinstance(given, list) else ()
    return [part for part in parts if isinstance(part, (dict, list))]


Metadata = Annotated[dict[str, Any], AfterValidator(_plain)]
Name = Annotated[str, Field(max_length=500)]
LARGEST = 1e30  # of a setting: single precision, which weights are in, ends a little above
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Seq = Annotated[int, Field(ge=0, lt=2**63)]  # a copied sampling client starts at a random multiple of a billion


class Body(BaseModel):
    model_config = ConfigDict(protected_namespaces=(), extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_wishes(cls, given: Any) -> Any:
        if isinstance(given, dict):
            known = {*cls.model_fields, "type"}
            for name, value in given.items():
                if name not in known and value not in (None, False, 0, "", [], {}):
                    raise ValueError(
                        f"{name!r} is not known to this server, which speaks the protocol of tinker {SPOKEN}"
                    )
        return given


class Anything(BaseModel):
    """A body of which nothing is used."""

    model_config = ConfigDict(extra="ignore")


class CreateSession(Body):
    tags: list[Name] = Field(default=[], max_length=1_000)
    user_metadata: Metadata | None = None
    sdk_version: Name = ""
    project_id: Name | None = None
    display_name: Name | None = None


class Heartbeat(Body):
    session_id: Name


class FinishReason(Body):
    type: Literal["success", "errored", "interrupted"]


class FinishSession(Body):
    reason: FinishReason
    detail: Annotated[str, Field(max_length=100_000)] | None = None


class Lora(Body):
    rank: int = 32
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class Optimizer(Body):
    """The family chosen when a run is made. There is one here."""

    model_config = ConfigDict(extra="allow")
    type: str = "adamw"

    @model_validator(mode="after")
    def _known(self) -> Optimizer:
        if self.type != "adamw":
            raise ValueError(f"optimizer {self.type!r}: this server has 'adamw'")
        return self


class CreateModel(Body):
    session_id: Name
    model_seq_id: Seq
    base_model: Name
    user_metadata: Metadata | None = None
    lora_config: Lora | None = None
    optimizer_config: Optimizer | None = None


class ModelId(Body):
    model_id: Name


class LoadWeights(Body):
    model_id: Name | None = None
    seq_id: Seq | None = None
    session_id: Name | None = None
    model_seq_id: Seq | None = None
    base_model: Name | None = None
    user_metadata: Metadata | None = None
    path: Name
    optimizer: bool
    optimizer_config: Optimizer | None = None

    @model_validator(mode="after")
    def _addressed(self) -> LoadWeights:
        legacy = self.model_id is not None and self.seq_id is not None
        if legacy == (self.session_id is not None and self.model_seq_id is not None):
            raise ValueError("give either model_id and seq_id, or session_id and model_seq_id")
        return self


class OptimStep(Body):
    model_id: Name
    seq_id: Seq
    adam_params: dict[str, Any] | None = None
    optimizer_params: dict[str, Any] | None = None

    def adam(self) -> AdamParams:
        """As the engine takes them; what is not a number, or none of Adam's, is the client's mistake."""
        if self.optimizer_params is not None or self.adam_params is None:
            kind = (self.optimizer_params or {}).get("type")
            raise UserError(f"optimizer_params of type {kind!r}: this server has AdamW; send adam_params")
        known = AdamParams.__dataclass_fields__
        for name, value in self.adam_params.items():
            if name not in known and name != "type":
                raise UserError(f"adam_params: {name!r} is none of {', '.join(known)}")
            if name in known and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise UserError(f"adam_params: {name}={value!r}, expected a number")
            if name in known and not -LARGEST <= value <= LARGEST:
                raise UserError(f"adam_params: {name}={value!r}, expected a finite number, {LARGEST:g} at most")
        try:
            return AdamParams(**{k: float(v) for k, v in self.adam_params.items() if k in known})
        except ValueError as error:
            raise UserError(str(error)) from error


class SaveWeights(Body):
    model_id: Name
    path: Name
    seq_id: Seq
    ttl_seconds: int | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(Body):
    model_id: Name
    path: Name | None = None
    sampling_session_seq_id: Seq | None = None
    kind: Name = "snapshot"
    seq_id: Seq
    ttl_seconds: int | None = None
    user_metadata: Metadata | None = None

    @model_validator(mode="after")
    def _one_place(self) -> SaveForSampler:
        if (self.path is None) == (self.sampling_session_seq_id is None):
            raise ValueError("give either path (a name to keep) or sampling_session_seq_id (unnamed weights)")
        return self


class SaveExternal(Body):
    model_id: Name
    path: Name
    seq_id: Seq
    ttl_seconds: int | None = None
    age_encryption_recipients: list[Name] | None = None


class CreateSampler(Body):
    session_id: Name
    sampling_session_seq_id: Seq
    base_model: Name | None = None
    model_path: Name | None = None


class JoinSampler(Body):
    sampling_session_id: Name


class Sampling(Body):
    """How to sample, as it comes; `SamplingParams` checks the values."""

    max_tokens: Whole | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: Whole = -1
    top_p: float = 1.0
    min_p: float = 0.0

    @field_validator("stop")
    @classmethod
    def _short_stops(cls, given: Any) -> Any:
        stops = given if isinstance(given, list) else [given]
        for stop in stops:
            if isinstance(stop, str):
                stop.encode()  # half of a pair of surrogates is a ValueError, here and not while sampling
        if len(stops) > STOPS or any(len(stop) > STOP_LENGTH for stop in stops if isinstance(stop, str)):
            raise ValueError(f"expected at most {STOPS} stops, of at most {STOP_LENGTH} characters")
        return given

    def params(self) -> SamplingParams:
        try:
            return SamplingParams(**self.model_dump())
        except ValueError as error:
            raise UserError(str(error)) from error


def _prompt(given: Any) -> Any:
    """The chunks' tokens in one list. By hand: a list of 100,000 integers is most of the work of reading a request."""
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


class Sample(Body):
    model_config = ConfigDict(arbitrary_types_allowed=True)

    sampling_session_id: Name | None = None
    seq_id: Seq | None = None
    base_model: Name | None = None
    model_path: Name | None = None
    num_samples: Whole = 1
    prompt: Annotated[ModelInput, BeforeValidator(_prompt)]
    sampling_params: Sampling = Sampling()
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Whole = 0
    topk_sample_logprobs: Whole = 0
    prompt_logprobs_last_n: int | None = None
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    record_stability_info: bool | None = None

    def session(self) -> tuple[str, int]:
        """The sampling session and the request's place in it; what this server does not do is refused by name."""
        for name in ("target_prompt_logprobs", "prompt_alt_tokens_k", "prompt_logprobs_last_n"):
            if getattr(self, name):
                raise UserError(f"{name} is not offered by this server; prompt_logprobs and topk_prompt_logprobs are")
        if self.sampling_session_id is None or self.seq_id is None:
            raise UserError("sampling needs sampling_session_id and seq_id (create_sampling_session makes a session)")
        return self.sampling_session_id, self.seq_id


class Retrieve(Body):
    request_id: Name
    allow_metadata_only: bool = False


class Target(Body):
    sampling_session_id: Name
    cloned_sampler_id: Seq = 0


class RetrieveMany(Body):
    target: Target
    prev_cursor: Whole = 0
    timeout: float | None = None
    retrieved_request_ids: list[Name] = Field(default=[], max_length=100_000)


class RequestId(Body):
    request_id: Name


class WeightsPath(Body):
    tinker_path: Name


class Ttl(Body):
    ttl_seconds: int | None = None
