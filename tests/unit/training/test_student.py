from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pos2distill.config import Recipe, Study
from pos2distill.losses.kl import mean_by_row
from pos2distill.models.head import FrozenHead
from pos2distill.models.hidden_states import response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch, collate
from pos2distill.training.rows import Row
from pos2distill.training.student import Student, prepare_for_training, trainable
from pos2distill.training.teachers import CachedTeacher, FullDistribution, TeacherDistribution, TopKDistribution
from scripts.model_families import save_tiny
from tests.support.samples import Source


@pytest.fixture
def parts(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]
) -> tuple[Student, ResponseBatch, FullDistribution]:
    """A student that has moved away from its teacher, a batch of 8 rows, and the teacher's states."""
    study = make_recipe().study
    source = make_source(study)
    rows = [source.build.row(key) for key in source.row_keys()[:8]]
    student = Student(load_model(study.model), study)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in student.lm.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    batch = collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    return student, batch, distribution_of(study, rows)


def distribution_of(study: Study, rows: Sequence[Row]) -> FullDistribution:
    return CachedTeacher(FrozenHead.from_checkpoint(study.model, torch.float32))(rows)


def naive_kl(student: Student, batch: ResponseBatch, teacher: FullDistribution) -> Tensor:
    """The plain way: a loop over rows, all logits of each, the definition of KL."""
    teacher_TV = teacher.hidden_TH @ teacher.head.weight_VH.T
    kls, start = [], 0
    for row, ids_L in enumerate(batch.input_ids_S.tensor_split(batch.packed.start_B1[1:-1].long())):
        positions = batch.position_S[batch.logit_index_T[batch.row_T == row]]
        p = teacher_TV[start : start + len(positions)].softmax(-1)
        q = student.lm(input_ids=ids_L[None]).logits[0, positions].softmax(-1)
        kls.append((p * (p.log() - q.log())).sum(-1).mean())
        start += len(positions)
    return torch.stack(kls)


def gradient(student: Student, loss: Tensor) -> Tensor:
    student.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in student.lm.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("together", [1, 7, 1000])
def test_student_value_and_gradient_equal_plain_computation(
    parts: tuple[Student, ResponseBatch, FullDistribution], monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """However many of the tokens' logits are looked at together."""
    student, batch, teacher = parts
    monkeypatch.setattr("pos2distill.models.loss_head.CHUNK_LOGITS", together * 300)
    weight_B = torch.linspace(0.1, 1, 8)  # so that a row taken for another shows
    ours, plain = student(batch, teacher), naive_kl(student, batch, teacher)
    assert plain.min() > 1e-3
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    one, other = (gradient(student, (weight_B * kl_B).sum()) for kl_B in (ours, plain))
    assert (one - other).norm() < 1e-5 * other.norm()
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.norm()))


