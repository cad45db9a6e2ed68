"""Samplers by name: `sampler=trainer`, `vllm`. A new one is a class of `SamplerOptions` and its entry here."""

from __future__ import annotations

from rlvr.clients.sampler_options import SamplerOptions, TrainerSampler
from rlvr.clients.vllm.vllm_options import VllmOptions
from rlvr.core.variants import Variants

SAMPLERS = Variants("sampler.name", SamplerOptions, TrainerSampler, VllmOptions)
