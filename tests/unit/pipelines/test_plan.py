import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.executors import build_executor
from pipelines.plan import make_plan, make_plans
from pipelines.provenance import Provenance
from pipelines.stages.prepare import prefix_task_errors, training_ids
from pipelines.stages.stage import Digests, RunContext
from pos2distill.config import Recipe
from pos2distill.errors import MachineError, TransientError, UserError
from pos2distill.records import example_from_row
from pos2distill.store.lease import Lease
from pos2distill.tasks.datasets import load_split

PREPARE, BASE, SAMPLE, DISTILL, DISTILLED = STAGES = (
    "prepare",
    "evaluate base",
    "sample",
    "distill",
    "evaluate distilled",
)

OWN_PROMPT = {"user": "{documents}Question: {question}", "document": "Title: {title}\n{text}\n", "separator": ""}

Make = Callable[..., Recipe]


def fingerprints(recipe: Recipe) -> dict[str, str]:
    return {stage.name: stage.fingerprint for stage in make_plan(recipe).stages}


def changed(before: Recipe, after: Recipe) -> set[str]:
    one, other = fingerprints(before), fingerprints(after)
    return {stage for stage in STAGES if one[stage] != other[stage]}


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ({"training": {"epochs": 3}}, {DISTILL, DISTILLED}),
        ({"training": {"lora": {"rank": 4}}}, {DISTILL, DISTILLED}),
        ({"training": {"precision": "bfloat16"}}, {DISTILL, DISTILLED}),
        ({"method": {"k": 2}}, {DISTILL, DISTILLED}),
        ({"method": {"weights": "official"}}, {DISTILL, DISTILLED}),
        (
            {"method": {"name": "sft", "view": "skip"}},
            {SAMPLE, DISTILL, DISTILLED},
        ),  # its samples need no teacher states
        ({"method": {"distractor_order": "reshuffled"}}, {DISTILL, DISTILLED}),
        ({"evaluation": {"max_new_tokens": 9}}, {BASE, DISTILLED}),
        ({"evaluation": {"slots": 2}}, {BASE, DISTILLED}),
        ({"sampling": {"temperature": 0.5}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"sampling": {"keep": "correct"}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"method": {"advantageous_slot": "last"}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"method": {"alignment": "official"}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"method": {"teacher": "resident"}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"method": {"teacher": "topk"}}, {SAMPLE, DISTILL, DISTILLED}),
        ({"model": {"dtype": "bfloat16"}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"model": {"engine": "vllm"}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"model": {"chat_template_kwargs": {"thinking": False}}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"data": {"train_examples": 7}}, {PREPARE, SAMPLE, DISTILL, DISTILLED}),
        ({"data": {"eval_examples": 3}}, {PREPARE, BASE, DISTILLED}),
        ({"evaluation": {"seed": 1}}, {PREPARE, BASE, DISTILLED}),
        ({"inference": {"method": "uniform_scale", "scales": [1.5]}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"inference": {"method": "lpes"}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"inference": {"method": "reorder"}}, {BASE, DISTILLED}),
        ({"inference": {"method": "ms_poe"}}, {BASE, DISTILLED}),
        ({"inference": {"method": "attention_buckets"}}, {BASE, DISTILLED}),
        ({"data": {"prompt": "qa"}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"data": {"prompt": "template", "template": OWN_PROMPT}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"evaluation": {"other_documents": [6]}}, {PREPARE, BASE, DISTILLED}),
        ({"evaluation": {"bootstrap_samples": 300}}, set()),  # a setting of the report only
        ({"method": {"name": "kl"}}, {DISTILL, DISTILLED}),
        ({"method": {"name": "seqkd"}}, {SAMPLE, DISTILL, DISTILLED}),  # its samples need no teacher states
        ({"data": {"metric": "em"}}, {BASE, SAMPLE, DISTILL, DISTILLED}),
        ({"seed": 1}, set(STAGES)),
    ],
)
def test_make_plan_setting_changes_its_stages(make_recipe: Make, override: dict[str, Any], stages: set[str]) -> None:
    before = make_recipe()
    after = make_recipe(**override)
    assert changed(before, after) == stages
    assert make_plan(before).fingerprint != make_plan(after).fingerprint


