"""The charts of an analysis, as Vega-Lite specifications like those of `charts`. Positions and tokens are 1-based.

An analysis is the content of an analysis.json; `analyses` are those of one study by model, `base` first.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pos2distill.evaluation.chains import STEPS
from pos2distill.evaluation.charts import AFTER, BEFORE, Spec, position_ticks
from pos2distill.evaluation.scores import format_slots

Analyses = Mapping[str, Mapping[str, Any]]

_MODELS = {"base": BEFORE, "distilled": AFTER}
# The size of each panel of a chart with several, so that one fits on a phone and two beside each other in the page.
_PANEL_WIDTH, _PANEL_HEIGHT = 300, 200
_MOST_LABELS = 15
_GOLD_TITLE = "gold position (from 1)"


def analysis_charts(analyses: Analyses) -> dict[str, Spec]:
    """A chart for every figure that some of the analyses have, by name, such as `token-shift`."""
    charts = {}
    for figure, draw in _CHARTS.items():
        present = {model: analysis for model, analysis in analyses.items() if "skipped" not in analysis[figure]}
        if present:
            charts[figure.replace("_", "-")] = draw(present)
    return charts


def _token_shift_chart(analyses: Analyses) -> Spec:
    """Nats per token and recovery by placement; then, for each model, mean KL by token and placement."""
    shifts = {model: analysis["token_shift"] for model, analysis in analyses.items()}
    any_analysis = next(iter(analyses.values()))
    nats = {"type": "quantitative", "title": "KL, nats per token", "scale": {"domainMin": 0}}
    recovery = {"type": "quantitative", "title": "tokens recovered", "scale": {"domain": [0, 1]}}
    recovery["axis"] = {"format": "%"}
    by_slot = {model: shift["nats_by_slot"] for model, shift in shifts.items()}
    recovered = {model: shift["recovery_by_slot"] for model, shift in shifts.items()}
    panels = [_estimates_panel(any_analysis, by_slot, nats), _estimates_panel(any_analysis, recovered, recovery)]
    by_token = {model: shift["nats_by_token"] for model, shift in shifts.items()}
    panels += _heat_panels(any_analysis, by_token, column="response token", value="mean KL, nats")
    return _concat("Token shift and recovery by position of the gold documents, and KL by token", panels)


def _attention_chart(analyses: Analyses) -> Spec:
    """Attention to the gold documents by placement; then, for each model, attention of the answer to every document."""
    any_analysis = next(iter(analyses.values()))
    y = {"type": "quantitative", "title": "attention to the gold documents", "scale": {"domainMin": 0}}
    panels = []
    for query in ("answer", "last_prompt_token"):
        gold = {model: analysis["attention"][query]["gold"] for model, analysis in analyses.items()}
        panels.append({"title": f"of the {query.replace('_', ' ')}", **_estimates_panel(any_analysis, gold, y)})
    by_document = {model: analysis["attention"]["answer"]["by_document"] for model, analysis in analyses.items()}
    panels += _heat_panels(any_analysis, by_document, column="document", value="attention of the answer")
    return _concat("Attention to the gold documents and to every document, by position of the gold documents", panels)


def _thought_shift_chart(analyses: Analyses) -> Spec:
    """The first failed step of chains, by group of placements."""
    rows = []
    for model, analysis in analyses.items():
        shift = analysis["thought_shift"]
        for group, ratios in (shift["by_group"] or {"all": shift["overall"]}).items():
            for order, step in enumerate(STEPS):
                row = {"chains": f"{group}, {_MODELS[model]}", "step": step, "order": order}
                rows.append(row | _estimate_values(ratios[step]))
    # Not the first two colors, which mean before and after.
    color: Spec = {"field": "step", "type": "nominal", "title": "first failed step"}
    color |= {"scale": {"domain": ["", " ", *STEPS]}, "legend": {"orient": "top", "values": list(STEPS), "columns": 2}}
    x: Spec = {"field": "value", "type": "quantitative", "title": "chains", "scale": {"domain": [0, 1]}}
    x["axis"] = {"format": "%"}
    y = {"field": "chains", "type": "nominal", "title": None, "sort": None}
    tooltip = [{"field": "chains"}, {"field": "step", "title": "first failed step"}, *_estimate_tooltip("fraction")]
    return {
        "description": "First failed step of chains by group of positions",
        "data": {"values": rows},
        "width": "container",
        # A number, since Vega-Lite cannot fit the width of a chart whose height is given by step.
        "height": 28 * len(rows) // len(STEPS),
        "mark": "bar",
        "encoding": {"x": x, "y": y, "color": color, "order": {"field": "order"}, "tooltip": tooltip},
    }


def _wrong_answers_chart(analyses: Analyses) -> Spec:
    """How often the only document that holds a wrong answer was at each position."""
    rows = []
    names = []
    for model, analysis in analyses.items():
        wrong = analysis["wrong_answers"]
        name = f"{_MODELS[model]}: {wrong['one_document']} of {wrong['wrong']} wrong answers"
        names.append(name)
        for slot, answers in enumerate(wrong["by_slot"]):
            rows.append({"model": name, "position": slot + 1, "answers": answers})
    documents = next(iter(analyses.values()))["documents"]
    # The names are stacked, since side by side they are wider than a phone.
    legend = {"orient": "top", "labelLimit": 0, "columns": 1}
    color = {"field": "model", "title": None, "scale": {"domain": names}, "legend": legend}
    x: Spec = {"field": "position", "type": "ordinal"}
    x["title"] = "position of the document (from 1)"
    x["axis"] = {"values": position_ticks(documents), "labelAngle": 0}
    y = {"field": "answers", "type": "quantitative", "title": "answers", "axis": {"tickMinStep": 1, "format": "d"}}
    tooltip = [{"field": name} for name in ("model", "position", "answers")]
    offset = {"field": "model", "scale": {"domain": names}}
    return {
        "description": "Positions of the documents that hold wrong answers",
        "data": {"values": rows},
        "width": "container",
        "height": _PANEL_HEIGHT,
        "mark": "bar",
        "encoding": {"x": x, "xOffset": offset, "y": y, "color": color, "tooltip": tooltip},
    }


# By the key of an analysis.
_CHARTS = {
    "token_shift": _token_shift_chart,
    "attention": _attention_chart,
    "thought_shift": _thought_shift_chart,
    "wrong_answers": _wrong_answers_chart,
}


def _concat(description: str, panels: Sequence[Spec]) -> Spec:
    # Colors mean models in some panels and values in others.
    resolve = {"scale": {"color": "independent", "shape": "independent"}}
    return {"description": description, "concat": list(panels), "columns": 2, "resolve": resolve}


def _estimates_panel(analysis: Mapping[str, Any], estimates: Mapping[str, Sequence[Any]], y: Spec) -> Spec:
    """Estimates by placement with their intervals: lines over the positions of one gold document, else points.

    Args:
        analysis: names the placements.
        estimates: for each model, one estimate for each placement.
        y: the axis, without a field.
    """
    rows = []
    for model, model_estimates in estimates.items():
        for slots, estimate in zip(analysis["slots"], model_estimates, strict=True):
            row = {"model": _MODELS[model], "position": format_slots(tuple(slots)), "slot": slots[0] + 1}
            rows.append(row | _estimate_values(estimate))
    shown = [_MODELS[model] for model in estimates]
    scale = {"domain": list(_MODELS.values())}
    color = {"field": "model", "title": None, "scale": scale, "legend": {"orient": "top", "values": shown}}
    x = _placements_axis(analysis)
    interval = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
    value = {"y": {**y, "field": "value"}}
    # Two shapes, since colors alone do not distinguish the models for everyone.
    points: Spec = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}}
    tooltip = [{"field": "model"}, {"field": "position"}, *_estimate_tooltip(y["title"])]
    points["encoding"] = value | {"shape": color, "tooltip": tooltip}
    if _has_one_gold(analysis):
        area: Spec = {"mark": {"type": "area", "opacity": 0.15}, "encoding": interval}
        line: Spec = {"mark": {"type": "line", "strokeWidth": 2}, "encoding": value}
        layers = [area, line, points]
        offset = {}
    else:
        layers = [{"mark": {"type": "rule", "strokeWidth": 1.5}, "encoding": interval}, points]
        offset = {"xOffset": {"field": "model", "scale": scale}}
    size = {"width": _PANEL_WIDTH, "height": _PANEL_HEIGHT}
    return {**size, "data": {"values": rows}, "encoding": {"x": x, "color": color, **offset}, "layer": layers}


def _placements_axis(analysis: Mapping[str, Any]) -> Spec:
    if not _has_one_gold(analysis):
        # All names would not fit beside each other.
        axis = {"values": _labels_shown(analysis), "labelAngle": -45}
        return {"field": "position", "type": "nominal", "title": _GOLD_TITLE, "sort": None, "axis": axis}
    documents = analysis["documents"]
    x: Spec = {"field": "slot", "type": "quantitative", "title": _GOLD_TITLE}
    x["scale"] = {"domain": [1, documents], "nice": False}
    x["axis"] = {"values": position_ticks(documents), "format": "d", "grid": False}
    return x


def _heat_panels(analysis: Mapping[str, Any], tables: Mapping[str, Any], *, column: str, value: str) -> list[Spec]:
    """A heat map for each model, rows by placement.

    Args:
        analysis: names the placements.
        tables: for each model, (placements, columns) values.
        column, value: titles of the columns and of the values.
    """
    highest = max(max(row) for table in tables.values() for row in table)
    # One range of colors for all models, so that they can be compared.
    scale = {"domain": [0, highest or 1], "scheme": "viridis"}
    color: Spec = {"field": "value", "type": "quantitative", "scale": scale}
    color["legend"] = {"orient": "bottom", "title": value}
    x: Spec = {"field": "column", "type": "ordinal", "title": f"{column} (from 1)"}
    x["axis"] = {"values": position_ticks(len(next(iter(tables.values()))[0])), "labelAngle": 0}
    y: Spec = {"field": "position", "type": "ordinal", "title": _GOLD_TITLE, "sort": None}
    y["axis"] = {"values": _labels_shown(analysis)}
    tooltip: list[Spec] = [{"field": "position", "title": _GOLD_TITLE}, {"field": "column", "title": column}]
    tooltip.append({"field": "value", "title": value, "format": ".4f"})
    panels = []
    for model, table in tables.items():
        rows = []
        for slots, values in zip(analysis["slots"], table, strict=True):
            for index, cell in enumerate(values):
                rows.append({"position": format_slots(tuple(slots)), "column": index + 1, "value": cell})
        panel: Spec = {
            "title": _MODELS[model],
            "data": {"values": rows},
            "width": _PANEL_WIDTH,
            "height": _PANEL_HEIGHT,
        }
        panel["mark"] = {"type": "rect", "stroke": None}
        panel["encoding"] = {"x": x, "y": y, "color": color, "tooltip": tooltip}
        panels.append(panel)
    return panels


def _has_one_gold(analysis: Mapping[str, Any]) -> bool:
    return all(len(slots) == 1 for slots in analysis["slots"])


def _labels_shown(analysis: Mapping[str, Any]) -> list[str]:
    """The names of the placements, or of some at equal distances if there are too many to be read."""
    names = [format_slots(tuple(slots)) for slots in analysis["slots"]]
    return names[:: -(-len(names) // _MOST_LABELS)]


def _estimate_values(estimate: Mapping[str, Any]) -> dict[str, Any]:
    low, high = estimate["ci95"]
    return {"value": estimate["value"], "low": low, "high": high, "interval": f"{low:.3g} to {high:.3g}"}


def _estimate_tooltip(title: str) -> list[Spec]:
    return [{"field": "value", "title": title, "format": ".3"}, {"field": "interval", "title": "95 % interval"}]
