"""The search of LPES: a genetic algorithm over curves of RoPE scales, and its controls (arXiv:2606.27705).

The paper's numbers of the algorithm could not be verified, so all of them are settings (docs/inference_methods.md).
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pos2distill.config.inference import SearchSection
from pos2distill.models.rope.curves import Genome, scales_of, to_genome
from pos2distill.randomness import derive_generator
from pos2distill.records import Floats

_PROPOSALS = 20  # until the algorithm gives up a place of a generation


@dataclass(frozen=True, slots=True)
class Candidate:
    """A genome that was measured.

    Attributes:
        accuracy: the accuracy at each of the searched slots.
        fitness: mean - gamma * GAP.
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


def _uniform_grid(settings: SearchSection) -> list[float]:
    """Evenly spaced scales that make `population` candidates together with 1, the unscaled model."""
    if not settings.smallest <= 1.0 <= settings.largest:
        beside_one: list[float] = np.linspace(settings.smallest, settings.largest, settings.population - 1).tolist()
        return beside_one
    grid: list[float] = np.linspace(settings.smallest, settings.largest, settings.population).tolist()
    # 1 itself takes the place of the nearest one.
    grid.remove(min(grid, key=lambda scale: abs(scale - 1.0)))
    return grid


def next_genomes(
    settings: SearchSection, measured: Sequence[Candidate], generation: int, *, layers: int, seed: int
) -> list[Genome]:
    """The genomes of one generation, a pure function of its arguments.

    Args:
        measured: the candidates of all earlier generations, in order.
        generation: its number, from 0.
        layers: the number of the model's layers.
    Returns: genomes to measure. No two of them give all layers the same scales, nor does one that is measured, as two
        flat curves do wherever their control points are. The first of all is the model as it is.
    """
    generator = derive_generator(seed, "search scales", settings.strategy, generation)
    known = {scales_of(candidate.genome, layers, settings.curve) for candidate in measured}
    genomes: list[Genome] = []

    def add(propose: Callable[[], Genome]) -> None:
        # A proposal that is already known is replaced, so that all strategies measure equally many candidates.
        for _ in range(_PROPOSALS):
            genome = propose()
            scales = scales_of(genome, layers, settings.curve)
            if scales not in known:
                known.add(scales)
                genomes.append(genome)
                return

    if generation == 0:
        add(lambda: _flat(settings, 1.0))
    if settings.strategy == "uniform":
        for scale in _uniform_grid(settings):
            add(functools.partial(_flat, settings, scale))
    elif settings.strategy == "random" or generation == 0:
        count = settings.population - 1 if generation == 0 else settings.children
        for _ in range(count):
            add(lambda: _random(settings, generator))
    else:
        parents = _fittest(measured, settings.parents)
        for _ in range(settings.mutations):
            add(lambda: _mutate(settings, parents, generator))
        for _ in range(settings.crossovers):
            add(lambda: _cross(settings, parents, generator))
    return genomes


def _fittest(measured: Sequence[Candidate], count: int) -> list[Floats]:
    """The genomes of the fittest candidates; `sorted` keeps the order of equal ones."""
    ranked = sorted(measured, key=lambda candidate: -candidate.fitness)
    return [np.asarray(candidate.genome) for candidate in ranked[:count]]


def _mutate(settings: SearchSection, parents: Sequence[Floats], generator: np.random.Generator) -> Genome:
    parent = parents[int(generator.integers(len(parents)))]
    steps = generator.normal(0.0, settings.mutation_step, len(parent))
    changed = generator.random(len(parent)) < settings.mutation_rate
    return _repair(settings, np.where(changed, parent + steps, parent))


def _cross(settings: SearchSection, parents: Sequence[Floats], generator: np.random.Generator) -> Genome:
    one, other = generator.choice(len(parents), 2, replace=len(parents) < 2)
    from_one = generator.random(len(parents[0])) < 0.5
    return _repair(settings, np.where(from_one, parents[one], parents[other]))


def _flat(settings: SearchSection, scale: float) -> Genome:
    """One scale for all layers, also outside the limits of the search."""
    inner_x = np.linspace(0.0, 1.0, settings.control_points)[1:-1]
    y = np.full(settings.control_points, scale)
    return to_genome(inner_x, y, smallest=scale, largest=scale, monotone=settings.monotone)


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
