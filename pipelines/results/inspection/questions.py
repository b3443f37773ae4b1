"""The questions of a run that are asked for, one after another."""

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from pos2distill.config import Study
from pos2distill.errors import UserError, did_you_mean_one
from pos2distill.evaluation.scores import position_order
from pos2distill.store.artifacts import Artifact

from ...artifact_names import BASE_SCORES, SAMPLES, SCORES
from ..artifact_lookup import open_artifact, study_of
from .answers import find_models, iter_answers
from .prompt_text import PromptText
from .question import QuestionValues
from .samples import iter_samples

_CHANGES = ("gained", "lost", "flipped")
_ANSWER_OUTCOMES = ("correct", "wrong", *_CHANGES, "cut", "refused")
_SAMPLE_OUTCOMES = ("kept", "wrong", "empty", "failed", "cut")


@dataclass(frozen=True, slots=True)
class QuestionFilter:
    """Which questions to show.

    Attributes:
        example: an id, or text in the id or the question.
        position: that of the gold documents, such as `3` or `1>5`.
        documents: how many the prompt has.
        outcome: for answers correct, wrong, gained, lost, flipped (gained or lost), cut or refused; for samples kept,
            wrong, empty, failed or cut.
    """

    example: str | None = None
    position: str | None = None
    outcome: str | None = None
    documents: int | None = None

    def accepts(self, row: QuestionValues) -> bool:
        """Whether a question is shown."""
        own_id: str = row["sample_id"] if "sample_id" in row else row["example_id"]
        words = "\n".join([own_id, row["location"], row["question"]]).lower()
        return (
            (self.example is None or self.example.lower() in words)
            and (self.position is None or self.position == row["position"])
            and self.documents in (None, row["documents"])
            and (self.outcome is None or self.outcome in row["outcomes"])
        )


def iter_questions(
    run: str,
    question_filter: QuestionFilter,
    *,
    samples: bool,
    prompts: bool,
    entropy: bool = False,
    task: str | None = None,
) -> Iterator[QuestionValues]:
    """The selected questions of a run, in the order of its examples.

    Args:
        run: a storage, or the path of an artifact with answers or samples.
        samples: show the samples of a storage, not its answers; also those of a run that did not finish them.
        prompts: show the text of each prompt.
        entropy: show the teacher's entropy at each token of kept samples.
        task: one of `evaluation.also_evaluate`, of a storage. Default: the main task.
    Raises:
        UserError: if the run has no answers or samples, or none at this position, or its samples no teacher states
            although `entropy` needs them.
    """
    artifact = open_artifact(run, [[SAMPLES]] if samples else [SCORES, [SAMPLES]], task, unfinished=True)
    study = study_of(artifact)
    is_finished = artifact.is_finished
    _print_notice(artifact, study, is_finished=is_finished)
    if entropy:
        _require_entropy(artifact, study)
    _require_outcome(question_filter.outcome, artifact)
    if artifact.name == SAMPLES:
        questions = iter_samples(artifact, study, entropy=entropy)
    else:
        models = find_models(artifact)
        _require_both_models(question_filter.outcome, artifact, models)
        questions = iter_answers(artifact, study, models)
    prompt_text = PromptText(study) if prompts else None
    positions: dict[int, set[str]] = {}
    for question in questions:
        values = question.values
        positions.setdefault(values["documents"], set()).add(values["position"])
        if not question_filter.accepts(values):
            continue
        row = dict(values)
        if question.read_entropy is not None:
            row["entropy"] = question.read_entropy()
        if prompt_text is not None:
            row["prompt"] = prompt_text(question.prompt)
        yield row
    if is_finished and positions:
        _require_evaluated(question_filter, positions)


def _print_notice(artifact: Artifact, study: Study, *, is_finished: bool) -> None:
    """Say that results are not finished, or which inference method they were made with."""
    method = study.inference.method
    if not is_finished:
        print(f"{artifact.url}: not finished; what is stored so far is shown", file=sys.stderr, flush=True)
    elif method != "none" and artifact.name != SAMPLES:
        print(f"{artifact.url}: inference.method={method}", file=sys.stderr, flush=True)


def require_limit(limit: int) -> None:
    """Reject a number of questions that cannot be shown."""
    if limit < 0:
        raise UserError(f"--limit: {limit}: expected 1 or more, or 0 for all")


def _require_evaluated(question_filter: QuestionFilter, positions: Mapping[int, Collection[str]]) -> None:
    """Reject a prompt length or a position that no prompt has. `positions`: by the number of documents."""
    documents, position = question_filter.documents, question_filter.position
    if documents is not None and documents not in positions:
        evaluated = ", ".join(map(str, sorted(positions)))
        raise UserError(f"--documents: {documents}: expected one of those evaluated: {evaluated}")
    possible = {each for number, found in positions.items() if documents in (None, number) for each in found}
    if position is not None and position not in possible:
        evaluated = ", ".join(sorted(possible, key=position_order))
        raise UserError(f"--position: {position}: expected one of those evaluated: {evaluated}")


def _require_entropy(artifact: Artifact, study: Study) -> None:
    """Reject `--entropy` where the teacher's states are not stored."""
    if artifact.name != SAMPLES:
        raise UserError("--entropy: is of samples; give --samples too")
    if study.method.teacher != "cached":
        raise UserError(
            f"--entropy: {artifact.url} holds no teacher states, which method.teacher=cached stores "
            f"(here {study.method.teacher})"
        )


def _require_outcome(name: str | None, artifact: Artifact) -> None:
    """Reject an outcome that nothing in the artifact can have."""
    possible = _SAMPLE_OUTCOMES if artifact.name == SAMPLES else _ANSWER_OUTCOMES
    if name is None or name in possible:
        return
    if name in _ANSWER_OUTCOMES:
        raise UserError(f"--outcome: {name}: is of answers; leave out --samples")
    if name in _SAMPLE_OUTCOMES:
        raise UserError(f"--outcome: {name}: is of samples; give --samples too")
    raise UserError(f"--outcome: {name}: expected one of {', '.join(possible)}{did_you_mean_one(name, possible)}")


def _require_both_models(outcome: str | None, artifact: Artifact, models: Mapping[str, Artifact]) -> None:
    """Reject a change as the outcome where one model alone has answered."""
    if outcome not in _CHANGES or len(models) > 1:
        return
    if artifact.name == BASE_SCORES:
        raise UserError(f"--outcome: {outcome}: {artifact.url} has answers before training alone")
    raise UserError(
        f"--outcome: {outcome}: {artifact.url} has answers after training alone; its storage holds no answers of its "
        f"base model to the same prompts, which `study` makes"
    )
