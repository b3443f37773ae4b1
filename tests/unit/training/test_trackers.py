import sys
from typing import Any

import pytest

from pos2distill.errors import UserError
from pos2distill.training.loop import StepRecord
from pos2distill.training.trackers import Tracker, check_trackers, open_trackers

RECORD = StepRecord(
    examples=("a", "b"),
    fraction=0.5,
    step=7,
    epoch=0,
    rows=4,
    loss=0.5,
    loss_trivial=0.25,
    loss_anchor=None,
    grad_norm=2.0,
    learning_rate=1e-3,
    weight_by_slot={1: 1.0},
)


def test_tracker_logs_values_under_their_step_without_gaps() -> None:
    logged: list[Any] = []
    Tracker(lambda values, step: logged.append((values, step)), lambda: None).log(RECORD)
    values = {"loss": 0.5, "loss_trivial": 0.25, "grad_norm": 2.0, "learning_rate": 1e-3}
    assert logged == [({f"train/{name}": value for name, value in values.items()}, 7)]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_check_trackers_names_a_missing_package(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        check_trackers([name])
    assert str(caught.value) == f"runtime.trackers: {name} is not installed; pip install {name}"


def test_check_trackers_accepts_none() -> None:
    assert open_trackers([], run="r", folder="f", settings={}) == []
