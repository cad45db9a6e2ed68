"""Environments of GEM 0.1, in its own interpreter. Needs gem-llm; imports nothing of rlvr.

The policy reads what an environment says, between the prefix and the suffix of its info, as by GEM's own wrappers.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import json
import sys
from typing import Any

from game_sessions import Step, serve_games
from pipe_server import Refusal

try:
    import gem
    from gem.envs.registration import ENV_REGISTRY

    MISSING = ""
except ImportError as error:
    MISSING = f"{sys.executable} cannot load gem ({error})"


@functools.cache
def load_data(name: str, options: str) -> dict[str, Any]:
    """The rows of an environment that has such, which all its episodes share."""
    env = gem.make(name, **json.loads(options))
    dataset = getattr(env, "dataset", None)
    return {} if dataset is None else {"dataset": dataset}


class GemGame:
    """The environment of {name, options}."""

    def __init__(self, config: dict[str, Any]) -> None:
        if MISSING:
            raise Refusal(MISSING)
        name, _, module = config["name"].partition("@")
        if module:
            importlib.import_module(module)
        if name not in ENV_REGISTRY:
            near = difflib.get_close_matches(name, ENV_REGISTRY, 1, 0.5)
            raise Refusal(f"there is no environment {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}")
        options = config["options"]
        self._env: Any = gem.make(name, **{**options, **load_data(name, json.dumps(options, sort_keys=True))})

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        text, info = self._env.reset(seed=seed)
        return write(text, info), info

    def step(self, action: str) -> Step:
        text, reward, terminated, truncated, info = self._env.step(action)
        return write(text, info), reward, terminated or truncated, info

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def write(text: Any, info: dict[str, Any]) -> Any:
    if not isinstance(text, str):
        return text
    between = "\n" if text and not text.endswith("\n") and info.get("suffix") else ""
    return f"{info.get('prefix', '')}{text}{between}{info.get('suffix', '')}"


if __name__ == "__main__":
    sys.path.append("")  # modules in the current folder that register environments
    serve_games(GemGame)
