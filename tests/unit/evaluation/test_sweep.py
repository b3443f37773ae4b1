import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from pos2distill.evaluation.report import Comparison
from pos2distill.evaluation.scores import Curve
from pos2distill.evaluation.sweep import (
    CellResult,
    Estimate,
    estimate,
    estimate_gap,
    render_sweep,
    shared_fraction,
    summarize_sweep,
)


def curve(mean: float, **changes: Any) -> Curve:
    given: dict[str, Any] = {
        "documents": 30,
        "examples": 7,
        "slots": (0, 29),
        "groups": ("", ""),
        "accuracy_by_slot": (mean, mean),
        "accuracy_ci95": ((mean, mean), (mean, mean)),
        "mean": mean,
        "ci95": (mean - 0.25, mean + 0.25),
        "gap": 0.125,
        "gap_ci95": (0.0, 0.5),
        "gap_corrected": 0.2,
        "position_p": 0.01,
        "f1": mean,
        "by_group": {},
        "by_group_ci95": {},
    }
    return Curve(**(given | changes))


def comparison(after: float, seed: int = 0, **changes: Any) -> Comparison:
    """Each seed has questions of its own."""
    paired = {"mean_difference": after - 0.5, "ci95": (-1.0, 1.0)}
    paired |= {"gap_change": 0.0, "gap_change_ci95": (-0.5, 0.5)}
    questions = frozenset({f"question of {seed}"})
    return Comparison("jsonl", "sub_em", curve(0.5, **changes), curve(after, **changes), paired, questions)


def cell(method: str, seed: int, after: float, **tasks: Comparison) -> CellResult:
    return CellResult({"method.name": method, "seed": seed}, {"training task": comparison(after, seed)} | tasks)


def test_estimate_over_seeds_by_hand() -> None:
    # Standard deviation .1, Student's t of 2 degrees of freedom 4.303: 4.303 * .1 / sqrt(3) = .24844.
    found = estimate([0.5, 0.6, 0.7], [(0.45, 0.55), (0.55, 0.65), (0.65, 0.75)], shared=0)
    assert found.value == pytest.approx(0.6)
    assert (found.low, found.high) == pytest.approx((0.6 - 0.24844, 0.6 + 0.24844), abs=1e-5)


@pytest.mark.parametrize(("shared", "below", "above"), [(1.0, 0.31894, 0.26781), (0.25, 0.26781, 0.25342)])
def test_estimate_over_seeds_that_share_questions_by_hand(shared: float, below: float, above: float) -> None:
    # The margins of the seeds are .1, .2 and .3 below and .1 above. Of all questions: sqrt(.24844^2 + .2^2) = .31894
    # and .26781; of a quarter of them sqrt(.24844^2 + .2^2 / 4) = .26781 and .25342.
    intervals = [(0.4, 0.6), (0.4, 0.7), (0.4, 0.8)]
    found = estimate([0.5, 0.6, 0.7], intervals, shared=shared)
    assert (found.low, found.high) == pytest.approx((0.6 - below, 0.6 + above), abs=1e-5)


def test_estimate_of_equal_seeds_with_the_same_questions_has_the_interval_over_questions() -> None:
    found = estimate([0.5, 0.5], [(0.25, 0.75)] * 2, shared=1)
    assert (found.value, found.low, found.high) == (0.5, 0.25, 0.75)


@pytest.mark.parametrize(("shared", "margin"), [(0.0, 0.25 / 2**0.5), (0.5, 0.25 * 0.75**0.5)])
def test_estimate_of_equal_seeds_is_no_surer_than_their_questions(shared: float, margin: float) -> None:
    """Seeds of a model that is nearly always right are often equal by chance: .25 * sqrt((1 + shared) / 2)."""
    found = estimate([0.5, 0.5], [(0.25, 0.75)] * 2, shared=shared)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5 - margin, 0.5 + margin))


def test_estimate_gap_of_a_flat_model_begins_at_0_with_any_number_of_seeds() -> None:
    """Noise raises every GAP to about .1, so that its own interval would begin far above 0."""
    gaps, corrected = [0.09, 0.1, 0.11] * 4, [-0.02, 0.0, 0.02] * 4
    intervals = [(0.0, 0.15)] * 12
    assert estimate(gaps, intervals, shared=0.0).low > 0.05
    gap, gap_corrected = estimate_gap(gaps, intervals, corrected, shared=0.0)
    assert gap.value == pytest.approx(0.1)
    assert gap.low == 0
    assert gap_corrected.low < 0 < gap_corrected.high


def test_estimate_gap_of_a_biased_model_begins_where_the_corrected_one_does() -> None:
    """Also if no seed alone has enough questions to show the bias."""
    gap, corrected = estimate_gap([0.2] * 10, [(0.0, 0.3)] * 10, [0.17] * 10, shared=0.0)
    assert gap.low == corrected.low == pytest.approx(0.17 - 0.17 / 10**0.5)
    assert estimate_gap([0.2], [(0.0, 0.3)], [0.17], shared=1.0)[0] == Estimate(0.2, 0.0, 0.3)


