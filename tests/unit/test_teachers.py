from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pos2distill.config import Recipe, Study
from pos2distill.errors import UserError
from pos2distill.models.load import load_model
from pos2distill.models.responses import ResponseBatch, predicting_hidden
from pos2distill.training.rows import Row
from pos2distill.training.teachers import ResidentStates, cached_states
from tests.unit.conftest import Source


@pytest.fixture
def source(make_recipe: Callable[..., Recipe], make_source: Callable[[Study], Source]) -> Source:
    return make_source(make_recipe().study)


@pytest.fixture
def rows(source: Source) -> list[Row]:
    """Rows of three examples, mixed."""
    return [source.row(*key) for key in ((2, (1,)), (0, (0,)), (2, (3,)), (1, (2,)), (0, (1,)))]


def test_resident_states_equal_cached_ones(source: Source, rows: list[Row]) -> None:
    lm = load_model(source.study.model)
    seen: list[int] = []

    @torch.no_grad()
    def frozen(batch: ResponseBatch) -> torch.Tensor:
        seen.append(len(batch.input_ids_BL))
        return predicting_hidden(lm, batch)

    resident = ResidentStates(frozen, alignment="shifted")(rows)
    torch.testing.assert_close(resident, cached_states(rows), rtol=0, atol=1e-5)
    assert seen == [3]  # once for each example, not for each row


def test_cached_states_stand_in_the_rows_order(rows: list[Row]) -> None:
    parts = cached_states(rows).split([len(row.response_ids) for row in rows])
    assert all(torch.equal(part, row.teacher_TH) for part, row in zip(parts, rows, strict=True))


def test_missing_states_are_told(rows: list[Row]) -> None:
    rows[1] = replace(rows[1], teacher_TH=None)
    with pytest.raises(UserError, match=r"hold no teacher states; sample again with method.teacher=cached"):
        cached_states(rows)
