"""Stage `search scales`: RoPE scales of all layers by the search of LPES, before the model is used for anything else.

Every generation is a file of the artifact, so that a search that was stopped continues after the last whole one.
The folder `config` holds the model's config with the scales that were found, for use elsewhere.
"""

import functools
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import pydantic

from pos2distill.config import ModelSection, Study
from pos2distill.literal_paths import last_part, list_matching, make_folder
from pos2distill.models.rope.curves import Genome, scales_of
from pos2distill.models.rope.search import Candidate, best, fitness, next_genomes
from pos2distill.sampling.prompting import PromptSpec
from pos2distill.sampling.scale_search import ScaledAccuracy
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.files import write_bytes
from pos2distill.tasks.permutations import candidate_placements

from ..artifact_names import ROPE_SCALES
from ..progress_bar import show_stage
from ..scaled_config import SCALED_CONFIG_FOLDER, scaled_config_files
from .plan_context import PlanContext
from .predictions import PROMPT_FIELDS
from .prepare import TRAIN_FILE, count_training, training_examples_input
from .stage import RunContext, Stage, recorded_seconds

_FIELDS = (*PROMPT_FIELDS, "seed", "inference.search", "evaluation.max_new_tokens")
_GENERATIONS = "generations"
# The first generation has at least the unscaled model. A later one is empty where every proposal was known, as with a
# mutation_step that is rounded to no change.
_FIRST = pydantic.TypeAdapter(Annotated[list[Candidate], pydantic.Field(min_length=1)])
_LATER = pydantic.TypeAdapter(list[Candidate])


def plan(context: PlanContext) -> Stage:
    """The stage of a study whose method is `lpes` without scales. It uses training questions only."""
    inputs = {"examples": training_examples_input(context.prepare, context.digests)}
    return context.declare(
        name="search scales",
        folder=ROPE_SCALES,
        fields=_FIELDS,
        run=run,
        inputs=inputs,
    )


def run(stage: Stage, context: RunContext) -> Manifest:
    """Measure one generation of candidates after the other, and record the scales of the fittest.

    Counts: prompts = candidates * examples * slots; without_correct_answers of the candidates give no correct answer.
    """
    with recorded_seconds(stage, context, "search") as seconds:
        layers = _layers(stage.study.model)
        generations = _search(stage, context, layers)
    settings = stage.study.inference.search
    candidates = [candidate for generation in generations for candidate in generation]
    chosen = best(candidates)
    placements = candidate_placements(stage.study.data.documents, stage.study.data.hops[0], settings.slots)
    examples = _count_examples(stage)
    scales = _scales(stage.study, chosen.genome, layers)
    _export(stage, scales)
    details = {
        "scales": list(scales),
        "fitness": chosen.fitness,
        "accuracy": list(chosen.accuracy),
        "searched_slots": [list(placement.slots) for placement in placements],
        "unscaled": asdict(candidates[0]),
        "best_by_generation": best_so_far(generations),
    }
    counts = {
        "candidates": len(candidates),
        "without_correct_answers": sum(not any(candidate.accuracy) for candidate in candidates),
        "examples": examples,
        "prompts": len(candidates) * examples * len(placements),
    }
    return stage.artifact.publish(counts=counts, seconds=seconds, details=details)


def _search(stage: Stage, context: RunContext, layers: int) -> list[list[Candidate]]:
    """All generations; those that an earlier run has finished are read."""
    study = stage.study
    settings = study.inference.search
    generations = read_generations(stage.artifact)
    if len(generations) == settings.rounds:
        return generations
    placements = candidate_placements(study.data.documents, study.data.hops[0], settings.slots)
    spec = PromptSpec(study.data.documents, {study.data.hops[0]: placements})
    # Any scales, so that the model is loaded as one that has some.
    scaled = study.replace(model=study.model.replace(rope_scales=(1.0,)))
    examples = stage.inputs["examples"].artifact
    count = _count_examples(stage)
    create = functools.partial(ScaledAccuracy, scaled, context.runtime, examples, TRAIN_FILE, count, spec)
    hint = context.executor.stalled_hint
    with (
        context.executor.actors(create, context.runtime.samplers, label="search") as measure,
        show_stage(stage.name, settings.rounds, done=len(generations), unit="generation", hint=hint) as shown,
    ):
        while len(generations) < settings.rounds:
            measured = [candidate for generation in generations for candidate in generation]
            number = len(generations)
            genomes = next_genomes(settings, measured, number, layers=layers, seed=study.seed)
            so_far = f", best fitness {best(measured).fitness:.3f}" if measured else ""
            accuracies: dict[int, list[float]] = {}
            for index, accuracy in measure([_scales(study, genome, layers) for genome in genomes]):
                accuracies[index] = accuracy
                shown.update(0, f"candidate {len(accuracies)} of {len(genomes)}{so_far}")
            generation = []
            for index, genome in enumerate(genomes):
                accuracy = tuple(accuracies[index])
                generation.append(Candidate(genome, accuracy, fitness(accuracy, settings.gamma)))
            _write_generation(stage.artifact, number, generation)
            generations.append(generation)
            shown.update(1, f"best fitness {best_so_far(generations)[-1]:.3f}")
    return generations


def _count_examples(stage: Stage) -> int:
    """How many training examples each candidate answers."""
    examples, limit = stage.inputs["examples"].artifact, stage.study.inference.search.examples
    return count_training(examples, at_most=limit, setting="inference.search.examples")


def _export(stage: Stage, scales: Sequence[float]) -> None:
    artifact = stage.artifact
    folder = f"{artifact.path}/{SCALED_CONFIG_FOLDER}"
    make_folder(artifact.fs, folder)
    for name, content in scaled_config_files(stage.study.model, scales, searched=True).items():
        write_bytes(artifact.fs, f"{folder}/{name}", content)


def _layers(model: ModelSection) -> int:
    """The number of the model's layers."""
    # Imported here, so that a study is planned without torch.
    from pos2distill.models.architecture import load_config

    layers: int = load_config(model).get_text_config().num_hidden_layers
    return layers


def _scales(study: Study, genome: Genome, layers: int) -> tuple[float, ...]:
    return scales_of(genome, layers, study.inference.search.curve)


def best_so_far(generations: Sequence[Sequence[Candidate]]) -> list[float]:
    """The fitness of the best candidate up to each generation."""
    values: list[float] = []
    for generation in generations:
        so_far = values[-1:]
        values.append(max(so_far + [candidate.fitness for candidate in generation]))
    return values


def read_generations(artifact: Artifact) -> list[list[Candidate]]:
    """The generations that are stored, in order.

    Raises:
        UserError: if a file is corrupt.
    """
    generations: list[list[Candidate]] = []
    for path in list_matching(artifact.fs, f"{artifact.path}/{_GENERATIONS}", "*.json"):
        with artifact.reading(f"{_GENERATIONS}/{last_part(path)}"):
            candidates = _LATER if generations else _FIRST
            generations.append(candidates.validate_json(artifact.fs.cat_file(path)))
    return generations


def _write_generation(artifact: Artifact, number: int, generation: Sequence[Candidate]) -> None:
    make_folder(artifact.fs, f"{artifact.path}/{_GENERATIONS}")
    artifact.write_json(f"{_GENERATIONS}/{number:04d}.json", [asdict(candidate) for candidate in generation])
