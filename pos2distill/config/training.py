"""The settings of training: how the student is optimized."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pos2distill.config.base import Precision, Section

# Of a training state, per trained parameter: its fp32 weight and AdamW's two moments (training/state.py).
STATE_BYTES = 12

_Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraSection(Section):
    """Low-rank adapters (arXiv:2106.09685). Without this section all weights are trained.

    There is no dropout, as in all training here: rows are passed twice, first for their weights and then for the
    gradient, with equal losses.
    """

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="an adapter's output is scaled by alpha / rank")
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description="linear layers by the last part of their names, as q_proj; all: every one but the output head",
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> "LoraSection":
        if not self.targets:
            raise ValueError("targets: expected at least one linear layer, or all")
        return self


class TrainingSection(Section):
    """The optimization; the defaults are the paper's, except with adapters."""

    # First, because the default of the learning rate depends on it.
    lora: LoraSection | None = None
    learning_rate: float = Field(
        default_factory=lambda settings: 1e-4 if settings.get("lora") else 3e-6,
        gt=0,
        description="Default: 3e-6; with adapters (training.lora) 1e-4",
    )
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    weight_decay: float = Field(0.01, ge=0)
    warmup_ratio: float = Field(0.05, ge=0, lt=1)
    min_lr_ratio: float = Field(0.1, ge=0, le=1, description="cosine decay ends at this fraction of learning_rate")
    max_grad_norm: float = Field(1.0, gt=0)
    global_batch_rows: int = Field(
        32,
        ge=2,
        description="maximum rows of a global batch, over all ranks and micro-batches. It has as many examples as "
        "fit with k + 1 rows each. With lambda 0 the row at the advantageous slot counts here but is not computed; r2 "
        "has k rows of each",
    )
    epochs: int = Field(2, ge=1)
    order: Literal["arrival", "fixed"] = Field(
        "arrival",
        description="order of samples in the first epoch of a streamed run. arrival: as they are finished; fixed: by "
        "the seed. All other epochs are ordered by the seed",
    )
    precision: Precision = Field("bfloat16", description="auto: as model.dtype")
