import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipelines import commands
from pipelines.cli import command_line, recipe_commands
from pipelines.missing_inputs import with_input_source_hint
from pipelines.plan import make_plan
from pipelines.stages.predictions import prediction_parts, read_predictions
from pipelines.terminal import summarize_manifest
from pos2distill.config import Recipe
from pos2distill.config.commands import COMMAND_FACTS
from pos2distill.config.load import load_recipe
from pos2distill.config.read import RECIPES, recipe_names
from pos2distill.config.sweep import sweep_cells
from pos2distill.errors import UserError
from pos2distill.store.artifacts import Artifact, Manifest
from pos2distill.store.storage import claim_storage
from tests.support.commands import replace_command, run_study
from tests.support.paths import PROJECT

Make = Callable[..., Recipe]
COMMANDS = command_line.build_parser().commands


@pytest.fixture
def recipe(make_recipe: Make, tmp_path: Path) -> str:
    make_recipe()
    return str(tmp_path / "recipe.yaml")


@pytest.mark.parametrize("module", ["cli.command_line", "commands", "dry_run", "api"])
def test_no_heavy_packages_are_imported_before_they_are_needed(module: str) -> None:
    """Help, misspelled fields, paths of nothing and cached results are answered at once."""
    code = (
        f"import sys, pipelines.{module}\n"
        "from pos2distill.config.load import load_recipe\n"
        "from pos2distill.config.read import recipe_names\n"
        "loaded = [load_recipe(name).name for name in recipe_names()]\n"
        "print(loaded, sorted({'torch', 'ray', 'vllm', 'transformers', 'deepspeed'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == f"{recipe_names()} []"


def test_help_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["--help"])
    shown = capsys.readouterr().out
    names = re.findall(r"^    ([a-z]+) ", shown, re.MULTILINE)
    assert {*COMMANDS} == {*names}
    for name in names:
        assert f"\n  python run.py {name}" in shown
    assert "Exit codes" in shown


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "cluster"])
def test_help_of_a_command_shows_examples_of_it_alone(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main([name, "--help"])
    examples = capsys.readouterr().out.partition("examples:\n")[2]
    commands_shown = re.findall(r"^  python run\.py ([a-z]+)", examples, re.MULTILINE)
    assert set(commands_shown) == {name}
    assert "Exit codes" in examples


def test_help_of_cluster_shows_its_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        command_line.main(["cluster", "status", "--help"])
    shown = capsys.readouterr().out
    assert "python run.py cluster status my_cluster.yaml" in shown
    assert "Exit codes" in shown
    assert "quickstart" not in shown


def test_cluster_rejects_dry_run_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["cluster", "submit", "kind", "quickstart", "--dry-run"])
    assert capsys.readouterr().err.endswith(
        "arguments: --dry-run; cluster render and validate send nothing (see python run.py cluster --help)\n"
    )


def test_commands_of_a_recipe_have_functions() -> None:
    assert commands.COMMANDS.keys() == recipe_commands._HELP.keys() == COMMAND_FACTS.keys()


@pytest.mark.parametrize("name", COMMAND_FACTS)
def test_facts_of_a_command_are_those_of_its_stages(name: str, tmp_path: Path) -> None:
    """A cluster gives a job the pools that these facts ask for, without planning the stages."""
    facts = COMMAND_FACTS[name]

    def work(*settings: str) -> set[str]:
        """The first words of the stages' names."""
        (planned,) = commands.plan_command(load_recipe("quickstart", [f"runtime.storage={tmp_path}", *settings]), name)
        return {stage.name.split()[0] for stage in planned.stages(commands.COMMANDS[name].stages)}

    assert ("analyze" in work()) == facts.adds_analysis
    if not facts.only_reads:
        expected = {"sample": facts.samples, "distill": facts.trains, "analyze": facts.analyzes}
        found = work("analysis.examples=2")
        assert {stage: stage in found for stage in expected} == expected


def test_recipes_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["recipes", "--json"]) == 0
    recipes = {recipe["name"]: recipe["description"] for recipe in json.loads(capsys.readouterr().out)}
    assert recipes.keys() == set(recipe_names())
    assert recipes["quickstart"] == load_recipe("quickstart").description


