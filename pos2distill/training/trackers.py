"""Step records to TensorBoard, Weights & Biases or MLflow, through their own libraries."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pos2distill.errors import UserError

if TYPE_CHECKING:
    from pos2distill.training.loop import StepRecord

_LOGGED = ("loss", "loss_trivial", "loss_anchor", "grad_norm", "learning_rate")


def check_trackers(names: Sequence[str]) -> None:
    """Check on the driver, before anything expensive starts; the workers have the same packages.

    Raises:
        UserError: naming the package that is not installed.
    """
    for name in names:
        # Looked up and not imported: only the worker of rank 0 logs.
        if importlib.util.find_spec(name) is None:
            raise UserError(f"runtime.trackers: {name} is not installed; pip install {name}")


def open_trackers(names: Sequence[str], *, run: str, folder: str, settings: dict[str, Any]) -> list["Tracker"]:
    """Start each tracker.

    Args:
        run: the run's name. folder: where TensorBoard writes. settings: the study, logged once.
    """
    return [_OPENERS[name](run, folder, settings) for name in names]


class Tracker:
    """One open tracker."""

    def __init__(self, log: Callable[[dict[str, float], int], None], close: Callable[[], None]) -> None:
        self._log = log
        self.close = close

    def log(self, record: "StepRecord") -> None:
        """Log one step's numbers under `train/`."""
        values: dict[str, float] = {}
        for name in _LOGGED:
            value = getattr(record, name)
            # A batch without anchor rows has no anchor loss.
            if value is not None:
                values[f"train/{name}"] = value
        self._log(values, record.step)


def _open_tensorboard(run: str, folder: str, settings: dict[str, Any]) -> Tracker:
    # The packages of trackers are optional, so each is imported only when a study names it.
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder)  # type: ignore[no-untyped-call]
    writer.add_text("study", f"```\n{settings}\n```")  # type: ignore[no-untyped-call]

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]

    return Tracker(log, writer.close)


def _open_wandb(run: str, folder: str, settings: dict[str, Any]) -> Tracker:
    import wandb

    session = wandb.init(project="pos2distill", name=run, config=settings)
    return Tracker(lambda values, step: session.log(values, step=step), session.finish)


def _open_mlflow(run: str, folder: str, settings: dict[str, Any]) -> Tracker:
    import mlflow

    mlflow.set_experiment("pos2distill")
    mlflow.start_run(run_name=run)
    mlflow.log_dict(settings, "study.json")
    return Tracker(lambda values, step: mlflow.log_metrics(values, step=step), mlflow.end_run)


_OPENERS: dict[str, Callable[[str, str, dict[str, Any]], Tracker]] = {
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
}
