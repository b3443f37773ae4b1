import csv
import json
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import yaml

from pos2distill.evaluation.evaluation_page import render_evaluation
from pos2distill.evaluation.page import chart_library
from pos2distill.evaluation.questions import EvaluatedPrompts, EvaluatedTask
from pos2distill.evaluation.references import REFERENCES
from pos2distill.evaluation.report import (
    Comparison,
    ReportInputs,
    build_summary,
    compare,
    render_model_card,
    render_report,
    verdict,
)
from pos2distill.evaluation.statistics import accuracy_interval
from tests.support.predictions import make_examples, predictions
from tests.support.reports import (
    STUDY,
    analyses,
    evaluation_inputs,
    report_inputs,
    scale_search,
    with_evaluation,
    with_gaps,
    with_search,
)
from tests.support.tables import decode_questions, examples_to_table

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def inputs() -> ReportInputs:
    return report_inputs()


def with_run(inputs: ReportInputs, **changes: Any) -> ReportInputs:
    return replace(inputs, run=replace(inputs.run, **changes))


@pytest.fixture(scope="module")
def pairs(inputs: ReportInputs) -> Comparison:
    return inputs.other_tasks["chains"]


@pytest.fixture(scope="module")
def files(inputs: ReportInputs) -> dict[str, bytes]:
    return render_report(inputs)


@pytest.fixture(scope="module")
def html(files: dict[str, bytes]) -> str:
    return files["index.html"].decode()


def test_build_summary_keys_and_values(inputs: ReportInputs) -> None:
    summary: dict[str, Any] = json.loads(json.dumps(build_summary(inputs)))
    assert summary["base"]["accuracy_by_slot"] == [1.0, 0.5, 0.0]
    assert summary["distilled"]["accuracy_by_slot"] == [1.0, 1.0, 0.5]
    assert summary["base"]["slots"] == [0, 1, 2]
    assert (summary["base"]["mean"], summary["base"]["gap"]) == (0.5, 1.0)
    assert summary["distilled"]["mean"] == pytest.approx(5 / 6)
    assert summary["paired"]["mean_difference"] == pytest.approx(1 / 3)
    for part in (summary["base"], summary["distilled"], summary["paired"]):
        low, high = part["ci95"]
        assert low <= high
    assert summary["other_documents"]["5"]["paired"]["mean_difference"] == -0.25
    assert summary["counts"] == {"examples": {"rows": 9, "train_unused": 2}}
    assert summary["seconds"] == {"examples": 0.25}
    assert summary["peak_memory_gib"] == {"distill": 1.25}
    assert (summary["fingerprint"], summary["dataset"]) == ("0123456789abcdef", "d")


def test_build_summary_says_how_the_study_was_made(inputs: ReportInputs) -> None:
    summary = build_summary(inputs)
    assert summary["verdict"].startswith(
        "Accuracy at position 3 of 3 is 100 points lower than at position 1 (which may be chance: p = 0.67); "
    )
    assert summary["command"] == "python run.py study tiny 'name=<b>'"
    assert summary["settings"]["seed"] == 3
    assert (summary["made_with"], summary["versions"]) == ({"git revision": "abc1234"}, {"torch": "2.13.0"})


def without_library(html: str) -> str:
    """The page without the code of the charts' library, which names addresses and elements that it may be asked for."""
    assert html.count(str(chart_library())) == 1
    return html.replace(str(chart_library()), "")


