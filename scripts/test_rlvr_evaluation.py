#!/usr/bin/env python
"""`rlvr evaluate-service` as a script of the clone, with the same options:

    python scripts/test_rlvr_evaluation.py
    python scripts/test_rlvr_evaluation.py --quick
    python scripts/test_rlvr_evaluation.py --tasks code_fibonacci math_problem

It needs the package (`make setup`, or pip install "rlvr[serve]") and a service that runs. Not a file of tests, whatever
its name; tests/service/test_service_evaluation.py exercises it.
"""

import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[1]

if __name__ == "__main__":
    sys.path.insert(0, str(CLONE))
    try:
        from rlvr.cli.main import run
    except ModuleNotFoundError as missing:
        sys.exit(f'{missing}; run it with the Python that has the package: `make setup`, or pip install "rlvr[serve]"')
    sys.exit(run(["evaluate-service", *sys.argv[1:]]))
