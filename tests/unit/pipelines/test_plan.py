import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.plan import make_plan
from pipelines.stages.prepare import make_examples, training_ids
from pos2distill.config import Recipe
from pos2distill.errors import UserError
from pos2distill.records import example_from_row
from pos2distill.tasks.datasets import load_split

EXAMPLES, BASE, SAMPLE, DISTILL, DISTILLED = STAGES = (
    "examples",
    "evaluate base",
    "sample",
    "distill",
    "evaluate distilled",
)

Make = Callable[..., Recipe]


def fingerprints(recipe: Recipe) -> dict[str, str]:
    return {stage: artifact.fingerprint for stage, artifact in make_plan(recipe).artifacts.items()}


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
        ({"data": {"train_examples": 7}}, {EXAMPLES, SAMPLE, DISTILL, DISTILLED}),
        ({"data": {"eval_examples": 3}}, {EXAMPLES, BASE, DISTILLED}),
        ({"data": {"prompt": "qa"}}, set(STAGES)),
        ({"evaluation": {"other_documents": [6]}}, {EXAMPLES, BASE, DISTILLED}),
        ({"evaluation": {"bootstrap_samples": 300}}, set()),  # of the report only
        ({"method": {"name": "kl"}}, {DISTILL, DISTILLED}),
        ({"method": {"name": "seqkd"}}, {SAMPLE, DISTILL, DISTILLED}),  # its samples need no teacher states
        ({"data": {"metric": "em"}}, set(STAGES)),
        ({"seed": 1}, set(STAGES)),
    ],
)
def test_a_setting_enters_the_stages_it_changes(make_recipe: Make, override: dict[str, Any], stages: set[str]) -> None:
    before = make_recipe()
    after = make_recipe(**override)
    assert changed(before, after) == stages
    assert make_plan(before).fingerprint != make_plan(after).fingerprint


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
    ],
)
def test_where_and_how_it_runs_is_not_its_identity(make_recipe: Make, override: dict[str, Any]) -> None:
    before, after = make_recipe(), make_recipe(**override)
    assert not changed(before, after)
    assert make_plan(before).fingerprint == make_plan(after).fingerprint


def test_other_bytes_change_everything_and_another_place_nothing(make_recipe: Make, tmp_path: Path) -> None:
    before = make_recipe()
    one = fingerprints(before)
    shutil.copytree(before.study.model.path, tmp_path / "moved")
    shutil.copy(before.study.data.path, tmp_path / "moved.jsonl")
    moved = {"model": {"path": str(tmp_path / "moved")}, "data": {"path": str(tmp_path / "moved.jsonl")}}
    assert fingerprints(make_recipe(**moved)) == one
    with open(tmp_path / "moved.jsonl", "a") as file:
        file.write("\n")
    assert changed(before, make_recipe(**moved)) == set(STAGES)


