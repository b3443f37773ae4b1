"""Methods that need no training, through the stages of a study. The tiny model, on the local executor."""

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.executors import build_executor
from pipelines.plan import Plan, make_plan
from pipelines.progress_bar import show_stage
from pipelines.stages import search_scales
from pipelines.stages.prepare import EVALUATION_FILE, TRAIN_FILE, read_prepared
from pipelines.stages.stage import RunContext
from pos2distill.config import ModelSection, Recipe
from pos2distill.config.inference import InferenceSection
from pos2distill.config.load import load_recipe
from pos2distill.losses.objectives import ANCHOR
from pos2distill.models.chat import stop_token_ids
from pos2distill.models.load import load_model, load_tokenizer
from pos2distill.models.rope.curves import CONFIG_KEY
from pos2distill.records import example_from_row
from pos2distill.sampling.engines.protocol import Completion, SamplingParams
from pos2distill.sampling.scale_search import ScaledAccuracy
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.lease import Lease
from pos2distill.tasks.permutations import advantageous_slots
from pos2distill.tasks.prompts import PromptBuilder
from pos2distill.training.rows import RowBuilder, decode_samples
from tests.support.commands import run_distill, run_evaluate, run_study
from tests.support.engines import hf_engine
from tests.support.results import sample_store, training_ids
from tests.support.toy import LOCAL

pytestmark = pytest.mark.xdist_group("compute")

SEARCH: dict[str, Any] = {
    "generations": 3,
    "population": 4,
    "parents": 2,
    "mutations": 2,
    "crossovers": 1,
    "examples": 8,
    "smallest": 0.9,
}

ENGINES = {"hf": (), "vllm": ("model.engine=vllm", "runtime.vllm.enforce_eager=true")}

Make = Callable[..., Recipe]


def lpes(small_toy: Make, storage: Path, *overrides: str) -> Recipe:
    longer = ("data.documents=20", "evaluation.other_documents=[]")  # at 12 documents the toy makes no mistakes
    return small_toy(
        storage, LOCAL, *longer, "inference.method=lpes", f"inference.search={json.dumps(SEARCH)}", *overrides
    )


def details(artifact: Artifact) -> dict[str, Any]:
    manifest = artifact.manifest()
    assert manifest is not None
    return manifest.details


def context_of(recipe: Recipe) -> RunContext:
    executor = build_executor(recipe.runtime)
    return RunContext(recipe.name, {}, recipe.runtime, executor, Lease())


def searched(plan: Plan) -> dict[str, Any]:
    assert plan.search_scales is not None
    return details(plan.search_scales.artifact)


def search(recipe: Recipe) -> Manifest:
    """Run the search alone, and what it needs."""
    plan, context = make_plan(recipe), context_of(recipe)
    assert plan.search_scales is not None
    plan.prepare.run(plan.prepare, context)
    return plan.search_scales.run(plan.search_scales, context)


def fitnesses(plan: Plan) -> set[float]:
    """Of all candidates."""
    assert plan.search_scales is not None
    files = (Path(plan.search_scales.artifact.path) / "generations").glob("*.json")
    return {candidate["fitness"] for file in files for candidate in json.loads(file.read_text())}


def answers(recipe: Recipe) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = make_plan(recipe).evaluate_base.artifact.read_table("predictions.parquet").to_pylist()
    return rows


