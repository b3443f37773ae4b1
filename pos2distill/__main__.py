"""`python -m pos2distill COMMAND …` and, where the package is installed, `pos2distill COMMAND …`."""

import importlib.util
import sys

from pos2distill import import_pipelines
from pos2distill.startup import mark_as_cli_process, silent_interrupts

_REQUIRED = ("pydantic", "yaml", "fsspec", "pyarrow", "ray")


def main() -> int:
    """Run the command line, as all that this process does. Returns the exit code."""
    mark_as_cli_process()
    with silent_interrupts():
        missing = [name for name in _REQUIRED if importlib.util.find_spec(name) is None]
        if missing:
            # In a checkout, most likely another Python than that of its environment.
            print(
                f"error: {sys.executable}: the package {missing[0]} is not installed; in a checkout run `make "
                f"install`, then .venv/bin/python run.py",
                file=sys.stderr,
            )
            return 2
        command_line = import_pipelines("cli.command_line")
    exit_code: int = command_line.main()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
