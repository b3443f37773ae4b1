"""How exact are the KL at the output head and its two gradients, compared with TRL's kernel and with a linear layer?

Every variant gets the same inputs, and a reference is computed from them in double precision. Run:

  python -m benchmarks.precision.precision [--device cuda] [--trl FOLDER] [--floor]

FOLDER holds TRL 1.16, which is not a dependency of the project:
  uv pip install --target FOLDER --no-deps trl==1.16.* datasets xxhash multiprocess dill

Shapes: T tokens, t of them at once, H hidden size, V vocabulary.
"""

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.circumstances import circumstances
from pos2distill.losses.kl import forward_kl
from pos2distill.models.loss_head import LossHead, float32_logits

VOCABULARY = 128_000
REFERENCE_TOKENS = 32  # at once, in double precision

Heads = tuple[Tensor, Tensor, Tensor, Tensor]
"""States and weights of the student, then of the teacher: (T, H), (V, H), (T, H), (V, H)."""

RELATIVE_ERRORS = ("kl", "states_gradient", "head_gradient")

Computed = tuple[Tensor, Tensor, Tensor]
"""The KL of each token, and the gradients of the student's states and weights: (T,), (T, H), (V, H)."""


@dataclass(frozen=True)
class Case:
    """One case of the comparison.

    precision: the precision of all inputs; autocast: the student's are float32 and rounded by autocast, the teacher's
        are bfloat16.
    spread: standard deviation of the logits.
    distance: the distance between student and teacher, relative to both states and weights.
    tokens, size, vocabulary: T, H and V.
    """

    precision: str
    spread: float
    distance: float
    tokens: int = 32
    size: int = 64
    vocabulary: int = VOCABULARY


CASES = [
    *(Case(precision, 1, 0.01) for precision in ("bfloat16", "autocast", "float32")),
    *(Case(precision, 3, 0.003) for precision in ("bfloat16", "autocast", "float32")),
    *(Case(precision, 20, 0.003) for precision in ("bfloat16", "autocast", "float32")),
    Case("bfloat16", 4, 0.02, tokens=300, size=256),  # the case in tests/gpu/test_loss_head.py
]
# How large must a KL be so that its value and the direction of its gradient are more than rounding? First come the
# bfloat16 cases from above with a large vocabulary and growing spread, then models that are closer and closer.
FLOOR_CASES = [
    *(case for case in CASES if case.precision == "bfloat16" and case.tokens == 32),
    *(Case("bfloat16", 3.1, distance, 128, vocabulary=32_000) for distance in (0.03, 0.01, 0.003, 0.001, 0.0003)),
]


def draw(case: Case, device: str) -> Heads:
    """Normal random numbers, drawn on the CPU so that every device gets the same ones."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    scale = case.spread / case.size**0.5
    teacher_TH, teacher_VH = normal(case.tokens, case.size), scale * normal(case.vocabulary, case.size)
    student_TH = teacher_TH + case.distance * normal(case.tokens, case.size)
    student_VH = teacher_VH + case.distance * scale * normal(case.vocabulary, case.size)
    of_student = torch.bfloat16 if case.precision == "bfloat16" else torch.float32
    of_teacher = torch.float32 if case.precision == "float32" else torch.bfloat16
    return (
        student_TH.to(device, of_student),
        student_VH.to(device, of_student),
        teacher_TH.to(device, of_teacher),
        teacher_VH.to(device, of_teacher),
    )


def token_weights(tokens: int, device: torch.device) -> Tensor:
    """The derivative of the loss by the KL of each token."""
    return torch.linspace(0.5, 1.5, tokens, device=device)


def reference(case: Case, heads: Heads) -> tuple[Computed, Tensor]:
    """The definitions, in double precision, with the derivative by the logits written out: w_t (q - p).

    Returns: KL and gradients, and the teacher's entropy at each token.
    """
    student_TH, student_VH, teacher_TH, teacher_VH = heads
    if case.precision == "autocast":
        student_TH, student_VH = student_TH.bfloat16(), student_VH.bfloat16()
    student_TH, student_VH = student_TH.double(), student_VH.double()
    teacher_TH, teacher_VH = teacher_TH.double(), teacher_VH.double()
    weight_T = token_weights(len(student_TH), student_TH.device).double()
    kl, entropy, to_states = [], [], []
    to_head_VH = torch.zeros_like(student_VH)
    for start in range(0, case.tokens, REFERENCE_TOKENS):
        chunk = slice(start, start + REFERENCE_TOKENS)
        log_p_tV = (teacher_TH[chunk] @ teacher_VH.T).log_softmax(-1)
        log_q_tV = (student_TH[chunk] @ student_VH.T).log_softmax(-1)
        p_tV = log_p_tV.exp()
        kl.append((p_tV * (log_p_tV - log_q_tV)).sum(-1))
        entropy.append(-(p_tV * log_p_tV).sum(-1))
        to_logits_tV = weight_T[chunk, None] * (log_q_tV.exp() - p_tV)
        to_states.append(to_logits_tV @ student_VH)
        to_head_VH += to_logits_tV.T @ student_TH[chunk]
    return (torch.cat(kl), torch.cat(to_states), to_head_VH), torch.cat(entropy)


def ours(head: nn.Linear, states_TH: Tensor, teacher_TH: Tensor, teacher_VH: Tensor) -> Tensor:
    """The product's loss head."""
    kl_T: Tensor = LossHead(head)(
        states_TH,
        token_losses=lambda logits_tV, chunk: forward_kl(float32_logits(teacher_TH[chunk], teacher_VH), logits_tV),
    )
    return kl_T