def test_search_gives_the_same_scales_at_any_batch_size_and_after_a_stop(
    small_toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = lpes(small_toy, tmp_path / "one", "runtime.samplers.batch_size=1")
    run_evaluate(one)
    plan_of_one = make_plan(one)
    expected = searched(plan_of_one)
    assert len(expected["scales"]) == 3
    best = expected["best_by_generation"]
    assert best == sorted(best)
    assert len(best) == SEARCH["generations"]
    assert expected["unscaled"]["fitness"] <= expected["fitness"] == best[-1]
    assert plan_of_one.search_scales is not None
    summary = json.loads((tmp_path / "one" / "evaluation" / "summary.json").read_text())
    assert summary["settings"]["inference"]["scales"] == expected["scales"]
    assert {name: summary["search"][name] for name in expected} == expected
    assert "Search of RoPE scales" in (tmp_path / "one" / "evaluation" / "index.html").read_text()
    exported = Path(plan_of_one.search_scales.artifact.path) / "config"
    assert json.loads((exported / "config.json").read_text())[CONFIG_KEY] == expected["scales"]
    assert f'{CONFIG_KEY}": {json.dumps(expected["scales"])}' in (exported / "README.md").read_text()
    # The scales matter, or any order of events would give the same result.
    assert len(fitnesses(plan_of_one)) > 1

    stopped = lpes(small_toy, tmp_path / "stopped", "runtime.samplers.batch_size=5")
    write, written = search_scales._write_generation, []

    def write_and_stop(artifact: Artifact, number: int, generation: Any) -> None:
        write(artifact, number, generation)
        written.append(number)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(search_scales, "_write_generation", write_and_stop)
        for _ in range(SEARCH["generations"]):
            with pytest.raises(KeyboardInterrupt):
                run_evaluate(stopped)
    assert written == list(range(SEARCH["generations"]))  # each generation was measured once
    run_evaluate(stopped)
    assert searched(make_plan(stopped)) == expected
    assert answers(stopped) == answers(one)


def test_search_continues_after_a_generation_without_a_new_candidate(make_recipe: Make, tmp_path: Path) -> None:
    few = {"generations": 3, "population": 3, "mutations": 2, "crossovers": 0, "mutation_step": 1e-9}
    recipe = make_recipe(
        model={"engine": "fake"},
        inference={"method": "lpes", "search": {**SEARCH, **few}},
        runtime={"executor": "local", "storage": str(tmp_path / "few")},
    )
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    plan.prepare.run(plan.prepare, context_of(recipe))
    first = plan.search_scales.run(plan.search_scales, context_of(recipe))
    assert first.counts["candidates"] == 3
    assert len(first.details["best_by_generation"]) == 3
    files = sorted((Path(plan.search_scales.artifact.path) / "generations").glob("*.json"))
    assert [len(json.loads(file.read_text())) for file in files] == [3, 0, 0]
    files[-1].unlink()  # as if it had been stopped before the last generation
    assert plan.search_scales.run(plan.search_scales, context_of(recipe)).details == first.details


def test_search_shows_its_best_fitness_while_it_measures(
    small_toy: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []

    @contextmanager
    def recording(*arguments: Any, **settings: Any) -> Iterator[Any]:
        with show_stage(*arguments, **settings) as shown:
            update = shown.update

            def record(count: int, note: str = "") -> None:
                notes.append(note)
                update(count, note)

            monkeypatch.setattr(shown, "update", record)
            yield shown

    monkeypatch.setattr("pipelines.stages.search_scales.show_stage", recording)
    best = search(lpes(small_toy, tmp_path)).details["best_by_generation"]
    first, second, third = SEARCH["population"], SEARCH["mutations"] + SEARCH["crossovers"], 3
    assert notes[:first] == [f"candidate {number} of {first}" for number in range(1, first + 1)]
    assert notes[first] == f"best fitness {best[0]:.3f}"
    so_far = [f"candidate {number} of {second}, best fitness {best[0]:.3f}" for number in range(1, second + 1)]
    assert notes[first + 1 : first + 1 + second] == so_far
    assert notes[-1] == f"best fitness {best[-1]:.3f}"
    assert len(notes) == first + second + third + 3


def one_generation(make_recipe: Make, storage: Path) -> Recipe:
    """A search of one generation, of the tiny model with the fake engine."""
    return make_recipe(
        model={"engine": "fake"},
        inference={"method": "lpes", "search": {**SEARCH, "generations": 1}},
        runtime={"executor": "local", "storage": str(storage)},
    )


def test_searched_scales_are_loaded_as_their_readme_says(make_recipe: Make, tmp_path: Path) -> None:
    """Its config over a copy of the model, and its lines of Python with the copy's path."""
    recipe = one_generation(make_recipe, tmp_path / "run")
    run_evaluate(recipe)
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    exported = Path(plan.search_scales.artifact.path) / "config"
    # The fake engine answers at random, so scale 1 may be best: other scales, which change the logits, take its place.
    config = json.loads((exported / "config.json").read_text())
    copy = shutil.copytree(recipe.study.model.path, tmp_path / "copy")
    (copy / "config.json").write_text(json.dumps({**config, CONFIG_KEY: [1.5, 1.2]}))
    (block,) = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block.replace("FOLDER", str(copy)), names)
    ids = torch.arange(5, 60)[None]
    with torch.no_grad():
        expected = load_model(ModelSection(path=recipe.study.model.path, rope_scales=(1.5, 1.2)))(ids).logits
        assert torch.equal(names["model"](ids).logits, expected)
        assert not torch.equal(load_model(ModelSection(path=recipe.study.model.path))(ids).logits, expected)


def test_evaluate_says_where_searched_scales_are(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = one_generation(make_recipe, tmp_path / "run")
    run_evaluate(recipe)
    *_, page, scales = capsys.readouterr().out.splitlines()
    assert page == f"page        {tmp_path}/run/evaluation/index.html"
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    assert scales == f"scales      {plan.search_scales.artifact.url}/config"
    assert (Path(scales.split()[1]) / "README.md").exists()


@pytest.mark.slow
def test_search_on_vllm_measures_what_transformers_does(small_toy: Make, tmp_path: Path) -> None:
    """The stage on both engines: the same candidates with the same accuracies, one engine for all of them."""
    few = f"inference.search={json.dumps({**SEARCH, 'generations': 1})}"
    found = [search(lpes(small_toy, tmp_path / name, few, *settings)).details for name, settings in ENGINES.items()]
    assert found[0] == found[1]


@pytest.mark.slow
def test_search_on_ray_gives_the_same_scales(local_ray: None, small_toy: Make, tmp_path: Path) -> None:
    """Two actors, which measure candidates in any order."""
    two = ("runtime.executor=ray", "runtime.samplers={min: 2, max: 2, batch_size: 5}")
    local, on_ray = lpes(small_toy, tmp_path / "local"), lpes(small_toy, tmp_path / "ray", *two)
    assert search(on_ray).details == search(local).details


@pytest.mark.slow
def test_search_on_ray_survives_engines_that_die(local_ray: None, make_recipe: Make, tmp_path: Path) -> None:
    """Every actor dies at its third call with its process; a new one measures the candidate that was lost."""
    dying = {"fake": {"die_at_call": 3}, "samplers": {"min": 2, "max": 2, "batch_size": 64}}
    runtimes: dict[str, dict[str, Any]] = {"whole": {"executor": "local"}, "dying": {"executor": "ray", **dying}}
    found = []
    for name, runtime in runtimes.items():
        recipe = make_recipe(
            model={"engine": "fake"},
            inference={"method": "lpes", "search": {**SEARCH, "generations": 2}},
            runtime={**runtime, "storage": str(tmp_path / name)},
        )
        manifest = search(recipe)
        found.append((manifest.counts, manifest.details))
    assert found[0] == found[1]
    assert found[0][0]["candidates"] > 6  # more calls than the two actors answer before they die


def test_search_does_not_depend_on_what_is_evaluated(small_toy: Make, tmp_path: Path) -> None:
    plan = make_plan(lpes(small_toy, tmp_path))
    other = make_plan(lpes(small_toy, tmp_path, "data.eval_examples=5", "evaluation.seed=5"))
    assert plan.search_scales is not None
    assert other.search_scales is not None
    # Whatever is evaluated, the search is the same, because it reads no evaluation question.
    assert plan.search_scales.fingerprint == other.search_scales.fingerprint
    assert plan.evaluate_base.fingerprint != other.evaluate_base.fingerprint


def test_search_warns_of_fewer_training_questions_than_it_is_to_use(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        model={"engine": "fake"},
        inference={"method": "lpes", "search": {**SEARCH, "examples": 1000}},
        runtime={"executor": "local", "storage": str(tmp_path / "few")},
    )
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    plan.prepare.run(plan.prepare, context_of(recipe))
    found = plan.search_scales.run(plan.search_scales, context_of(recipe))
    warning = (
        f"warning: inference.search.examples: 1000, but there are {found.counts['examples']} training examples; "
        f"all of them are used"
    )
    assert capsys.readouterr().err.splitlines().count(warning) == 1


def test_search_answers_training_questions_alone(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered: set[str] = set()

    class Recording(ScaledAccuracy):
        async def __call__(self, scales: tuple[float, ...]) -> list[float]:
            for batch in self.batches:
                answered.update(batch["example_id"].to_pylist())
            return await super().__call__(scales)

    monkeypatch.setattr(search_scales, "ScaledAccuracy", Recording)
    recipe = make_recipe(
        model={"engine": "fake"},
        inference={"method": "lpes", "search": SEARCH},
        runtime={"executor": "local", "storage": str(tmp_path / "recorded")},
    )
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    plan.prepare.run(plan.prepare, context_of(recipe))
    plan.search_scales.run(plan.search_scales, context_of(recipe))
    train, held_out = (
        set(read_prepared(plan.prepare.artifact, file, ["example_id"])["example_id"].to_pylist())
        for file in (TRAIN_FILE, EVALUATION_FILE)
    )
    assert len(answered) == min(SEARCH["examples"], len(train))
    assert answered <= train
    assert not answered & held_out


def test_evaluate_with_given_scales_writes_the_config_that_has_them(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(
        inference={"method": "uniform_scale", "scales": [1.5]},
        runtime={"executor": "local", "storage": str(tmp_path / "given")},
    )
    run_evaluate(recipe)
    folder = tmp_path / "given" / "evaluation" / "config"
    assert f"scales      {folder}" in capsys.readouterr().out.splitlines()
    assert json.loads((folder / "config.json").read_text())[CONFIG_KEY] == [1.5, 1.5]
    card = (folder / "README.md").read_text()
    assert "of a model with a RoPE scale for each layer: 1.5, 1.5." in card
    assert f'{CONFIG_KEY}": [1.5, 1.5]' in card


def test_study_with_scales_exports_a_model_that_has_them(make_recipe: Make, tmp_path: Path) -> None:
    recipe = make_recipe(
        inference={"method": "uniform_scale", "scales": [1.5]},
        training={"epochs": 1},
        runtime={"executor": "local", "storage": str(tmp_path / "scaled")},
    )
    run_study(recipe)
    plan = make_plan(recipe)
    config = json.loads((Path(plan.distill.artifact.path) / "model" / "config.json").read_text())
    assert config[CONFIG_KEY] == [1.5, 1.5]
    assert "vllm serve FOLDER" in (Path(plan.distill.artifact.path) / "model" / "README.md").read_text()
    # The exported folder answers as the study's own evaluation did, without a setting.
    folder = f"{plan.distill.artifact.path}/model"
    exported = make_recipe(model={"path": folder}, runtime={"executor": "local", "storage": str(tmp_path / "exported")})
    run_evaluate(exported)
    distilled = plan.evaluate_distilled.artifact.read_table("predictions.parquet").to_pylist()
    assert answers(exported) == distilled
    # A model that is distilled from it has the scales too, and its card says so.
    again = make_recipe(model={"path": folder}, runtime={"executor": "local", "storage": str(tmp_path / "again")})
    run_study(again)
    model = Path(make_plan(again).distill.artifact.path) / "model"
    assert json.loads((model / "config.json").read_text())[CONFIG_KEY] == [1.5, 1.5]
    assert "vllm serve FOLDER" in (model / "README.md").read_text()


def test_checkpoints_of_adapters_keep_the_scales_of_the_model(make_recipe: Make) -> None:
    recipe = make_recipe(
        inference={"method": "lpes", "scales": [1.5, 1.2]},
        training={"epochs": 1, "lora": {"rank": 4}},
        runtime={"executor": "local"},
    )
    run_distill(recipe)
    folder = f"{make_plan(recipe).distill.artifact.path}/model"
    assert json.loads((Path(folder) / "config.json").read_text())[CONFIG_KEY] == [1.5, 1.2]
    # Loaded without a setting, it computes with them.
    ids = torch.arange(5, 60)[None]
    section = recipe.study.model.model_copy(update={"path": folder, "rope_scales": ()})
    with torch.no_grad():
        own, named, plain = (
            load_model(section.model_copy(update={"rope_scales": scales}))(ids).logits
            for scales in ((), (1.5, 1.2), (1.0,))
        )
    assert torch.equal(own, named)
    assert not torch.allclose(own, plain, atol=1e-3)


def test_random_advantageous_slots_are_those_of_the_samples_and_of_no_trivial_row(
    make_recipe: Make, tmp_path: Path
) -> None:
    recipe = make_recipe(
        method={"advantageous_slot": "random", "k": 2},
        sampling={"keep": "all"},
        training={"epochs": 1},
        runtime={"executor": "local", "storage": str(tmp_path / "random")},
    )
    run_study(recipe)
    plan = make_plan(recipe)
    study, documents = recipe.study, recipe.study.data.documents
    build = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=512, reserve=0)
    rows = RowBuilder(build, study)
    ids, store = training_ids(recipe), sample_store(recipe)
    samples = decode_samples(store.load(store.index(ids), np.arange(len(ids))))
    slots = set()
    for sample in samples:
        assert sample is not None
        (slot,) = advantageous_slots(study, sample.example)
        slots.add(slot)
        assert sample.teacher_prompt_ids.tolist() == build(sample.example, documents, (slot,)).tolist()
        anchor, *trivial = [rows.row(key) for key in rows.keys(sample)]
        assert (anchor.slots, anchor.slot_id) == ((slot,), ANCHOR)
        assert len(trivial) == 2
        assert all(row.slots != (slot,) for row in trivial)
    assert len(slots) > 1
    assert "at a random position of 4" in (Path(plan.distill.artifact.path) / "model" / "README.md").read_text()


def test_reorder_asks_with_the_documents_at_the_slots_of_their_ranks(make_recipe: Make, tmp_path: Path) -> None:
    """The stored answers are those of the engine to prompts that are arranged by the measured curve."""
    recipe = make_recipe(
        inference={"method": "reorder"},
        method={"auto_slots": 4, "auto_examples": 5},
        runtime={"executor": "local", "storage": str(tmp_path / "reordered")},
    )
    plan = make_plan(recipe)
    assert plan.choose_slot is not None
    # A curve whose order is not its own inverse, in the place of the measured one.
    curve = {"documents": 4, "slots": [0, 1, 2, 3], "accuracy_by_slot": [0.7, 0.2, 0.9, 0.5]}
    order = (2, 0, 3, 1)
    plan.prepare.run(plan.prepare, context_of(recipe))
    plan.choose_slot.artifact.fs.makedirs(plan.choose_slot.artifact.path)
    plan.choose_slot.artifact.publish(counts={}, seconds={}, details={"slots": [2], "curve": curve, "accuracy": 0.9})
    manifest = plan.evaluate_base.run(plan.evaluate_base, context_of(recipe))
    assert manifest.counts["prompts"] == 16
    study = recipe.study
    build = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=512, reserve=0)
    examples = [example_from_row(row) for row in plan.prepare.artifact.read_table("evaluation.parquet").to_pylist()]
    by_id = {example.example_id: example for example in examples}
    engine = hf_engine(study.model)
    params = SamplingParams(
        0.0, 1.0, study.evaluation.max_new_tokens, tuple(stop_token_ids(study.model, build.tokenizer))
    )
    for row in answers(recipe):
        prompt = build(by_id[row["example_id"]], 4, tuple(row["slots"]), slot_of_rank=order)
        (answer,) = asyncio.run(engine.generate([prompt], params, [0]))
        assert isinstance(answer, Completion)
        assert row["sampled_ids"] == answer.token_ids.tolist()


@pytest.mark.parametrize(
    "inference",
    [
        {"method": "ms_poe", "ms_poe": {"first_layer": 0, "smallest": 1.1, "largest": 2.5}},
        {"method": "attention_buckets", "bases": [1.0, 4.0]},
    ],
)
def test_evaluate_answers_with_the_method_and_its_settings(
    make_recipe: Make, tmp_path: Path, inference: dict[str, Any]
) -> None:
    """The stored answers are those of an engine with these settings, and not those with the method's defaults."""
    recipe = make_recipe(inference=inference, runtime={"executor": "local", "storage": str(tmp_path / "method")})
    run_evaluate(recipe)
    study = recipe.study
    examples = make_plan(recipe).prepare.artifact.read_table("evaluation.parquet").to_pylist()
    build = PromptBuilder(load_tokenizer(study.model), study.data.prompt, max_length=512, reserve=0)
    by_id = {row["example_id"]: example_from_row(row) for row in examples}
    params = SamplingParams(
        0.0, 1.0, study.evaluation.max_new_tokens, tuple(stop_token_ids(study.model, build.tokenizer))
    )
    rows = answers(recipe)
    prompts = [build(by_id[row["example_id"]], 4, tuple(row["slots"])) for row in rows]
    texts = {}
    for name, settings in {"own": inference, "default": {"method": inference["method"]}}.items():
        engine = hf_engine(study.model, InferenceSection.model_validate(settings))
        results = asyncio.run(engine.generate(prompts, params, [0] * len(prompts)))
        texts[name] = [result.token_ids.tolist() for result in results if isinstance(result, Completion)]
    assert [row["sampled_ids"] for row in rows] == texts["own"]
    assert texts["own"] != texts["default"]


def test_lpes_on_the_toy_loads_as_a_recipe() -> None:
    recipe = load_recipe("quickstart", [LOCAL, "inference.method=lpes", "inference.search.generations=2"])
    assert recipe.study.inference.searches_scales
    assert recipe.study.model.rope_scales == ()
