"""`python -m pos2distill COMMAND …` and, where the package is installed, `pos2distill COMMAND …`."""

import importlib
import importlib.util
import sys


def main() -> int:
    """Run the command line. Returns the exit code."""
    # An installed package holds `pipelines`; in a checkout it is a package next to this one.
    installed = importlib.util.find_spec("pos2distill.pipelines") is not None
    package = "pos2distill.pipelines" if installed else "pipelines"
    # By name, since the library imports nothing of the pipelines.
    command_line = importlib.import_module(f"{package}.command_line")
    exit_code: int = command_line.main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
