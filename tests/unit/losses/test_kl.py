import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pos2distill.losses.kl import forward_kl, mean_by_row, reverse_kl, topk_kl


def test_forward_kl_by_hand() -> None:
    # p = (1/2, 1/2), q = (1/4, 3/4):  ln(2)/2 + ln(2/3)/2 = ln(4/3)/2
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2):  ln(2)/2 + 0 - ln(2)/4 = ln(2)/4
    two = forward_kl(torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]).log())
    three = forward_kl(torch.tensor([[2.0, 1.0, 1.0]]).log(), torch.tensor([[1.0, 1.0, 2.0]]).log())
    assert two.item() == pytest.approx(math.log(4 / 3) / 2, abs=1e-6)
    assert three.item() == pytest.approx(math.log(2) / 4, abs=1e-6)


def test_forward_kl_is_forward_and_not_reverse() -> None:
    teacher, student = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]).log()
    # Reverse: (1/4) ln(1/2) + (3/4) ln(3/2) = 0.1308, forward: 0.1438.
    assert forward_kl(teacher, student).item() == pytest.approx(0.1438, abs=1e-4)
    assert forward_kl(student, teacher).item() == pytest.approx(0.1308, abs=1e-4)


def numpy_kl(teacher: np.ndarray, student: np.ndarray) -> np.ndarray:
    """The definition, in float64, from probabilities."""

    def probabilities(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    p, q = probabilities(teacher), probabilities(student)
    return (p * (np.log(p) - np.log(q))).sum(-1)


@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_forward_kl_equals_numpy_in_double_precision(scale: float) -> None:
    random = np.random.default_rng(0)
    teacher, student = (random.normal(0, scale, (50, 97)).astype(np.float32) for _ in range(2))
    ours = forward_kl(torch.from_numpy(teacher), torch.from_numpy(student)).numpy()
    np.testing.assert_allclose(ours, numpy_kl(teacher, student), rtol=1e-5, atol=1e-6)


def test_forward_kl_of_bfloat16_logits_is_computed_in_float32() -> None:
    teacher, student = (torch.randn(20, 50, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    ours = forward_kl(teacher, student)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, forward_kl(teacher.float(), student.float()), rtol=0, atol=0)


@given(st.integers(0, 2**31), st.sampled_from([1e-4, 1.0, 30.0]))
def test_forward_kl_is_never_negative_and_zero_for_equal_logits(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(4, 11, generator=generator) * scale for _ in range(2))
    assert (forward_kl(teacher, student) >= 0).all()
    assert forward_kl(teacher, teacher).tolist() == [0.0] * 4
    # Logits that differ by a constant mean the same distribution.
    assert forward_kl(teacher, teacher + 3).max() < 1e-4


def test_forward_kl_gradient_is_student_minus_teacher() -> None:
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(3, 7, generator=generator, requires_grad=True) for _ in range(2))
    forward_kl(teacher, student).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
    torch.testing.assert_close(student.grad, student.softmax(-1) - teacher.softmax(-1), rtol=1e-4, atol=1e-6)


def test_forward_kl_names_unequal_shapes() -> None:
    with pytest.raises(ValueError, match=r"expected equal shapes, got teacher \(2, 3\), student \(2, 4\)"):
        forward_kl(torch.zeros(2, 3), torch.zeros(2, 4))


# --- reverse_kl


def test_reverse_kl_by_hand() -> None:
    """q = (1/2, 1/2) and p = (1/4, 3/4): KL(q || p) is 1/2 ln 2 + 1/2 ln(2/3)."""
    student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 3.0]]).log()
    assert reverse_kl(student, teacher).item() == pytest.approx(math.log(2) / 2 + math.log(2 / 3) / 2)