@pytest.mark.parametrize(("view", "weight"), [("skip", 0.3), ("cyclic", 0.3), ("pose", 1.0)])
def test_make_plan_gives_training_the_view(make_recipe: Make, view: str, weight: float) -> None:
    """The weight is of the views that have one."""
    plain = make_plan(make_recipe(method={"name": "seqkd"})).distill
    viewed = make_plan(make_recipe(method={"name": "seqkd", "view": view, "view_weight": 0.3})).distill
    assert (viewed.study.method.view, viewed.study.method.view_weight) == (view, weight)
    assert viewed.fingerprint != plain.fingerprint


@pytest.mark.parametrize(
    ("method", "setting", "stages"),
    [
        ("ms_poe", {"ms_poe": {"first_layer": 1}}, {BASE, DISTILLED}),
        ("ms_poe", {"ms_poe": {"largest": 2.0}}, {BASE, DISTILLED}),
        ("ms_poe", {"ms_poe": {"ranking": "released"}}, {BASE, DISTILLED}),
        ("ms_poe", {"ms_poe": {"spacing": "released"}}, {BASE, DISTILLED}),
        ("attention_buckets", {"bases": [1.0, 2.0]}, {BASE, DISTILLED}),
        ("lpes", {"search": {"gamma": 0.5}}, {"search scales", BASE, SAMPLE, DISTILL, DISTILLED}),
        ("lpes", {"search": {"strategy": "random"}}, {"search scales", BASE, SAMPLE, DISTILL, DISTILLED}),
        ("lpes", {"scales": [1.5, 1.2]}, {"search scales", BASE, SAMPLE, DISTILL, DISTILLED}),
    ],
)
def test_make_plan_settings_of_the_method_in_use_change_what_it_changes(
    make_recipe: Make, method: str, setting: dict[str, Any], stages: set[str]
) -> None:
    before, after = (
        fingerprints(make_recipe(inference={"method": method, "ms_poe": {"first_layer": 0}, **each}))
        for each in ({}, setting)
    )
    assert {name for name in {*before, *after} if before.get(name) != after.get(name)} == stages


@pytest.mark.parametrize(
    "override",
    [
        {"name": "other", "description": "words"},
        {"runtime": {"samplers": {"max": 4, "batch_size": 3}, "trainers": {"strategy": "zero3", "workers": 4}}},
        {
            "runtime": {
                "trainers": {"micro_batch_tokens": 100},
                "vllm": {"max_num_seqs": 8},
                "trackers": ["tensorboard"],
            }
        },
        {"evaluation": {"other_documents": []}},
        {"inference": {"bases": [1, 2]}},  # a setting of a method that is not used
        {"method": {"view_weight": 2}},
        {"model": {"chat_template_kwargs": {}}},
    ],
)
def test_make_plan_ignores_the_runtime(make_recipe: Make, override: dict[str, Any]) -> None:
    before, after = make_recipe(), make_recipe(**override)
    assert not changed(before, after)
    assert make_plan(before).fingerprint == make_plan(after).fingerprint


def test_make_plan_seeds_with_one_evaluation_seed_share_the_base_evaluation(make_recipe: Make) -> None:
    first, second = (make_recipe(seed=seed, evaluation={"seed": 7}) for seed in (0, 1))
    assert changed(first, second) == {PREPARE, SAMPLE, DISTILL, DISTILLED}


def test_make_plan_depends_on_bytes_not_paths(make_recipe: Make, tmp_path: Path) -> None:
    before = make_recipe()
    one = fingerprints(before)
    shutil.copytree(before.study.model.path, tmp_path / "moved")
    shutil.copy(before.study.data.path, tmp_path / "moved.jsonl")
    moved = {"model": {"path": str(tmp_path / "moved")}, "data": {"path": str(tmp_path / "moved.jsonl")}}
    assert fingerprints(make_recipe(**moved)) == one
    with open(tmp_path / "moved.jsonl", "a") as file:
        file.write("\n")
    assert changed(before, make_recipe(**moved)) == set(STAGES)


