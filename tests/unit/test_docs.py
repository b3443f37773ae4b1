import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig

from benchmarks.validator.other_tools import REPORT, objects_and_pods
from benchmarks.wrong_input.count import KINDS
from pipelines.checks.model_checks import check_against_model
from pipelines.cli.command_line import build_parser
from pos2distill.config import METHODS
from pos2distill.config.evaluation_recipe import evaluation_recipe
from pos2distill.config.inference_table import INFERENCE_METHODS
from pos2distill.config.load import load_recipe, make_recipe
from pos2distill.config.paths import project_root
from pos2distill.records import Document, Example
from pos2distill.tasks.prompts import MessageBuilder
from scripts.reference_tables import CLUSTER_PAGE, PAGE, render, render_cluster
from scripts.render_presets import RENDERED


def test_reference_tables_are_up_to_date() -> None:
    """Else run `make docs`."""
    assert PAGE.read_text() == render(PAGE.read_text())
    assert CLUSTER_PAGE.read_text() == render_cluster(CLUSTER_PAGE.read_text())


def test_reference_tables_list_every_setting() -> None:
    page = PAGE.read_text()
    for line in (
        "| `advantageous_slot` | first \\| last \\| auto \\| random \\| integer \\| [integer, …] | first |",
        "| `betas` | [number, number] | [0.9, 0.95] |",
        "## `runtime.samplers`, `runtime.teachers`",
    ):
        assert line in page


