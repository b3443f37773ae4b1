"""Charts are compiled by Vega-Lite itself, which reports what it does not understand on stderr."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import vl_convert

from pos2distill.evaluation.charts import (
    VEGA_LITE,
    Spec,
    curve_chart,
    is_pair_grid,
    loss_chart,
    position_ticks,
    sweep_chart,
    theme,
    to_png,
    weights_chart,
)
from pos2distill.evaluation.scores import Curve


def curve(slots: tuple[Any, ...], *, groups: tuple[str, ...] = (), documents: int = 20) -> Curve:
    accuracy = tuple(index / len(slots) for index in range(len(slots)))
    return Curve(
        documents=documents,
        examples=60,
        slots=slots,
        groups=groups or ("",) * len(slots),
        accuracy_by_slot=accuracy,
        accuracy_ci95=tuple((max(0, value - 0.1), value + 0.1) for value in accuracy),
        mean=0.5,
        ci95=(0.4, 0.6),
        gap=1.0,
        gap_ci95=(0.9, 1.0),
        gap_corrected=0.9,
        position_p=0.01,
        f1=0.5,
        by_group={},
        by_group_ci95={},
    )


LINES = curve((0, 9, 19))
PAIRS = curve(tuple(itertools.permutations((0, 9, 19), 2)))
GROUPS = curve(((0, 1), (5, 6), (8, 0)), groups=("connected", "connected", "reversed"))
STEPS = [
    {"step": number, "loss": 1 / (number + 1), "loss_trivial": 0.0, "loss_anchor": None, "weight_by_slot": {"1": 0.5}}
    for number in range(300)
]
GOLD_ALONE = {"accuracy": 0.75, "ci95": (0.5, 0.875)}
ESTIMATES = {"mean": (0.5, 0.4, 0.6), "gap": (0.2, 0.1, 0.3)}


def charts() -> Iterator[tuple[str, Spec]]:
    for name, shown in (("lines", LINES), ("pairs", PAIRS), ("groups", GROUPS)):
        yield name, curve_chart({"before": shown, "after": shown})
    yield "marked", curve_chart({"before": LINES}, advantageous=19)
    yield (
        "references",
        curve_chart({"before": LINES, "after": LINES}, references={"before": {"gold_alone": GOLD_ALONE}}),
    )
    yield "loss", loss_chart(STEPS)
    yield "weights", weights_chart(STEPS, 3)
    yield "sweep", sweep_chart([("r1", ESTIMATES, ESTIMATES), ("sft", ESTIMATES, ESTIMATES)])


CHARTS = dict(charts())


@pytest.mark.parametrize("name", CHARTS)
def test_charts_are_valid_vega_lite(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    # A size, since this compiler has no page that contains the chart.
    spec = {**CHARTS[name], "width": 300} if CHARTS[name].get("width") == "container" else CHARTS[name]
    svg = vl_convert.vegalite_to_svg(spec, vl_version=VEGA_LITE, config=theme())
    assert svg.startswith("<svg")
    assert "undefined" not in svg
    assert "NaN" not in svg
    assert capfd.readouterr().err == ""


def test_to_png_is_a_picture() -> None:
    assert to_png(CHARTS["lines"]).startswith(b"\x89PNG\r\n\x1a\n")


def test_curve_chart_has_every_point_with_its_interval() -> None:
    spec = curve_chart({"before": LINES, "after": LINES})
    rows = spec["data"]["values"]
    assert len(rows) == 6
    assert rows[1] == {
        "model": "before (mean 0.500)",
        "position": "10",
        "group": "",
        "accuracy": 1 / 3,
        "low": 1 / 3 - 0.1,
        "high": 1 / 3 + 0.1,
        "interval": "0.233 to 0.433",
        "questions": 60,
        "slot": 10,
    }


def test_curve_chart_marks_of_placements() -> None:
    assert "params" in CHARTS["groups"]
    assert CHARTS["pairs"]["columns"] == 2
    assert [layer["mark"]["type"] for layer in CHARTS["lines"]["layer"]] == ["area", "line", "point"]
    assert [layer["mark"]["type"] for layer in CHARTS["marked"]["layer"]] == ["rule", "area", "line", "point", "text"]


def test_curve_chart_has_a_line_for_each_accuracy_without_a_position() -> None:
    rule, text = CHARTS["references"]["layer"][-2:]
    assert (rule["mark"]["type"], text["mark"]["type"]) == ("rule", "text")
    row = {"model": "before (mean 0.500)", "prompt": "gold documents alone", "accuracy": 0.75}
    assert rule["data"]["values"] == text["data"]["values"] == [row | {"interval": "0.500 to 0.875"}]


def test_loss_chart_leaves_out_what_a_logarithm_cannot_show_and_limits_points() -> None:
    rows = CHARTS["loss"]["data"]["values"]
    assert {row["series"] for row in rows} == {"objective"}
    assert len(rows) == 100  # three steps each
    assert rows[0] == {"step": 3, "series": "objective", "nats": pytest.approx((1 + 1 / 2 + 1 / 3) / 3)}


def test_weights_chart_has_a_mean_for_every_position() -> None:
    rows = CHARTS["weights"]["data"]["values"]
    assert rows[:3] == [
        {"step": 1, "last": 14, "position": 1, "weight": 0.0},
        {"step": 1, "last": 14, "position": 2, "weight": 0.5},
        {"step": 1, "last": 14, "position": 3, "weight": 0.0},
    ]


def test_theme_colors_have_contrast() -> None:
    """At least 4.5:1, WCAG's limit for text."""
    for dark, background in ((False, "#ffffff"), (True, "#0f172a")):
        colors = theme(dark=dark)["range"]["category"]
        assert all(contrast(color, background) >= 4.5 for color in colors), colors


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(color: str) -> float:
    """Relative luminance of WCAG 2."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_is_pair_grid() -> None:
    assert is_pair_grid(PAIRS)
    assert not is_pair_grid(GROUPS)
    assert not is_pair_grid(LINES)
    assert not is_pair_grid(curve(((0, 1), (1, 0))))


@pytest.mark.parametrize(
    ("documents", "ticks"), [(4, [1, 2, 3, 4]), (30, [1, 5, 10, 15, 20, 25, 30]), (20, [1, 5, 10, 15, 20])]
)
def test_position_ticks(documents: int, ticks: list[int]) -> None:
    assert position_ticks(documents) == ticks
