"""What a run says of its settings before it starts."""

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines.checks.setting_warnings import warn_of_settings
from pipelines.cli import command_line
from pipelines.commands import COMMANDS
from pipelines.plan import make_plan
from pipelines.provenance import Provenance, record_provenance
from pos2distill.config import Recipe
from pos2distill.errors import warn_once
from pos2distill.store.artifacts import Artifact
from pos2distill.training.rows import row_keys_of_rank
from tests.support.commands import run_evaluate, run_sample

Make = Callable[..., Recipe]


@pytest.fixture
def warnings_of(capsys: pytest.CaptureFixture[str]) -> Callable[[Recipe], list[str]]:
    def warn(recipe: Recipe) -> list[str]:
        capsys.readouterr()
        plan = make_plan(recipe)
        pending = [stage for stage in plan.stages if stage.artifact.manifest() is None]
        warn_of_settings(recipe, pending)
        return capsys.readouterr().err.splitlines()

    return warn


@pytest.fixture
def warnings_if_finished(capsys: pytest.CaptureFixture[str]) -> Callable[[Recipe], list[str]]:
    """Warnings of a run without pending stages, so that its model need not exist."""

    def warn(recipe: Recipe) -> list[str]:
        warn_of_settings(recipe, [])
        return capsys.readouterr().err.splitlines()

    return warn


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"inference": {"ms_poe": {"ranking": "released"}}},
            "warning: inference.ms_poe: has no effect, since inference.method is none, not ms_poe",
        ),
        (
            {"inference": {"method": "ms_poe", "bases": [1, 2]}},
            "warning: inference.bases: has no effect, since inference.method is ms_poe, not attention_buckets",
        ),
        (
            {"inference": {"method": "lpes", "scales": [1, 2], "search": {"gamma": 0.5}}},
            "warning: inference.search: has no effect, since inference.scales are given",
        ),
        ({"sampling": {"top_p": 0.9}}, "warning: sampling.top_p: has no effect, since sampling.temperature is 0"),
        ({"method": {"view_weight": 3}}, "warning: method.view_weight: has no effect, since method.view is none"),
        (
            {"method": {"name": "seqkd", "view": "pose", "view_weight": 3}},
            "warning: method.view_weight: has no effect, since method.view is pose",
        ),
        (
            {"runtime": {"endpoint": {"base_url": "http://127.0.0.1:9/v1"}}},
            "warning: runtime.endpoint.base_url: has no effect, since model.engine is hf, not openai",
        ),
        (
            {
                "model": {"engine": "openai"},
                "runtime": {
                    "executor": "local",
                    "endpoint": {"base_url": "http://127.0.0.1:9/v1", "concurrency": 200},
                    "samplers": {"batch_size": 64},
                },
            },
            "warning: runtime.endpoint.concurrency: 200, but in one process a batch ends before the next one begins, "
            "so at most 64 requests are under way (runtime.samplers.batch_size); raise that too",
        ),
        (
            {"model": {"api": "completions"}},
            "warning: model.api: has no effect, since model.engine is hf, not openai",
        ),
        (
            {"model": {"extra_body": {"seed": 1}}},
            "warning: model.extra_body: has no effect, since model.engine is hf, not openai",
        ),
    ],
)
def test_warn_of_settings_names_those_of_a_method_that_is_not_chosen(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]], settings: dict[str, Any], line: str
) -> None:
    recipe = make_recipe(**settings)
    assert warnings_of(recipe) == [line]
    assert warnings_of(recipe) == []  # as for the next study of a sweep


@pytest.mark.parametrize("command", ["sample", "distill", "evaluate", "study"])
def test_warn_of_settings_names_a_method_of_evaluations_where_nothing_is_evaluated(
    make_recipe: Make, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    recipe = make_recipe(inference={"method": "reorder"})
    warn_of_settings(recipe, COMMANDS[command].stages(make_plan(recipe)))
    assert capsys.readouterr().err == (command in ("sample", "distill")) * (
        "warning: inference.method: reorder changes only evaluations; samples and training are those of the plain "
        "model\n"
    )


@pytest.mark.parametrize(("rate", "warned"), [(1e6, True), (0.1, True), (1e-2, False)])
def test_warn_of_settings_names_a_rate_that_is_very_high(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]], rate: float, *, warned: bool
) -> None:
    lines = warnings_of(make_recipe(training={"learning_rate": rate}))
    line = f"warning: training.learning_rate: {rate:g} is very high; usual rates are 1e-6 to 1e-4, of adapters 1e-4 to "
    assert [each.startswith(line) for each in lines] == [True] * warned