def test_another_model_changes_all_that_it_computes(make_recipe: Make, tmp_path: Path) -> None:
    before = make_recipe()
    shutil.copytree(before.study.model.path, tmp_path / "edited")
    (tmp_path / "edited" / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    after = make_recipe(model={"path": str(tmp_path / "edited")})
    assert changed(before, after) == {BASE, SAMPLE, DISTILL, DISTILLED}


def test_artifacts_lie_under_the_storage_by_name_and_fingerprint(make_recipe: Make, tmp_path: Path) -> None:
    plan = make_plan(make_recipe())
    names = ["examples", "base-scores", "samples", "checkpoint", "distilled-scores"]
    assert [artifact.url for artifact in plan.artifacts.values()] == [
        f"{tmp_path}/storage/{name}-{artifact.fingerprint}"
        for name, artifact in zip(names, plan.artifacts.values(), strict=True)
    ]
    assert len({artifact.fingerprint for artifact in plan.artifacts.values()}) == 5


def test_what_cannot_be_read_is_told(make_recipe: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"dat.jsonl: no such file \(data.path\); did you mean 'data.jsonl'"):
        make_plan(make_recipe(data={"path": str(tmp_path / "dat.jsonl")}))
    with pytest.raises(UserError, match=r"no such model folder \(model.path\)"):
        make_plan(make_recipe(model={"path": str(tmp_path / "nothing")}))


def test_the_examples_stage_writes_the_split(make_recipe: Make) -> None:
    recipe = make_recipe(evaluation={"other_documents": [6]})
    plan = make_plan(recipe)
    manifest = make_examples(recipe, plan.examples)
    split = load_split(recipe.study.data, documents=6, seed=0)
    assert manifest.counts == split.counts
    assert plan.examples.manifest() == manifest
    assert training_ids(plan).to_pylist() == [example.example_id for example in split.train]
    assert [example_from_row(row) for row in plan.examples.read_table("train.parquet").to_pylist()] == list(split.train)
    assert plan.examples.read_table("evaluation.parquet")["example_id"].to_pylist() == [
        example.example_id for example in split.evaluation
    ]


def test_make_plan_ignores_how_the_batch_is_cut(make_recipe: Make) -> None:
    cut = {"trainers": {"strategy": "zero3", "workers": 2, "micro_batch_tokens": 500}}
    assert changed(make_recipe(), make_recipe(runtime=cut)) == set()


@pytest.mark.parametrize(
    "method",
    [
        {"weights": "paper", "anchor_weight": 1},  # what r1 chooses itself
        {"advantageous_slot": 0},  # the same as `first`
        {"auto_examples": 3},  # looked at for `auto` alone
    ],
)
def test_another_way_to_write_the_same_method_is_the_same_study(make_recipe: Make, method: dict[str, Any]) -> None:
    assert make_plan(make_recipe()).fingerprint == make_plan(make_recipe(method=method)).fingerprint


def test_samples_with_states_serve_methods_that_need_none(make_recipe: Make) -> None:
    r1, seqkd = make_recipe(), make_recipe(method={"name": "seqkd"})
    assert make_plan(r1).samples.url != make_plan(seqkd).samples.url
    before = make_plan(seqkd).checkpoint.fingerprint
    samples = make_plan(r1).samples
    samples.fs.makedirs(samples.path)
    samples.publish(counts={}, seconds={})
    assert make_plan(r1).samples.url == make_plan(seqkd).samples.url
    assert make_plan(seqkd).checkpoint.fingerprint == before


def test_how_many_tokens_the_teacher_tells_is_the_samples_own(make_recipe: Make) -> None:
    few, many, default, same = (
        make_recipe(method={"teacher": "topk", **k})
        for k in ({"teacher_topk": 8}, {"teacher_topk": 9}, {}, {"teacher_topk": 64})
    )
    assert changed(few, many) == {SAMPLE, DISTILL, DISTILLED}
    assert changed(default, same) == set()
    assert changed(make_recipe(method={"teacher": "resident"}), few) == {SAMPLE, DISTILL, DISTILLED}


def test_longer_prompts_change_which_published_rows_are_trained_on(make_recipe: Make) -> None:
    """Rows with too few documents are passed over, unless they are filled up."""
    for distractors, stages in (
        ("given", {EXAMPLES, BASE, SAMPLE, DISTILL, DISTILLED}),
        ("random", {EXAMPLES, BASE, DISTILLED}),
    ):
        one, other = (
            make_recipe(data={"format": "dpr", "distractors": distractors}, evaluation={"other_documents": lengths})
            for lengths in ([], [6])
        )
        assert changed(one, other) == stages


def test_auto_is_a_stage_of_its_own(make_recipe: Make) -> None:
    auto = make_recipe(method={"advantageous_slot": "auto"})
    assert list(make_plan(auto).artifacts) == [EXAMPLES, BASE, "choose slot", SAMPLE, DISTILL, DISTILLED]
    more = make_recipe(method={"advantageous_slot": "auto", "auto_examples": 3})
    assert changed(auto, more) == {SAMPLE, DISTILL, DISTILLED}
    assert fingerprints(auto)["choose slot"] != fingerprints(more)["choose slot"]


def test_another_task_is_asked_of_the_same_models(make_recipe: Make, tmp_path: Path) -> None:
    other = make_recipe(name="other", seed=0, evaluation={"slots": 2})
    file = tmp_path / "other.yaml"
    (tmp_path / "recipe.yaml").rename(file)
    alone, both = make_recipe(), make_recipe(evaluation={"also_evaluate": [str(file)]})
    plan = make_plan(both)
    # All data is checked first, and all bases are measured before training.
    assert list(plan.artifacts) == [
        *(EXAMPLES, "other: examples", BASE, "other: evaluate base"),
        *(SAMPLE, DISTILL, DISTILLED, "other: evaluate distilled"),
    ]
    assert changed(alone, both) == set()
    assert plan.transfers["other"].base_scores.fingerprint == make_plan(other).base_scores.fingerprint
    assert plan.fingerprint != make_plan(alone).fingerprint
