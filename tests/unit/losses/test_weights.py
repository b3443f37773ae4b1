import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pos2distill.losses.weights import adaptive_weights, position_weights

# Slots 3 and 7 are trivial, 0 is the anchor. Means .15 and .40: e^.15 / (e^.15 + e^.40) = .4378235.
KL = torch.tensor([0.2, 0.1, 0.4, 0.05])
SLOT = torch.tensor([3, 3, 7, 0])
SHARE = math.exp(0.15) / (math.exp(0.15) + math.exp(0.40))


def test_position_weights_of_the_paper_by_hand() -> None:
    assert pytest.approx(0.4378235, abs=1e-7) == SHARE
    expected = [SHARE, SHARE / 2, 1 - SHARE, 0.0]
    assert position_weights(KL, SLOT, SLOT != 0, variant="paper").tolist() == pytest.approx(expected, abs=1e-6)


def test_position_weights_official_multiply_by_slots_over_rows() -> None:
    # 2 slots present; 2 rows at slot 3, 1 at slot 7.
    expected = [SHARE, SHARE / 2, 2 * (1 - SHARE), 0.0]
    assert position_weights(KL, SLOT, SLOT != 0, variant="official").tolist() == pytest.approx(expected, abs=1e-6)


def test_position_weights_uniform_are_one_over_the_trivial_rows() -> None:
    assert position_weights(KL, SLOT, SLOT != 0, variant="uniform").tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])


def test_position_weights_accept_anchors_at_any_slot() -> None:
    weights = position_weights(KL, SLOT, SLOT != 3, variant="paper")
    fraction = math.exp(0.4) / (math.exp(0.4) + math.exp(0.05))
    assert weights.tolist() == pytest.approx([0, 0, fraction, 1 - fraction], abs=1e-6)


def naive_weights(kl: list[float], slot: list[int], anchor: int) -> list[float]:
    """The paper's formula, row by row, in plain Python."""
    at = {s: [k for k, other in zip(kl, slot, strict=True) if other == s] for s in set(slot) - {anchor}}
    total = sum(math.exp(sum(values) / len(values)) for values in at.values())
    weights = []
    for k, s in zip(kl, slot, strict=True):
        if s == anchor:
            weights.append(0.0)
            continue
        fraction = math.exp(sum(at[s]) / len(at[s])) / total
        weights.append(fraction * (k / max(at[s]) if max(at[s]) > 0 else 1.0))
    return weights


rows = st.lists(st.tuples(st.one_of(st.just(0.0), st.floats(1e-6, 20)), st.integers(0, 5)), min_size=1, max_size=24)


@given(rows)
def test_position_weights_equal_the_formula_in_plain_python(rows: list[tuple[float, int]]) -> None:
    kl, slot = map(list, zip(*rows, strict=True))
    kl = torch.tensor(kl).tolist()  # as float32
    slot_id_N = torch.tensor(slot)
    ours = position_weights(torch.tensor(kl), slot_id_N, slot_id_N != 0, variant="paper")
    assert ours.tolist() == pytest.approx(naive_weights(kl, slot, 0), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("variant", ["paper", "official", "uniform"])
@given(rows=rows, order=st.randoms(use_true_random=False))
def test_position_weights_do_not_depend_on_the_order_of_rows(
    variant: str, rows: list[tuple[float, int]], order: object
) -> None:
    shuffled = list(range(len(rows)))
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    kl, slot = torch.tensor([kl for kl, _ in rows]), torch.tensor([slot for _, slot in rows])
    trivial = slot != 0
    one = position_weights(kl, slot, trivial, variant=variant)[shuffled]  # type: ignore[arg-type]
    other = position_weights(kl[shuffled], slot[shuffled], trivial[shuffled], variant=variant)  # type: ignore[arg-type]
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", ["paper", "official", "uniform"])
def test_position_weights_of_anchors_only_are_zero(variant: str) -> None:
    anchors = torch.zeros(2, dtype=torch.bool)
    weights = position_weights(torch.tensor([0.3, 0.1]), torch.tensor([2, 2]), anchors, variant=variant)  # type: ignore[arg-type]
    assert weights.tolist() == [0.0, 0.0]


def test_position_weights_of_a_solved_slot_have_ratio_one() -> None:
    weights = position_weights(torch.zeros(2), torch.tensor([1, 2]), torch.ones(2, dtype=torch.bool), variant="paper")
    assert weights.tolist() == [0.5, 0.5]


def test_position_weights_of_a_single_row_are_one() -> None:
    """Why weights are made of the global batch: on a micro-batch of one row the method is gone."""
    assert position_weights(torch.tensor([0.7]), torch.tensor([5]), torch.tensor([True]), variant="paper").item() == 1


def test_position_weights_are_detached_and_float32() -> None:
    weights = position_weights(KL.bfloat16().requires_grad_(), SLOT, SLOT != 0, variant="paper")
    assert not weights.requires_grad
    assert weights.dtype == torch.float32


@pytest.mark.parametrize(
    ("kl", "slot", "message"),
    [
        (torch.tensor([0.1, math.nan, 0.2]), torch.tensor([1, 2, 3]), r"finite and >= 0: rows \[1\] are \[nan\]"),
        (torch.tensor([math.inf, 0.1]), torch.tensor([0, 2]), r"rows \[0\] are \[inf\]"),
        (torch.tensor([0.1, -0.5]), torch.tensor([1, 2]), r"rows \[1\] are \[-0.5\]"),
        (torch.zeros(2), torch.zeros(3), r"expected three tensors of shape \(N,\), got \(2,\), \(3,\), \(3,\)"),
        (torch.zeros(2, 1), torch.zeros(2, 1), r"three tensors of shape \(N,\), got \(2, 1\), \(2, 1\), \(2, 1\)"),
    ],
)
def test_position_weights_name_invalid_input(kl: Tensor, slot: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        position_weights(kl, slot, slot != 0, variant="paper")


@pytest.mark.parametrize(("excess", "expected"), [(0.02, [0.75, 0.25]), (0.002, [0.525, 0.475])])
def test_adaptive_weights_divide_by_at_least_a_hundredth_of_a_nat(excess: float, expected: list[float]) -> None:
    """The mean excess is that, and then a tenth of it: (1 - e / .02 + excess / .02) / 2."""
    weights = adaptive_weights(torch.tensor([excess, 0.0]), torch.zeros(2), torch.ones(2, dtype=torch.bool))
    assert weights.tolist() == pytest.approx(expected)
