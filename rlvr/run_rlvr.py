"""Training from a clone, nothing installed: `python3 rlvr/run_rlvr.py [--config-name=NAME] [key=value ...]`.

Without a config it runs `train_rlvr_model`. It is `rlvr train` and takes whatever that takes. Where the interpreter
that was called lacks what training needs and the clone has a virtual environment (`make setup`), that one is used.
"""

import os
import sys

DEFAULT = "train_rlvr_model"
BASE = ("numpy", "omegaconf", "pydantic", "rich", "typer", "yaml")
TRAIN = ("safetensors", "tokenizers", "torch", "transformers")

HERE = os.path.dirname(os.path.realpath(__file__))
CLONE = os.path.dirname(HERE)
if sys.path and os.path.realpath(sys.path[0] or ".") == HERE:
    # Run as a file, Python looks for modules beside it first, and our types.py would stand for the library's.
    sys.path[0] = CLONE


def main() -> int:
    """Run `rlvr train` with the words of the command line; its exit code."""
    from importlib.util import find_spec

    missing = [name for name in (*BASE, *TRAIN) if find_spec(name) is None]
    environment = os.path.join(CLONE, ".venv")
    python = os.path.join(environment, "bin", "python")
    if missing and os.path.exists(python) and os.path.realpath(sys.prefix) != os.path.realpath(environment):
        os.execv(python, [python, *sys.argv])
    if needed := [name for name in missing if name in BASE]:
        print(
            f"rlvr: {sys.executable} has no {', '.join(needed)}. Run `make setup` in {CLONE} once (makes .venv, which "
            "this script then uses by itself), or pip install -e '.[train]'",
            file=sys.stderr,
        )
        return 2
    from rlvr.cli.main import run

    words = sys.argv[1:]
    named = any(word.partition("=")[0] in ("--config-name", "--config", "--help") for word in words)
    return run(["train", *([] if named else [f"--config-name={DEFAULT}"]), *words])


if __name__ == "__main__":
    sys.exit(main())
