"""Engines on one CPU thread, for tests."""

from pos2distill.config import ModelSection
from pos2distill.config.inference import InferenceSection
from pos2distill.sampling.engines.hf import HfEngine

_PLAIN = InferenceSection()


def hf_engine(model: ModelSection, inference: InferenceSection = _PLAIN, *, threads: int = 1) -> HfEngine:
    """The reference engine on a CPU. inference: how it answers; default: the model as it is."""
    return HfEngine(model, inference, threads=threads, device="cpu")
