"""Charts are compiled by Vega-Lite itself, which reports what it does not understand on stderr."""

import re
from typing import Any

import pytest
import vl_convert

from pos2distill.evaluation.analysis_charts import analysis_charts
from pos2distill.evaluation.charts import VEGA_LITE, Spec, theme
from pos2distill.evaluation.report import render_analysis
from tests.support.reports import analyses, analysis

PAIRS = ((0, 1), (2, 0))
CHARTS = analysis_charts(analyses())
PNG = b"\x89PNG\r\n\x1a\n"


def without_chains() -> dict[str, dict[str, Any]]:
    """One model, of which nothing is wrong and nothing is shifted."""
    base = analysis(0.0)
    base["thought_shift"] = {"skipped": "no chains"}
    base["wrong_answers"] |= {"wrong": 0, "one_document": 0, "by_slot": [0, 0, 0]}
    return {"base": base}


STUDIES = {
    "both": analyses(),
    "pairs": {"base": analysis(0.4, PAIRS), "distilled": analysis(0.1, PAIRS)},
    "base": without_chains(),
}


def panels(name: str) -> list[Spec]:
    found: list[Spec] = CHARTS[name]["concat"]
    return found


@pytest.mark.parametrize("study", STUDIES)
def test_analysis_charts_are_valid_vega_lite(study: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, chart in analysis_charts(STUDIES[study]).items():
        # A size, since this compiler has no page that contains the chart.
        spec = {**chart, "width": 300} if chart.get("width") == "container" else chart
        svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=theme())
        assert svg.startswith("<svg"), name
        assert "undefined" not in svg, name
        assert "NaN" not in svg, name
    assert capfd.readouterr().err == ""


def test_analysis_charts_has_a_chart_for_every_figure_that_is_available() -> None:
    assert list(CHARTS) == ["token-shift", "attention", "thought-shift", "wrong-answers"]
    assert list(analysis_charts(without_chains())) == ["token-shift", "attention", "wrong-answers"]
    assert analysis_charts({}) == {}


def test_analysis_charts_token_shift_has_every_estimate_with_its_interval() -> None:
    nats, recovery = panels("token-shift")[:2]
    rows = nats["data"]["values"]
    assert [(row["model"], row["position"], row["slot"], row["value"]) for row in rows] == [
        ("before", "1", 1, 0.0),
        ("before", "3", 3, 0.4),
        ("after", "1", 1, 0.0),
        ("after", "3", 3, 0.1),
    ]
    assert (rows[1]["low"], rows[1]["high"]) == (pytest.approx(0.3), 0.5)
    assert rows[1]["interval"] == "0.3 to 0.5"
    assert [row["value"] for row in recovery["data"]["values"]] == [1.0, 0.8, 1.0, 0.8]
    for panel in (nats, recovery):
        (points,) = [layer for layer in panel["layer"] if layer["mark"]["type"] == "point"]
        assert {"field": "interval", "title": "95 % interval"} in points["encoding"]["tooltip"]


def test_analysis_charts_token_shift_has_every_token_in_one_range_of_colors() -> None:
    before, after = panels("token-shift")[2:]
    assert (before["title"], after["title"]) == ("before", "after")
    assert before["data"]["values"][3:] == [
        {"position": "3", "column": 1, "value": 0.8},
        {"position": "3", "column": 2, "value": 0.4},
        {"position": "3", "column": 3, "value": 0.0},
    ]
    assert len(after["data"]["values"]) == 6
    for panel in (before, after):
        assert panel["encoding"]["color"]["scale"] == {"domain": [0, 0.8], "scheme": "viridis"}


