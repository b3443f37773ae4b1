"""The questions of a run as tasks of lm-evaluation-harness, so that it asks the same prompts of any model.

One task for each prompt length and position, and for each prompt length a group, whose mean is that of the report. The
harness's logs of samples are read back as scores by position. Written for lm-eval 0.4.13.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from pos2distill.config import Study
from pos2distill.errors import UserError
from pos2distill.evaluation.scores import position_order
from pos2distill.literal_paths import last_part, list_matching
from pos2distill.records import PREDICTION_SCHEMA
from pos2distill.store.artifacts import Artifact
from pos2distill.store.storage import RUN_FILE
from pos2distill.urls import open_url, storage_errors

from ..artifact_names import SCORES
from ..stages.resolve import resolve_auto_settings
from ..stages.stage import Input
from .artifact_lookup import input_artifact, open_artifact, open_folder, provenance_of, study_of
from .inspection.question import QuestionValues
from .inspection.questions import QuestionFilter, iter_questions
from .run_summaries import summary_of

_URL = re.compile(r"[a-z][a-z0-9+.-]*:/")  # as a path has it, in which two slashes are one
_COMMON = "_common.yaml"
_SCORE_COLUMNS = ("example_id", "documents", "placement", "order", "group", "slots", "correct", "f1")
_SCORE_SCHEMA = pa.schema([PREDICTION_SCHEMA.field(name) for name in _SCORE_COLUMNS])
_SCORING = '''\
"""Judges answers as pos2distill does, which must be installed beside lm-eval."""

from pos2distill.tasks.metrics import score
from pos2distill.tasks.thoughts import begun_thought


def process_results(doc, results):
    right, f1 = score(doc["metric"], begun_thought(doc["prompt"]) + results[0], doc["answers"])
    return {"accuracy": float(right), "f1": f1}
'''


@dataclass(frozen=True, slots=True)
class Export:
    """What was exported.

    Attributes:
        groups: the names of the tasks by their group, one for each prompt length, the shortest first.
        compared_with: what `compare` takes to compare other answers to these questions with the run's; None if no
            report and no results of `evaluate` have them by themselves, as of a sweep.
        caveat: how the answers of another program will differ from the run's, which used a method; None if they will
            not.
    """

    groups: dict[str, list[str]]
    compared_with: str | None
    caveat: str | None


def export_tasks(run: str, folder: Path) -> Export:
    """Write the questions of a run at every evaluated position as tasks.

    Args:
        run: a storage, or the path of an artifact with answers.
        folder: a new or empty one.
    Raises:
        UserError: if the run has no answers or its model is behind a server, if the folder holds files, or if the text
            of a prompt would not be read as the tokens of the prompt.
    """
    artifact = open_artifact(run, [SCORES])
    study = study_of(artifact)
    if study.model.uses_chat_api:
        raise UserError(f"{run}: the server of {study.model.path} makes its prompts, so they cannot be exported")
    if _URL.match(str(folder)):
        raise UserError(f"{folder}: expected a folder on this machine, since lm-eval reads no other")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: expected a new or empty folder")
    found = iter_questions(artifact.url, QuestionFilter(), samples=False, prompts=True)
    # Tasks are by position, which prompts with the gold documents alone, or with none, do not have. A question of which
    # a server refused a prompt has no answer that another one could be compared with.
    answered = (row for row in found if row["documents"] in study.prompt_lengths and "refused" not in row["outcomes"])
    is_new = not folder.exists()
    caveat = _caveat(artifact, study)
    # Before the prompts are built, which takes long.
    with storage_errors(str(folder), "FOLDER"):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        rows = list(_checked(answered, study))
    except UserError:
        if is_new:
            folder.rmdir()
        raise
    run_name = "pos2distill_" + _as_name(artifact.url.rstrip("/").split("/")[-2])
    _write_yaml(folder / _COMMON, _common(study))
    (folder / "scoring.py").write_text(_SCORING)
    groups: dict[str, list[str]] = {}
    for (documents, _, position), task_rows in groupby(sorted(rows, key=_task_key), key=_task_key):
        group = f"{run_name}_{documents}_documents"
        task = f"{group}_position_{_as_name(position)}"
        groups.setdefault(group, []).append(task)
        _write_task(folder, task, [_doc(row, study) for row in task_rows])
    # Every answer counts the same, as in a curve: where examples differ in their hops, tasks differ in size.
    metrics = [{"metric": name, "aggregation": "mean", "weight_by_size": True} for name in ("accuracy", "f1")]
    for group, tasks in groups.items():
        _write_yaml(folder / f"{group}.yaml", {"group": group, "task": tasks, "aggregate_metric_list": metrics})
    return Export(groups, summary_of(artifact), caveat)


def _caveat(artifact: Artifact, study: Study) -> str | None:
    if _is_scaled(artifact, study):
        return (
            "the model had RoPE scales by layer: serve MODEL with them and use --model vllm; lm_eval's hf ignores them"
        )
    if study.inference.spec.changes == "attention":
        return f"the run used inference.method {study.inference.method}, which lm_eval cannot use"
    return None


def _is_scaled(artifact: Artifact, study: Study) -> bool:
    """Whether the model had a RoPE scale other than 1: of the settings, of a search, or of its own config."""
    if not study.has_weights:
        return False
    # Imported here: torch takes seconds.
    from pos2distill.models.architecture import load_config
    from pos2distill.models.rope.layer_scales import resolve_scales

    if "scales" in provenance_of(artifact).inputs:
        search = input_artifact(artifact, "scales")
        if not search.is_finished:  # deleted since
            return True
        study = resolve_auto_settings(study, {"scales": Input(search, search.fingerprint)})
    model = study.model
    return any(scale != 1 for scale in resolve_scales(model.rope_scales, load_config(model), model.path))


def find_sample_logs(folder: str) -> list[str]:
    """The logs of samples in the harness's output folder, or in its folder of one model: the newest of each task.

    Raises:
        UserError: if they are of several models.
    """
    fs, root = open_folder(folder, "RUN")
    with storage_errors(folder, "RUN"):
        if fs.exists(f"{root}/{RUN_FILE}"):
            return []  # a run, whatever else was written into its folder
        paths = list_matching(fs, root, "samples_*.jsonl") + list_matching(fs, root, "*/samples_*.jsonl")
    folders = sorted({path.rpartition("/")[0] for path in paths})
    if len(folders) > 1:
        names = ", ".join(last_part(each) for each in folders)
        raise UserError(
            f"{folder}: holds logs of samples of {len(folders)} models; expected the folder of one ({names})"
        )
    # Named samples_TASK_DATE.jsonl, so that the last one of a task is the newest.
    newest = {path.rpartition("_")[0]: path for path in paths}
    return list(newest.values())


def read_sample_logs(paths: list[str], folder: str) -> pa.Table:
    """Scores of the harness's answers to exported questions, in those columns of `PREDICTION_SCHEMA` that it knows.

    Args:
        paths: the result of `find_sample_logs`.
        folder: where they were found.
    Raises:
        UserError: if a line is not of an exported task, with its file and number.
    """
    fs, _ = open_url(folder, "RUN")
    rows = []
    with storage_errors(folder, "RUN"):
        for path in paths:
            # Bytes: a text may hold other line breaks of Unicode, which JSON does not escape.
            for number, line in enumerate(fs.cat_file(path).splitlines(), start=1):
                try:
                    rows.append(_score_row(json.loads(line)))
                except (ValueError, KeyError, TypeError):
                    raise UserError(
                        f"{path}, line {number}: expected an answer to a question that `export` of this version "
                        f"wrote, as logged by lm_eval with --log_samples"
                    ) from None
    return pa.Table.from_pylist(rows, _SCORE_SCHEMA)


def _score_row(sample: dict[str, Any]) -> QuestionValues:
    doc = sample["doc"]
    return {
        "example_id": str(doc["id"]),
        "documents": int(doc["documents"]),
        "placement": int(doc["placement"]),
        "order": int(doc["order"]),
        "group": "",
        "slots": [int(slot) for slot in doc["slots"]],
        "correct": float(sample["accuracy"]) == 1.0,
        "f1": float(sample["f1"]),
    }


def _checked(rows: Iterator[QuestionValues], study: Study) -> Iterator[QuestionValues]:
    """The rows, of which each prompt's text has as many tokens as the prompt."""
    from pos2distill.models.load import load_tokenizer

    tokenizer = load_tokenizer(study.model)
    for row in rows:
        tokens = len(tokenizer.encode(row["prompt"], add_special_tokens=False))
        if tokens != row["prompt_tokens"]:
            raise UserError(
                f"{row['example_id']}, position {row['position']}: the text of the prompt has {tokens} tokens, and the "
                f"prompt {row['prompt_tokens']}: another program would ask another prompt, so nothing is exported"
            )
        yield row