def test_render_report_page_needs_no_other_file(html: str) -> None:
    page = without_library(html)
    sources = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]+)""", page)
    assert sources == ["curves.csv", "summary.json"]  # links to the files beside the page
    assert re.findall(r"@import|url\(|<link|<iframe|<object|https?://|fetch\(", page) == []


def test_render_report_escapes_text(html: str) -> None:
    page = without_library(html)
    assert page.count("<script") == 4
    assert "A run &lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; more" in page
    assert "name=&lt;b&gt;" in page


def test_chart_library_does_not_end_its_script_element() -> None:
    assert "</script" not in chart_library()
    assert "<!--" not in chart_library()


def test_render_report_shows_the_numbers(html: str, inputs: ReportInputs) -> None:
    text = to_text(html)
    for part in (
        "0.500 → 0.833",
        "1.000 → 0.500",
        "+0.333",
        "train unused 2",
        "0.2 s",
        "1.2 GiB",
        "torch 2.13.0",
        "Seed 3",
    ):
        assert part in text
    assert verdict(inputs.main) in text
    assert "training.epochs 7" in text
    assert "git revision abc1234" in text


def to_text(html: str) -> str:
    """What a reader of the page sees, in one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", without_library(html)))


def test_gaps_are_shown_with_interval_and_corrected(inputs: ReportInputs) -> None:
    """A lower end above 0 that rounds to 0 is not shown as 0."""
    gaps = ("0.350 [0.250, 0.450], corrected 0.330", "0.100 [above 0, 0.200], corrected -0.010")
    report = replace(inputs, main=with_gaps(inputs.main))
    text = to_text(render_report(report)["index.html"].decode())
    assert "before, 95 %: [0.250, 0.450], corrected 0.330 after, 95 %: [above 0, 0.200], corrected -0.010 " in text
    assert " ".join(gaps) in text  # neighbors in the table
    assert f"| GAP (max - min) | {gaps[0]} | {gaps[1]} |" in render_model_card(report)
    page = evaluation_inputs(inputs.tasks[0])
    evaluation = replace(page.evaluation, curves=(report.main.after,))
    text = to_text(render_evaluation(replace(page, evaluation=evaluation))["index.html"].decode())
    assert "GAP between positions 0.100 95 %: [above 0, 0.200], corrected -0.010" in text
    assert "0.100 [above 0, 0.200] -0.010 3 × 2" in text


def test_pages_show_no_sign_at_a_corrected_gap_of_0(inputs: ReportInputs) -> None:
    before, after = (replace(curve, gap_corrected=-0.0004) for curve in (inputs.main.before, inputs.main.after))
    report = replace(inputs, main=replace(inputs.main, before=before, after=after))
    page = evaluation_inputs(inputs.tasks[0])
    evaluation = replace(page.evaluation, curves=(after,))
    for text in (
        to_text(render_report(report)["index.html"].decode()),
        to_text(render_evaluation(replace(page, evaluation=evaluation))["index.html"].decode()),
        render_model_card(report),
    ):
        assert "corrected 0.000" in text
        assert " -0.000" not in text


def test_groups_are_shown_with_intervals(inputs: ReportInputs, pairs: Comparison) -> None:
    groups: dict[str, Any] = {"by_group": {"reversed": 0.25}, "by_group_ci95": {"reversed": (0.125, 0.5)}}
    before, after = (
        replace(pairs.before, **groups),
        replace(pairs.after, by_group={"reversed": 0.75}, by_group_ci95={"reversed": (0.5, 0.875)}),
    )
    main = replace(pairs, before=before, after=after)
    text = to_text(render_report(replace(inputs, main=main, others=[], advantageous=()))["index.html"].decode())
    assert "reversed 0.250 [0.125, 0.500] 0.750 [0.500, 0.875]" in text
    page = evaluation_inputs(inputs.tasks[0])
    evaluation = replace(page.evaluation, curves=(before,))
    text = to_text(render_evaluation(replace(page, evaluation=evaluation))["index.html"].decode())
    assert "reversed 0.250 [0.125, 0.500]" in text


def test_render_report_page_holds_every_curve(html: str) -> None:
    data = page_data(html)
    assert [curve["label"] for curve in data["curves"]] == [
        "3 documents (as trained)",
        "5 documents",
        "chains, 3 documents",
    ]
    assert [(curve["task"], curve["view"]) for curve in data["curves"]] == [(0, 0), (0, 1), (1, 0)]
    assert data["charts"].keys() == {"loss", "weights"}
    assert data["themes"].keys() == {"light", "dark"}