def test_reverse_kl_gradient_flows_to_the_student_only() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 7, generator=generator, requires_grad=True) for _ in range(2))
    reverse_kl(student, teacher).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_reverse_kl_of_bfloat16_logits_is_the_forward_kl_of_swapped_models_in_float32() -> None:
    """KL(student || teacher) is the forward KL in which the student is the teacher."""
    student, teacher = (torch.randn(20, 50, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    ours = reverse_kl(student, teacher)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, forward_kl(student, teacher), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(20))
def test_reverse_kl_of_equal_distributions_is_not_negative(seed: int) -> None:
    """Logits that differ by a constant mean the same distribution; rounding alone would make some values negative."""
    logits = torch.randn(50, 50, generator=torch.Generator().manual_seed(seed))
    kl = reverse_kl(logits, logits + 3)
    assert (kl >= 0).all()
    assert kl.max() < 1e-4


# --- topk_kl: the most likely tokens, and one bucket for the rest


def top(teacher_TV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs_TK, ids_TK = teacher_TV.log_softmax(-1).topk(k)
    return ids_TK.int(), logprobs_TK


def test_topk_kl_by_hand() -> None:
    # p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2), one token kept: of (1/2, 1/2) and (1/4, 3/4), ln(4/3)/2;
    # all kept: ln(2)/4, as above.
    teacher, student = torch.tensor([[2.0, 1.0, 1.0]]).log(), torch.tensor([[1.0, 1.0, 2.0]]).log()
    assert topk_kl(*top(teacher, 1), student).item() == pytest.approx(math.log(4 / 3) / 2, abs=1e-6)
    assert topk_kl(*top(teacher, 3), student).item() == pytest.approx(math.log(2) / 4, abs=1e-6)


@given(st.integers(0, 2**31), st.sampled_from([0.1, 1.0, 8.0]))
def test_topk_kl_grows_with_k_to_the_forward_kl(seed: int, scale: float) -> None:
    """The data-processing inequality: merging tokens never makes two distributions easier to tell apart."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (torch.randn(5, 12, generator=generator) * scale for _ in range(2))
    bounds = torch.stack([topk_kl(*top(teacher, k), student) for k in range(1, 13)])
    assert (bounds >= 0).all()
    slack = 1e-6 + 1e-5 * forward_kl(teacher, student)
    assert (bounds[1:] >= bounds[:-1] - slack).all()
    assert ((bounds[-1] - forward_kl(teacher, student)).abs() <= slack).all()


@pytest.mark.parametrize("k", [1, 5, 97])
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
def test_topk_kl_equals_numpy_in_double_precision(k: int, scale: float) -> None:
    random = np.random.default_rng(0)
    teacher, student = (random.normal(0, scale, (50, 97)) for _ in range(2))
    ids, logprobs = top(torch.from_numpy(teacher).float(), k)

    def merged(logits: np.ndarray) -> np.ndarray:
        """Logits of the k tokens and of the rest as one."""
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        kept = np.take_along_axis(weights, ids.long().numpy(), -1)
        rest = np.stack([np.delete(row, chosen).sum() for row, chosen in zip(weights, ids.tolist(), strict=True)])
        return np.log(np.column_stack([kept, rest]) if k < 97 else kept)

    ours = topk_kl(ids, logprobs, torch.from_numpy(student).float()).numpy()
    np.testing.assert_allclose(ours, numpy_kl(merged(teacher), merged(student)), rtol=1e-5, atol=1e-5)


def test_topk_kl_gradient_treats_the_rest_as_one_token() -> None:
    """d KL / d logit: q - p at the kept tokens; elsewhere q scaled by 1 - p(rest) / q(rest)."""
    generator = torch.Generator().manual_seed(0)
    teacher, student = (torch.randn(3, 7, generator=generator, requires_grad=True) for _ in range(2))
    ids, logprobs = top(teacher, 2)
    topk_kl(ids, logprobs, student).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
    p, q = teacher.detach().softmax(-1), student.detach().softmax(-1)
    is_kept = torch.zeros_like(p, dtype=torch.bool).scatter(-1, ids.long(), True)
    rest_p, rest_q = ((each * ~is_kept).sum(-1, keepdim=True) for each in (p, q))
    expected = torch.where(is_kept, q - p, q * (1 - rest_p / rest_q))
    torch.testing.assert_close(student.grad, expected, rtol=1e-4, atol=1e-6)


def test_topk_kl_of_confident_models_is_finite() -> None:
    """A teacher and a student that leave nothing to the rest, in fp32, and a student that leaves all to it."""
    sure, elsewhere = torch.tensor([[90.0, 0.0, 0.0]]), torch.tensor([[-90.0, 0.0, 0.0]], requires_grad=True)
    assert topk_kl(*top(sure, 1), sure).item() == 0
    kl = topk_kl(*top(sure, 1), elsewhere)
    assert kl.item() == pytest.approx(90 + math.log(2), rel=1e-5)
    kl.sum().backward()
    assert elsewhere.grad is not None
    assert elsewhere.grad.isfinite().all()


def test_mean_by_row_by_hand() -> None:
    value = torch.tensor([1.0, 5.0, 2.0, 3.0, 10.0], requires_grad=True)
    mean = mean_by_row(value, torch.tensor([0, 2, 0, 0, 1]), 3)
    assert mean.tolist() == [2.0, 10.0, 5.0]
    mean.sum().backward()
    assert value.grad is not None
    torch.testing.assert_close(value.grad, torch.tensor([1 / 3, 1.0, 1 / 3, 1 / 3, 1.0]))