@pytest.mark.parametrize("shared", [1.0, 0.0])
def test_estimate_of_one_seed_has_its_interval(shared: float) -> None:
    assert estimate([0.5], [(0.25, 0.75)], shared=shared) == Estimate(0.5, 0.25, 0.75)


def test_estimate_ends_at_its_bounds() -> None:
    # 12.706 * .0283 / sqrt(2) = .254.
    found = estimate([0.95, 0.99], [(0.9, 1.0)] * 2, shared=0)
    assert (found.value, found.low, found.high) == pytest.approx((0.97, 0.716, 1.0), abs=1e-3)
    found = estimate([-0.95, -0.99], [(-1.0, -0.9)] * 2, shared=0, bounds=(-1.0, 1.0))
    assert (found.value, found.low, found.high) == pytest.approx((-0.97, -1.0, -0.716), abs=1e-3)


def test_shared_fraction_is_the_mean_over_pairs() -> None:
    one, two, three = frozenset("abcd"), frozenset("abce"), frozenset("defg")
    # Three of four, one of four and one of four.
    assert shared_fraction([one, two, three]) == pytest.approx((3 + 1 + 1) / 12)
    assert shared_fraction([one, one]) == 1
    assert shared_fraction([one, three | two]) == pytest.approx(4 / (4 * 7) ** 0.5)
    assert shared_fraction([one]) == 1


GROUPS: dict[str, Any] = {"by_group": {"connected": 0.625}, "by_group_ci95": {"connected": (0.5, 0.75)}}
CELLS = [
    cell("sft", 0, 0.75),
    cell("sft", 1, 0.75),
    cell("r1", 0, 0.9, chains=comparison(0.25, **GROUPS)),
    cell("r1", 1, 0.9, chains=comparison(0.25, **GROUPS)),
]


def test_render_sweep_shows_a_row_for_each_setting_of_every_task() -> None:
    files = render_sweep("ablation", "Two methods.", CELLS, {"torch": "2.13"})
    assert files["sweep.png"].startswith(b"\x89PNG")
    page = files["index.html"].decode()
    # Without scripts: the data of the chart names everything, and the code of its library is long.
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[: page.index("<script")]))
    # Equal seeds with questions of their own: .25 / sqrt(2).
    assert "sft 2 0.500 [0.323, 0.677] 0.750 [0.573, 0.927]" in text
    assert "as far as seeds share questions, the margin over questions is added" in text
    assert "jsonl, sub_em, 2 placements × 7 examples" in text
    # A task that only some cells have shows the rows of these cells, with their groups.
    chains = text[text.index("chains") :]
    assert "r1 2" in chains
    assert "sft" not in chains
    assert "connected 0.625" in chains


def test_render_sweep_names_the_settings_of_a_section() -> None:
    cells = [
        replace(cell("r1", 0, 0.75), settings={"inference": {"method": "none"}}),
        replace(cell("r1", 0, 0.75), settings={"inference": {}}),
        replace(cell("r1", 0, 0.5), settings={"inference": {"method": "uniform_scale", "scales": [1.5]}}),
    ]
    rows = list(csv.DictReader(io.StringIO(render_sweep("s", "", cells, {})["sweep.csv"].decode())))
    assert list(dict.fromkeys(row["setting"] for row in rows)) == [
        "none",
        "default inference",
        "uniform_scale, scales [1.5]",
    ]


def test_render_sweep_of_one_seed_has_the_intervals_of_its_examples() -> None:
    files = render_sweep("one", "", [cell("r1", 0, 0.75, chains=comparison(0.25, gap_ci95=(1e-6, 0.5)))], {})
    page = files["index.html"].decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[: page.index("<script")]))
    training, chains = text.split("chains")
    assert "bootstrap" not in text
    assert "0.125 [0.000, 0.500] 0.125 [0.000, 0.500] 0.200 0.200 0.000 [-0.500, 0.500]" in training
    assert "0.125 [above 0, 0.500] 0.125 [above 0, 0.500]" in chains


def seeds_with_corrected_gaps() -> list[CellResult]:
    """Two seeds with corrected GAPs of .2 and .2 before, of .0 and .2 after, and changes of -.2 and .0."""
    cells = []
    for seed, gap in enumerate((0.0, 0.2)):
        compared = comparison(0.75, seed, **GROUPS)
        paired = compared.paired | {"gap_change": gap - 0.2}
        compared = replace(compared, after=replace(compared.after, gap_corrected=gap), paired=paired)
        cells.append(CellResult({"method.name": "r1", "seed": seed}, {"training task": compared}))
    return cells


def test_render_sweep_shows_corrected_gaps_and_their_change_over_seeds() -> None:
    page = render_sweep("two seeds", "", seeds_with_corrected_gaps(), {})["index.html"].decode()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page[: page.index("<script")]))
    headers = "GAP before GAP after corrected GAP before corrected GAP after change of the corrected GAP"
    assert headers in text
    # 12.706 * .1414 / sqrt(2) = 1.2706, more than a GAP can be.
    # The equal ones are .2 above and .3 below the ends of their interval over questions, over sqrt(2).
    assert "0.200 [0.059, 0.412] 0.100 [-1.000, 1.000] -0.100 [-1.000, 1.000]" in text


