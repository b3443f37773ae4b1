"""Values with their intervals as text: for pages, the terminal, gates and the model card."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pos2distill.evaluation.statistics import Interval


def format_value(value: float, digits: int = 3) -> str:
    """A value; `0.000`, never `-0.000`, if it rounds to 0."""
    return f"{value:z.{digits}f}"


def format_lower(value: float, digits: int = 3) -> str:
    """The lower end of an interval; `above 0` if it is but rounds to 0, which would seem to be in the interval."""
    shown = format_value(value, digits)
    return "above 0" if value > 0 and float(shown) == 0 else shown


def format_interval(interval: Interval) -> str:
    """An interval of fractions: `[0.250, 0.450]`, or `[above 0, 0.450]` (see `format_lower`)."""
    low, high = interval
    return f"[{format_lower(low)}, {format_value(high)}]"


def format_estimate(value: float, interval: Interval) -> str:
    """A fraction with its interval: `0.350 [0.250, 0.450]`."""
    return f"{format_value(value)} {format_interval(interval)}"


def format_gap(gap: float, interval: Interval, corrected: float) -> str:
    """A GAP with its interval and corrected: `0.350 [0.250, 0.450], corrected 0.330`."""
    return f"{format_estimate(gap, interval)}, corrected {format_value(corrected)}"


def to_csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bytes:
    """A table as CSV in UTF-8, with one line for each row. None is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue().encode()


def code_span(text: str) -> str:
    """Text as code in Markdown, whatever it contains.

    Source: CommonMark 0.31, code spans: they end at as many backticks as they begin with.
    """
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    # Spaces, since a backtick beside the fence would be a part of it; Markdown removes one on each side.
    return f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}"
