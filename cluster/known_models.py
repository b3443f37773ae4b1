"""The size of the models in the recipes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model. width: the length of a hidden state."""

    parameters: int
    layers: int
    width: int


# By the last part of their names: a copy usually keeps that.
KNOWN_MODELS = {
    "Mistral-7B-Instruct-v0.3": KnownModel(parameters=7_248_023_552, layers=32, width=4096),
    "Meta-Llama-3-8B-Instruct": KnownModel(parameters=8_030_261_248, layers=32, width=4096),
    "Llama-3.1-8B-Instruct": KnownModel(parameters=8_030_261_248, layers=32, width=4096),
    "Qwen1.5-7B-Chat": KnownModel(parameters=7_721_324_544, layers=32, width=4096),
    "Qwen2.5-7B-Instruct": KnownModel(parameters=7_615_616_512, layers=28, width=3584),
}


def known_model(path: str) -> KnownModel | None:
    """The model that a path, a URL or a name on the hub ends with; None for one that is not known here."""
    return KNOWN_MODELS.get(path.rstrip("/").rpartition("/")[2])
