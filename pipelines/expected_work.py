"""How much a stage has to do, as far as that is known before it runs."""

import math
from collections.abc import Callable, Mapping

from pos2distill.store.samples import SampleStore, UnreadablePartError
from pos2distill.tasks.permutations import candidate_placements

from .artifact_names import BASE_SCORES, CHECKPOINT, DISTILLED_SCORES, ROPE_SCALES, SAMPLES, SLOT_SCORES
from .stages.distill import read_logged_steps
from .stages.evaluate import eval_specs, reference_specs
from .stages.made_from import changed_input
from .stages.predictions import prediction_parts
from .stages.sample import sample_ids_of
from .stages.stage import Stage


def expected_work(stage: Stage, counts: Mapping[str, Mapping[str, int] | None]) -> str:
    """The prompts, answers or steps of a whole stage, and how many are stored; empty if they are not known.

    Only reads: corrupt parts of what is stored are left to the stage.

    Args:
        counts: what the stage `prepare` counts, by the URL of its artifact.
    """
    if stage.artifact.name == CHECKPOINT:
        return _steps(stage)
    describe = _DESCRIPTIONS.get(stage.artifact.name)
    questions = counts.get(stage.inputs["examples"].artifact.url) if describe else None
    return describe(stage, questions) if describe and questions else ""


def _steps(stage: Stage) -> str:
    study = stage.study
    steps = math.ceil(study.wanted_samples / study.samples_per_batch) * study.training.epochs
    examples, rows = study.largest_batch
    all_steps = f"at most {_count(steps, 'step')} of at most {_count(examples, 'example')} ({_count(rows, 'row')})"
    return all_steps + _stored(len(read_logged_steps(stage.artifact)), "done")


def _evaluation(stage: Stage, questions: Mapping[str, int]) -> str:
    specs = eval_specs(stage.study) + reference_specs(stage.study)
    num_questions = questions["eval"]
    prompts = num_questions * sum(spec.prompts_per_example for spec in specs)
    return f"{prompts:,} prompts ({num_questions:,} questions){_answered(stage)}"


def _choice_of_slot(stage: Stage, questions: Mapping[str, int]) -> str:
    study = stage.study
    placements = candidate_placements(study.data.documents, study.data.hops[0], study.method.auto_slots)
    num_questions = min(questions["train"], study.method.auto_examples)
    prompts = num_questions * len(placements)
    return f"{prompts:,} prompts ({num_questions:,} questions){_answered(stage)}"


def _search(stage: Stage, questions: Mapping[str, int]) -> str:
    """Fewer if a generation has too few proposals that are new."""
    study, search = stage.study, stage.study.inference.search
    placements = candidate_placements(study.data.documents, study.data.hops[0], search.slots)
    candidates = search.population + (search.rounds - 1) * search.children
    num_questions = min(questions["train"], search.examples)
    prompts = candidates * num_questions * len(placements)
    return f"at most {prompts:,} prompts ({candidates:,} candidates, {num_questions:,} questions)"


def _samples(stage: Stage, questions: Mapping[str, int]) -> str:
    candidates = stage.study.sampling.candidates
    chosen = f", each chosen from {candidates:,}" if candidates > 1 else ""
    wanted = stage.study.wanted_samples
    available = f"from at most {questions['train']:,} questions"
    return f"until {wanted:,} answers are kept{chosen}, {available}{_kept(stage)}"


def _answered(stage: Stage) -> str:
    if changed_input(stage) is not None:  # they will be discarded
        return ""
    return _stored(len(prediction_parts(stage.artifact).read()), "answered")


def _kept(stage: Stage) -> str:
    if not stage.inputs["examples"].artifact.is_finished:
        return ""
    try:
        tally = SampleStore(stage.artifact, read_only=True).read_tally(sample_ids_of(stage))
    except UnreadablePartError:
        return ""
    return _stored(tally.outcomes["kept"], "kept")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _stored(count: int, what: str) -> str:
    return f"; {count:,} {what} so far" if count else ""


_DESCRIPTIONS: Mapping[str, Callable[[Stage, Mapping[str, int]], str]] = {
    BASE_SCORES: _evaluation,
    DISTILLED_SCORES: _evaluation,
    SLOT_SCORES: _choice_of_slot,
    ROPE_SCALES: _search,
    SAMPLES: _samples,
}