def test_render_report_shows_analyses(inputs: ReportInputs) -> None:
    files = render_report(replace(inputs, analyses=analyses()))
    names = ["token-shift", "attention", "thought-shift", "wrong-answers"]
    page = without_library(files["index.html"].decode())
    assert re.findall(r'<div id="([a-z-]+)" class="chart">', page) == ["curve", *names, "loss", "weights"]
    assert "<img" not in page
    assert page_data(page)["charts"].keys() == {"loss", "weights", *names}
    assert all(files[f"{name}.png"].startswith(PNG) for name in names)


def test_render_report_and_evaluation_show_the_search_of_scales(inputs: ReportInputs) -> None:
    searched = replace(inputs, run=with_search(inputs.run))
    evaluated = evaluation_inputs(inputs.tasks[0])
    evaluation = render_evaluation(replace(evaluated, run=with_search(evaluated.run)))
    for files, others in ((render_report(searched), ["loss", "weights"]), (evaluation, [])):
        page = without_library(files["index.html"].decode())
        names = ["scale-search", "rope-scales"]
        assert re.findall(r'<div id="([a-z-]+)" class="chart">', page) == ["curve", *names, *others]
        assert page_data(page)["charts"].keys() == {*names, *others}
        assert all(files[f"{name}.png"].startswith(PNG) for name in names)
        text = re.sub(r"<[^>]+>", "", page)
        assert "26 candidates on 40 training questions: the best scales have a fitness of 0.348" in text
        assert "the model without scales 0.279." in text
        assert re.search(r"<th scope=\"row\">2</th><td>0.150</td><td>0.300</td>", page)
        assert "mean accuracy minus 0.25 times the GAP" in text
    assert build_summary(searched)["search"] == scale_search()
    assert build_summary(inputs)["search"] is None


def test_render_report_says_that_no_scales_were_better(inputs: ReportInputs) -> None:
    run = with_search(inputs.run)
    kept = {**scale_search(), "fitness": 0.279, "accuracy": [0.5, 0.15, 0.45], "scales": [1.0] * 4}
    html = render_report(replace(inputs, run=replace(run, search=kept)))["index.html"].decode()
    assert "the model without scales 0.279: no scales were better." in html


def test_render_report_of_1000_questions_at_5_slots_is_below_10_megabytes(inputs: ReportInputs) -> None:
    """As in published data: 20 documents of 100 words. Nothing of them is shortened."""
    random = np.random.default_rng(0)
    before, after = (predictions(20, random.random((1000, 5)) < chance) for chance in (0.5, 0.7))
    prompts = EvaluatedPrompts("20 documents", 20, [before, after])
    examples = examples_to_table(make_examples(1000, 20, words=100))
    large = EvaluatedTask("sub_em", "qa", examples, {}, [prompts])
    study = replace(inputs, main=compare(before, after, 20, STUDY), others=[], other_tasks={}, tasks=[large])
    lengths = {"prompt_tokens": {"20": {"mean": 2600.0, "max": 2700}}, "context_tokens": 4096}
    page = render_report(with_run(study, prompt_lengths=lengths))["index.html"]
    assert len(page) < 10_000_000
    (encoded,) = re.findall(r'id="questions-data">([^<]+)<', page.decode())
    data = decode_questions(encoded)
    assert (data["document_length"], data["left_out"], len(data["tasks"][0]["questions"])) == (None, 0, 1000)


def test_render_report_page_holds_the_questions(html: str) -> None:
    (encoded,) = re.findall(r'id="questions-data">([^<]+)<', html)
    first, second = decode_questions(encoded)["tasks"]
    assert [question["id"] for question in first["questions"]] == ["e0", "e1"]
    assert first["questions"][0]["location"] == "d.jsonl, line 1"
    assert [view["label"] for view in first["views"]] == ["3 documents", "5 documents"]
    assert len(second["views"][0]["positions"]) == 6


