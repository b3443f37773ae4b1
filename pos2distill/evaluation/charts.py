"""The report's charts, as Vega-Lite 6.4 specifications: interactive in the page, and as PNG files beside it.

Positions are 1-based in charts. Colors come from the theme, so that the same chart is readable on light and dark.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pos2distill.evaluation.formatting import format_lower
from pos2distill.evaluation.references import REFERENCES
from pos2distill.evaluation.scores import Curve, format_slots

Spec = dict[str, Any]

VEGA_LITE = "6.4"
BEFORE, AFTER = "before", "after"
ALL_GROUPS = "all"
"""The value of the parameter `group` that shows the placements of all groups."""

# Before and after, then the further series. At least 4.5:1 against the background.
_LIGHT = {
    "text": "#334155",
    "grid": "#e2e8f0",
    "category": ["#c2410c", "#0f766e", "#6d28d9", "#1d4ed8", "#a16207", "#475569"],
}
_DARK = {
    "text": "#cbd5e1",
    "grid": "#334155",
    "category": ["#fb923c", "#2dd4bf", "#c4b5fd", "#93c5fd", "#fde047", "#94a3b8"],
}
_MOST_BANDS = 3  # intervals that are drawn as bands, one over the other
# A chart of training has this many groups of steps, whatever the number of steps. A single step weighs few positions,
# so a heat map of single steps would show only noise.
_LOSS_BUCKETS, _WEIGHT_BUCKETS = 120, 24

_ACCURACY_AXIS = {"title": "accuracy", "format": "%"}
_MODEL, _GROUP = {"field": "model"}, {"field": "group"}
_ACCURACY, _INTERVAL = {"field": "accuracy", "format": ".3f"}, {"field": "interval", "title": "95 % interval"}
_CURVE_TOOLTIP = [_MODEL, {"field": "position"}, _GROUP, _ACCURACY, _INTERVAL, {"field": "questions"}]


def theme(*, dark: bool = False) -> Spec:
    """The configuration of a chart: font, colors and axes."""
    colors = _DARK if dark else _LIGHT
    return {
        "font": "system-ui, sans-serif",
        "background": "transparent" if dark else "white",
        "view": {"stroke": None},
        "axis": {
            "labelColor": colors["text"],
            "titleColor": colors["text"],
            "gridColor": colors["grid"],
            "domainColor": colors["text"],
            "tickColor": colors["text"],
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
        },
        "legend": {
            "labelColor": colors["text"],
            "titleColor": colors["text"],
            "labelFontSize": 13,
            "symbolSize": 120,
            # Not as pale as the bands of intervals, which the legend describes too.
            "symbolOpacity": 1,
            # Names of models are longer than Vega's 160 pixels, and a narrow screen has 320 for them.
            "labelLimit": 320,
        },
        "header": {"labelColor": colors["text"], "titleColor": colors["text"], "labelFontSize": 13},
        "title": {"color": colors["text"], "fontSize": 13, "fontWeight": "normal"},
        "rule": {"color": colors["text"]},
        "text": {"color": colors["text"]},
        "range": {"category": colors["category"]},
    }


def curve_chart(
    curves: Mapping[str, Curve],
    *,
    advantageous: int | None = None,
    references: Mapping[str, Mapping[str, Any]] | None = None,
    selectable: bool = False,
) -> Spec:
    """Accuracy by placement of the gold documents with 95 % intervals, for one curve or several.

    One gold document: lines over its positions. Two gold documents at every ordered pair of some slots: a heat map for
    each curve. Otherwise: bars for every placement, of the group that the parameter `group` names.

    Args:
        curves: curves by name, all for prompts of one length.
        advantageous: 0-based slot to mark where the chart has lines.
        references: horizontal lines in such a chart, by the curve's name, as in `summarize_references`.
        selectable: choosing a name in the legend fades all other lines; for more curves than can be distinguished.
    """
    any_curve = next(iter(curves.values()))
    names = {name: f"{name} (mean {curve.mean:.3f})" for name, curve in curves.items()}
    rows = [row for name, curve in curves.items() for row in _curve_rows(names[name], curve)]
    legend = {"orient": "top", **({"columns": 3} if selectable else {})}
    color = {"field": "model", "title": None, "scale": {"domain": list(names.values())}, "legend": legend}
    description = f"Accuracy by position of the gold document among {any_curve.documents}, with 95 % intervals"
    base = {"data": {"values": rows}, "description": description}
    if is_pair_grid(any_curve):
        return base | _heat_maps(names, any_curve)
    if any(not isinstance(slot, int) for slot in any_curve.slots):
        return base | _bars(names, any_curve, color)
    lines = _lines(any_curve, color, advantageous, selectable=selectable)
    if references:
        lines["layer"] += _reference_lines({names[name]: each for name, each in references.items()}, color)
    return base | lines


def _curve_rows(name: str, curve: Curve) -> list[dict[str, Any]]:
    rows = []
    for index, slot in enumerate(curve.slots):
        low, high = curve.accuracy_ci95[index]
        row: dict[str, Any] = {
            "model": name,
            "position": format_slots(slot),
            "group": curve.groups[index],
            "accuracy": curve.accuracy_by_slot[index],
            "low": low,
            "high": high,
            "interval": f"{low:.3f} to {high:.3f}",
            "questions": curve.examples,
        }
        if isinstance(slot, int):
            row["slot"] = slot + 1
        else:
            row["first"], row["second"] = str(slot[0] + 1), str(slot[1] + 1)
        rows.append(row)
    return rows


def _lines(curve: Curve, color: Spec, advantageous: int | None, *, selectable: bool) -> Spec:
    ticks = position_ticks(curve.documents)
    title = f"position of the gold document among {curve.documents} (from 1)"
    scale = {"domain": [1, curve.documents], "nice": False}
    x: Spec = {"field": "slot", "type": "quantitative", "title": title, "scale": scale}
    x["axis"] = {"values": ticks, "format": "d", "grid": False}
    y = {"field": "accuracy", "type": "quantitative", "scale": {"domain": [0, 1]}, "axis": _ACCURACY_AXIS}
    tooltip = [field for field in _CURVE_TOOLTIP if field is not _GROUP]
    # Two shapes, since colors alone do not distinguish the models for everyone.
    shape = {"field": "model", "title": None, "scale": color["scale"], "legend": color["legend"]}
    area: Spec = {
        "mark": {"type": "area", "opacity": 0.15},
        "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}},
    }
    points: Spec = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}}
    points["encoding"] = {"y": y, "shape": shape, "tooltip": tooltip}
    layers: list[Spec] = [area, {"mark": {"type": "line", "strokeWidth": 2}, "encoding": {"y": y}}, points]
    if len(color["scale"]["domain"]) > _MOST_BANDS:
        layers.remove(area)  # many bands hide the lines; the tooltip has the interval
    for layer in layers:
        layer["encoding"] |= {"x": x, "color": color}
        if selectable:
            shown = layer["mark"].get("opacity", 1)
            layer["encoding"]["opacity"] = {"condition": {"param": "chosen", "value": shown}, "value": 0.05}
    if selectable:
        # Without a choice all are chosen. In a layered chart a parameter belongs to one of the layers.
        select = {"type": "point", "fields": ["model"]}
        points["params"] = [{"name": "chosen", "select": select, "bind": "legend"}]
    if advantageous is not None:
        rule, name = _mark_advantageous(advantageous, curve.documents)
        # The line is below the points, which react to the pointer.
        layers = [rule, *layers, name]
    return {"width": "container", "height": 300, "layer": layers}


def _reference_lines(references: Mapping[str, Mapping[str, Any]], color: Spec) -> list[Spec]:
    """A dashed line at each accuracy that has no position, and the kind of prompt above the highest of its lines."""
    rows: list[dict[str, Any]] = []
    for model, by_name in references.items():
        for name, reference in by_name.items():
            low, high = reference["ci95"]
            row = {"model": model, "prompt": REFERENCES[name], "accuracy": reference["accuracy"]}
            rows.append(row | {"interval": f"{low:.3f} to {high:.3f}"})
    y = {"field": "accuracy", "type": "quantitative"}
    tooltip = [_MODEL, {"field": "prompt"}, _ACCURACY, _INTERVAL]
    rule: Spec = {"data": {"values": rows}, "mark": {"type": "rule", "strokeDash": [6, 4]}}
    rule["encoding"] = {"y": y, "color": color, "tooltip": tooltip}
    highest = [{"op": "max", "field": "accuracy", "as": "accuracy"}]
    label: Spec = {"data": {"values": rows}, "transform": [{"aggregate": highest, "groupby": ["prompt"]}]}
    label["mark"] = {"type": "text", "align": "right", "baseline": "bottom", "dy": -3, "fontSize": 11}
    # x in pixels: at the right end whatever the positions are.
    label["encoding"] = {"x": {"value": "width"}, "y": y, "text": {"field": "prompt"}}
    return [rule, label]


def _mark_advantageous(slot: int, documents: int) -> list[Spec]:
    """A dotted line at the slot, with its name on the side that has more room."""
    x = {"datum": slot + 1, "type": "quantitative", "scale": {"zero": False}}
    # Without data of their own, both would be drawn once for every point of the curves.
    once: Spec = {"data": {"values": [{}]}}
    in_right_half = slot > documents / 2
    # The page's text names the slot, so screen readers need not read these marks.
    text: Spec = {"type": "text", "text": "advantageous", "baseline": "bottom", "fontSize": 11, "aria": False}
    text |= {"align": "right", "dx": -5} if in_right_half else {"align": "left", "dx": 5}
    rule = once | {"mark": {"type": "rule", "strokeDash": [2, 3], "aria": False}, "encoding": {"x": x}}
    return [rule, once | {"mark": text, "encoding": {"x": x, "y": {"datum": 0.01, "type": "quantitative"}}}]


def _bars(names: Mapping[str, str], curve: Curve, color: Spec) -> Spec:
    title = f"positions of the gold documents among {curve.documents}, in hop order (from 1)"
    x = {"field": "position", "type": "nominal", "title": title, "sort": None, "axis": {"labelAngle": -45}}
    offset = {"field": "model", "scale": {"domain": list(names.values())}}
    y = {"field": "accuracy", "type": "quantitative", "scale": {"domain": [0, 1]}, "axis": _ACCURACY_AXIS}
    bars: Spec = {"mark": "bar", "encoding": {"y": y, "color": color}}
    intervals: Spec = {"mark": {"type": "rule"}, "encoding": {"y": {**y, "field": "low"}, "y2": {"field": "high"}}}
    for layer in (bars, intervals):
        layer["encoding"] |= {"x": x, "xOffset": offset, "tooltip": _CURVE_TOOLTIP}
    shown = {"filter": f"group == '{ALL_GROUPS}' || datum.group == group"}
    params = [{"name": "group", "value": ALL_GROUPS}]
    return {"width": "container", "height": 300, "params": params, "transform": [shown], "layer": [bars, intervals]}


def is_pair_grid(curve: Curve) -> bool:
    """Whether the placements are every ordered pair of some slots."""
    pairs = [slot for slot in curve.slots if not isinstance(slot, int) and len(slot) == 2]
    slots: set[int] = set()
    for pair in pairs:
        slots.update(pair)
    all_pairs = len(slots) * (len(slots) - 1)
    # Two slots have only two pairs, which bars show better than a heat map.
    return len(curve.slots) == len(pairs) == all_pairs and all_pairs > 2


def _heat_maps(names: Mapping[str, str], curve: Curve) -> Spec:
    """Accuracy by (first-hop position, second-hop position)."""
    slots: set[int] = set()
    for slot in curve.slots:
        slots.update(slot if not isinstance(slot, int) else (slot,))
    order = [str(slot + 1) for slot in sorted(slots)]
    x: Spec = {"field": "second", "type": "ordinal", "sort": order, "title": "position of the second hop's document"}
    y = {"field": "first", "type": "ordinal", "sort": order, "title": "position of the first hop's document"}
    x["axis"] = {"labelAngle": 0}
    # All maps have the whole range of colors, so that they can be compared.
    scale = {"domain": [0, 1], "scheme": "viridis"}
    color = {"field": "accuracy", "type": "quantitative", "scale": scale, "legend": {"format": "%", "orient": "bottom"}}
    cells = {"mark": "rect", "encoding": {"color": color, "tooltip": _CURVE_TOOLTIP}}
    # Readable on viridis, which is dark at 0.
    contrast = {"condition": {"test": "datum.accuracy < 0.6", "value": "white"}, "value": "black"}
    number = {"field": "accuracy", "type": "quantitative", "format": ".2f"}
    numbers = {"mark": "text", "encoding": {"text": number, "color": contrast}}
    facet = {"field": "model", "type": "nominal", "title": None, "sort": list(names.values())}
    layers = {"width": 270, "height": 270, "layer": [cells, numbers], "encoding": {"x": x, "y": y}}
    return {"facet": facet, "columns": 2, "spec": layers}


def loss_chart(steps: Sequence[Mapping[str, Any]]) -> Spec:
    """The objective, and the mean loss of trivial and anchor rows, by optimizer step, on a logarithmic axis.

    Pale: the mean of each group of steps; strong: the moving geometric mean over a tenth of the run, since one high
    step would raise an arithmetic mean for as long as the window.
    """
    names = {"loss": "objective", "loss_trivial": "trivial rows", "loss_anchor": "anchor rows"}
    rows = []
    for bucket in _buckets(steps, _LOSS_BUCKETS):
        for field, name in names.items():
            # A logarithmic axis cannot show a loss of 0.
            values = [step[field] for step in bucket if step[field]]
            if values:
                rows.append({"step": bucket[-1]["step"] + 1, "series": name, "nats": float(np.mean(values))})
    half_window = max(1, min(len(steps), _LOSS_BUCKETS) // 20)
    # Not the first two colors, which mean before and after.
    scale = {"domain": ["", " ", *names.values()]}
    legend = {"orient": "top", "values": list(names.values())}
    color = {"field": "series", "type": "nominal", "title": None, "scale": scale, "legend": legend}
    x = {"field": "step", "type": "quantitative", "title": "optimizer step", "axis": {"grid": False, "tickMinStep": 1}}
    y = {"field": "nats", "type": "quantitative", "title": "nats", "scale": {"type": "log"}}
    tooltip = [{"field": "series"}, {"field": "step"}, {"field": "nats", "format": ".4f"}]
    pale = {"mark": {"type": "line", "opacity": 0.3, "strokeWidth": 1}, "encoding": {"y": y}}
    logarithm = {"calculate": "log(datum.nats)", "as": "log_nats"}
    mean = {"op": "mean", "field": "log_nats", "as": "smooth_log_nats"}
    window = {
        "window": [mean],
        "frame": [-half_window, half_window],
        "groupby": ["series"],
        "sort": [{"field": "step"}],
    }
    back = {"calculate": "exp(datum.smooth_log_nats)", "as": "smooth"}
    strong: Spec = {"transform": [logarithm, window, back], "mark": {"type": "line", "strokeWidth": 2.5}}
    strong["encoding"] = {"y": {**y, "field": "smooth"}, "tooltip": tooltip}
    return {
        "description": "Loss by optimizer step",
        "data": {"values": rows},
        "width": "container",
        "height": 220,
        "encoding": {"x": x, "color": color},
        "layer": [pale, strong],
    }


def weights_chart(steps: Sequence[Mapping[str, Any]], documents: int) -> Spec:
    """The mean weight of each gold position in a step's loss, over the run, as a heat map."""
    rows = []
    for bucket in _buckets(steps, _WEIGHT_BUCKETS):
        total_by_slot = np.zeros(documents)
        for step in bucket:
            for slot, weight in step["weight_by_slot"].items():
                # The step log is JSON, where keys are text.
                total_by_slot[int(slot)] += weight
        span = {"step": bucket[0]["step"] + 1, "last": bucket[-1]["step"] + 2}
        for slot, total in enumerate(total_by_slot.tolist()):
            rows.append({**span, "position": slot + 1, "weight": total / len(bucket)})
    y: Spec = {"field": "position", "type": "ordinal", "title": "position of the gold document"}
    y["axis"] = {"values": position_ticks(documents)}
    x: Spec = {
        "field": "step",
        "type": "quantitative",
        "title": "optimizer step",
        "scale": {"zero": False, "nice": False},
    }
    x["axis"] = {"grid": False, "tickMinStep": 1}
    color: Spec = {"field": "weight", "type": "quantitative", "scale": {"scheme": "viridis"}}
    color["legend"] = {"orient": "top", "title": "weight in a step's loss"}
    tooltip = [{"field": "position"}, {"field": "step", "title": "from step"}, {"field": "weight", "format": ".4f"}]
    return {
        "description": "Weight of each position of the gold document in the loss, by optimizer step",
        "data": {"values": rows},
        "width": "container",
        "height": 240,
        "mark": {"type": "rect", "stroke": None},
        "encoding": {"x": x, "x2": {"field": "last"}, "y": y, "color": color, "tooltip": tooltip},
    }


