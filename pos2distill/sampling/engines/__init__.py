"""Engines that generate responses: vllm, hf (transformers), openai and fake (for tests), with one protocol."""

from typing import assert_never

from pos2distill.config import ModelSection, Runtime
from pos2distill.config.inference import InferenceSection
from pos2distill.sampling.engines.protocol import Engine


def build_engine(
    model: ModelSection, inference: InferenceSection, runtime: Runtime, *, threads: int, device: str
) -> Engine:
    """Build the engine that `model.engine` names. Only its own package is imported.

    Args:
        inference: how the engine answers; the scales of layers are in `model`.
        threads: number of torch's threads, on a CPU.
        device: "cpu" or "cuda".
    """
    if model.engine == "vllm":
        from pos2distill.sampling.engines.vllm import VllmEngine

        return VllmEngine.start(model, runtime.vllm, threads=threads, device=device)
    if model.engine == "hf":
        from pos2distill.sampling.engines.hf import HfEngine

        return HfEngine(model, inference, threads=threads, device=device)
    if model.engine == "openai":
        from pos2distill.sampling.engines.openai import OpenAiEngine

        return OpenAiEngine(model, runtime.endpoint)
    if model.engine == "fake":
        from pos2distill.sampling.engines.fake import FakeEngine

        return FakeEngine(runtime.fake)
    assert_never(model.engine)