def test_recipes_lists_names_and_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == recipe_names()
    assert all(load_recipe(line.split()[0]).description in line for line in lines)


def test_recipes_prints_a_recipe_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["recipes", "quickstart"]) == 0
    copy = tmp_path / "mine.yaml"
    copy.write_text(capsys.readouterr().out)
    assert load_recipe(str(copy)).study.method == load_recipe("quickstart").study.method
    assert copy.read_text() == (RECIPES / "quickstart.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quickstrat"], "quickstrat: no recipe of the project; did you mean 'quickstart'?"),
        (["../recipes/quickstart"], "../recipes/quickstart: no recipe of the project; did you mean 'quickstart'?"),
        (["quickstart", "--json"], "--json: is an option of the list; leave it out to print a recipe"),
    ],
)
def test_recipes_rejects_what_it_cannot_print(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["recipes", *words]) == 2
    assert capsys.readouterr() == ("", f"error: {message}\n")


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_dry_run_shows_settings_and_writes_nothing(
    recipe: str,
    tmp_path: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipelines.dry_run._PROMPT_LINES", 2)
    changed = ["training.epochs=5", "training.global_batch_rows=15"]
    assert command_line.main(["study", recipe, *changed, "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    again = tmp_path / "again.yaml"
    again.write_text(shown)
    resolved = load_recipe(recipe, changed)
    assert load_recipe(str(again)) == resolved
    settings = yaml.safe_load(shown)
    assert settings["training"]["epochs"] == 5
    # A default is shown only if it is asked for.
    assert ("betas" in settings["training"]) == bool(options)
    plan = make_plan(resolved)
    assert f"# study {plan.fingerprint}, storage {resolved.storage}" in shown
    for stage in plan.stages:
        assert f"#   to run    {stage.name:<18}  {stage.artifact.url}\n" in shown
    assert f"#   to write  {'report':<18}  {resolved.storage}/report/index.html\n" in shown
    assert not Path(resolved.storage).exists()
    assert "# data      records 40, duplicate 0, eval unused 15, train unused 13, train 8, eval 4, answer in " in shown
    assert re.findall("^# work      (.*)$", shown, re.M) == [
        "evaluate base: 16 prompts (4 questions)",  # at 4 slots
        "sample: until 8 answers are kept, from at most 8 questions",
        "distill: at most 15 steps of at most 3 examples (12 rows)",  # five epochs of three batches
        "evaluate distilled: 16 prompts (4 questions)",
    ]
    prompt = re.search(
        r"^# prompt    4 documents: (\d+) tokens \(the longest checked\), and 8 for the answer\n((?:#   \| .*\n)+)",
        shown,
        re.M,
    )
    assert prompt is not None
    assert "<s><|user|>Title: " in prompt[2]
    assert prompt[2].endswith("<|assistant|>\n")
    assert ("more lines (--full shows them)" in prompt[2]) != bool(options)


def test_dry_run_names_no_method_of_a_sweep_of_methods(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(tmp_path / "recipe.yaml")
    make_recipe(sweep={"seed": [0, 1]})
    assert command_line.main(["study", recipe, "--dry-run"]) == 0
    assert "# method r1; all other settings have their defaults" in capsys.readouterr().out
    make_recipe(sweep={"method.name": ["r1", "seqkd"]})
    assert command_line.main(["study", recipe, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "\n# all other settings have their defaults" in shown
    assert shown.count("# data      records 40") == 1


def test_dry_run_counts_the_work_of_every_task_and_round(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"slots": [0, 3], "other_documents": [3], "other_slots": 2, "distractor_orders": 2}
    make_recipe(name="small", data={"documents": 3, "eval_examples": 2}, method={"k": 2})
    other = (tmp_path / "recipe.yaml").rename(tmp_path / "small.yaml")
    make_recipe(
        evaluation={**evaluation, "reference_prompts": True, "also_evaluate": [str(other)]},
        method={"name": "r1-on-policy", "k": 3, "anchor_weight": 0},
    )
    assert command_line.main(["study", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.findall("^# work      (.*)$", shown, re.M) == [
        # Two slots among four and two among three documents in two orders, no document, and the gold document alone.
        "evaluate base: 40 prompts (4 questions)",
        "small: evaluate base: 6 prompts (2 questions)",
        "sample: until 24 answers are kept, from at most 8 questions",  # K = 3 of each
        "distill: at most 1 step of at most 8 examples (24 rows)",
        "sample 2: until 24 answers are kept, from at most 8 questions",
        "distill 2: at most 1 step of at most 8 examples (24 rows)",
        "evaluate distilled: 40 prompts (4 questions)",
        "small: evaluate distilled: 6 prompts (2 questions)",
    ]


def test_dry_run_counts_the_prompts_of_measurements(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    search = {
        "generations": 3,
        "population": 6,
        "mutations": 2,
        "crossovers": 1,
        "parents": 3,
        "examples": 5,
        "slots": 2,
    }
    make_recipe(
        method={"advantageous_slot": "auto", "auto_examples": 4, "auto_slots": 3},
        inference={"method": "lpes", "search": search},
        sweep={"seed": [0, 1]},
    )
    assert command_line.main(["study", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert re.findall("^# work      (.*)$", shown, re.M) == [
        # 6 and twice 3 candidates, 5 questions at 2 slots.
        "search scales: at most 120 prompts (12 candidates, 5 questions), seed=0",
        "choose slot: 12 prompts (4 questions), seed=0",
        "evaluate base: 16 prompts (4 questions), seed=0",
        "sample: until 8 answers are kept, from at most 8 questions, seed=0",
        "distill: at most 1 step of at most 8 examples (32 rows), seed=0",
        "evaluate distilled: 16 prompts (4 questions), seed=0",
    ]


def test_dry_run_counts_what_an_interrupted_run_has_stored(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_recipe(runtime={"executor": "local"})
    run_study(recipe)
    plan = make_plan(recipe)
    answers = read_predictions(plan.evaluate_base.artifact)
    prediction_parts(plan.evaluate_base.artifact).append(answers.slice(0, 5))
    for stage in (plan.evaluate_base, plan.first_sample, plan.distill):
        stage.artifact.remove("manifest.json")
    plan.distill.artifact.fs.makedirs(f"{plan.distill.artifact.path}/training/local/00000001-abcd")
    plan.distill.artifact.write_json("training/local/latest.json", ["00000001-abcd"])
    capsys.readouterr()
    assert command_line.main(["study", str(tmp_path / "recipe.yaml"), "runtime.executor=local", "--dry-run"]) == 0
    assert re.findall("^# work      (.*)$", capsys.readouterr().out, re.M) == [
        "evaluate base: 16 prompts (4 questions); 5 answered so far",
        "sample: until 8 answers are kept, from at most 8 questions; 8 kept so far",
        "distill: at most 1 step of at most 8 examples (32 rows); 1 done so far",
        "evaluate distilled: 16 prompts (4 questions)",  # of a checkpoint that is made again
    ]


def test_dry_run_counts_the_candidates_of_a_sample(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe(method={"name": "seqkd"}, sampling={"candidates": 8, "temperature": 0.7})
    assert command_line.main(["sample", str(tmp_path / "recipe.yaml"), "--dry-run"]) == 0
    line = "# work      sample: until 8 answers are kept, each chosen from 8, from at most 8 questions\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "stages"),
    [
        ("evaluate", ["prepare", "evaluate base"]),
        ("sample", ["prepare", "sample"]),
        ("distill", ["prepare", "sample", "distill"]),
    ],
)
def test_dry_run_shows_the_stages_of_its_command(
    recipe: str, command: str, stages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main([command, recipe, "--dry-run"]) == 0
    lines = [line.removeprefix("#   ") for line in capsys.readouterr().out.splitlines() if line.startswith("#   ")]
    lines = [line for line in lines if not line.endswith("index.html") and not line.startswith("| ")]
    assert [line[10:28].rstrip() for line in lines] == stages
    assert all(line.startswith("to run") for line in lines)


def test_report_rejects_unfinished_results_by_dry_run_too(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = load_recipe(recipe)
    claim_storage(resolved.storage, resolved.name)
    for options in ([], ["--dry-run"]):
        assert command_line.main(["report", recipe, *options]) == 2
        assert f"{resolved.storage}: stage `prepare` has not finished (fingerprint " in capsys.readouterr().err
        assert command_line.main(["report", recipe, "sweep.seed=[0, 1]", *options]) == 2
        assert ": 2 of 2 studies are not finished: seed=0; seed=1; run `study` again" in capsys.readouterr().err


def test_dry_run_shows_cached_stages(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_recipe(recipe)
    claim_storage(loaded.storage, loaded.name)
    artifact = make_plan(loaded).first_sample.artifact
    with artifact.writing():
        artifact.publish(counts={}, seconds={})
    assert command_line.main(["study", recipe, "--dry-run"]) == 0
    assert f"#   cached    {'sample':<18}  {artifact.url}\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "quickstrat"], "quickstrat: no such recipe; did you mean 'quickstart'?"),
        (["study", "RECIPE", "training.epoch=1"], "training.epoch: unknown field; did you mean 'epochs'?"),
        (["study", "RECIPE", "training"], "training: expected section.field=value"),
        (["study", "RECIPE", "data.path=gone.jsonl", "--dry-run"], "gone.jsonl: no such file"),
        (["study", "RECIPE", "training.lora.targets=[q_prj]", "--dry-run"], "did you mean 'q_proj'?"),
        (
            ["study", "RECIPE", "data.eval_examples=9999"],
            "data.eval_examples (or --examples with --model) asks for 9999",
        ),
        (
            ["study", "RECIPE", "evaluation.other_documents=[7]"],
            "line 1: documents: found 6, but prompts of 7 slots are asked for (data.documents, or --documents with",
        ),
        (["distill", "RECIPE", "runtime.mode=staged"], "run `study` first (or `sample`)"),
    ],
)
def test_main_reports_user_errors_in_one_line(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert command_line.main([recipe if argument == "RECIPE" else argument for argument in arguments]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.endswith("\n")


def test_distill_names_samples_of_other_settings(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = load_recipe(recipe)
    claim_storage(resolved.storage, resolved.name)
    with Artifact(resolved.storage, "samples", "feedfeedfeedfeed").writing():
        Artifact(resolved.storage, "samples", "feedfeedfeedfeed").publish(counts={}, seconds={})
    expected = make_plan(resolved).first_sample.fingerprint
    for options in ([], ["--dry-run"]):
        assert command_line.main(["distill", recipe, "runtime.mode=staged", *options]) == 2
        assert (
            f"stage `sample` has not finished (fingerprint {expected}); the storage holds feedfeedfeedfeed, made with "
            "other settings; run `study` first (or `sample`)"
        ) in capsys.readouterr().err


def test_report_names_unfinished_studies_of_a_sweep(
    make_recipe: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = make_recipe(sweep={"seed": [0, 1], "method.k": [1, 2]})
    claim_storage(sweep.storage, sweep.name)
    for settings, cell in sweep_cells(sweep):
        for artifact in [stage.artifact for stage in make_plan(cell).stages]:
            if settings["seed"] == 0 and not artifact.manifest():
                with artifact.writing():
                    artifact.publish(counts={}, seconds={})
    assert command_line.main(["report", str(tmp_path / "recipe.yaml")]) == 2
    assert capsys.readouterr().err == (
        f"error: {sweep.storage}: 2 of 4 studies are not finished: seed=1, method.k=1; seed=1, method.k=2; "
        "run `study` again\n"
    )


def test_summarize_manifest_shows_the_choice_or_the_counts() -> None:
    choice = {"slots": [3, 4], "accuracy": 0.75, "ci95": [0.7, 0.8], "curve": {"documents": 20}}
    assert (
        summarize_manifest(Manifest("f", {"prompts": 9}, {}, choice))
        == "position 4>5 of 20 documents, 0.75 [0.70, 0.80]"
    )
    assert summarize_manifest(Manifest("f", {"rows": 9, "train_unused": 2}, {}, {})) == "rows 9, train unused 2"


def test_study_rejects_a_folder_that_holds_other_files(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    storage = Path(load_recipe(recipe).storage)
    storage.mkdir()
    (storage / "notes.txt").write_text("mine")
    assert command_line.main(["study", recipe]) == 2
    assert "is not empty and holds no run" in capsys.readouterr().err
    assert [path.name for path in storage.iterdir()] == ["notes.txt"]


def test_study_leaves_nothing_after_bad_data(make_recipe: Make, tmp_path: Path) -> None:
    recipe = make_recipe()
    with open(recipe.study.data.path, "a") as file:
        file.write(json.dumps({"question": "?"}) + "\n")
    assert command_line.main(["study", str(tmp_path / "recipe.yaml")]) == 2
    assert not Path(recipe.storage).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "other.jsonl: no such file (data.path)"),
        ("{}", "other.jsonl, line 1: fields question, answers, documents are missing"),
    ],
)
def test_study_names_the_task_of_bad_data(
    make_recipe: Make, tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recipe(name="other", data={"path": str(tmp_path / "other.jsonl")})
    (tmp_path / "recipe.yaml").rename(tmp_path / "other.yaml")
    if content:
        (tmp_path / "other.jsonl").write_text(content)
    make_recipe(evaluation={"also_evaluate": [str(tmp_path / "other.yaml")]})
    assert command_line.main(["study", str(tmp_path / "recipe.yaml"), f"runtime.storage={tmp_path}/run"]) == 2
    assert capsys.readouterr().err.startswith(f"error: evaluation.also_evaluate: other: {tmp_path}/{message}")


@pytest.mark.parametrize("name", [name for name in recipe_names() if not name.startswith("quickstart")])
def test_the_comments_of_a_built_in_recipe_say_where_its_data_come_from(name: str) -> None:
    comments, _, _ = (RECIPES / f"{name}.yaml").read_text().partition("name: ")
    assert re.search(r"docs/data\.md|`python -m examples\.\S+ runs/|`make real` makes", comments)


def test_a_built_in_recipe_says_where_its_own_model_and_data_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    source = "; `recipes kv_smollm2` says where it comes from\n"
    toy = f"model.path={load_recipe('quickstart').study.model.path}"
    assert command_line.main(["study", "kv_smollm2", toy, "--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/runs/kv.jsonl.gz: no such file (data.path){source}"
    assert command_line.main(["study", "kv_smollm2", toy, "data.path=mine.jsonl", "--dry-run"]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/mine.jsonl: no such file (data.path)\n"
    # The model may have been made here.
    recipe = load_recipe("kv_smollm2")
    with pytest.raises(UserError) as caught, with_input_source_hint(recipe):
        raise UserError(f"{os.path.abspath(recipe.study.model.path)}: no such model folder (model.path)")
    assert str(caught.value).endswith(source.rstrip())


def test_report_without_results_makes_no_folder(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["report", recipe, f"runtime.storage={tmp_path}/typo"]) == 2
    assert "typo: stage `prepare` has not finished (fingerprint" in capsys.readouterr().err
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["nonsense"], ["study"], ["study", "quickstart", "--nonsense"]),
        *(["evaluate", "quickstart", "--fail-if-gap-above", points] for points in ("nan", "-1", "101", "five")),
        ["study", "quickstart", "--fail-if-gap-above", "5"],
    ],
)
def test_main_rejects_wrong_words_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(arguments)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("--help)")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("studdy quickstart", "error: studdy: no such command; did you mean 'study'? (see python run.py --help)"),
        ("measure quickstart", "error: measure: no such command; expected one of: analyze, cluster, compare, "),
        ("cluster rendr gke", "error: rendr: no such action; did you mean 'render'? (see python run.py cluster --he"),
        ("cluster gke", "error: gke: no such action; expected one of: delete, logs, render, status, submit, valid"),
        ("study quickstart --dryrun", "unrecognized arguments: --dryrun; did you mean '--dry-run'?"),
        ("evaluate quickstart --fail-if-mean-belw=5", "did you mean '--fail-if-mean-below'?"),
        ("study quickstart --training.epochs=3", "; settings have no dashes: training.epochs=3"),
        ("study quickstart --epochs 2", "; settings have no dashes: training.epochs=…"),
        ("study quickstart --learning-rate=1e-4", "; settings have no dashes: training.learning_rate=1e-4"),
        ("study quickstart --seed 3", "--seed; settings have no dashes: seed=… or evaluation.seed=…"),
        ("study quickstart --config x", "; a setting is given as section.field=value, such as training.epochs=2"),
        ("study quickstart --resume", "--resume; the same command continues a run that was stopped"),
        (
            "study quickstart --fail-if-gap-above 5",
            "unrecognized arguments: --fail-if-gap-above; an option of evaluate, submit, cluster",
        ),
        *(
            (
                f"{command} quickstart --model m --data d.jsonl",
                "unrecognized arguments: --model --data; a job needs a recipe, which settings change, as in "
                "nq_mistral_7b model.path=... data.path=...",
            )
            for command in ("submit --address http://127.0.0.1:1 evaluate", "cluster submit kind evaluate")
        ),
        ("runs --epochs 2", "unrecognized arguments: --epochs (see python run.py runs --help)"),
        (
            "submit quickstart --address http://127.0.0.1:1 --dry-run",
            "--dry-run; without `submit` and its options, the same command with --dry-run is checked here, and not run",
        ),
        ("recipes quickstart foo", "unrecognized arguments: foo (see python run.py recipes --help)"),
    ],
)
def test_main_names_the_nearest_right_word(words: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(words.split())
    assert hint in capsys.readouterr().err


def test_dry_run_rejects_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["study", "quickstart", "--dry-run", "--json"]) == 2
    assert capsys.readouterr().err.startswith("error: --json: --dry-run shows the settings as YAML")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fail-if-drop-above=5"], "--fail-if-drop-above and --baseline: expected both or none"),
        (["--fail-if-drop-above=5", "--baseline=/nope"], "--baseline: /nope: no such folder"),
        (
            ["--fail-if-drop-above=5", "--baseline=examples/own_data/questions.jsonl"],
            "--baseline: examples/own_data/questions.jsonl: is a file; expected a run's storage, or one of its folders",
        ),
    ],
)
def test_dry_run_checks_the_gate(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["evaluate", "quickstart", "--dry-run", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("points", ["five", "101", "nan"])
def test_fail_if_gap_above_takes_percentage_points_only(points: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["evaluate", "quickstart", "--fail-if-gap-above", points])
    message = (
        f"--fail-if-gap-above: expected a number from 0 to 100, got {points} (see python run.py evaluate --help)\n"
    )
    assert message in capsys.readouterr().err


def test_main_ends_on_sigterm_with_143(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    replace_command(monkeypatch, "study", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert command_line.main(["study", recipe]) == 143
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_main_ends_on_ctrl_c_with_130(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    replace_command(monkeypatch, "study", interrupt)
    assert command_line.main(["study", recipe]) == 130
    assert capsys.readouterr().err == "interrupted; run the same command again to continue\n"


def test_main_keeps_the_traceback_of_a_bug(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    replace_command(monkeypatch, "study", stumble)
    with pytest.raises(ZeroDivisionError):
        command_line.main(["study", recipe])


def test_main_reports_a_fault_in_one_line(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device", "/full")

    replace_command(monkeypatch, "study", fail)
    assert command_line.main(["study", recipe]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: /full: No space left on device; free space there")
    assert line.count("\n") == 1
    monkeypatch.setenv("POS2DISTILL_DEBUG", "1")
    assert command_line.main(["study", recipe]) == 2
    assert "in fail\n" in capsys.readouterr().err


def test_output_that_is_closed_ends_the_program_silently() -> None:
    command = [sys.executable, "run.py", "recipes"]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 141


def test_output_without_the_characters_of_a_message_is_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "run.py", "study", "é", "--dry-run"]
    done = subprocess.run(
        command, cwd=PROJECT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ?: no such recipe")


@pytest.mark.parametrize("words", [["--dry"], ["--ful", "--dry-run"]])
def test_options_are_not_abbreviated(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command_line.main(["study", "quickstart", *words])
    assert "unrecognized arguments: --" in capsys.readouterr().err


def test_full_is_an_option_of_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["study", "quickstart", "--full"]) == 2
    assert capsys.readouterr().err == "error: --full: is an option of --dry-run\n"
