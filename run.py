"""`python run.py COMMAND RECIPE …`: see `python run.py --help`."""

import sys

from pos2distill.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
