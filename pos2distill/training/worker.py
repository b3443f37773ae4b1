"""What runs on each training worker: load, resume, train, save the model."""

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pos2distill.config import fingerprint
from pos2distill.errors import CorruptState, UserError
from pos2distill.faults import disk_is_full
from pos2distill.hardware import peak_memory_gib
from pos2distill.models.files import copy_other_configs
from pos2distill.models.load import load_prompt_builder, load_tokenizer
from pos2distill.records import EXAMPLE_SCHEMA, sample_id_array
from pos2distill.scratch import user_folder
from pos2distill.store.artifacts import Artifact
from pos2distill.store.checkpoint_layout import ADAPTER_FOLDER, MODEL_FOLDER, train_again_hint
from pos2distill.store.files import allow_usual_access, sync_folder
from pos2distill.store.retry import retry_while_unreachable
from pos2distill.store.samples import SampleStore
from pos2distill.training.checkpointer import Checkpointer
from pos2distill.training.job import TrainingJob, TrainingOutcome
from pos2distill.training.loader import BatchLoader
from pos2distill.training.loop import TrainingLoop
from pos2distill.training.memory import translate_model_oom_error
from pos2distill.training.progress import TrainingProgress
from pos2distill.training.rows import RowBuilder
from pos2distill.training.session import WorkerSession
from pos2distill.training.state import StoredState
from pos2distill.training.step_log import StepLog
from pos2distill.training.strategies import build_strategy
from pos2distill.training.strategies.protocol import Strategy
from pos2distill.training.teachers import build_teacher

_GIB = 1 << 30
# The largest relative error of the adapters' update in the merged model that passes without a warning.
_MAX_ROUNDING = 0.1


def run_worker(job: TrainingJob, session: WorkerSession) -> TrainingOutcome:
    """Train on this worker, from the last checkpoint if there is one, and save the model.

    Raises:
        UserError: if training cannot continue.
    """
    study, trainers = job.study, job.runtime.trainers
    scratch = clear_scratch_folder(job, session)
    examples = job.examples.read_table(job.examples_file, ["example_id"], schema=EXAMPLE_SCHEMA)
    ids = sample_id_array(examples["example_id"].combine_chunks(), study.method.responses_per_example)
    with translate_model_oom_error(study, trainers, session.dist.world_size):
        strategy = build_strategy(study, trainers, session.device, job.student_start)
        teacher = build_teacher(study, strategy.base_states, session.device)
        progress = resume(job, session, strategy, len(ids), scratch)
    with _step_log(job, session, progress.step, min(len(ids), study.wanted_samples)) as log:
        checkpointer = Checkpointer(job, session, strategy, log, progress.step, scratch)
        loader = BatchLoader(study, ids, SampleStore(job.samples), session.open_stream, session.dist)
        # No room is reserved: the response exists, and fitted into the context behind the advantageous prompt.
        build_row = RowBuilder(load_prompt_builder(study, reserve=0), study)
        loop = TrainingLoop(study, trainers, build_row, strategy, teacher, session.dist)
        warnings: tuple[str, ...] = ()
        try:
            finished = loop.train(loader, progress, log, checkpointer.requested_action, checkpointer.save)
            # Before the model is saved: rank 0 uploads it alone, which may take longer than the others wait here. Not
            # `all_gather_object`: after a stop, the thread that prepares batches may still wait in its group.
            peak = session.dist.all_reduce_max(_peak_bytes(session)) / _GIB
            if finished:
                warnings = save_model(job, session, strategy, scratch)
                # Of the first rank, whose outcome counts: it has gathered the whole model.
                peak = max(peak, _peak_bytes(session) / _GIB)
        except Exception as error:
            # Otherwise states that wait for their upload would keep the disk full.
            if disk_is_full(error):
                shutil.rmtree(scratch, ignore_errors=True)
            raise
    checkpointer.close()
    return TrainingOutcome(finished, progress.step, peak, warnings)


def _peak_bytes(session: WorkerSession) -> int:
    return int(peak_memory_gib(str(session.device)) * _GIB)


@contextmanager
def _step_log(job: TrainingJob, session: WorkerSession, step: int, samples: int) -> Iterator[StepLog | None]:
    """The log of training steps on rank 0, None on others. It is written and closed at the end, see `StepLog`."""
    if session.dist.rank != 0:
        yield None
        return
    log = StepLog(job, session, step, samples)
    try:
        yield log
        log.flush()
    except BaseException:
        # A restart in this process opens the trackers again. What ended the run is what the user must see.
        with contextlib.suppress(Exception):
            log.close()
        raise
    log.close()