@pytest.mark.parametrize(
    ("training", "dtype", "is_low"),
    [
        ({"lora": {"rank": 2}, "learning_rate": 3e-6}, "bfloat16", True),
        ({"lora": {"rank": 2}, "learning_rate": 2e-5}, "bfloat16", False),
        ({"lora": {"rank": 2}, "learning_rate": 3e-6}, "float32", False),
        ({"learning_rate": 3e-6}, "bfloat16", False),
    ],
)
def test_warn_of_settings_names_a_rate_that_is_too_low_for_adapters(
    make_recipe: Make,
    warnings_of: Callable[[Recipe], list[str]],
    capsys: pytest.CaptureFixture[str],
    training: dict[str, Any],
    dtype: str,
    is_low: bool,
) -> None:
    recipe = make_recipe(training=training, model={"dtype": dtype})
    assert warnings_of(recipe) == is_low * [
        "warning: training.learning_rate: 3e-06 is a rate for all weights; adapters (training.lora) usually need about "
        "1e-4, and rounding to bfloat16 would take most of so small an update from the merged model"
    ]
    # Of commands that train nothing.
    warn_once.cache_clear()
    warn_of_settings(recipe, [])
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("trainers", "rows", "useful"),
    [
        ({"workers": 8}, 24, None),
        ({"workers": 16}, 24, 12),  # two rows each
        ({"workers": 24}, 24, None),
        ({"workers": 1, "max_workers": 30}, 24, 24),
        ({"workers": 64}, 24, 24),
        ({"workers": 5}, 4, 4),
    ],
)
def test_warn_of_settings_names_workers_without_rows(
    make_recipe: Make,
    warnings_of: Callable[[Recipe], list[str]],
    trainers: dict[str, Any],
    rows: int,
    useful: int | None,
) -> None:
    """Six examples with four rows each, or one example; three rows of the batch are too few for another one."""
    batch = 27 if rows == 24 else 7
    recipe = make_recipe(training={"global_batch_rows": batch}, runtime={"trainers": {"strategy": "zero3", **trainers}})
    name, workers = list(trainers.items())[-1]
    lines = [
        f"warning: runtime.trainers.{name}: {workers}, but a global batch has {rows} rows "
        f"(training.global_batch_rows: {batch}), which {useful} workers compute as fast; more only share the memory"
    ]
    assert warnings_of(recipe) == (lines if useful else [])
    # These are the workers that `row_keys_of_rank` gives rows to.
    keys: Any = list(range(rows))
    with_rows = [rank for rank in range(workers) if not row_keys_of_rank(keys, rank, workers)[0][1]]
    assert len(with_rows) == (useful or workers)


def test_warn_of_settings_counts_the_rows_that_are_computed(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]]
) -> None:
    """Of methods without anchor rows, and of data with fewer examples than a batch holds."""
    trainers = {"strategy": "zero3", "workers": 20}
    for method, examples, rows in (("kl", 8, 18), ("r1-on-policy", 8, 24), ("r1", 2, 8)):
        recipe = make_recipe(
            method={"name": method},
            data={"train_examples": examples},
            training={"global_batch_rows": 24},
            runtime={"trainers": trainers},
        )
        (line,) = warnings_of(recipe)
        assert f"a global batch has {rows} rows" in line


def test_warn_of_settings_names_a_prompt_without_documents_that_asks_for_no_conclusion(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]]
) -> None:
    template = {"user": "{documents} {question} End with: The answer is"}
    asked = {**template, "without_documents": "{question} End with: The answer is"}
    for own, references, count in ((template, False, 0), (asked, True, 0), (template, True, 1)):
        data = {"prompt": "template", "template": own}
        lines = warnings_of(make_recipe(data=data, evaluation={"reference_prompts": references}))
        assert lines == count * [
            "warning: data.template.without_documents: does not ask for 'The answer is', which data.metric em judges"
        ]


def test_warn_of_settings_says_nothing_of_those_in_use(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]]
) -> None:
    for inference in (
        {"method": "lpes", "search": {"gamma": 0.5}},
        {"method": "ms_poe", "ms_poe": {"first_layer": 1}},
        {"method": "attention_buckets", "bases": [1, 2]},
    ):
        assert warnings_of(make_recipe(inference=inference)) == []


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """`on_cpu(True)`: from now on, this machine multiplies matrices faster in bfloat16."""

    def change(is_faster_in_bfloat16: bool) -> None:
        monkeypatch.setattr("pos2distill.config.base.cpu_is_faster_in_bfloat16", lambda: is_faster_in_bfloat16)

    return change


