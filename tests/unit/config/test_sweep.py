from collections.abc import Callable
from pathlib import Path

import pytest

from pos2distill.config import (
    Recipe,
)
from pos2distill.config.load import load_recipe
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError


@pytest.mark.parametrize(
    ("override", "suggests_sweep"),
    [
        ("seed=[1, 2]", True),
        ("method.name=[r1, sft]", True),
        ("method.name=[r1, nope]", False),
        ("sampling.temperature=[hot, cold]", False),
        ("evaluation.slots=[a, b]", False),
        ("training.learning_rate=[1e-5, -1]", False),
        ("training.lora=[1, 2]", False),
        ("runtime.samplers.max=[1, 2]", False),
    ],
)
def test_load_recipe_suggests_a_sweep_over_valid_values_only(
    load: Callable[..., Recipe], override: str, suggests_sweep: bool
) -> None:
    with pytest.raises(UserError) as caught:
        load(override)
    hint = f"; to try several with `study`, set sweep.{override.partition('=')[0]}"
    assert str(caught.value).endswith(hint) is suggests_sweep
    assert ("sweep" in str(caught.value)) is suggests_sweep


@pytest.mark.parametrize("swept", ["training.learning_rate=1e-3", "seed=5"])
def test_load_recipe_rejects_a_value_for_a_setting_that_is_swept(load: Callable[..., Recipe], swept: str) -> None:
    """It would have no effect."""
    sweep = "sweep={training.learning_rate: [1e-4, 2e-4], seed: [0, 1]}"
    with pytest.raises(UserError) as caught:
        load(sweep, swept)
    name = swept.partition("=")[0]
    assert str(caught.value) == (
        f"command line: {name}: the recipe sweeps {name}; change its values (sweep.{name}=[…]), or add 'sweep={{}}' "
        f"for one study"
    )
    for off in ("sweep={}", "sweep=null"):
        assert not load(sweep, off, swept).sweep


@pytest.mark.parametrize(
    ("sweep", "override", "is_rejected"),
    [
        ("{method.name: [sft, r1]}", "method={name: r1}", True),
        ("{method.k: [1, 2]}", "method={name: r1}", False),
        ("{method: [{name: sft}, {name: r1, k: 3}]}", "method.k=2", False),
    ],
)
def test_load_recipe_rejects_a_section_around_a_swept_setting(
    load: Callable[..., Recipe], sweep: str, override: str, is_rejected: bool
) -> None:
    words = (f"sweep={sweep}", override)
    if is_rejected:
        with pytest.raises(UserError, match=r"^command line: method: the recipe sweeps method.name; change its values"):
            load(*words)
    else:
        assert len(load(*words).sweep) == 1


