"""`python -m pos2distill COMMAND …` and, where the package is installed, `pos2distill COMMAND …`."""

import sys

from pos2distill import import_pipelines
from pos2distill.startup import silent_interrupts


def main() -> int:
    """Run the command line. Returns the exit code."""
    with silent_interrupts():
        command_line = import_pipelines("command_line")
    exit_code: int = command_line.main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
