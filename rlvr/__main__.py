"""`python -m rlvr`: the command line, where no script `rlvr` is on the path. Exercised by tests/test_cli.py."""

import sys

from rlvr.cli.main import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