def page_data(html: str) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="page-data">(.+?)</script>', html)
    return json.loads(text)


def test_render_report_csv_has_every_point(files: dict[str, bytes]) -> None:
    rows = list(csv.DictReader(files["curves.csv"].decode().splitlines()))
    assert len(rows) == 2 * (3 + 2 + 6)
    assert rows[1] == {
        "task": "",
        "documents": "3",
        "model": "before",
        "position": "2",
        "group": "",
        "accuracy": "0.5",
        "low": rows[1]["low"],
        "high": rows[1]["high"],
        "questions": "2",
    }
    assert {row["position"] for row in rows if row["task"] == "chains"} == {"1>2", "1>3", "2>1", "2>3", "3>1", "3>2"}


def test_render_report_warns_of_truncated_answers(inputs: ReportInputs, html: str) -> None:
    assert "Warning" not in html
    counts = {**inputs.run.counts, "evaluate base": {"prompts": 20, "hit_max_tokens": 3}}
    page = render_report(with_run(inputs, counts=counts))["index.html"].decode()
    assert page.count("Warning:") == 1
    assert (
        "evaluate base: 3 of 20 answers were cut at evaluation.max_new_tokens; raise it if they are incomplete." in page
    )


def test_render_report_plots_are_png(files: dict[str, bytes]) -> None:
    pictures = {"accuracy.png", "loss.png", "weights.png", "accuracy-5-documents.png"}
    assert files.keys() == pictures | {"index.html", "curves.csv"}
    assert all(files[name].startswith(PNG) for name in pictures)
    assert len({files[name] for name in pictures}) == 4


def test_render_report_of_zero_losses(inputs: ReportInputs) -> None:
    """A logarithmic axis cannot show a loss of 0."""
    step: dict[str, Any] = {"step": 0, "loss": 0.0, "loss_trivial": 0.0, "loss_anchor": None, "weight_by_slot": {}}
    assert render_report(replace(inputs, steps=[step]))["loss.png"].startswith(PNG)


def test_render_model_card_shows_the_curve(inputs: ReportInputs) -> None:
    card = render_model_card(inputs)
    _, head, body = card.split("---\n", 2)
    assert card.startswith("---\n")
    assert yaml.safe_load(head) == {
        "base_model": "base/model",
        "license": "apache-2.0",
        "library_name": "transformers",
        "tags": ["pos2distill", "position-bias"],
    }
    rows = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", body, re.MULTILINE)
    assert rows == [("1", "1.000", "1.000"), ("2", "0.500", "1.000"), ("3", "0.000", "0.500")]
    assert "position 1 of 3" in body
    assert "0123456789abcdef" in body
    assert "- **Base model**: `base/model`, license apache-2.0." in body
    assert "| `training.epochs` | `7` |" in body
    assert "git revision abc1234" in body
    assert f"**{verdict(inputs.main)}**" in body


@pytest.mark.parametrize("folder", ["/home/me/models/", "s3://mine/models/"])
def test_render_model_card_shows_no_paths_and_urls(inputs: ReportInputs, folder: str) -> None:
    settings = {**inputs.run.settings, "model": {"path": f"{folder}base", "rope_scales": []}}
    changed = {"model.path": f"{folder}base", "data.path": f"{folder}q.jsonl", "training.epochs": 7}
    changed["evaluation.also_evaluate"] = [f"{folder}other.yaml"]
    command = f"python run.py study {folder}recipe.yaml"
    private = with_run(inputs, settings=settings, changed_settings=changed, command=command)
    card = render_model_card(replace(private, base_model=None))
    assert "- **Base model**: `base`, license apache-2.0." in card
    assert "| `training.epochs` | `7` |" in card
    assert folder not in card


def test_render_model_card_describes_the_adapter(inputs: ReportInputs) -> None:
    settings = {**inputs.run.settings, "training": {"lora": {"rank": 24}}}
    with_adapter = replace(with_run(inputs, settings=settings), has_adapter=True)
    card = render_model_card(with_adapter)
    assert "as a LoRA adapter of rank 24 in peft's format. On the base model it computes what this model does" in card
    assert "adapter" not in render_model_card(inputs)
    scaled = {**settings, "model": {**settings["model"], "rope_scales": [1.2]}}
    card = render_model_card(with_run(with_adapter, settings=scaled))
    assert "On the base model with the scales above it computes" in card


def test_render_model_card_shows_settings_as_text(inputs: ReportInputs) -> None:
    template = {"user": "`{documents}` <b>|</b>"}
    card = render_model_card(with_run(inputs, changed_settings={"data.template": template, "training.epochs": 7}))
    shown = "{'user': '`{documents}` <b>\\|</b>'}"
    assert f"| `data.template` | `` {shown} `` |" in card
    assert "| `training.epochs` | `7` |" in card


def test_render_model_card_shows_a_description_as_text(inputs: ReportInputs) -> None:
    card = render_model_card(with_run(inputs, description="R1 <script>alert(1)</script> & more"))
    assert "\n\nR1 &lt;script>alert(1)&lt;/script> & more\n\n" in card


def test_render_report_of_two_hops_has_a_heat_map_and_no_weights(inputs: ReportInputs, pairs: Comparison) -> None:
    choice = {"slots": [1, 2], "accuracy": 0.75, "ci95": (0.7, 0.8)}
    two_hop = replace(inputs, main=pairs, others=[], advantageous=(1, 2), choice=choice, method="r2")
    files = render_report(two_hop)
    assert files.keys() == {"index.html", "curves.csv", "accuracy.png", "loss.png"}
    html = re.sub(r"\s+", " ", files["index.html"].decode())
    measured = "measured: 0.750 [0.700, 0.800] on training examples, the best of several and so too high on average"
    assert f"advantageous position 2&gt;3 ({measured})" in html
    assert "at position 2>3 of 3" in render_model_card(two_hop)
    assert "| 1>3 | 1.000 | 1.000 |" in render_model_card(two_hop)
    assert build_summary(two_hop)["base"]["slots"][1] == (0, 2)


def test_render_report_and_summary_include_other_tasks(inputs: ReportInputs, html: str) -> None:
    assert build_summary(inputs)["other_tasks"]["chains"]["paired"]["mean_difference"] == 0.5
    assert re.search(r'<th scope="row">chains</th><td>0.500</td><td>1.000</td>', html)
    assert "chains: sub-EM of the first line, SQuAD normalization, greedy, on d." in html


def test_report_says_how_long_prompts_are(html: str, inputs: ReportInputs) -> None:
    assert "in prompts of 80 tokens (20 % of the model's context)" in html
    assert build_summary(inputs)["context_tokens"] == 400


def test_report_shows_what_a_retriever_and_orders_do(inputs: ReportInputs) -> None:
    """Accuracies before: 1, 1/2, 0; after: 1, 1, 1/2."""
    data = STUDY.data.model_copy(update={"documents": 3})
    study = with_evaluation(STUDY.model_copy(update={"data": data}), retriever_ranks=(1.0, 1.0))
    main = compare(predictions(3, [[1, 1, 0], [1, 0, 0]]), predictions(3, [[1, 1, 1], [1, 1, 0]]), 3, study)
    assert main.expected is not None
    assert (main.expected["base"]["accuracy"], main.expected["distilled"]["accuracy"]) == (0.75, 1.0)
    # The ranks are those among three documents.
    assert compare(predictions(2, [[1, 1]]), predictions(2, [[1, 0]]), 2, study).expected is None
    before, after = (replace(curve, broken_by_order=(0.5, 0.25, 0.0)) for curve in (main.before, main.after))
    page = render_report(replace(inputs, main=replace(main, before=before, after=after)))["index.html"].decode()
    assert "expect 0.750 [" in page
    assert "breaks, by position: 0.50 0.25 0.00 before, 0.50 0.25 0.00 after" in page