def test_make_plan_depends_on_the_model(make_recipe: Make, tmp_path: Path) -> None:
    before = make_recipe()
    shutil.copytree(before.study.model.path, tmp_path / "edited")
    (tmp_path / "edited" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    after = make_recipe(model={"path": str(tmp_path / "edited")})
    assert changed(before, after) == {BASE, SAMPLE, DISTILL, DISTILLED}


def test_make_plan_fixes_the_commit_of_a_hub_model(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes that start later load the same model, whatever `main` names by then."""
    commit = "a" * 40
    cached = tmp_path / "models--org--name"
    shutil.copytree(make_recipe().study.model.path, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    named, fixed = (make_recipe(model={"path": "org/name", "revision": revision}) for revision in (None, commit))
    for stage in make_plan(named).stages[1:]:
        assert stage.study.model.revision == commit
    assert Provenance.now(named, make_plan(named).study.model).settings["model"]["revision"] == commit
    assert fingerprints(named) == fingerprints(fixed)
    # The digest of the model names the commit, so that one in the settings changes nothing.
    digests = Digests(f"org/name@{commit}", "data")
    assert digests.fingerprint(named.study) == digests.fingerprint(make_plan(named).study)


def test_make_plan_names_artifacts_by_fingerprint(make_recipe: Make, tmp_path: Path) -> None:
    plan = make_plan(make_recipe())
    names = ["examples", "base-scores", "samples", "checkpoint", "distilled-scores"]
    for name, stage in zip(names, plan.stages, strict=True):
        assert stage.artifact.url == f"{tmp_path}/storage/{name}-{stage.fingerprint}"
    assert len({stage.fingerprint for stage in plan.stages}) == 5


def test_make_plan_rejects_missing_files(make_recipe: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dat.jsonl: no such file \(data.path\); did you mean 'data.jsonl'"):
        make_plan(make_recipe(data={"path": str(tmp_path / "dat.jsonl")}))
    with pytest.raises(UserError, match=r"no such model folder \(model.path\)"):
        make_plan(make_recipe(model={"path": str(tmp_path / "nothing")}))


def test_prepare_writes_the_split(make_recipe: Make) -> None:
    recipe = make_recipe(evaluation={"other_documents": [6]}, runtime={"executor": "local"})
    stage = make_plan(recipe).prepare
    logged_settings = recipe.study.model_dump(mode="json")
    run = RunContext(recipe.name, logged_settings, recipe.runtime, build_executor(recipe.runtime), Lease())
    manifest = stage.run(stage, run)
    split = load_split(recipe.study.data, documents=6, seed=0)
    assert manifest.counts == split.counts
    assert stage.artifact.manifest() == manifest
    assert training_ids(stage.artifact).to_pylist() == [example.example_id for example in split.train]
    assert [example_from_row(row) for row in stage.artifact.read_table("train.parquet").to_pylist()] == list(
        split.train
    )
    evaluation_ids = stage.artifact.read_table("evaluation.parquet")["example_id"].to_pylist()
    assert evaluation_ids == [example.example_id for example in split.evaluation]


def test_stage_receives_only_the_settings_it_declares(make_recipe: Make) -> None:
    """A setting that is not in the fingerprint cannot influence the result: `run` sees its default."""
    plan = make_plan(make_recipe(method={"k": 2}, training={"epochs": 3}, evaluation={"max_new_tokens": 9}))
    assert (plan.first_sample.study.training.epochs, plan.first_sample.study.evaluation.max_new_tokens) == (2, 100)
    assert (plan.evaluate_base.study.evaluation.max_new_tokens, plan.evaluate_base.study.method.k) == (9, 4)
    assert (plan.distill.study.training.epochs, plan.distill.study.method.k) == (3, 2)


def test_stage_declares_the_stages_that_it_streams(make_recipe: Make) -> None:
    plan = make_plan(make_recipe())
    assert [dict(stage.streams) for stage in plan.stages if stage is not plan.distill] == [{}] * 4
    assert plan.distill.streams == {"samples": plan.first_sample}
    assert plan.distill.inputs["samples"].artifact == plan.first_sample.artifact


def test_choose_slot_does_not_depend_on_bootstrap_samples(make_recipe: Make) -> None:
    """Its interval has a number of its own, so that a setting of the report never trains again."""
    few, many = (
        make_recipe(method={"advantageous_slot": "auto"}, evaluation={"bootstrap_samples": count})
        for count in (200, 300)
    )
    assert fingerprints(few) == fingerprints(many)
    assert make_plan(few).fingerprint != make_plan(many).fingerprint


@pytest.mark.parametrize(
    "method",
    [
        {"weights": "paper", "anchor_weight": 1},  # the defaults of r1
        {"advantageous_slot": 0},  # the same as `first`
        {"auto_examples": 3},  # used for `auto` only
    ],
)
def test_make_plan_ignores_how_a_method_is_written(make_recipe: Make, method: dict[str, Any]) -> None:
    assert make_plan(make_recipe()).fingerprint == make_plan(make_recipe(method=method)).fingerprint


def test_make_plans_shares_samples_with_methods_that_need_no_teacher(make_recipe: Make) -> None:
    r1, seqkd = make_recipe(), make_recipe(method={"name": "seqkd"})
    alone = make_plan(seqkd)
    assert make_plan(r1).first_sample.artifact.url != alone.first_sample.artifact.url
    for order in ([r1, seqkd], [seqkd, r1]):
        one, other = make_plans(order)
        expected = make_plan(r1).first_sample.artifact.url
        assert one.first_sample.artifact.url == other.first_sample.artifact.url == expected
    assert make_plans([r1, seqkd])[1].distill.fingerprint == alone.distill.fingerprint


def test_make_plan_teacher_topk_changes_the_samples(make_recipe: Make) -> None:
    few, many, default, same = (
        make_recipe(method={"teacher": "topk", **k})
        for k in ({"teacher_topk": 8}, {"teacher_topk": 9}, {}, {"teacher_topk": 64})
    )
    assert changed(few, many) == {SAMPLE, DISTILL, DISTILLED}
    assert changed(default, same) == set()
    assert changed(make_recipe(method={"teacher": "resident"}), few) == {SAMPLE, DISTILL, DISTILLED}


def test_make_plan_longer_prompts_skip_published_records(make_recipe: Make) -> None:
    """Rows with too few documents are passed over, unless they are filled up."""
    for distractors, stages in (
        ("given", {PREPARE, BASE, SAMPLE, DISTILL, DISTILLED}),
        ("random", {PREPARE, BASE, DISTILLED}),
    ):
        one, other = (
            make_recipe(data={"format": "dpr", "distractors": distractors}, evaluation={"other_documents": lengths})
            for lengths in ([], [6])
        )
        assert changed(one, other) == stages


def test_make_plan_auto_adds_a_stage(make_recipe: Make) -> None:
    auto = make_recipe(method={"advantageous_slot": "auto"})
    assert [stage.name for stage in make_plan(auto).stages] == [
        PREPARE,
        "choose slot",
        BASE,
        SAMPLE,
        DISTILL,
        DISTILLED,
    ]
    more = make_recipe(method={"advantageous_slot": "auto", "auto_examples": 3})
    assert changed(auto, more) == {SAMPLE, DISTILL, DISTILLED}
    assert fingerprints(auto)["choose slot"] != fingerprints(more)["choose slot"]


def test_make_plan_evaluates_other_tasks_with_the_same_models(make_recipe: Make, tmp_path: Path) -> None:
    other = make_recipe(name="other", seed=0, evaluation={"slots": 2})
    file = tmp_path / "other.yaml"
    (tmp_path / "recipe.yaml").rename(file)
    alone, both = make_recipe(), make_recipe(evaluation={"also_evaluate": [str(file)]})
    plan = make_plan(both)
    # All data is checked first, and all bases are measured before training.
    assert [stage.name for stage in plan.stages] == [
        *(PREPARE, "other: prepare", BASE, "other: evaluate base"),
        *(SAMPLE, DISTILL, DISTILLED, "other: evaluate distilled"),
    ]
    assert changed(alone, both) == set()
    assert plan.other_tasks["other"].evaluate_base.fingerprint == make_plan(other).evaluate_base.fingerprint
    assert plan.fingerprint != make_plan(alone).fingerprint


@pytest.mark.parametrize("method", [{"name": "r1"}, {"name": "r1-on-policy", "rounds": 1}])
def test_slot_of_the_teacher_changes_what_is_sampled_and_trained(make_recipe: Make, method: dict[str, Any]) -> None:
    """Where the teacher has its advantage, the setting is in no dump, so that it changes no fingerprint."""
    plain, random = make_recipe(method=method), make_recipe(method={**method, "teacher_slot": "random"})
    assert changed(plain, random) == {SAMPLE, DISTILL, DISTILLED}
    assert "teacher_slot" not in plain.study.model_dump_json()
    assert "teacher_slot" in random.study.model_dump_json()


def test_divergence_changes_what_is_trained_alone(make_recipe: Make) -> None:
    """The paper's is in no dump, so that it changes no fingerprint."""
    forward, reverse = make_recipe(), make_recipe(method={"divergence": "reverse"})
    assert changed(forward, reverse) == {DISTILL, DISTILLED}
    assert '"divergence"' not in forward.study.model_dump_json()


@pytest.fixture
def with_other_task(make_recipe: Make, tmp_path: Path) -> Callable[[dict[str, Any], dict[str, Any]], Recipe]:
    """`with_other_task(inference, settings of the other recipe)`: a recipe that is evaluated on another one too."""

    def make(inference: dict[str, Any], other: dict[str, Any]) -> Recipe:
        make_recipe(name="other", **other)
        file = (tmp_path / "recipe.yaml").rename(tmp_path / "other.yaml")
        return make_recipe(inference=inference, evaluation={"also_evaluate": [str(file)]})

    return make


@pytest.mark.parametrize(
    ("inference", "other"),
    [
        ({"method": "reorder"}, {"data": {"train_examples": 0}}),
        ({"method": "reorder"}, {"method": {"auto_slots": 1}}),
        ({"method": "ms_poe"}, {"analysis": {}}),
        ({"method": "uniform_scale", "scales": [1.5]}, {"analysis": {}}),
    ],
)
def test_make_plan_applies_the_inference_method_to_other_tasks(
    with_other_task: Callable[..., Recipe], inference: dict[str, Any], other: dict[str, Any]
) -> None:
    """Whatever the other recipe has for its own training and analysis, which are not used."""
    recipe = with_other_task(inference, other)
    task = make_plan(recipe).other_tasks["other"]
    assert task.study.inference == recipe.study.inference
    assert task.study.model == recipe.study.model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"evaluation": {"distractor_orders": 3}},
            "other: has 3 orders of distractors (evaluation.distractor_orders), but inference.method 'reorder' orders",
        ),
        (
            {"data": {"hops": [2, 3]}, "evaluation": {"slots": "pairs"}},
            "other: inference.method 'reorder' requires one number of hops (data.hops)",
        ),
    ],
)
def test_make_plan_rejects_other_tasks_that_cannot_be_reordered(
    with_other_task: Callable[..., Recipe], other: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(f"evaluation.also_evaluate: {message}")):
        make_plan(with_other_task({"method": "reorder"}, other))


