"""Turn out-of-memory errors of a GPU into errors that name the settings to change."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pos2distill.config import Study, TrainersSection
from pos2distill.errors import MachineError, UserError
from pos2distill.models.memory import is_out_of_memory
from pos2distill.training.micro_batches import MicroBatch


@contextmanager
def translate_model_oom_error(study: Study, trainers: TrainersSection, workers: int) -> Iterator[None]:
    """Turn an out-of-memory error of a GPU while the model and its state are loaded into a UserError.

    Args:
        workers: how many there are now, which divide the model among them.
    Raises:
        UserError: in place of the out-of-memory error, which would occur again; names the settings to change.
        MachineError: the same where elastic training has fewer workers than it may have: another attempt may get more.
    """

    def make_error() -> UserError:
        remedies = _join(_remedies_for_model(study, trainers))
        kind = MachineError if _may_get_more(trainers, workers) else UserError
        return kind(f"training: the memory of a GPU does not hold the model and its optimizer; {remedies}")

    with _translate_oom_error(make_error):
        yield


@contextmanager
def translate_step_oom_error(
    study: Study, trainers: TrainersSection, micro_batches: Sequence[MicroBatch], workers: int, *, is_first: bool
) -> Iterator[None]:
    """Turn an out-of-memory error of a GPU in a training step into a UserError.

    Args:
        workers: see `translate_model_oom_error`.
        is_first: whether this is the first step since the process has started.
    Raises:
        UserError: in place of the out-of-memory error of a first step, which would fail again after a restart; names
            the settings to change.
        MachineError: the same for a later step, which may succeed after a restart, as where memory is fragmented, and
            as in `translate_model_oom_error`.
    """

    def make_error() -> UserError:
        largest = max(sum(micro.batch.packed.query_lengths) for micro in micro_batches)
        remedies = _join([*_remedies_for_pass(trainers, micro_batches), *_remedies_for_model(study, trainers)])
        kind = UserError if is_first and not _may_get_more(trainers, workers) else MachineError
        return kind(
            f"training: the memory of a GPU does not hold a step, whose largest micro-batch has {largest} tokens; "
            f"{remedies}; the same command continues"
        )

    with _translate_oom_error(make_error):
        yield


@contextmanager
def _translate_oom_error(make_error: Callable[[], UserError]) -> Iterator[None]:
    """Raise the error that `make_error` returns in place of an out-of-memory error of a GPU."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise make_error() from error


def _may_get_more(trainers: TrainersSection, workers: int) -> bool:
    """Whether there can be more workers than these."""
    return workers < (trainers.max_workers or trainers.workers)


def _remedies_for_pass(trainers: TrainersSection, micro_batches: Sequence[MicroBatch]) -> list[str]:
    """Settings with which a pass needs less memory."""
    remedies = ["lower data.documents"]
    if any(len(micro.rows) > 1 for micro in micro_batches):
        remedies = [f"lower runtime.trainers.micro_batch_tokens ({trainers.micro_batch_tokens})"]
    if not trainers.gradient_checkpointing:
        remedies.append("set runtime.trainers.gradient_checkpointing to true")
    return remedies


def _remedies_for_model(study: Study, trainers: TrainersSection) -> list[str]:
    """Settings with which the model and its optimizer need less memory of each GPU."""
    remedies = ["use more workers (runtime.trainers.workers)"]
    if trainers.strategy == "torch":
        remedies = ["set runtime.trainers.strategy to zero3 with more workers"]
    if study.training.lora is None:
        remedies.append("train adapters (training.lora)")
    return remedies


def _join(remedies: Sequence[str]) -> str:
    """Join the remedies in a sentence: a, b or c."""
    *others, last = remedies
    return f"{', '.join(others)} or {last}" if others else last