AUTO = {"model": {"dtype": "auto"}, "training": {"precision": "auto"}, "runtime": {"executor": "local"}}


@pytest.mark.parametrize(
    ("run", "stage", "slot"),
    [(run_evaluate, "evaluate base", "first"), (run_evaluate, "evaluate base", 0), (run_sample, "sample", 0)],
)
def test_warn_of_settings_names_finished_stages_of_another_cpu(
    make_recipe: Make,
    warnings_of: Callable[[Recipe], list[str]],
    on_cpu: Callable[[bool], None],
    run: Callable[[Recipe], object],
    stage: str,
    slot: str | int,
) -> None:
    """As if a run were continued on a machine where `auto` is another precision."""
    on_cpu(False)
    method = {"advantageous_slot": slot}
    recipe = make_recipe(**AUTO, method=method)
    run(recipe)
    assert warnings_of(recipe) == []
    on_cpu(True)
    words = "model.dtype=float32 training.precision=float32"
    assert warnings_of(make_recipe(**AUTO, method=method)) == [
        f"warning: {recipe.storage}: holds a finished stage '{stage}' made with {words}, which is not used, "
        f"since auto chooses another precision on this CPU; add {words} to use it"
    ]
    # Where more differs, it is no run to continue; and a precision that is written is meant.
    assert warnings_of(make_recipe(**AUTO, method=method, evaluation={"max_new_tokens": 9})) == []
    assert warnings_of(make_recipe(model={"dtype": "bfloat16"}, training={"precision": "bfloat16"})) == []


def test_warn_of_settings_survives_records_that_are_corrupt(
    make_recipe: Make, warnings_of: Callable[[Recipe], list[str]], on_cpu: Callable[[bool], None]
) -> None:
    on_cpu(False)
    recipe = make_recipe(**AUTO)
    run_evaluate(recipe)
    (Path(make_plan(recipe).evaluate_base.artifact.path) / "provenance.json").write_text("{}")
    on_cpu(True)
    assert warnings_of(make_recipe(**AUTO)) == []


def test_commands_warn_before_they_run(make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_recipe(method={"view_weight": 3}, runtime={"executor": "local"})
    assert command_line.main(["study", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    assert "warning: method.view_weight: has no effect, since method.view is none" in capsys.readouterr().err


@pytest.mark.parametrize("is_url", [False, True])
def test_warn_of_settings_names_a_prompt_unlike_that_of_training(
    make_recipe: Make, warnings_if_finished: Callable[[Recipe], list[str]], tmp_path: Path, is_url: bool
) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    trained = make_recipe(data={"prompt": "plain"}, model=thinking)
    artifact = Artifact(f"memory://{uuid.uuid4().hex}/runs" if is_url else str(tmp_path / "runs"), "checkpoint", "f1a0")
    model = f"{artifact.url}/model"
    same = make_recipe(model={"path": model, **thinking}, data={"prompt": "plain"})
    other = make_recipe(model={"path": model}, data={"prompt": "qa"})
    assert warnings_if_finished(other) == []  # nothing tells how it was trained
    with artifact.writing():
        artifact.publish(counts={}, seconds={})
    record_provenance(artifact, Provenance.now(trained), "distill", {})
    assert warnings_if_finished(same) == []
    assert warnings_if_finished(other) == [
        f"warning: data.prompt: qa, but {model} was trained with data.prompt=plain",
        f"warning: model.chat_template_kwargs: {{}}, but {model} was trained with "
        'model.chat_template_kwargs={"enable_thinking": true}',
    ]


def test_warn_of_settings_names_a_template_unlike_that_of_training(
    make_recipe: Make, warnings_if_finished: Callable[[Recipe], list[str]], tmp_path: Path
) -> None:
    def data(user: str) -> dict[str, Any]:
        return {"prompt": "template", "template": {"user": user}}

    trained = make_recipe(data=data("{documents} {question}"))
    artifact = Artifact(str(tmp_path / "runs"), "checkpoint", "f1a0")
    with artifact.writing():
        artifact.publish(counts={}, seconds={})
    record_provenance(artifact, Provenance.now(trained), "distill", {})
    model = {"path": f"{artifact.url}/model"}
    same, other = (
        make_recipe(model=model, data=data(text)) for text in ("{documents} {question}", "{documents}{question}")
    )
    assert warnings_if_finished(same) == []
    assert warnings_if_finished(other) == [f"warning: data.template: another one than {model['path']} was trained with"]
    plain = make_recipe(model=model, data={"prompt": "plain", "template": None})
    assert warnings_if_finished(plain) == [
        f"warning: data.prompt: plain, but {model['path']} was trained with data.prompt=template"
    ]
