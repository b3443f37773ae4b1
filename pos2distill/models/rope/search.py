"""The search of LPES: a genetic algorithm over curves of RoPE scales, and its controls (arXiv:2606.27705).

The paper's numbers of the algorithm could not be verified, so all of them are settings (docs/methods.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pos2distill.config.inference import SearchSection
from pos2distill.models.rope.curves import Floats, Genome, to_genome
from pos2distill.randomness import derive_generator


@dataclass(frozen=True, slots=True)
class Candidate:
    """A genome that was measured.

    accuracy: at each of the searched slots. fitness: mean - gamma * GAP.
    """

    genome: Genome
    accuracy: tuple[float, ...]
    fitness: float


def fitness(accuracy: Sequence[float], gamma: float) -> float:
    """mean(accuracy) - gamma * (max(accuracy) - min(accuracy))."""
    return float(np.mean(accuracy)) - gamma * (max(accuracy) - min(accuracy))


def best(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate of the highest fitness; of equal ones the first."""
    return max(candidates, key=lambda candidate: candidate.fitness)


def next_genomes(settings: SearchSection, measured: Sequence[Candidate], generation: int, seed: int) -> list[Genome]:
    """The genomes of one generation, a pure function of its arguments.

    Args:
        measured: the candidates of all earlier generations, in order. generation: counted from 0.
    Returns: genomes to measure, each of them once and none that is measured; fewer than a generation has if the
        algorithm proposes some twice.
    """
    generator = derive_generator(seed, "search scales", settings.strategy, generation)
    if settings.strategy == "uniform":
        proposed = _uniform_grid(settings)
    elif settings.strategy == "random" or generation == 0:
        first = [_unscaled(settings)] if generation == 0 else []
        count = settings.population if generation == 0 else settings.children
        proposed = first + [_random(settings, generator) for _ in range(count - len(first))]
    else:
        proposed = _children(settings, measured, generator)
    known = {candidate.genome for candidate in measured}
    genomes = []
    for genome in proposed:
        if genome not in known:
            known.add(genome)
            genomes.append(genome)
    return genomes


def _children(settings: SearchSection, measured: Sequence[Candidate], generator: np.random.Generator) -> list[Genome]:
    """Mutations and crossovers of the fittest candidates so far. `sorted` keeps the order of equal ones."""
    ranked = sorted(measured, key=lambda candidate: -candidate.fitness)
    parents = [np.asarray(candidate.genome) for candidate in ranked[: settings.parents]]
    children = []
    for _ in range(settings.mutations):
        parent = parents[generator.integers(len(parents))]
        steps = generator.normal(0.0, settings.mutation_step, len(parent))
        changed = generator.random(len(parent)) < settings.mutation_rate
        children.append(_repair(settings, np.where(changed, parent + steps, parent)))
    for _ in range(settings.crossovers):
        one, other = generator.choice(len(parents), 2, replace=len(parents) < 2)
        from_one = generator.random(len(parents[0])) < 0.5
        children.append(_repair(settings, np.where(from_one, parents[one], parents[other])))
    return children


def _uniform_grid(settings: SearchSection) -> list[Genome]:
    scales = np.linspace(settings.smallest, settings.largest, settings.population)
    return [_flat(settings, scale) for scale in scales]


def _unscaled(settings: SearchSection) -> Genome:
    """The model as it is, or the nearest to it within the limits."""
    return _flat(settings, min(max(1.0, settings.smallest), settings.largest))


def _flat(settings: SearchSection, scale: float) -> Genome:
    inner_x = np.linspace(0.0, 1.0, settings.control_points)[1:-1]
    return _repair(settings, np.concatenate([inner_x, np.full(settings.control_points, scale)]))


def _random(settings: SearchSection, generator: np.random.Generator) -> Genome:
    inner_x = generator.random(settings.control_points - 2)
    y = generator.uniform(settings.smallest, settings.largest, settings.control_points)
    return _repair(settings, np.concatenate([inner_x, y]))


def _repair(settings: SearchSection, numbers: Floats) -> Genome:
    inner = settings.control_points - 2
    return to_genome(
        numbers[:inner],
        numbers[inner:],
        smallest=settings.smallest,
        largest=settings.largest,
        monotone=settings.monotone,
    )
