"""Train as a script of your own would: `python examples/run_rlvr.py --config-name=train_rlvr_test [key=value ...]`.

Without a config it runs `train_rlvr_model`: a small transformer learns arithmetic from what can be verified. Works in
a clone, with or without the package installed.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rlvr.run_rlvr import main

if __name__ == "__main__":
    sys.exit(main())