def linear_layer(head: nn.Linear, states_TH: Tensor, teacher_TH: Tensor, teacher_VH: Tensor) -> Tensor:
    """Logits as a linear layer returns them, in the dtype of its inputs; the KL in float32."""
    with torch.no_grad():
        teacher_TV = F.linear(teacher_TH, teacher_VH)
    return forward_kl(teacher_TV, head(states_TH))


def trl(head: nn.Linear, states_TH: Tensor, teacher_TH: Tensor, teacher_VH: Tensor) -> Tensor:
    """The kernel of TRL 1.16's `DistillationTrainer` at beta = 0."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    kl_T: Tensor = ChunkedDivergenceFunction.apply(states_TH, head.weight, None, teacher_TH, teacher_VH, None, 0.0)[0]
    return kl_T


VARIANTS: dict[str, Callable[[nn.Linear, Tensor, Tensor, Tensor], Tensor]] = {
    "ours": ours,
    "linear_layer": linear_layer,
    "trl": trl,
}


def compute(case: Case, heads: Heads, variant: str) -> Computed:
    """KL and gradients of one variant."""
    student_TH, student_VH, teacher_TH, teacher_VH = heads
    states_TH = student_TH.clone().requires_grad_()
    head = nn.Linear(1, 1, bias=False)
    head.weight = nn.Parameter(student_VH)
    with torch.autocast(student_TH.device.type, torch.bfloat16, enabled=case.precision == "autocast"):
        kl_T = VARIANTS[variant](head, states_TH, teacher_TH, teacher_VH)
    (token_weights(len(kl_T), kl_T.device) * kl_T).sum().backward()
    assert states_TH.grad is not None
    assert head.weight.grad is not None
    return kl_T.detach(), states_TH.grad, head.weight.grad


def errors(found: Computed, expected: Computed) -> dict[str, float]:
    """How far a variant is from the reference.

    kl, states_gradient, head_gradient: the norm of the difference divided by the norm of the reference.
    kl_mean, kl_largest: the mean and the largest error of a token's KL, in nats.
    states_cosine, head_cosine: the cosine between the gradient and that of the reference.
    """
    kl_error_T = (found[0].double() - expected[0]).abs()
    result = {"kl_mean": float(kl_error_T.mean()), "kl_largest": float(kl_error_T.max())}
    for name, one, other in zip(RELATIVE_ERRORS, found, expected, strict=True):
        result[name] = float((one.double() - other).norm() / other.norm())
    for name, one, other in zip(("states_cosine", "head_cosine"), found[1:], expected[1:], strict=True):
        result[name] = float(F.cosine_similarity(one.double().flatten(), other.flatten(), dim=0))
    return result


def measure(case: Case, device: str, variants: list[str]) -> dict[str, Any]:
    """The errors of all variants, and what the distributions are like: mean and largest KL, mean entropy, in nats."""
    heads = draw(case, device)
    expected, entropy_T = reference(case, heads)
    result = asdict(case) | {"kl": float(expected[0].mean()), "largest_kl": float(expected[0].max())}
    result |= {"entropy": float(entropy_T.mean()), "errors": {}}
    for variant in variants:
        result["errors"][variant] = errors(compute(case, heads, variant), expected)
    if "trl" in variants:
        ours_errors, trl_errors = result["errors"]["ours"], result["errors"]["trl"]
        result["ours_over_trl"] = {name: ours_errors[name] / trl_errors[name] for name in RELATIVE_ERRORS}
    return result


def write_report(name: str, cases: list[Case], device: str, variants: list[str]) -> None:
    """Measure cases, and write their report to this folder."""
    start = time.monotonic()
    results = []
    for case in cases:
        results.append(measure(case, device, variants))
        print(json.dumps(results[-1]), flush=True)
    packages = ["torch", "transformers", *(["trl"] if "trl" in variants else [])]
    report = {"cases": results, "seconds": round(time.monotonic() - start)}
    report |= circumstances(*packages, device=device)
    Path(__file__).with_name(f"{name}_{device}.json").write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    """Write the reports of both lists of cases, or of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--trl", help="folder with TRL 1.16; by default, its kernel is left out")
    parser.add_argument("--floor", action="store_true", help="only the cases at the noise floor")
    options = parser.parse_args()
    if options.trl:
        sys.path.append(options.trl)  # after the environment's own packages
    has_trl = importlib.util.find_spec("trl") is not None
    variants = [name for name in VARIANTS if name != "trl" or has_trl]
    if not options.floor:
        write_report("precision", CASES, options.device, variants)
    write_report("precision_floor", FLOOR_CASES, options.device, variants)


if __name__ == "__main__":
    main()