def test_render_sweep_writes_every_measure_as_csv() -> None:
    files = render_sweep("two seeds", "", seeds_with_corrected_gaps(), {})
    rows = list(csv.DictReader(files["sweep.csv"].decode().splitlines()))
    assert all((row["task"], row["setting"], row["seeds"]) == ("training task", "r1", "2") for row in rows)
    measures = {row["measure"]: [float(row[name]) for name in ("value", "low", "high")] for row in rows}
    assert list(measures) == [
        "mean before",
        "GAP before",
        "corrected GAP before",
        "connected before",
        "mean after",
        "GAP after",
        "corrected GAP after",
        "connected after",
        "difference of the means",
        "change of the corrected GAP",
    ]
    assert measures["GAP after"] == pytest.approx([0.125, 0.0, 0.125 + 0.375 / 2**0.5])
    assert measures["corrected GAP after"] == pytest.approx([0.1, -1, 1])
    assert measures["change of the corrected GAP"] == pytest.approx([-0.1, -1, 1])


def test_render_sweep_of_one_seed_writes_no_interval_of_a_corrected_gap() -> None:
    files = render_sweep("one", "", [cell("r1", 0, 0.75)], {})
    (row,) = [row for row in files["sweep.csv"].decode().splitlines() if ",corrected GAP after," in row]
    assert row == "training task,r1,1,corrected GAP after,0.2,,"


def test_render_sweep_shows_the_curve_of_each_setting_over_seeds() -> None:
    cells = [
        CellResult({"method.name": "r1", "seed": seed}, {"training task": replace(comparison(0.5, seed), after=after)})
        for seed, after in enumerate(
            curve(0.5, accuracy_by_slot=(first, 0.6), accuracy_ci95=((first, first), (0.6, 0.6)))
            for first in (0.4, 0.6)
        )
    ]
    files = render_sweep("ablation", "One method.", [*cells, cell("sft", 0, 0.75)], {})
    rows = list(csv.reader(files["curves.csv"].decode().splitlines()))
    # Student's t of 1 degree of freedom 12.706: 12.706 * .1414 / sqrt(2) = 1.27, more than an accuracy can be.
    assert rows == [
        ["setting", "documents", "position", "accuracy", "low", "high", "questions"],
        ["before", "30", "1", "0.5", "0.5", "0.5", "7"],
        ["before", "30", "30", "0.5", "0.5", "0.5", "7"],
        ["r1", "30", "1", "0.5", "0.0", "1.0", "7"],
        ["r1", "30", "30", "0.6", "0.6", "0.6", "7"],
        ["sft", "30", "1", "0.75", "0.75", "0.75", "7"],
        ["sft", "30", "30", "0.75", "0.75", "0.75", "7"],
    ]
    assert files["curves.png"].startswith(b"\x89PNG")
    data = files["index.html"].decode().partition('id="page-data">')[2].partition("</script>")[0]
    names = {row["model"] for row in json.loads(data)["charts"]["curves"]["data"]["values"]}
    assert names == {"before (mean 0.500)", "r1 (mean 0.500)", "sft (mean 0.750)"}


def test_render_sweep_of_initial_models_or_slots_that_differ() -> None:
    other = CellResult({"method.name": "seqkd", "seed": 0}, {"training task": comparison(0.5)})
    base = replace(other.tasks["training task"], before=curve(0.25))
    differ = [cell("r1", 0, 0.75), CellResult(other.settings, {"training task": base})]
    rows = list(csv.reader(render_sweep("two", "", differ, {})["curves.csv"].decode().splitlines()))
    assert [row[0] for row in rows[1::2]] == ["r1, before", "seqkd, before", "r1", "seqkd"]
    slots = CellResult(other.settings, {"training task": comparison(0.5, slots=(0, 15))})
    assert render_sweep("two", "", [cell("r1", 0, 0.75), slots], {}).keys() == {
        "index.html",
        "sweep.csv",
        "sweep.png",
    }


def test_summarize_sweep_holds_every_cell() -> None:
    summary = json.loads(json.dumps(summarize_sweep("ablation", CELLS)))
    assert [each["settings"]["seed"] for each in summary["cells"]] == [0, 1, 0, 1]
    assert summary["cells"][2]["tasks"]["chains"]["distilled"]["mean"] == 0.25


def test_summarize_sweep_holds_the_estimates_over_seeds() -> None:
    summary = json.loads(json.dumps(summarize_sweep("two seeds", seeds_with_corrected_gaps())))
    (row,) = summary["estimates"]
    assert (row["label"], row["seeds"]) == ("r1", 2)
    after = row["tasks"]["training task"]["after"]
    assert after["gap"] == pytest.approx({"value": 0.125, "low": 0.0, "high": 0.125 + 0.375 / 2**0.5})
    assert after["gap_corrected"] == pytest.approx(0.1)
    assert after["gap_corrected_ci95"] == pytest.approx([-1, 1])
    assert row["tasks"]["training task"]["gap_change"]["value"] == pytest.approx(-0.1)
