"""Lines that several of these commands print."""

from collections.abc import Mapping
from typing import Any


def format_inference(entry: Mapping[str, Any]) -> str:
    """The inference-time method of a run, with the scales that it was given, or how they were searched.

    Empty if it has none.
    """
    method, scales, search = entry.get("inference", "none"), entry.get("scales"), entry.get("search")
    if method == "none":
        return ""
    if not scales:
        return f" with {method}" + (f" ({search} search)" if search else "")
    smallest, largest = min(scales), max(scales)
    return f" with {method} {smallest:g}" + (f" to {largest:g}" if len(scales) > 1 else "")


def format_run_gap(gap: float, interval: tuple[float, float], corrected: float, why_meaningless: str | None) -> str:
    """The GAP of one evaluation with its interval, or why it means nothing."""
    # Imported here, so that --help is answered at once.
    from pos2distill.evaluation.formatting import format_gap

    return f"means nothing ({why_meaningless})" if why_meaningless else format_gap(gap, interval, corrected)
