"""How the scripts of this folder report wrong input or a fault of the machine: one line and exit code 2."""

import sys

from pos2distill.errors import UserError
from pos2distill.faults import error_text

# The errors that the scripts catch.
EXPECTED = (UserError, OSError)


def report(error: Exception) -> int:
    """Print the error in one line. Returns the exit code."""
    filename = getattr(error, "filename", None)
    print(f"error: {filename}: {error_text(error)}" if filename else f"error: {error}", file=sys.stderr)
    return 2