REFERENCE = {"accuracy": 0.75, "ci95": (0.5, 0.875), "cut": 0.0}


def test_report_shows_accuracy_without_positions(inputs: ReportInputs, html: str) -> None:
    paired = {"mean_difference": 0.125, "ci95": (-0.25, 0.5)}
    compared = {
        "base": REFERENCE,
        "distilled": {**REFERENCE, "accuracy": 0.875, "ci95": (0.625, 1.0)},
        "paired": paired,
    }
    shown = replace(inputs, main=replace(inputs.main, references=dict.fromkeys(REFERENCES, compared)))
    text = to_text(render_report(shown)["index.html"].decode())
    row = "0.750 [0.500, 0.875] 0.875 [0.625, 1.000] +0.125 [-0.250, +0.500]"
    assert f"without documents {row}" in text
    assert f"gold documents alone {row}" in text
    assert build_summary(shown)["references"]["gold_alone"]["paired"] == paired
    card = render_model_card(shown)
    assert "| accuracy with gold documents alone | 0.750 [0.500, 0.875] | 0.875 [0.625, 1.000] |\n" in card
    assert "| accuracy without documents | 0.750 [0.500, 0.875] | 0.875 [0.625, 1.000] |\n" in card
    assert "Where there is no position" not in html
    assert build_summary(inputs)["references"] is None
    assert "alone" not in render_model_card(inputs)


def test_evaluation_shows_accuracy_without_positions(inputs: ReportInputs) -> None:
    page = evaluation_inputs(inputs.tasks[0])
    assert "Where there is no position" not in render_evaluation(page)["index.html"].decode()
    evaluation = replace(page.evaluation, references=dict.fromkeys(REFERENCES, REFERENCE))
    html = render_evaluation(replace(page, evaluation=evaluation))["index.html"].decode()
    assert "without documents 0.750 [0.500, 0.875], gold documents alone 0.750 [0.500, 0.875]." in to_text(html)
    assert evaluation.summary()["references"]["closed_book"] == REFERENCE


def test_evaluation_shows_what_a_retriever_does(inputs: ReportInputs) -> None:
    """Accuracies 1, 1/2, 0; those of the two questions are 1 and 1/2 if the gold document is first or second."""
    page = evaluation_inputs(inputs.tasks[0], 1.0, 1.0)
    expected = page.evaluation.summary()["expected"]
    low, high = expected["ci95"]
    assert expected["accuracy"] == 0.75
    assert (low, high) == accuracy_interval(np.array([1.0, 0.5]), answers=3)
    text = to_text(render_evaluation(page)["index.html"].decode())
    assert f"evaluation.retriever_ranks says, expect 0.750 [{low:.3f}, {high:.3f}]." in text
    without = evaluation_inputs(inputs.tasks[0])
    assert without.evaluation.summary()["expected"] is None
    assert "retriever_ranks" not in to_text(render_evaluation(without)["index.html"].decode())


def test_evaluation_shows_the_questions_to_see_a_difference_between_positions(inputs: ReportInputs) -> None:
    """The variance of 1/6 on average is below 1/2, that of two questions of which one differs."""
    page = evaluation_inputs(inputs.tasks[0])
    # By the latter: (2.80158 / .02)^2 / 2 = 9811.1.
    assert page.evaluation.summary()["questions_to_see"] == {"1": 39245, "2": 9812, "5": 1570, "10": 393}
    text = to_text(render_evaluation(page)["index.html"].decode())
    assert (
        "Questions needed to see a difference between two positions (80 % power): about 9812 for 2 points, "
        "1570 for 5 points, 393 for 10 points; this evaluation has 2."
    ) in text
    alone = replace(page, evaluation=replace(page.evaluation, questions_to_see={}))
    assert "80 %" not in to_text(render_evaluation(alone)["index.html"].decode())
