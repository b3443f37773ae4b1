"""The tables of `benchmarks.methods`: their variants are valid settings, and are compared with a like base."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.methods import methods, transfer
from benchmarks.methods.methods import settings_of, stored_runs, write_report
from benchmarks.methods.rows import Run, print_table, summarize
from benchmarks.methods.tables import TABLES, Table, Variant
from pipelines.checks.model_checks import check_against_model
from pipelines.plan import make_plan
from pipelines.stages.search_scales import read_generations
from pos2distill.config import Recipe
from pos2distill.config.load import load_recipe
from tests.support.results import counts_of

VARIANTS = [(table, variant) for table in TABLES.values() for variant in table.variants]


def load(table: Table, variant: Variant, storage: Path, seed: int = 1) -> Recipe:
    return load_recipe(table.recipe, settings_of(table, variant, seed, str(storage)))


@pytest.mark.parametrize(("table", "variant"), VARIANTS, ids=[f"{t.recipe}: {v.name}" for t, v in VARIANTS])
def test_variants_load_and_have_a_like_base(table: Table, variant: Variant, tmp_path: Path) -> None:
    recipe = load(table, variant, tmp_path)
    (base,) = (each for each in table.variants if each.name == variant.base)
    plain = load(table, base, tmp_path).study
    study = recipe.study
    assert (study.model.engine, study.data.prompt, study.data.metric) == (
        plain.model.engine,
        plain.data.prompt,
        plain.data.metric,
    )
    assert study.evaluation == plain.evaluation
    # Else the seconds of training would contain those of sampling.
    assert recipe.runtime.mode == "staged"
    # The same questions whatever the seed of training and search.
    assert study.evaluation.seed == 0
    # The real model is made by `make real`; the toys are here.
    if Path(study.model.path).exists() and Path(study.data.path).exists():
        check_against_model(study)
        assert make_plan(recipe).evaluate_base.artifact.url.startswith(str(tmp_path))


@pytest.mark.parametrize("name", TABLES)
def test_variants_have_names_of_their_own(name: str) -> None:
    names = [variant.name for variant in TABLES[name].variants]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ["toy", "smollm2", "facts_gpu", "rates_gpu"])
def test_stored_runs_reads_the_committed_reports(name: str) -> None:
    """They were written before runs had a commit; to add runs to them must stay possible."""
    report = Path(__file__).parents[2] / "benchmarks" / "methods" / f"methods_{name}.json"
    runs = stored_runs(report, TABLES[name])
    assert runs["base"][0].mean == json.loads(report.read_text())["variants"]["base"]["mean"]["value"]
    assert {variant.name for variant in TABLES[name].variants} >= set(runs)


def test_a_report_written_anew_keeps_how_its_runs_were_made(tmp_path: Path) -> None:
    """Early reports say it once, beside the variants."""
    table = TABLES["smollm2"]
    early = {
        "recipe": table.recipe,
        "common": table.common,
        "machine": "early",
        "commit": "old",
        "versions": {"vllm": "1"},
    }
    variants = {}
    for name in ("base", "r1"):
        run = dataclasses.asdict(a_run(0.5, [1, 2]))
        variants[name] = {"runs": [{key: run[key] for key in run if key not in ("machine", "commit", "versions")}]}
    (tmp_path / "methods_early.json").write_text(json.dumps({**early, "variants": variants}))
    runs = stored_runs(tmp_path / "methods_early.json", table)
    newer = dataclasses.replace(runs["r1"][0], seed=1, commit="new", machine="other")
    runs["r1"].append(newer)
    write_report("smollm2", table, runs, tmp_path)
    again = stored_runs(tmp_path / "methods_smollm2.json", table)
    assert again == runs
    assert again["r1"][1] == newer
    first = again["r1"][0]
    assert (first.machine, first.commit, first.versions) == ("early", "old", {"vllm": "1"})
    assert first.date == run["date"]


def test_main_asks_for_the_base_of_what_the_report_has_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"runs": [dataclasses.asdict(a_run(1.0, [1]))]}
    report = {"recipe": "r", "common": [], "variants": {"base": row, "ms_poe": row}}
    (tmp_path / "methods_toy.json").write_text(json.dumps(report))
    variants = (Variant("base", ()), Variant("reorder", ()), Variant("ms_poe", (), base="base, hf"))
    monkeypatch.setitem(TABLES, "toy", Table("r", (), variants))
    words = ["methods", "toy", str(tmp_path), "--output", str(tmp_path), "--only", "reorder"]
    monkeypatch.setattr("sys.argv", words)
    monkeypatch.setattr(methods, "run", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(SystemExit):
        methods.main()
    expected = "--only: base, hf with seed 0 comes first, since ms_poe is compared with it"
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"recipe": "other"}, "measured with ['other', 'seed=0'], not with ['r', 'seed=0']"),
        ({"common": ["seed=1"]}, "measured with ['r', 'seed=1'], not with ['r', 'seed=0']"),
        (
            {"variants": {"base": {"settings": ["method.k=9"], "runs": []}}},
            "base was measured with ['method.k=9']; the table has []",
        ),
        (
            {"variants": {"gone": {"settings": [], "runs": []}}},
            "gone was measured with []; the table has no such variant",
        ),
    ],
)
def test_main_rejects_a_report_of_other_settings_with_one_line(
    changed: dict[str, object],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Runs with other settings would be averaged with those of the table."""
    report = {"recipe": "r", "common": ["seed=0"], "variants": {}} | changed
    (tmp_path / "methods_toy.json").write_text(json.dumps(report))
    monkeypatch.setitem(TABLES, "toy", Table("r", ("seed=0",), (Variant("base", ()),)))
    monkeypatch.setattr("sys.argv", ["methods", "toy", str(tmp_path), "--output", str(tmp_path)])
    monkeypatch.setattr(methods, "run", lambda *_, **__: pytest.fail("it ran"))
    assert methods.main() == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/methods_toy.json: {expected}\n"


