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

    rank: int = Field(16, ge=1, description="Rank of the adapters.")
    alpha: float = Field(
        32.0, gt=0, description="Numerator of the factor alpha / rank, by which an adapter's output is multiplied."
    )
    targets: Literal["all"] | tuple[str, ...] = Field(
        "all",
        description="Linear layers that get adapters, by the last part of their names, for example q_proj. `all`: "
        "every one except the output head.",
    )

    @model_validator(mode="after")
    def _something_is_trained(self) -> "LoraSection":
        if not self.targets:
            raise ValueError("targets: expected at least one linear layer, or all")
        return self


class TrainingSection(Section):
    """The optimization; the defaults are the paper's, except with adapters."""

    # First, because the default of the learning rate depends on it.
    lora: LoraSection | None = Field(None, description="Low-rank adapters. Default: all weights are trained.")
    learning_rate: float = Field(
        default_factory=lambda settings: 1e-4 if settings.get("lora") else 3e-6,
        gt=0,
        description="Peak learning rate. Default: 3e-6; 1e-4 with adapters (training.lora).",
    )
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.95), description="Coefficients beta1 and beta2 of AdamW.")
    weight_decay: float = Field(0.01, ge=0, description="Weight decay of AdamW.")
    warmup_ratio: float = Field(
        0.05,
        ge=0,
        lt=1,
        description="Fraction of the training over which the learning rate rises linearly from 0 to its peak.",
    )
    min_lr_ratio: float = Field(
        0.1, ge=0, le=1, description="Learning rate at the end of the cosine decay, as a fraction of learning_rate."
    )
    max_grad_norm: float = Field(1.0, gt=0, description="Norm to which larger gradients are clipped.")
    global_batch_rows: int = Field(
        32,
        ge=2,
        description="Maximum number of rows in a global batch, over all ranks and micro-batches; it holds as many "
        "examples as fit, with k + 1 rows each (k for r2). If anchor_weight is 0, the row at the "
        "advantageous slot counts too, but is not computed.",
    )
    epochs: int = Field(2, ge=1, description="Number of passes over the samples.")
    order: Literal["arrival", "fixed"] = Field(
        "arrival",
        description="Order of the samples in the first epoch of a streamed run. `arrival`: as they are finished; "
        "`fixed`: by the seed, like all other epochs.",
    )
    precision: Precision = Field(
        "bfloat16", description="Precision in which the student is trained. `auto`: as for model.dtype."
    )
