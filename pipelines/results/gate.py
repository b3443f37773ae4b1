"""The gate of `evaluate`: the predictions that it compares with, and its limits."""

import sys

import pyarrow as pa

from pos2distill.config import Study
from pos2distill.config.gate import Gate
from pos2distill.errors import UserError, reworded
from pos2distill.evaluation.gate import check_gate
from pos2distill.evaluation.result import Evaluation
from pos2distill.evaluation.scores import Grid, GridMismatch, to_grid
from pos2distill.store.files import is_corrupt, read_if_any, read_table
from pos2distill.urls import open_url, storage_errors

from ..provenance import PROVENANCE_FILE, parse_provenance
from ..stages.predictions import PREDICTIONS, REFUSALS
from .run_summaries import question_settings, read_run_summary


def read_baseline(url: str, study: Study) -> Grid:
    """The predictions of another run: a file, the folder of an evaluation's artifact that holds it, or what `compare`
    takes, of which they are the last model's.

    Raises:
        UserError: if there are none.
    """
    path = _predictions_of(url)
    fs, file = open_url(path, "--baseline")
    _require_same_task(path, study)
    refusals = f"{file.rpartition('/')[0]}/{REFUSALS}"
    try:
        refused = read_table(fs, refusals)["example_id"].to_pylist() if fs.exists(refusals) else ()
        return to_grid(read_table(fs, file), study.data.documents, refused)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"--baseline: {path}: no such file; expected a run, or the folder of its answers") from None
    except (pa.ArrowException, KeyError):
        raise UserError(f"--baseline: {path}: no table of predictions of this version") from None
    except OSError as error:
        if not is_corrupt(error):
            raise
        raise UserError(f"--baseline: {path}: corrupt; evaluate that model again, or name another baseline") from None
    except ValueError:
        raise UserError(
            f"--baseline: {path}: holds no answers to prompts of {study.data.documents} documents; expected another "
            f"evaluation of the same questions"
        ) from None


def _require_same_task(path: str, study: Study) -> None:
    """Reject a baseline whose questions had other documents, or whose answers were judged otherwise.

    A file by itself, without the record of how it was made, is taken as it is.
    """
    fs, file = open_url(path, "--baseline")
    with storage_errors(path, "--baseline"):
        record = read_if_any(fs, f"{file.rpartition('/')[0]}/{PROVENANCE_FILE}")
    if record is None:
        return
    try:
        others = question_settings(parse_provenance(record).settings)
    except (ValueError, KeyError, TypeError):
        raise UserError(
            f"--baseline: {path}: the {PROVENANCE_FILE} beside it is corrupt, or not of this program; evaluate that "
            f"model again, or move the baseline to a folder of its own"
        ) from None
    own = question_settings(study.model_dump(mode="json"))
    for name, value in others.items():
        if value != own[name]:
            raise UserError(
                f"--baseline: {path}: was made with data.{name}={value}, and this evaluation has {own[name]}"
            )


def _predictions_of(url: str) -> str:
    if url.endswith(".parquet"):
        return url
    path = f"{url.rstrip('/')}/{PREDICTIONS}"
    fs, file = open_url(path, "--baseline")
    if fs.exists(file):
        return path
    with reworded(lambda message: f"--baseline: {message}"):
        summary = read_run_summary(url)
    return f"{summary.answers(list(summary.curves)[-1]).url}/{PREDICTIONS}"


def check_evaluation(gate: Gate, study: Study, evaluation: Evaluation, baseline: Grid | None) -> None:
    """Print the limits that the evaluation keeps.

    Args:
        baseline: the result of `read_baseline`; None without a baseline.
    Raises:
        GateError: if the data show that a limit is exceeded, or hardly any answer is correct.
        UserError: if the baseline has other questions or slots.
    """
    grid = to_grid(evaluation.predictions, study.data.documents, evaluation.refused["example_id"].to_pylist())
    settings = study.evaluation
    try:
        passed = check_gate(
            gate, evaluation.curve, grid, baseline, bootstrap_samples=settings.bootstrap_samples, seed=settings.seed
        )
    except GridMismatch:
        raise UserError(
            "--baseline: other questions, slots or prompt lengths than this evaluation; both need the same data, "
            "data.eval_examples, evaluation.slots and evaluation.seed"
        ) from None
    for each in passed:
        # On stderr what --quiet must not hide: the gate passes, and might not with more questions.
        outcome = "not decided, which passes" if each.is_undecided else "passed"
        print(f"gate {outcome}: {each.line}", file=sys.stderr if each.is_undecided else sys.stdout)