def _buckets(steps: Sequence[Mapping[str, Any]], most: int) -> list[Sequence[Mapping[str, Any]]]:
    """The steps in order, in at most `most` groups of equal size."""
    size = max(1, -(-len(steps) // most))
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def sweep_chart(rows: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]]) -> Spec:
    """Mean accuracy and GAP of every setting of a sweep, before and after, with intervals over seeds.

    Args:
        rows: (label, before, after) of each setting; the last two are
            {"mean": (value, low, high), "gap": (value, low, high)}.
    """
    values = []
    for label, *models in rows:
        for model, estimates in zip((BEFORE, AFTER), models, strict=True):
            for name, title in (("mean", "mean accuracy"), ("gap", "GAP")):
                value, low, high = estimates[name]
                interval = f"{format_lower(low)} to {high:.3f}"
                row = {"setting": label, "model": model, "measure": title, "value": value}
                values.append(row | {"low": low, "high": high, "interval": interval})
    scale = {"domain": [BEFORE, AFTER]}
    color = {"field": "model", "title": None, "scale": scale, "legend": {"orient": "top"}}
    # The same range for all sweeps, so that reports can be compared.
    x: Spec = {"field": "value", "type": "quantitative", "scale": {"domain": [0, 1], "clamp": True}, "title": None}
    x["axis"] = {"format": ".1f"}
    y: Spec = {"field": "setting", "type": "nominal", "sort": [label for label, _, _ in rows], "title": None}
    y["axis"] = {"labelLimit": 220}
    tooltip: list[Spec] = [{"field": name} for name in ("setting", "model", "measure")]
    tooltip += [{"field": "value", "format": ".3f"}, {"field": "interval", "title": "95 % interval"}]
    rule: Spec = {
        "mark": {"type": "rule", "strokeWidth": 1.5},
        "encoding": {"x": {**x, "field": "low"}, "x2": {"field": "high"}},
    }
    point: Spec = {"mark": {"type": "point", "filled": True, "size": 70, "opacity": 1}, "encoding": {"x": x}}
    point["encoding"]["shape"] = {**color}
    for layer in (rule, point):
        layer["encoding"] |= {"color": color, "tooltip": tooltip}
    offset = {"field": "model", "scale": scale}
    cell = {"width": 250, "height": {"step": 12}, "layer": [rule, point], "encoding": {"y": y, "yOffset": offset}}
    facet = {"field": "measure", "type": "nominal", "title": None, "sort": ["mean accuracy", "GAP"]}
    description = "Mean accuracy and GAP of every setting, before and after, with intervals"
    return {"description": description, "data": {"values": values}, "facet": facet, "columns": 2, "spec": cell}


def position_ticks(documents: int) -> list[int]:
    """1 and about six multiples of 5; every position of few documents."""
    step = 1
    if documents > 10:
        step = max(1, round(documents / 6 / 5) * 5)
    ticks = [1]
    for position in range(step, documents + 1, step):
        if position > 1:
            ticks.append(position)
    return ticks


def to_png(spec: Spec) -> bytes:
    """The chart as a picture for documents, in light colors. Charts without a width of their own get 640 pixels."""
    # Imported where used: the library starts a JavaScript engine.
    import vl_convert

    sized = {**spec, "width": 640} if spec.get("width") == "container" else spec
    png: bytes = vl_convert.vegalite_to_png(sized, vl_version=VEGA_LITE, config=theme(), scale=2)
    return png
