"""The SDK's `types` by the same names: the messages of `rlvr.core.messages`, and what the local service says of
itself."""

from dataclasses import dataclass

from rlvr.core.messages import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    OptimStepResponse,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    SaveWeightsResponse,
)
from rlvr.core.tensors import TensorData
from rlvr.core.types import StopReason

__all__ = [
    "AdamParams",
    "Datum",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "GetInfoResponse",
    "GetServerCapabilitiesResponse",
    "ModelData",
    "ModelInput",
    "OptimStepResponse",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsForSamplerResponse",
    "SaveWeightsResponse",
    "StopReason",
    "SupportedModel",
    "TensorData",
]

SaveWeightsForSamplerResponse = SaveWeightsResponse


@dataclass(frozen=True)
class SupportedModel:
    model_name: str
    max_context_length: int
    trainable: bool = True
    sampleable: bool = True


@dataclass(frozen=True)
class GetServerCapabilitiesResponse:
    """The base models that are loaded. Any other folder or hub name is loaded when it is asked for."""

    supported_models: list[SupportedModel]


@dataclass(frozen=True)
class ModelData:
    model_name: str
    arch: str | None = None
    tokenizer_id: str | None = None


@dataclass(frozen=True)
class GetInfoResponse:
    """What a training client trains. `lora_rank` is None where it is all weights."""

    model_data: ModelData
    model_id: str
    model_name: str
    is_lora: bool
    lora_rank: int | None