def test_sweep_cells_are_every_combination(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={method.name: [r1, sft], seed: [0, 1]}", "method.k=2")
    cells = sweep_cells(recipe)
    assert [(cell.study.method.name, cell.study.seed) for _, cell in cells] == [
        ("r1", 0),
        ("r1", 1),
        ("sft", 0),
        ("sft", 1),
    ]
    assert cells[2][0] == {"method.name": "sft", "seed": 0}
    assert all(cell.study.method.k == 2 and cell.storage == recipe.storage and not cell.sweep for _, cell in cells)


def test_sweep_cells_resolve_each_method_by_itself(load: Callable[..., Recipe]) -> None:
    cells = sweep_cells(load("sweep={method.name: [r1, seqkd], data.documents: [20, 6]}", "method.k=2"))
    resolved = [
        (cell.study.method.weights, cell.study.method.teacher, cell.study.method.auto_slots) for _, cell in cells
    ]
    assert resolved == [
        ("paper", "cached", 10),
        ("paper", "cached", 6),
        ("uniform", "none", 10),
        ("uniform", "none", 6),
    ]
    hops = sweep_cells(load("sweep={data.hops: [[1], [2]]}", "data.format=jsonl"))
    assert [cell.study.evaluation.slots for _, cell in hops] == ["all", "pairs"]


def test_sweep_cells_take_whole_sections(load: Callable[..., Recipe]) -> None:
    sections = "{inference: [{method: reorder}, {method: uniform_scale, scales: [1.5]}], seed: [0, 1]}"
    cells = sweep_cells(load(f"sweep={sections}", "inference.method=lpes", "inference.scales=[1, 2, 3]"))
    inference = [cell.study.inference for _, cell in cells]
    assert [(each.method, each.scales) for each in inference] == [
        *[("reorder", ())] * 2,
        *[("uniform_scale", (1.5,))] * 2,
    ]
    assert [settings["seed"] for settings, _ in cells] == [0, 1, 0, 1]
    # As they are written, since they name the studies in reports: paths are not made absolute.
    written = [{"path": "examples/toy/base"}, {"path": "examples/toy/base", "max_length": 900}]
    recipe = load(f"sweep={{model: {written}}}")
    assert [settings["model"] for settings, _ in sweep_cells(recipe)] == written


def test_sweep_cells_keep_what_a_section_does_not_name(load: Callable[..., Recipe]) -> None:
    recipe = load("sweep={method: [{name: r1}, {name: seqkd, k: 3}]}", "method.k=2", "method.advantageous_slot=last")
    methods = [cell.study.method for _, cell in sweep_cells(recipe)]
    assert [(each.name, each.k, each.advantageous_slot) for each in methods] == [
        ("r1", 2, "last"),
        ("seqkd", 3, "last"),
    ]
    # Those that the recipe leaves open are each method's own.
    assert [each.weights for each in methods] == ["paper", "uniform"]


def test_sweep_cells_compare_published_methods(load: Callable[..., Recipe]) -> None:
    methods = [
        "{name: seqkd, view: skip}",
        "{name: seqkd, view: pose}",
        "{name: r1, teacher_slot: random}",
        "{name: r1-on-policy}",
    ]
    cells = sweep_cells(load(f"sweep={{method: [{', '.join(methods)}]}}", "model.max_length=900"))
    studies = [cell.study for _, cell in cells]
    assert [(each.method.view, each.method.teacher_slot) for each in studies] == [
        ("skip", "advantageous"),
        ("pose", "advantageous"),
        ("none", "random"),
        ("none", "advantageous"),
    ]
    assert [each.sampling.keep for each in studies] == ["correct", "correct", "correct", "all"]
    candidates = sweep_cells(load("sweep={sampling.candidates: [1, 8]}", "sampling.temperature=0.7"))
    assert [cell.study.sampling.candidates for _, cell in candidates] == [1, 8]


def test_sweep_cells_keep_the_settings_of_inference_methods(load: Callable[..., Recipe]) -> None:
    """But for scales, which two methods have. Within a section too."""
    recipe = load(
        "sweep={inference: [{method: none}, {method: lpes, search: {examples: 40}}, {method: ms_poe}]}",
        "inference.search.generations=3",
        "inference.ms_poe.largest=1.5",
        "model.engine=hf",
    )
    inference = [cell.study.inference for _, cell in sweep_cells(recipe)]
    assert [(each.search.generations, each.ms_poe.largest) for each in inference] == [(3, 1.5)] * 3
    assert inference[1].search.examples == 40


def test_sweep_cells_know_which_precisions_the_cpu_decides(
    load: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise both would be the same study.
    monkeypatch.setattr("pos2distill.config.base.cpu_is_faster_in_bfloat16", lambda: True)
    (_, auto), (_, chosen) = sweep_cells(
        load("sweep={training.precision: [auto, float32]}", "model.dtype=auto", "runtime.trainers.strategy=torch")
    )
    assert set(auto.auto_precisions) == {"model.dtype", "training.precision"}
    assert set(chosen.auto_precisions) == {"model.dtype"}


def test_sweep_cells_of_a_recipe_made_in_python(load: Callable[..., Recipe]) -> None:
    loaded = load()
    recipe = Recipe(name="made", description="d", study=loaded.study, sweep={"seed": (0, 1)})
    assert [cell.study.seed for _, cell in sweep_cells(recipe)] == [0, 1]
    assert sweep_cells(recipe)[0][1].study == loaded.study


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ("{method.nme: [r1]}", "sweep: method.nme: not a setting of a study; did you mean 'method.name'?"),
        ("{training.lr: [1e-4]}", "not a setting of a study; did you mean 'training.learning_rate'?"),
        ("{runtime.storage: [a, b]}", "sweep: runtime.storage: not a setting of a study"),
        ("{evaluation.also_evaluate: [[x]]}", "sweep: evaluation.also_evaluate: not a setting of a study"),
        ("{seed: []}", "sweep: seed: expected at least one value"),
        ("{seed: [0, 1, 0]}", "sweep: seed=0: is the same study as an earlier one; list each value once"),
        ("{method.k: [2, 30]}", "sweep: method.k: 30 trivial slots, but"),
        ("{method.k: 4}", "sweep: method.k: input should be a list, for example [4]"),
        ("{method: {name: [r2, sft]}}", "sweep: method: write method.name: [...]"),
        ("{training: {lora: {rank: [4, 8]}}}", "sweep: training: write training.lora.rank: [...]"),
        ("[seed]", "sweep: input should be a mapping, got ['seed']"),
        ("{evaluation: [{slots: 2}]}", "sweep: evaluation: not a setting of a study"),
        ("{model.rope_scales: [[1.5]]}", "sweep: model.rope_scales: filled in from inference.scales; set those"),
        ("{model: [{path: m, rope_scales: [2]}]}", "sweep: model.rope_scales: filled in from inference.scales; set th"),
        ("{inference: [lpes]}", "sweep: inference: expected a section with fields, such as method: lpes, got 'lpes'"),
        (
            "{method: [{name: r1}], method.k: [2, 4]}",
            "sweep: method: is swept as a section, and so is its setting method.k; name one of them",
        ),
        ("{inference: [{method: uniform_scale}]}", "sweep: inference.scales: 'uniform_scale' needs one number"),
    ],
)
def test_sweep_cells_reports_a_bad_sweep(load: Callable[..., Recipe], sweep: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        sweep_cells(load(f"sweep={sweep}"))
    assert message in str(caught.value)


@pytest.mark.parametrize("sweep", ["{data.eval_fraction: [0.5, 0.1]}", "{data: [{}, {eval_fraction: 0.1}]}"])
def test_sweep_cells_reject_another_split_than_that_of_the_other_tasks(load: Callable[..., Recipe], sweep: str) -> None:
    """A question of training could be one of evaluation."""
    with pytest.raises(UserError) as caught:
        sweep_cells(load(f"sweep={sweep}", "evaluation.also_evaluate=[nq_llama3_8b]"))
    assert str(caught.value) == (
        "sweep: evaluation.also_evaluate: nq_llama3_8b: its data.eval_fraction is 0.5, here it is 0.1; they must be "
        "equal, so that no evaluation question is trained on"
    )


def test_load_recipe_overrides_a_sweep(load: Callable[..., Recipe]) -> None:
    assert load("sweep.method.k=[1, 2]", "sweep.seed=[0, 1]").sweep == {"method.k": (1, 2), "seed": (0, 1)}


def test_sweep_cells_make_paths_absolute(
    load: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cells = sweep_cells(load("sweep.data.path=[a.jsonl, b.jsonl]"))
    assert [cell.study.data.path for _, cell in cells] == [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert [cell.written_paths["data.path"] for _, cell in cells] == ["a.jsonl", "b.jsonl"]


def test_sweep_cells_keep_the_paths_as_they_were_written() -> None:
    recipe = load_recipe("quickstart", ["sweep={model: [{path: ./a}, {dtype: float32}], seed: [0]}"])
    written = [cell.written_paths for _, cell in sweep_cells(recipe)]
    assert written == [{**recipe.written_paths, "model.path": "./a"}, recipe.written_paths]