class LargestTensors(TorchDispatchMode):
    """Watches every tensor that any operation makes, in backward too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[-1] == self.width:
                self.elements = max(self.elements, leaf.numel())
        return result


def test_student_computes_logits_for_a_chunk_of_response_tokens_only(
    parts: tuple[Student, ResponseBatch, FullDistribution], monkeypatch: pytest.MonkeyPatch
) -> None:
    student, batch, teacher = parts
    vocabulary, chunk = 300, 33  # more logits than the head, 32 * 300, which is transposed
    assert chunk < len(batch.row_T)
    monkeypatch.setattr("pos2distill.models.loss_head.CHUNK_LOGITS", chunk * vocabulary)
    with LargestTensors(vocabulary) as watched:
        student(batch, teacher).sum().backward()
    assert watched.elements == chunk * vocabulary
    with LargestTensors(vocabulary) as plain:
        naive_kl(student, batch, teacher).sum().backward()
    assert plain.elements == batch.packed.longest * vocabulary  # the watch does see them


def test_student_loss_on_anchor_rows_is_zero_before_training(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]
) -> None:
    study = make_recipe().study
    source = make_source(study)
    rows = [source.row(index, study.fixed_advantageous_slots(1)) for index in range(len(source.examples))]
    student = Student(load_model(study.model), study)
    batch = collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    with torch.no_grad():
        assert student(batch, distribution_of(study, rows)).max() < 1e-6


def test_student_cross_entropy_equals_that_of_transformers(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]
) -> None:
    study = make_recipe(method={"name": "seqkd"}).study
    source = make_source(study)
    student = Student(load_model(study.model), study)
    for row in (source.row(0, (1,)), source.row(1, (3,))):
        own = student(collate([row.prompt_ids], [row.response_ids]), None)
        ids = torch.tensor([[*row.prompt_ids.tolist(), *row.response_ids.tolist()]])
        labels = ids.clone()
        labels[0, : len(row.prompt_ids)] = -100
        torch.testing.assert_close(own[0], student.lm(input_ids=ids, labels=labels).loss)


def test_full_distribution_cross_entropy_is_the_base_models(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]
) -> None:
    """At the advantageous slot the base model and a student that has not moved lose the same."""
    study = make_recipe(method={"name": "r2", "weights": "adaptive"}).study
    source = make_source(study)
    student = Student(load_model(study.model), study)
    rows = [source.row(index, (0,)) for index in range(3)]
    batch = collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    with torch.no_grad():
        loss_T = distribution_of(study, rows).cross_entropy(batch.target_T)
        torch.testing.assert_close(mean_by_row(loss_T, batch.row_T, 3), student(batch, None))


def test_prepare_for_training_freezes_the_encoder_of_images(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """No token passes through it, so under ZeRO-3 its weights would only decay."""
    recipe = make_recipe()
    lm = load_model(save_tiny("gemma3", tmp_path), packed=True)
    prepare_for_training(lm, recipe.study, recipe.runtime.trainers)
    frozen = {name for name, parameter in lm.named_parameters() if not parameter.requires_grad}
    assert frozen
    assert all("vision_tower" in name or "multi_modal_projector" in name for name in frozen)
    assert not any("vision" in name or "projector" in name for name in trainable(lm))
    assert any("language_model" in name for name in trainable(lm))


def test_prepare_for_training_freezes_corrections_of_routers(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """ERNIE's are parameters."""
    recipe = make_recipe()
    lm = load_model(save_tiny("ernie4_5_moe", tmp_path), packed=True)
    prepare_for_training(lm, recipe.study, recipe.runtime.trainers)
    frozen = {name for name, parameter in lm.named_parameters() if not parameter.requires_grad}
    assert frozen == {"model.layers.1.mlp.gate.moe_statics.e_score_correction_bias"}


def test_prepare_for_training_draws_no_experts_at_random(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """PhiMoE's routers do in training mode, and get no gradient there."""
    recipe = make_recipe(method={"name": "seqkd"})
    model = save_tiny("phimoe", tmp_path)
    initial, lm = (load_model(model, packed=True) for _ in range(2))
    prepare_for_training(lm, recipe.study, recipe.runtime.trainers)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(5, 60, 100).astype(np.int32) for _ in range(6)]
    batch = collate(prompts, [prompt[:20] for prompt in prompts])
    with torch.no_grad():
        expected_TH = response_hidden_states(initial, batch)
        assert torch.equal(response_hidden_states(lm, batch), expected_TH)
    Student(lm, recipe.study)(batch, None).sum().backward()
    routers = [parameter for name, parameter in lm.named_parameters() if "router" in name]
    assert routers
    assert all(router.grad is not None and router.grad.abs().max() > 0 for router in routers)


@pytest.mark.parametrize("teacher_kind", ["hidden states", "top k"])
def test_student_in_bfloat16_computes_the_kl_of_its_states_in_float32(
    make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source], teacher_kind: str
) -> None:
    """Cached and resident teachers give hidden states. The reference is float64, of the same states."""
    study = make_recipe(model={"dtype": "bfloat16"}).study
    source = make_source(study)
    rows = [source.build.row(key) for key in source.row_keys()[:8]]
    batch = collate([row.prompt_ids for row in rows], [row.response_ids for row in rows])
    student = Student(load_model(study.model), study)
    head_VH = student.head.weight.detach().double()
    states = CachedTeacher(FrozenHead.from_checkpoint(study.model, torch.bfloat16))(rows)
    teacher_TV = (states.hidden_TH.double() @ head_VH.T).log_softmax(-1)
    distribution: TeacherDistribution = states
    if teacher_kind == "top k":
        logprobs_TK, ids_TK = teacher_TV.topk(teacher_TV.shape[1])
        distribution = TopKDistribution(ids_TK, logprobs_TK.float())
    with torch.no_grad():
        student_TV = (response_hidden_states(student.lm, batch).double() @ head_VH.T).log_softmax(-1)
        expected_T = (teacher_TV.exp() * (teacher_TV - student_TV)).sum(-1)
        found_B = student(batch, distribution)
    torch.testing.assert_close(found_B.double(), mean_by_row(expected_T, batch.row_T, 8), rtol=1e-5, atol=1e-6)