@pytest.mark.parametrize("kind", [UserError, TransientError, MachineError])
def test_prefix_task_errors_keeps_the_type(kind: type[UserError]) -> None:
    """By its type, a job on a cluster waits and tries again, or ends for good."""
    message = r"^evaluation\.also_evaluate: other: s3://b/x: cannot be used$"
    with pytest.raises(UserError, match=message) as caught, prefix_task_errors("other"):
        raise kind("s3://b/x: cannot be used")
    assert type(caught.value) is kind
    with pytest.raises(kind, match=r"^of the study$"), prefix_task_errors(None):
        raise kind("of the study")


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_evaluations_depend_on_the_models_name_at_a_server(make_recipe: Make, api: str) -> None:
    """The path may be that of its tokenizer alone."""

    def evaluation(**endpoint: str) -> str:
        return make_plan(
            make_recipe(
                model={"engine": "openai", "api": api, "dtype": "bfloat16"},
                runtime={"executor": "local", "endpoint": {"base_url": "http://127.0.0.1:1", **endpoint}},
            )
        ).evaluate_base.fingerprint

    assert len({evaluation(), evaluation(served_model="v1"), evaluation(served_model="v2")}) == 3


def test_reference_prompts_change_evaluations_alone(make_recipe: Make) -> None:
    without, asked = (make_plan(make_recipe(evaluation={"reference_prompts": each})) for each in (False, True))
    assert without.fingerprint == make_plan(make_recipe()).fingerprint
    assert without.evaluate_base.fingerprint != asked.evaluate_base.fingerprint
    assert without.distill.fingerprint == asked.distill.fingerprint


def test_template_changes_all_that_depends_on_prompts(make_recipe: Make) -> None:
    """Each of its texts."""
    own, other = (
        make_recipe(
            data={"prompt": "template", "template": {**OWN_PROMPT, **changed_text}},
            method={"advantageous_slot": "auto"},
            inference={"method": "lpes", "scales": []},
            analysis={"examples": 2},
        )
        for changed_text in ({}, {"system": "Be brief."})
    )
    one, two = fingerprints(own), fingerprints(other)
    assert {name for name in one if one[name] == two[name]} == {PREPARE}


def test_report_depends_on_the_retrievers_ranks(make_recipe: Make) -> None:
    """They change no stage, but what the report shows."""
    ranks = [[], [3, 2, 1], [1, 2, 3]]
    plans = [make_plan(make_recipe(evaluation={"retriever_ranks": each})) for each in ranks]
    assert len({plan.fingerprint for plan in plans}) == 3
    assert len({plan.evaluate_distilled.fingerprint for plan in plans}) == 1
