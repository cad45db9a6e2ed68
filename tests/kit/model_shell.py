"""A folder that looks like a model's: a config and a weight, and nothing that could be loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_model_shell(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder
