"""What to change where a GPU's memory does not hold training."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from pos2distill.config import Study, TrainersSection
from pos2distill.errors import MachineError, UserError
from pos2distill.training.micro_batches import MicroBatch


@contextmanager
def explain_memory_of_model(study: Study, trainers: TrainersSection) -> Iterator[None]:
    """Load the model, its optimizer and the last state of training.

    Raises:
        UserError: if a GPU's memory does not hold them.
    """

    def explain() -> UserError:
        remedies = _join(_larger(study, trainers))
        return UserError(f"training: the memory of a GPU does not hold the model and its optimizer; {remedies}")

    with _raise_for_lack_of_memory(explain):
        yield


@contextmanager
def explain_memory_of_step(
    study: Study, trainers: TrainersSection, micro_batches: Sequence[MicroBatch], *, is_first: bool
) -> Iterator[None]:
    """Run a step. is_first: since the process has started.

    Raises:
        UserError: if a GPU's memory does not hold the first step: another start would end in the same way.
        MachineError: if it does not hold a later one. That may pass, as where memory is fragmented.
    """

    def explain() -> UserError:
        largest = max(sum(micro.batch.packed.query_lengths) for micro in micro_batches)
        remedies = _join([*_smaller(trainers, micro_batches), *_larger(study, trainers)])
        kind = UserError if is_first else MachineError
        return kind(
            f"training: the memory of a GPU does not hold a step, whose largest micro-batch has {largest} tokens; "
            f"{remedies}; the same command continues"
        )

    with _raise_for_lack_of_memory(explain):
        yield


@contextmanager
def _raise_for_lack_of_memory(explain: Callable[[], UserError]) -> Iterator[None]:
    """Raise what `explain` returns in place of an error of a GPU's memory."""
    try:
        yield
    except RuntimeError as error:
        if not _is_lack_of_memory(error):
            raise
        raise explain() from error


def _is_lack_of_memory(error: RuntimeError) -> bool:
    """Whether a GPU's memory is full: for torch's allocator, or for CUDA itself, which has no class of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, torch.AcceleratorError) and "out of memory" in str(error)


def _smaller(trainers: TrainersSection, micro_batches: Sequence[MicroBatch]) -> list[str]:
    """What makes a pass need less memory."""
    remedies = ["lower data.documents"]
    if any(len(micro.rows) > 1 for micro in micro_batches):
        remedies = [f"lower runtime.trainers.micro_batch_tokens ({trainers.micro_batch_tokens})"]
    if not trainers.gradient_checkpointing:
        remedies.append("set runtime.trainers.gradient_checkpointing to true")
    return remedies


def _larger(study: Study, trainers: TrainersSection) -> list[str]:
    """What makes the model and its optimizer need less of a GPU."""
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
