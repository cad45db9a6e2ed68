"""`sampler.name=vllm`: vLLM servers sample over HTTP, and the run's own client trains (docs/scale/vllm.md)."""

from rlvr.clients.vllm.vllm_options import VllmOptions

__all__ = ["VllmOptions"]