def methods_by_command() -> list[tuple[str, str, str, str]]:
    """The lines of "Every method by one command": method, settings, further ones for either recipe."""
    page = (project_root() / "docs" / "methods.md").read_text()
    section = page.partition("## Every method by one command")[2].partition("## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [tuple(cell.strip() for cell in cells) for cells in lines[2:]]  # type: ignore[misc]


def settings_in(*cells: str) -> list[str]:
    return [setting for cell in cells for code in re.findall("`([^`]*)`", cell) for setting in shlex.split(code)]


@pytest.fixture
def config_of_smollm2(tmp_path: Path) -> Path:
    """A folder with a config of the real model's layers and positions, which `make_model` would make."""
    sizes = {"num_hidden_layers": 30, "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    LlamaConfig(**sizes, vocab_size=49152, max_position_embeddings=8192).save_pretrained(tmp_path)  # type: ignore[arg-type]
    return tmp_path


@pytest.mark.parametrize("line", [line for line in methods_by_command() if "`" in line[1]], ids=lambda line: line[0])
def test_methods_by_command_load_with_both_recipes(line: tuple[str, str, str, str], config_of_smollm2: Path) -> None:
    _, settings, toy, real = line
    real_settings = [*settings_in(settings, real), f"model.path={config_of_smollm2}"]
    study = load_recipe("facts_smollm2", real_settings).study
    check_against_model(study)
    # What `em` looks for ends a chain of thought, which the recipe's 32 tokens would cut off.
    if study.data.metric == "em":
        assert study.sampling.max_new_tokens == study.evaluation.max_new_tokens == 512
    if toy and not toy.startswith("`"):
        return  # says in words why not, or what instead
    check_against_model(load_recipe("quickstart", settings_in(settings, toy)).study)


def test_methods_by_command_name_every_method() -> None:
    settings = [setting for line in methods_by_command() for setting in settings_in(line[1])]
    assert {f"method.name={name}" for name in METHODS} <= set(settings)
    assert {f"inference.method={name}" for name in INFERENCE_METHODS if name != "none"} <= set(settings)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (project_root() / page).read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "block", blocks("docs/running.md", "yaml"), ids=["laptop", "one GPU", "one GPU, small model", "several GPUs"]
)
def test_settings_of_running_are_those_of_a_recipe(block: str) -> None:
    data = {"format": "jsonl", "path": "q.jsonl", "documents": 10, "train_examples": 8, "eval_examples": 8}
    recipe = {"name": "mine", "description": "Mine.", "model": {"path": "m"}, "data": data}
    for section, settings in yaml.safe_load(block).items():
        recipe[section] = {**recipe.get(section, {}), **settings}  # type: ignore[dict-item]
    make_recipe(recipe, [], source="running.md")


def test_template_of_the_data_page_makes_the_prompt_that_it_shows() -> None:
    (block,) = blocks("docs/data.md", "yaml")
    recipe = {"name": "mine", "description": "Mine.", "model": {"path": "m"}, **yaml.safe_load(block)}
    data = make_recipe(recipe, source="data.md").study.data
    example = Example("e", "Who?", ("A",), (Document("Fox", "It is A.", 0), Document("Owl", "It is B.")))
    system, user = MessageBuilder(data.wording, max_length=None, reserve=8)(example, 2, (1,))
    sentence = "You are the assistant of Example Ltd. Answer from the context alone, in one short sentence."
    assert system == {"role": "system", "content": sentence}
    content = "Context:\n[1] Owl: It is B.\n[2] Fox: It is A.\n\nQuestion: Who?"
    assert user == {"role": "user", "content": content}


def test_settings_of_evaluate_are_those_of_a_recipe() -> None:
    (block,) = blocks("docs/evaluate.md", "yaml")
    data = {"format": "jsonl", "path": "q.jsonl", "train_examples": 0}
    make_recipe({"name": "mine", "description": "Mine.", "data": data, **yaml.safe_load(block)}, source="evaluate.md")


def test_command_with_arguments_of_vllm_uses_vllm() -> None:
    """`evaluate --model` runs the model with transformers by default."""
    (block,) = [block for block in blocks("docs/models.md", "bash") if "engine_args" in block]
    program, script, command, option, model, *words = shlex.split(block)
    assert [program, script, command, option, words[0]] == ["python", "run.py", "evaluate", "--model", "--data"]
    recipe = evaluation_recipe(model, words[1], overrides=words[2:])
    assert recipe.study.model.engine == "vllm"
    assert recipe.study.model.engine_args == {"quantization": "fp8"}


def test_examples_of_models_that_think_switch_it_off() -> None:
    shown = [
        *blocks("docs/evaluate.md", "bash"),
        *blocks("docs/evaluate.md", "yaml"),
        *blocks("docs/python.md", "python"),
    ]
    lines = [line for block in shown for line in block.replace("\\\n", "").splitlines()]
    lines += build_parser().commands["evaluate"].format_help().splitlines()
    for line in lines:
        assert "Qwen3" not in line or "enable_thinking=false" in line, line


def test_own_data_is_what_the_readme_shows() -> None:
    """The record in the README is one of the file's, shortened, and the recipe is of that file."""
    folder = project_root() / "examples" / "own_data"
    records = {json.loads(line)["question"]: json.loads(line) for line in (folder / "questions.jsonl").open()}
    (shown,) = (json.loads(block) for block in blocks("README.md", "json"))
    record = records[shown["question"]]
    assert (shown["answers"], shown["documents"][0]["title"]) == (record["answers"], record["documents"][0]["title"])
    for record in records.values():
        (document,) = record["documents"]
        assert any(answer.lower() in document["text"].lower() for answer in record["answers"])
    recipe = load_recipe(str(folder / "recipe.yaml"))
    assert Path(recipe.study.data.path).name == "questions.jsonl"
    assert len(records) == 24


PAGES = sorted(
    str(path.relative_to(project_root()))
    for pattern in ("*.md", "docs/*.md", "benchmarks/**/*.md", "examples/*/*.md")
    for path in project_root().glob(pattern)
)


# Of words that this project uses; followed by a letter, since "parallelism" and "analysis" are the same everywhere.
OTHER_SPELLING = re.compile(
    r"\b(?:(?:de|re|un)?(?:tokeni|normali|summari|initiali|optimi|recogni|quanti|randomi|minimi|seriali)s(?:e|ing|ation)"
    r"|analyse[rd]?\b|analysing|(?:behavi|col|neighb|(?:un)?fav)our|distils?\b|licence|judgement|misspelt)",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PAGES)
def test_spelling_is_american_in_prose(page: str) -> None:
    assert OTHER_SPELLING.findall((project_root() / page).read_text()) == []


def test_spelling_is_american_in_code() -> None:
    folders = ("benchmarks", "cluster", "pipelines", "pos2distill", "scripts")
    for path in (path for folder in folders for path in (project_root() / folder).rglob("*.py")):
        assert OTHER_SPELLING.findall(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize("page", PAGES)
def test_prose_has_short_lines(page: str) -> None:
    """Tables, code and links cannot be wrapped."""
    in_code = False
    for number, line in enumerate((project_root() / page).read_text().splitlines(), start=1):
        in_code ^= line.startswith("```")
        if not in_code and not line.startswith(("|", "![")) and "](" not in line:
            assert len(line) <= 120, f"{page}, line {number}"


def named_tests(text: str) -> set[str]:
    return set(re.findall(r"`(test_\w+)`", text))


def defined_tests() -> set[str]:
    defined: set[str] = set()
    for path in (project_root() / "tests").rglob("test_*.py"):
        defined.update(re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE))
    return defined


def test_table_of_wrong_input_names_tests_that_exist() -> None:
    """In `benchmarks/wrong_input/README.md`, every input has the test that holds what becomes of it."""
    page = (project_root() / "benchmarks" / "wrong_input" / "README.md").read_text()
    table = page.partition("## Inputs that once failed badly")[2]
    rows = [line.strip("|").split("|") for line in table.replace("\\|", "").splitlines() if line.startswith("| ")][1:]
    inputs = [cells for cells in rows if not cells[0].strip().startswith("**")]
    assert len(inputs) > 30
    assert all(named_tests(cells[2]) for cells in inputs)
    assert named_tests(table) <= defined_tests()


def test_counted_tests_of_wrong_input_exist() -> None:
    """pytest finds none of a kind if the path of one is wrong."""
    for kind in KINDS.values():
        for test in kind:
            file, _, name = test.partition("::")
            text = (project_root() / "tests" / "unit" / file).read_text()
            assert f"def {name}" in text, test


def test_counts_of_wrong_input_are_those_of_the_report() -> None:
    """Else run `benchmarks.wrong_input.count` again, and write its numbers into the README."""
    folder = project_root() / "benchmarks" / "wrong_input"
    report = json.loads((folder / "wrong_input.json").read_text())
    page = (folder / "README.md").read_text().partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    shown = {row[0]: (int(row[1]), float(row[4])) for row in rows[2:]}
    counted = {
        kind: (outcomes["refused"], round(outcomes["longest_seconds"], 1)) for kind, outcomes in report["cases"].items()
    }
    assert shown == counted
    assert all(set(outcomes) == {"refused", "longest_seconds"} for outcomes in report["cases"].values())
    assert report["date"] in page
    assert not report["commit"].endswith("-dirty")


def test_tests_and_files_in_the_table_of_production_exist() -> None:
    """`benchmarks/validator/README.md` names the test that shows each behavior."""
    root = project_root()
    page = (root / "benchmarks" / "validator" / "README.md").read_text()
    table = page.partition("## What production would meet")[2]
    tests = named_tests(table)
    assert len(tests) > 30
    assert tests <= defined_tests()
    for name in re.findall(r"`((?:cluster|pipelines|pos2distill)/[\w/.]+)`", table):
        assert (root / name).is_file(), name


def test_report_of_other_checkers_covers_the_presets() -> None:
    """Else run `benchmarks.validator.other_tools` again."""
    count = 0
    for path in RENDERED.glob("*.yaml"):
        count += len(list(objects_and_pods(list(yaml.safe_load_all(path.read_text())))))
    report = json.loads(REPORT.read_text())
    assert report["objects"] == report["kubernetes-validate"]["passed"] == count
    assert report["kubernetes-validate"]["other lines"] == []


def test_tables_of_other_checkers_hold_the_numbers_of_their_report() -> None:
    """Those of `benchmarks/validator/README.md`."""
    report = json.loads(REPORT.read_text())
    page = (project_root() / "benchmarks" / "validator" / "README.md").read_text()
    section = page.partition("## Other checkers on the presets")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in cells] for cells in lines]
    (schemas,) = (row for row in rows if row[0].startswith("kubernetes-validate "))
    passed = report["kubernetes-validate"]["passed"]
    assert schemas[1:] == [str(report["objects"]), str(passed), str(report["objects"] - passed)]
    checkov = report["checkov"]
    (rules,) = (row for row in rows if row[0].startswith("checkov "))
    assert rules == [
        f"checkov {checkov['checkov_version']}, its checks of Kubernetes",
        str(report["objects"]),
        f"{checkov['passed']} checks",
        f"{checkov['failed']} checks, of {len(checkov['failed checks'])} kinds",
    ]
    shown: dict[str, int] = {}
    for row in rows:
        checks = re.findall(r"`(CKV_\w+)`", row[0])
        if checks:
            shown.update(zip(checks, map(int, row[1].split(", ")), strict=True))
    assert shown == {check: entry["objects"] for check, entry in checkov["failed checks"].items()}
    assert checkov["failed"] == sum(shown.values())
