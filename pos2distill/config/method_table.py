"""The methods that can be compared, in one table. Code that depends on the method reads its entry (`Method`).

A new method is one entry of `_ALL`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

RowWeights = Literal["paper", "official", "uniform", "adaptive"]


@dataclass(frozen=True, slots=True)
class Method:
    """What distinguishes one method from the others.

    Attributes:
        name: the value of `method.name`.
        description: one phrase, for the documentation.
        loss: the loss of a row. kl: KL between base model and student, in the direction of `method.divergence`, mean
            over response tokens; ce: cross-entropy on the response.
        target: the response of a row. sampled: from the advantageous prompt; gold: the data set's first answer.
        weights: weights of trivial rows, if `method.weights` is left open.
        allowed_weights: all that this method can use.
        anchor_weight: lambda, if `method.anchor_weight` is left open.
        sum_over_k: whether the loss sums over the K trivial prompts of an example, as in the paper's R2, instead of
            averaging.
        reserves_anchor: whether a global batch has room for an anchor row of every example, also where none is
            computed.
        on_policy: every row's response is the student's own answer to the row's prompt, not one answer to the
            advantageous prompt for all rows of an example.
        rounds: rounds of sampling and training, if `method.rounds` is left open. Only on-policy methods have more than
            one.
    """

    name: str
    description: str
    loss: Literal["kl", "ce"]
    target: Literal["sampled", "gold"]
    weights: RowWeights
    allowed_weights: tuple[RowWeights, ...]
    anchor_weight: float = 0.0
    sum_over_k: bool = False
    reserves_anchor: bool = True
    on_policy: bool = False
    rounds: int = 1


# Position weights need the KL of each row, and adaptive weights a cross-entropy to compare with the base model's.
_KL_WEIGHTS: tuple[RowWeights, ...] = ("paper", "official", "uniform")
_CE_WEIGHTS: tuple[RowWeights, ...] = ("uniform", "adaptive")

_ALL = (
    Method(
        name="r1",
        description="KL to the base model, with position weights and anchor rows",
        loss="kl",
        target="sampled",
        weights="paper",
        allowed_weights=_KL_WEIGHTS,
        # The paper's lambda.
        anchor_weight=1.0,
    ),
    Method(
        name="kl+align",
        description="r1 without anchor rows",
        loss="kl",
        target="sampled",
        weights="paper",
        allowed_weights=_KL_WEIGHTS,
    ),
    Method(
        name="kl",
        description="r1 without anchor rows and position weights",
        loss="kl",
        target="sampled",
        weights="uniform",
        allowed_weights=_KL_WEIGHTS,
    ),
    Method(
        name="r1-on-policy",
        description="r1 on the student's own answers to its training prompts",
        loss="kl",
        target="sampled",
        weights="paper",
        allowed_weights=_KL_WEIGHTS,
        anchor_weight=1.0,
        on_policy=True,
        rounds=2,
    ),
    Method(
        name="r2",
        description="cross-entropy on sampled chains of thought, summed over an example's trivial prompts",
        loss="ce",
        target="sampled",
        weights="uniform",
        allowed_weights=_CE_WEIGHTS,
        sum_over_k=True,
        reserves_anchor=False,
    ),
    Method(
        name="seqkd",
        description="cross-entropy on sampled answers",
        loss="ce",
        target="sampled",
        weights="uniform",
        allowed_weights=_CE_WEIGHTS,
    ),
    Method(
        name="sft",
        description="cross-entropy on the data set's answers",
        loss="ce",
        target="gold",
        weights="uniform",
        # Adaptive weights compare with the base model's loss on its own response, which is not the target here.
        allowed_weights=("uniform",),
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in _ALL}
"""Every method by its name."""

# The values of the setting `method.name`, in the order of the table. mypy accepts a Literal of written values only.
if TYPE_CHECKING:
    MethodName = str
else:
    MethodName = Literal[tuple(METHODS)]
