"""The inference-time methods, in one table. Code that needs to know what a method changes reads its entry.

CONTRIBUTING.md says what a new method needs beside its entry in `_ALL`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True, slots=True)
class InferenceMethod:
    """What distinguishes one method from the others.

    Attributes:
        name: the value of `inference.method`.
        description: one phrase, for the documentation.
        changes: what it changes. nothing: the plain model. order: the order of the documents in the prompt. scales: the
            RoPE scales of the model's layers, with which it also samples, teaches and is trained. attention: the
            model's attention in evaluations alone, in a way that only transformers supports.
        settings: those of its settings in section `inference` that belong to it.
    """

    name: str
    description: str
    changes: Literal["nothing", "order", "scales", "attention"]
    settings: tuple[str, ...] = ()

    @property
    def only_evaluated(self) -> bool:
        """Whether it changes evaluations, and not the model that is sampled and trained."""
        return self.changes in ("order", "attention")


_ALL = (
    InferenceMethod(name="none", description="the model as it is", changes="nothing"),
    InferenceMethod(
        name="reorder",
        description="the best-ranked document at the slot where the model does best, and so on",
        changes="order",
    ),
    InferenceMethod(
        name="uniform_scale",
        description="one RoPE scale for all layers",
        changes="scales",
        settings=("scales",),
    ),
    InferenceMethod(
        name="lpes",
        description="one RoPE scale for each layer, searched",
        changes="scales",
        settings=("scales", "search"),
    ),
    InferenceMethod(
        name="ms_poe",
        description="one RoPE scale for each head, by its attention to the prompt (engine hf only)",
        changes="attention",
        settings=("ms_poe",),
    ),
    InferenceMethod(
        name="attention_buckets",
        description="several RoPE bases, whose distributions are mixed (engine hf only)",
        changes="attention",
        settings=("bases",),
    ),
)

INFERENCE_METHODS: dict[str, InferenceMethod] = {method.name: method for method in _ALL}
"""Every method by its name."""

# The values of `inference.method`, in the order of the table. mypy accepts a Literal of written values only.
if TYPE_CHECKING:
    InferenceMethodName = str
else:
    InferenceMethodName = Literal[tuple(INFERENCE_METHODS)]