def test_analysis_charts_attention_has_both_queries_and_every_document() -> None:
    answer, last, before, _ = panels("attention")
    assert (answer["title"], last["title"]) == ("of the answer", "of the last prompt token")
    assert [row["value"] for row in answer["data"]["values"]] == [0.5, 0.3, 0.5, 0.3]
    cells = [(row["position"], row["column"], row["value"]) for row in before["data"]["values"]]
    assert cells == [("1", 1, 0.5), ("1", 2, 0.1), ("1", 3, 0.1), ("3", 1, 0.2), ("3", 2, 0.1), ("3", 3, 0.3)]


def test_analysis_charts_thought_shift_has_every_step_of_every_group() -> None:
    rows = CHARTS["thought-shift"]["data"]["values"]
    assert len(rows) == 2 * 2 * 4
    assert [(row["chains"], row["step"], row["value"]) for row in rows[:4]] == [
        ("connected, before", "retrieval", 0.4),
        ("connected, before", "reasoning", 0.2),
        ("connected, before", "answer", 0.1),
        ("connected, before", "none", 0.3),
    ]
    assert rows[-1]["chains"] == "reversed, after"
    ungrouped = analysis(0.4)
    ungrouped["thought_shift"]["by_group"] = {}
    rows = analysis_charts({"base": ungrouped})["thought-shift"]["data"]["values"]
    assert {row["chains"] for row in rows} == {"all, before"}


def test_analysis_charts_steps_have_colors_of_their_own() -> None:
    """A scale of more values than the theme has colors would begin with the first color again."""
    domain = CHARTS["thought-shift"]["encoding"]["color"]["scale"]["domain"]
    for dark in (False, True):
        assert len(domain) <= len(set(theme(dark=dark)["range"]["category"]))


def test_analysis_charts_wrong_answers_counts_by_position() -> None:
    rows = CHARTS["wrong-answers"]["data"]["values"]
    assert [(row["position"], row["answers"]) for row in rows] == [(1, 0), (2, 2), (3, 1)] * 2
    assert rows[0]["model"] == "before: 3 of 6 wrong answers"
    assert rows[-1]["model"] == "after: 3 of 6 wrong answers"


def test_analysis_charts_marks_of_placements() -> None:
    """No line joins placements of several documents, which have no order."""
    marks = [layer["mark"]["type"] for layer in panels("token-shift")[0]["layer"]]
    assert marks == ["area", "line", "point"]
    panel = analysis_charts(STUDIES["pairs"])["token-shift"]["concat"][0]
    assert [layer["mark"]["type"] for layer in panel["layer"]] == ["rule", "point"]
    assert [row["position"] for row in panel["data"]["values"]] == ["1>2", "3>1"] * 2


@pytest.mark.parametrize(("placements", "shown"), [(15, 15), (16, 8), (31, 11)])
def test_analysis_charts_limits_the_names_of_placements(placements: int, shown: int) -> None:
    base = analysis(0.4, tuple((slot,) for slot in range(placements)))
    base["token_shift"] = {"skipped": "no answer"}
    for query in ("answer", "last_prompt_token"):
        base["attention"][query]["gold"] *= placements
        base["attention"][query] = {
            "gold": base["attention"][query]["gold"][:placements],
            "by_document": [[0.1, 0.2, 0.3]] * placements,
        }
    heat_map = analysis_charts({"base": base})["attention"]["concat"][2]
    assert len(heat_map["encoding"]["y"]["axis"]["values"]) == shown
    assert len(heat_map["data"]["values"]) == 3 * placements


def test_render_analysis_writes_a_picture_of_every_chart() -> None:
    files = render_analysis("tiny", analyses())
    assert files.keys() == {"index.html", *(f"{name}.png" for name in CHARTS)}
    pictures = [files[f"{name}.png"] for name in CHARTS]
    assert all(picture.startswith(PNG) for picture in pictures)
    assert len(set(pictures)) == 4


def test_render_analysis_page_has_an_element_for_every_chart() -> None:
    html = render_analysis("tiny", analyses())["index.html"].decode()
    assert re.findall(r'<div id="([a-z-]+)" class="chart">', html) == list(CHARTS)
