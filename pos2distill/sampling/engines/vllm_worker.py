"""Imported by vLLM in every worker of our engine (`worker_extension_cls`), before the worker loads the model."""

from pos2distill.sampling.engines.vllm_rope import RopeScales, register

__all__ = ["RopeScales"]

# Registered here too, because a checkout that is not installed has no entry point.
register()
