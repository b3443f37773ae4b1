"""`python run.py COMMAND RECIPE …`: see `python run.py --help`."""

import sys

from pipelines.command_line import main

if __name__ == "__main__":
    sys.exit(main())
