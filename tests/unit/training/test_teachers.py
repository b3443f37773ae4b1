from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.losses.kl import forward_kl
from pos2distill.models.hidden_states import hidden_from_bytes, response_hidden_states
from pos2distill.models.load import load_model
from pos2distill.models.packing import ResponseBatch
from pos2distill.training.rows import Row
from pos2distill.training.teachers import (
    CachedTeacher,
    FullDistribution,
    ResidentTeacher,
    TeacherSource,
    TopKDistribution,
    TopKTeacher,
    build_teacher,
)
from tests.support.samples import Source

CPU = torch.device("cpu")
VOCABULARY = 300


def mixed_rows(source: Source) -> list[Row]:
    """Rows of three examples, mixed."""
    return [source.row(*key) for key in ((2, (1,)), (0, (0,)), (2, (3,)), (1, (2,)), (0, (1,)))]


def teacher_of(source: Source) -> TeacherSource:
    teacher = build_teacher(source.study, not_called, CPU)
    assert teacher is not None
    return teacher


def not_called(batch: ResponseBatch) -> torch.Tensor:
    raise AssertionError("only a resident teacher computes")


def full_distribution(source: Source) -> FullDistribution:
    distribution = teacher_of(source)(mixed_rows(source))
    assert isinstance(distribution, FullDistribution)
    return distribution


def logits(source: Source, row: Row) -> torch.Tensor:
    """The base model's, by the plain way."""
    ids, start = [*row.sample.teacher_prompt_ids, *row.sample.response_ids], len(row.sample.teacher_prompt_ids) - 1
    with torch.no_grad():
        logits_LV = load_model(source.study.model)(torch.tensor([ids])).logits[0]
    return logits_LV[start : start + len(row.response_ids)]


def student_logits(like: torch.Tensor) -> torch.Tensor:
    return torch.randn(len(like), VOCABULARY, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ({}, CachedTeacher),
        ({"teacher": "resident"}, ResidentTeacher),
        ({"teacher": "topk"}, TopKTeacher),
        ({"name": "r2", "weights": "adaptive"}, CachedTeacher),
        ({"name": "seqkd", "teacher": "resident"}, type(None)),
        ({"name": "sft", "teacher": "topk"}, type(None)),
    ],
)
def test_build_teacher_makes_the_one_named_if_the_method_has_one(
    make_recipe: Callable[..., Recipe], method: dict[str, str], kind: type
) -> None:
    assert type(build_teacher(make_recipe(method=method).study, not_called, CPU)) is kind


def test_resident_teacher_equals_the_cached_one(make: Callable[..., Source]) -> None:
    source = make()
    lm = load_model(source.study.model, packed=True)
    seen: list[int] = []

    @torch.no_grad()
    def frozen(batch: ResponseBatch) -> torch.Tensor:
        seen.append(batch.row_count)
        return response_hidden_states(lm, batch)

    cached = full_distribution(source)
    resident = ResidentTeacher(cached.head, frozen)(mixed_rows(source))
    torch.testing.assert_close(resident.hidden_TH, cached.hidden_TH, rtol=0, atol=1e-5)
    assert seen == [3]  # once for each example, not for each row
    student_TV = student_logits(cached.hidden_TH)
    torch.testing.assert_close(resident.kl(student_TV), cached.kl(student_TV), rtol=1e-5, atol=1e-5)


def test_resident_teacher_tells_two_responses_to_one_example_apart(make: Callable[..., Source]) -> None:
    """On-policy, every row of an example has a response of its own."""
    source = make()
    lm = load_model(source.study.model, packed=True)
    first = source.row(0, (1,))
    other_ids = first.response_ids[1:]
    second = replace(first, response_ids=other_ids, sample=replace(first.sample, response_ids=other_ids))

    @torch.no_grad()
    def frozen(batch: ResponseBatch) -> torch.Tensor:
        return response_hidden_states(lm, batch)

    distribution = ResidentTeacher(full_distribution(source).head, frozen)([first, second])
    expected = torch.cat([logits(source, first), logits(source, second)])
    torch.testing.assert_close(distribution.head(distribution.hidden_TH), expected, rtol=1e-4, atol=1e-4)


def test_cached_teacher_returns_states_in_the_order_of_rows(make: Callable[..., Source]) -> None:
    source = make()
    rows = mixed_rows(source)
    parts = full_distribution(source).hidden_TH.split([len(row.response_ids) for row in rows])
    for part, row in zip(parts, rows, strict=True):
        assert row.sample.hidden is not None
        assert torch.equal(part, hidden_from_bytes(row.sample.hidden, "float32", len(row.response_ids)))


def test_cached_teacher_requires_stored_states(make: Callable[..., Source]) -> None:
    source = make()
    rows = mixed_rows(source)
    rows[1] = replace(rows[1], sample=replace(rows[1].sample, hidden=None))
    with pytest.raises(
        UserError, match=r"^the sample of example \S+ has no teacher states; delete the samples and sample again with"
    ):
        teacher_of(source)(rows)


@pytest.mark.parametrize("teacher", ["cached", "resident"])
def test_full_distribution_has_the_divergence_of_the_method(make: Callable[..., Source], teacher: str) -> None:
    source = make(method={"teacher": teacher, "divergence": "reverse"})
    rows = mixed_rows(source)
    lm = load_model(source.study.model, packed=True)
    found = build_teacher(source.study, lambda batch: response_hidden_states(lm, batch).detach(), CPU)
    assert found is not None
    teacher_TV = torch.cat([logits(source, row) for row in rows])
    student_TV = student_logits(teacher_TV)
    log_q_TV, log_p_TV = student_TV.log_softmax(-1), teacher_TV.log_softmax(-1)
    expected_T = (log_q_TV.exp() * (log_q_TV - log_p_TV)).sum(-1)
    torch.testing.assert_close(found(rows).kl(student_TV), expected_T, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(expected_T, forward_kl(teacher_TV, student_TV), rtol=1e-2)


@pytest.mark.parametrize("k", [1, 20, VOCABULARY])
def test_topk_distribution_kl_is_a_lower_bound_of_the_exact_kl(make: Callable[..., Source], k: int) -> None:
    source = make(method={"teacher": "topk", "teacher_topk": k})
    rows = mixed_rows(source)
    top = teacher_of(source)(rows)
    assert isinstance(top, TopKDistribution)
    teacher_TV = torch.cat([logits(source, row) for row in rows])
    assert len(top.ids_TK) == len(teacher_TV)
    student_TV = student_logits(teacher_TV)
    bound_T, exact_T = top.kl(student_TV), forward_kl(teacher_TV, student_TV)
    assert (bound_T <= exact_T + 1e-5).all()
    assert torch.allclose(bound_T, exact_T, rtol=1e-4, atol=1e-5) == (k == VOCABULARY)
