"""The output head's products in float32 on a GPU, against the same in double precision."""

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from pos2distill.losses.kl import forward_kl
from pos2distill.models.loss_head import LossHead, float32_logits

TOKENS, VOCABULARY, SIZE = 300, 128_000, 256
REPORT = Path(__file__).parents[2] / "benchmarks" / "precision" / "precision_cpu.json"


def errors_of_trl() -> dict[str, float]:
    """Of TRL 1.16's kernel with these sizes and distances, which on a CPU rounds where both round on a GPU."""
    for case in json.loads(REPORT.read_text())["cases"]:
        if (case["precision"], case["tokens"], case["size"]) == ("bfloat16", TOKENS, SIZE):
            errors: dict[str, float] = case["errors"]["trl"]
            return errors
    raise AssertionError(f"{REPORT}: no case of these sizes")


def draw() -> tuple[Tensor, ...]:
    """States and heads in bfloat16: the student's, then the teacher's."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    teacher_TH, teacher_VH = normal(TOKENS, SIZE), 4 / SIZE**0.5 * normal(VOCABULARY, SIZE)
    student_TH, student_VH = teacher_TH + 0.02 * normal(TOKENS, SIZE), teacher_VH + 0.005 * normal(VOCABULARY, SIZE)
    return tuple(each.bfloat16() for each in (student_TH, student_VH, teacher_TH, teacher_VH))


def test_loss_head_in_bfloat16_on_a_gpu_is_exact_up_to_its_inputs() -> None:
    """In several chunks; errors are at most twice those of TRL's kernel.

    The gradient of the logits and those of the parameters are rounded to bfloat16, once each.
    """
    student_TH, student_VH, teacher_TH, teacher_VH = draw()
    lm_head = nn.Linear(SIZE, VOCABULARY, bias=False, device="cuda", dtype=torch.bfloat16)
    lm_head.weight = nn.Parameter(student_VH.clone())
    head, states_TH = LossHead(lm_head), student_TH.clone().requires_grad_()
    kl_T = head(
        states_TH,
        token_losses=lambda logits_tV, chunk: forward_kl(float32_logits(teacher_TH[chunk], teacher_VH), logits_tV),
    )
    kl_T.sum().backward()
    exact_TH, exact_VH = (each.double().requires_grad_() for each in (student_TH, student_VH))
    log_q_TV = (exact_TH @ exact_VH.T).log_softmax(-1)
    log_p_TV = (teacher_TH.double() @ teacher_VH.double().T).log_softmax(-1)
    exact_T = (log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(-1)
    exact_T.sum().backward()
    limits = errors_of_trl()
    for name, found, expected in (
        ("kl", kl_T, exact_T),
        ("states_gradient", states_TH.grad, exact_TH.grad),
        ("head_gradient", lm_head.weight.grad, exact_VH.grad),
    ):
        assert found is not None
        assert expected is not None
        assert (found.double() - expected).norm() <= 2 * limits[name] * expected.norm()