def a_run(seconds: float, right: list[int]) -> Run:
    mean = sum(right) / (2 * len(right))
    same = (0, "2026-01-01", [mean, mean], mean, (mean, mean), mean, 0.0, 0.0)
    return Run(*same, seconds, 1.0, right, commit="abc", machine="m", versions={})


def test_write_report_compares_a_variant_with_its_own_base(tmp_path: Path) -> None:
    """hf is slower than vLLM, so a method on hf is compared with the base on hf; each run keeps its commit."""
    variants = (Variant("base", ()), Variant("base, hf", (), base="base, hf"), Variant("ms_poe", (), base="base, hf"))
    runs = {
        "base": [a_run(1.0, [0, 1, 2, 1])],
        "base, hf": [dataclasses.replace(a_run(8.0, [0, 1, 1, 1]), commit="def")],
        "ms_poe": [a_run(10.0, [2, 1, 1, 1])],
    }
    rows = write_report("small", Table("r", (), variants, timed=True), runs, tmp_path)
    assert rows["ms_poe"]["relative_time"] == pytest.approx(1.25)
    assert rows["ms_poe"]["change"]["value"] == pytest.approx(0.25)
    assert rows["base, hf"]["relative_time"] == 1.0
    stored = json.loads((tmp_path / "methods_small.json").read_text())
    assert "commit" not in stored
    assert stored["variants"]["base, hf"]["runs"][0]["commit"] == "def"
    assert stored_runs(tmp_path / "methods_small.json", Table("r", (), variants))["ms_poe"][0].commit == "abc"


