"""The search of LPES on a fitness that is known."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pos2distill.config.inference import SearchSection
from pos2distill.models.rope.curves import Genome, scales_of
from pos2distill.models.rope.search import Candidate, best, fitness, next_genomes

LAYERS = 12
TARGET = np.array(scales_of((0.25, 0.75, 1.2, 1.3, 1.7, 1.8), LAYERS, "bezier"))


def distance(genome: Genome) -> float:
    """To a planted curve, root mean square over layers."""
    return float(np.sqrt(np.mean((np.array(scales_of(genome, LAYERS, "bezier")) - TARGET) ** 2)))


def search(settings: SearchSection, seed: int = 0, cost: Callable[[Genome], float] = distance) -> list[Candidate]:
    measured: list[Candidate] = []
    for generation in range(settings.rounds):
        for genome in next_genomes(settings, measured, generation, layers=LAYERS, seed=seed):
            measured.append(Candidate(genome, (), -cost(genome)))
    return measured


def settings_with(**values: Any) -> SearchSection:
    return SearchSection.model_validate({"generations": 40, **values})


def test_fitness_by_hand() -> None:
    assert fitness([0.5, 0.25, 0.75], 1.0) == pytest.approx(0.0)
    assert fitness([0.5, 0.25, 0.75], 0.5) == pytest.approx(0.25)
    assert fitness([0.5, 0.25, 0.75], 0.0) == pytest.approx(0.5)


def test_best_takes_the_first_of_equal_candidates() -> None:
    candidates = [Candidate((float(index),), (), value) for index, value in enumerate([0.1, 0.5, 0.5])]
    assert best(candidates).genome == (1.0,)


@pytest.mark.parametrize("step", [{}, {"mutation_step": 0.05}], ids=["default step", "larger step"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_genetic_search_finds_a_planted_curve_and_beats_random_search_of_equal_budget(
    seed: int, step: dict[str, float]
) -> None:
    genetic = search(settings_with(**step), seed)
    random = search(settings_with(strategy="random"), seed)
    assert len(genetic) == len(random) == 64 + 39 * 32
    assert -best(genetic).fitness < 0.01
    assert -best(genetic).fitness < 0.7 * -best(random).fitness


def test_search_is_a_pure_function_of_the_seed() -> None:
    settings = settings_with(generations=4)
    assert search(settings, seed=3) == search(settings, seed=3)
    assert search(settings, seed=3) != search(settings, seed=4)


def test_search_begins_with_the_unscaled_model_and_measures_nothing_twice() -> None:
    for strategy in ("genetic", "random"):
        measured = search(settings_with(strategy=strategy, generations=6, population=8, parents=4))
        assert scales_of(measured[0].genome, LAYERS, "bezier") == (1.0,) * LAYERS
        scales = [scales_of(candidate.genome, LAYERS, "bezier") for candidate in measured]
        assert len(set(scales)) == len(scales)


def test_search_measures_no_flat_curve_twice() -> None:
    """Where scale 1 is best, parents are flat, and so are many children, wherever their control points are."""
    settings = settings_with(generations=12, mutation_step=0.1)
    measured = search(settings, cost=lambda genome: max(genome[2:]) - 1)
    scales = [scales_of(candidate.genome, LAYERS, "bezier") for candidate in measured]
    assert len(set(scales)) == len(scales) == 64 + 11 * 32
    assert best(measured) is measured[0]


def test_children_are_made_of_the_fittest_of_all_generations() -> None:
    """Without mutations, every y of a child is one of the same place in a parent, and the young ones are worse."""
    drawn = settings_with(strategy="random", population=29, monotone=False)
    genomes = next_genomes(drawn, [], 0, layers=LAYERS, seed=0)[1:]  # without the unscaled model
    old, young = genomes[:8], genomes[8:]
    measured = [Candidate(genome, (), 1.0) for genome in old] + [Candidate(genome, (), 0.0) for genome in young]
    settings = settings_with(mutations=0, crossovers=20, parents=8, monotone=False)
    children = next_genomes(settings, measured, 2, layers=LAYERS, seed=0)
    assert (len(old), len(young), len(children)) == (8, 20, 20)
    for child in children:
        for place in range(2, 6):  # the x are sorted, so they may change their place
            assert child[place] in {genome[place] for genome in old}


def test_crossovers_take_each_number_from_either_parent() -> None:
    one, other = (0.25, 0.75, 1.1, 1.2, 1.3, 1.4), (0.25, 0.75, 1.9, 1.8, 1.7, 1.6)
    settings = settings_with(mutations=0, crossovers=12, parents=2, population=2, monotone=False)
    parents = [Candidate(one, (), 0.5), Candidate(other, (), 0.4)]
    children = next_genomes(settings, parents, 1, layers=LAYERS, seed=0)
    assert len(children) == 12  # 14 combinations are neither parent
    assert {child[:2] for child in children} == {(0.25, 0.75)}
    for place in range(2, 6):
        assert {child[place] for child in children} == {one[place], other[place]}


def test_uniform_grid_is_flat_and_spans_the_limits() -> None:
    # Neither parents nor children are of any use to it.
    settings = settings_with(strategy="uniform", population=5, mutations=0, crossovers=0)
    grid = [scales_of(candidate.genome, 4, "bezier") for candidate in search(settings)]
    assert grid == [(scale,) * 4 for scale in (1.0, 1.25, 1.5, 1.75, 2.0)]


@pytest.mark.parametrize(
    ("population", "smallest", "largest", "grid"),
    [
        (3, 1.5, 2.0, [1.0, 1.5, 2.0]),
        (2, 1.5, 2.0, [1.0, 1.5]),
        (4, 0.6, 1.5, [1.0, 0.6, 1.2, 1.5]),
        (3, 0.5, 1.5, [1.0, 0.5, 1.5]),
    ],
)
def test_uniform_grid_has_as_many_candidates_with_the_unscaled_model(
    population: int, smallest: float, largest: float, grid: list[float]
) -> None:
    settings = settings_with(
        strategy="uniform", population=population, parents=1, mutations=0, smallest=smallest, largest=largest
    )
    found = [scales_of(candidate.genome, 1, "bezier") for candidate in search(settings)]
    assert [scale for (scale,) in found] == pytest.approx(grid)


def test_search_without_control_points_between_the_ends() -> None:
    settings = settings_with(control_points=2, curve="linear", generations=3, population=6, parents=3)
    assert all(len(candidate.genome) == 2 for candidate in search(settings, cost=lambda genome: abs(genome[0] - 1.5)))


def test_search_may_find_nothing_new_in_a_generation() -> None:
    """Steps that are rounded to no change propose what is known; the search continues to its last generation."""
    settings = settings_with(
        generations=4, population=4, parents=2, mutations=2, crossovers=0, mutation_step=1e-9, examples=1
    )
    measured = search(settings_with(generations=1, population=4, parents=2))
    for generation in range(1, settings.rounds):
        assert next_genomes(settings, measured, generation, layers=LAYERS, seed=0) == []
    assert len(search(settings)) == 4