def clear_scratch_folder(job: TrainingJob, session: WorkerSession) -> Path:
    """Remove what workers that died on this node left in the folder of this run, and return the folder.

    A training state has 12 bytes per parameter, so that two of them may not fit on the disk. To be called before the
    first collective: until it, no worker of this node writes to the folder.
    """
    name = f"training-{fingerprint(job.checkpoint.url)}"
    if session.local_rank == 0:
        shutil.rmtree(user_folder(name), ignore_errors=True)
    return user_folder(name)


def resume(
    job: TrainingJob, session: WorkerSession, strategy: Strategy, samples: int, scratch: Path
) -> TrainingProgress:
    """Restore the newest training state that is intact; without any state, begin.

    Raises:
        UserError: if no saved state is intact, or one is of another model or run.
    """
    corrupt: list[CorruptState] = []
    for state in session.saved_states():
        with session.opened_state(state, scratch) as folder:
            found = _read_state(folder, session.state_url(state), session, strategy, samples)
            if not isinstance(found, UserError):
                stored, progress = found
                strategy.load_state(stored)
        # After the `with` block, which has removed its copy of the state.
        if isinstance(found, CorruptState):
            corrupt.append(found)
        elif isinstance(found, UserError):
            raise _with_remedy(found, job.checkpoint)
        else:
            if corrupt and session.dist.rank == 0:
                session.warn(f"{corrupt[0]}; training continues from an earlier state, at step {progress.step}")
            return progress
    if corrupt:
        raise _with_remedy(corrupt[0], job.checkpoint)
    return TrainingProgress.at_start(samples)


def _with_remedy(error: UserError, checkpoint: Artifact) -> UserError:
    error.args = (f"{error}; {train_again_hint(checkpoint)}",)
    return error


def _read_state(
    folder: Path, url: str, session: WorkerSession, strategy: Strategy, samples: int
) -> tuple[StoredState, TrainingProgress] | UserError:
    """A saved training state, or what is wrong with it. A collective, with the same outcome on all ranks.

    The workers that read the same copy check all of its files together. A `CorruptState` names a missing or corrupt
    file; another error says that the state is of another model, run or version.
    """
    found: UserError | None = None
    try:
        stored = StoredState(folder, strategy.state_shapes(), url)
        stored.verify(rank=session.reader_rank, readers=session.readers)
        progress = TrainingProgress.load(folder, samples, url)
    except UserError as error:
        found = error
    errors = [error for error in session.dist.all_gather_object(found) if error is not None]
    return errors[0] if errors else (stored, progress)


def save_model(job: TrainingJob, session: WorkerSession, strategy: Strategy, scratch: Path) -> tuple[str, ...]:
    """Save weights and tokenizer, and adapters by themselves too. Every rank takes part, one writes.

    Returns: warnings, on the rank that writes.
    """
    write = session.dist.rank == 0
    # The adapters of a later round fit the checkpoint of the round before, and not the study's model.
    saves_adapter = job.study.training.lora is not None and job.student_start == job.study.model
    if saves_adapter:
        with _artifact_folder(job.checkpoint, ADAPTER_FOLDER, session, scratch) as folder:
            strategy.save_adapter(folder)
    with _artifact_folder(job.checkpoint, MODEL_FOLDER, session, scratch) as folder:
        # On every rank: under ZeRO-3, gathering the weights is a collective.
        error = strategy.save(folder)
        if write:
            load_tokenizer(job.study.model).save_pretrained(folder)
            copy_other_configs(job.study.model, folder)
    if error <= _MAX_ROUNDING:
        return ()
    exact = f"; {job.checkpoint.url}/{ADAPTER_FOLDER} has the exact update" if saves_adapter else ""
    return (
        f"training.learning_rate: {job.study.training.learning_rate:g}: rounding to {job.study.model.dtype} changed "
        f"the adapters' update in the merged model by {error:.0%}{exact}; a higher rate loses less",
    )


@contextmanager
def _artifact_folder(artifact: Artifact, name: str, session: WorkerSession, scratch: Path) -> Iterator[Path]:
    """A folder for what becomes a folder of the artifact when the context ends."""
    write = session.dist.rank == 0
    # A local artifact gets the files directly, without a second copy of many gigabytes.
    parent = Path(artifact.path) if artifact.is_local else scratch
    folder = parent / name
    if write:
        shutil.rmtree(folder, ignore_errors=True)  # left by a run that was killed while it saved
    yield folder
    if not write:
        return
    allow_usual_access(folder)
    if artifact.is_local:
        sync_folder(folder)  # not again after an error: the system has discarded what it could not write
        return

    def upload() -> None:
        artifact.remove(name)  # left by a run that was killed while it uploaded, and may have had other files
        artifact.upload(folder, name)

    retry_while_unreachable(upload, session.warn)
    shutil.rmtree(folder)