def test_times_of_parts_of_a_table_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that takes days is made in parts, on machines that differ or have other work."""
    variants = (Variant("base", ()), Variant("reorder", ()))
    runs = {"base": [a_run(1.0, [0, 1])], "reorder": [a_run(3.0, [0, 1])]}
    rows = write_report("small", Table("r", (), variants), runs, tmp_path)
    assert (rows["reorder"]["seconds_per_answer"], rows["reorder"]["relative_time"]) == (3.0, None)
    print_table(rows)
    cells = [cell.strip() for cell in capsys.readouterr().out.splitlines()[-1].split("|")]
    assert cells[-3:-1] == ["", "1"]


def test_summarize_averages_the_change_of_the_gap_over_seeds() -> None:
    """The base is right at one of two slots; one seed at both, the other as the base: half the GAP is left."""
    base, better, same = (
        dataclasses.replace(a_run(1.0, [len(answer.strip("0"))] * 8), answers=[answer] * 8)
        for answer in ("10", "11", "10")
    )
    rows = [summarize(runs, base, timed=True) for runs in ([base], [better], [better, same])]
    changes = [row["gap_change"] and row["gap_change"]["value"] for row in rows]
    assert changes == [None, pytest.approx(-1), pytest.approx(-0.5)]
    # Of runs that were made before it was recorded it is not known.
    assert summarize([better, a_run(1.0, [1] * 8)], base, timed=True)["gap_change"] is None


@pytest.mark.parametrize("name", transfer.TABLES)
def test_tasks_of_a_transfer_load_with_a_search_and_with_its_scales(name: str, tmp_path: Path) -> None:
    table = transfer.TABLES[name]
    loaded = [
        transfer.load(task, str(tmp_path), 1, "inference.method=lpes", setting)
        for task in table.tasks.values()
        for setting in (f"inference.search={table.search}", "inference.scales=[1.0, 1.2, 1.5]")
    ]
    assert len({recipe.study.model.path for recipe in loaded}) == 1
    assert {recipe.study.evaluation.seed for recipe in loaded} == {0}
    assert len({recipe.storage for recipe in loaded}) == len(table.tasks)


def test_a_transfer_evaluates_the_scales_of_each_task_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer of the fake run is right where the recipe's own task searched its scales."""
    table = transfer.TABLES["toy"]
    chosen = {"quickstart": [1.0, 1.0, 1.5], "quickstart_r2": [1.0, 1.0, 1.25]}
    seen = []

    def run(recipe: Recipe, *, trains: bool) -> Run:
        scales = recipe.study.inference.scales
        seen.append((recipe.name, recipe.study.seed, list(scales)))
        own = recipe.study.inference.method == "lpes" and not scales
        search = {"scales": chosen[recipe.name]} if own else None
        return dataclasses.replace(a_run(1.0, [2, 2] if own else [1, 1]), seed=recipe.study.seed, search=search)

    monkeypatch.setattr(transfer, "run", run)
    output = tmp_path / "new" / "folder"
    words = ["transfer", "toy", str(tmp_path), "--seeds", "1", "0", "1", "--output", str(output)]
    monkeypatch.setattr("sys.argv", words)
    transfer.main()

    assert seen[:2] == [("quickstart", 0, []), ("quickstart_r2", 0, [])]
    for seed, calls in ((0, seen[2:6]), (1, seen[6:])):
        assert calls == [
            ("quickstart", seed, []),
            ("quickstart_r2", seed, chosen["quickstart"]),
            ("quickstart_r2", seed, []),
            ("quickstart", seed, chosen["quickstart_r2"]),
        ]
    report = json.loads((output / "transfer_toy.json").read_text())
    one_hop, two_hops = table.tasks
    for evaluated, other in ((one_hop, two_hops), (two_hops, one_hop)):
        row = report["evaluated"][evaluated]
        assert row["none"]["change"] is None
        assert (row[evaluated]["change"]["value"], row[other]["change"]["value"]) == (0.5, 0.0)
        assert [each["seed"] for each in report["searches"][evaluated]] == [0, 1]
        assert not {"seconds_per_answer", "search"} & report["runs"][evaluated][evaluated][0].keys()


def test_run_counts_cut_answers_and_samples(make_recipe: Callable[..., Recipe]) -> None:
    """The random model never ends an answer by itself, and every answer is kept."""
    recipe = make_recipe(runtime={"executor": "local", "mode": "staged"}, method={"k": 1})
    trained = methods.run(recipe, trains=True)
    answers = make_plan(recipe).evaluate_distilled.artifact.read_table("predictions.parquet")["finish_reason"]
    assert trained.cut == answers.to_pylist().count("length") > 0
    assert [answer.count("1") for answer in trained.answers or ()] == trained.right
    assert trained.sampled == 8
    assert trained.kept == counts_of(recipe, "sample")["kept"] > 0
    base = methods.run(recipe, trains=False)
    assert (base.sampled, base.kept, base.search) == (None, None, None)


def test_run_records_what_a_search_of_scales_found(make_recipe: Callable[..., Recipe]) -> None:
    search = {"generations": 1, "population": 2, "parents": 1, "mutations": 1, "crossovers": 1, "examples": 4}
    recipe = make_recipe(
        runtime={"executor": "local", "mode": "staged"}, inference={"method": "lpes", "search": search}
    )
    found = methods.run(recipe, trains=False).search
    assert found is not None
    plan = make_plan(recipe)
    assert plan.search_scales is not None
    (generation,) = read_generations(plan.search_scales.artifact)
    assert found["fitness without scales"] == generation[0].fitness
    assert found["fitness"] == max(candidate.fitness for candidate in generation)
    assert found["scales"] == list(plan.search_scales.output().details("scales")["scales"])
