"""The options of `evaluate` that make it a gate, also where it is submitted as a job."""

import argparse
import contextlib

from pos2distill.config.gate import Gate
from pos2distill.errors import UserError, warn_once

GATE_OPTIONS = {
    "--fail-if-gap-above": "fail if the GAP is larger than this",
    "--fail-if-mean-below": "fail if the mean accuracy is smaller than this",
    "--fail-if-drop-above": "fail if the mean accuracy is lower than that of --baseline by more than this",
}


def _percentage_points(text: str) -> float:
    """A limit in percentage points."""
    with contextlib.suppress(ValueError):
        points = float(text)
        if 0 <= points <= 100:
            return points
    raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text}")


def add_gate(command: argparse.ArgumentParser) -> None:
    gate = command.add_argument_group(
        "gate",
        "for evaluate: exit with code 1 if the results show, with 95 % confidence, that the\ncheckpoint (or the model, "
        "if there is no checkpoint) violates a limit.\nPOINTS are percentage points: 25 for a GAP of .25",
    )
    for option, text in GATE_OPTIONS.items():
        gate.add_argument(option, type=_percentage_points, metavar="POINTS", help=text)
    gate.add_argument(
        "--baseline",
        metavar="RUN",
        help="for --fail-if-drop-above: a run that answered the same questions, as `compare` takes it",
    )


def read_gate(options: argparse.Namespace) -> Gate:
    """The gate of parsed arguments. A warning for limits that may be fractions.

    Raises:
        UserError: if only one of a drop and its baseline is given, or an empty baseline.
    """
    if (options.fail_if_drop_above is None) != (options.baseline is None):
        raise UserError("--fail-if-drop-above and --baseline: expected both or none")
    # As of a variable of the shell that is not set.
    if options.baseline is not None and not options.baseline.strip():
        raise UserError("--baseline: is empty; expected a run, or the folder of its answers")
    gate = Gate(options.fail_if_gap_above, options.fail_if_mean_below, options.fail_if_drop_above, options.baseline)
    for option, points in gate.limits().items():
        if 0 < points < 1:
            as_points = f"{points:g} as a fraction is {100 * points:g}"
            warn_once(f"{option}: {points:g} is less than one percentage point; {as_points}")
    return gate