def _task_key(row: QuestionValues) -> tuple[int, list[int], str]:
    return row["documents"], position_order(row["position"]), row["position"]


def _as_name(text: str) -> str:
    return re.sub(r"\W+", "_", text)


def _doc(row: QuestionValues, study: Study) -> dict[str, Any]:
    return {
        "id": row["example_id"],
        "prompt": row["prompt"],
        "answers": row["answers"],
        "target": row["answers"][0],
        "metric": study.data.metric,
        "position": row["position"],
        "documents": row["documents"],
        "placement": row["placement"],
        "order": row["order"],
        "slots": row["slots"],
    }


def _common(study: Study) -> dict[str, Any]:
    """What all tasks share. Prompts hold the chat template's text already."""
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("accuracy", "f1")]
    return {
        "dataset_path": "json",
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "doc_to_target": "target",
        "target_delimiter": "",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": study.evaluation.max_new_tokens},
        "metric_list": metrics,
        "metadata": {"version": 1.0},
    }


def _write_task(folder: Path, task: str, docs: list[dict[str, Any]]) -> None:
    data = folder.resolve() / f"{task}.jsonl"
    data.write_text("".join(json.dumps(doc, ensure_ascii=False) + "\n" for doc in docs), encoding="utf-8")
    settings = {"include": _COMMON, "task": task, "dataset_kwargs": {"data_files": {"test": str(data)}}}
    # YAML's own tag, which PyYAML would write only for an object.
    _write_yaml(folder / f"{task}.yaml", settings, "process_results: !function scoring.process_results\n")


def _write_yaml(path: Path, settings: Mapping[str, Any], more: str = "") -> None:
    path.write_text(yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True) + more, encoding="utf-8")
