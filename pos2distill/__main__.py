"""`python -m pos2distill COMMAND …` and, where the package is installed, `pos2distill COMMAND …`."""

import sys

from pos2distill import import_pipelines
from pos2distill.startup import be_program, silent_interrupts


def main() -> int:
    """Run the command line, as all that this process does. Returns the exit code."""
    be_program()
    with silent_interrupts():
        command_line = import_pipelines("command_line")
    exit_code: int = command_line.main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
