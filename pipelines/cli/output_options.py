"""The options --quiet and --json of the commands that run something."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator


def add_output_options(command: argparse.ArgumentParser) -> None:
    """Add both."""
    command.add_argument("--quiet", action="store_true", help="print only warnings and errors")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object at the end, and everything else to stderr"
    )


@contextlib.contextmanager
def redirected_output(options: argparse.Namespace) -> Iterator[None]:
    """With --quiet nothing is printed but warnings and errors; with --json the lines for people go to stderr."""
    if options.quiet:
        with open(os.devnull, "w", encoding="utf-8") as nothing, contextlib.redirect_stdout(nothing):
            yield
    elif options.json:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield
