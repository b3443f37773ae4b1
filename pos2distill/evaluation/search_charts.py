"""The charts of a search of RoPE scales (LPES), as Vega-Lite specifications like those of `charts`."""

from collections.abc import Mapping, Sequence
from typing import Any

from pos2distill.evaluation.charts import Spec

Search = Mapping[str, Any]
"""What the stage `search scales` recorded: its details and its counts."""


def search_charts(search: Search | None) -> dict[str, Spec]:
    """The best fitness by generation and the scales by layer, by name; none without a search."""
    if search is None:
        return {}
    fitness = _fitness_chart(search["best_by_generation"], search["unscaled"]["fitness"])
    return {"scale-search": fitness, "rope-scales": _scales_chart(search["scales"])}


def _fitness_chart(best_by_generation: Sequence[float], unscaled: float) -> Spec:
    """The fitness of the best candidate so far after each generation; dashed: that of the unscaled model."""
    rows = [{"generation": number, "fitness": value} for number, value in enumerate(best_by_generation, 1)]
    x = _count_axis("generation", "generation")
    y = {"field": "fitness", "type": "quantitative", "title": "best fitness", "scale": {"zero": False}}
    tooltip = [{"field": "generation"}, {"field": "fitness", "format": ".4f"}]
    line: Spec = {"mark": {"type": "line", "interpolate": "step-after", "point": True}}
    line["encoding"] = {"x": x, "y": y, "tooltip": tooltip}
    once: Spec = {"data": {"values": [{"fitness": unscaled, "name": "without scales"}]}}
    rule = once | {"mark": {"type": "rule", "strokeDash": [6, 4]}, "encoding": {"y": y, "tooltip": tooltip[1:]}}
    # Above the line at its left end, where the search has found the least.
    label = once | {"mark": {"type": "text", "align": "left", "baseline": "bottom", "dx": 4, "dy": -3}}
    label["encoding"] = {"x": {"value": 0}, "y": y, "text": {"field": "name"}}
    return {
        "description": "Fitness of the best scales by generation of the search",
        "data": {"values": rows},
        "width": "container",
        "height": 200,
        "layer": [rule, line, label],
    }


def _scales_chart(scales: Sequence[float]) -> Spec:
    """The scale of each layer, from 1."""
    rows = [{"layer": layer, "scale": scale} for layer, scale in enumerate(scales, 1)]
    x = _count_axis("layer", "layer (from 1)")
    y = {"field": "scale", "type": "quantitative", "title": "RoPE scale", "scale": {"zero": False}}
    tooltip = [{"field": "layer"}, {"field": "scale", "format": ".3f"}]
    return {
        "description": "RoPE scale of every layer",
        "data": {"values": rows},
        "width": "container",
        "height": 200,
        "mark": {"type": "line", "point": True},
        "encoding": {"x": x, "y": y, "tooltip": tooltip},
    }


def _count_axis(field: str, title: str) -> Spec:
    """A horizontal axis of whole numbers."""
    axis = {"grid": False, "tickMinStep": 1, "format": "d"}
    return {
        "field": field,
        "type": "quantitative",
        "title": title,
        "scale": {"zero": False, "nice": False},
        "axis": axis,
    }
