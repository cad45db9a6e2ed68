"""`python -m rlvr`: the command line, where no script `rlvr` is on the path."""

import sys

from rlvr.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
