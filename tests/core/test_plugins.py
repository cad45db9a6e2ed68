"""Names from installed packages and from `imports`, and what is said of a plug-in that fails."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlvr
from rlvr.algorithms import resolve_algorithm
from rlvr.algorithms.optimizers import OPTIMIZERS, AdamW
from rlvr.config import load
from rlvr.core import plugins
from rlvr.reward import resolve_reward
from rlvr.runs.program_settings import settings_of
from tests.kit.forked_process import run_forked
from tests.kit.plugin_package import MODULE, WORDS, write_package
from tests.kit.tiny_run import TINY


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that are installed; no plug-in is imported yet."""
    monkeypatch.setattr(plugins, "_failures", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return tmp_path


def rlvr_command(*words: str, path: Path | None = None, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "plug.yaml").write_text("seed: 1\n")
    root = Path(rlvr.__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*filter(None, [path]), root]))}
    return run_forked(["-m", "rlvr", *words], cwd=cwd, env=environment, timeout=300)


def test_names_of_an_installed_package_work_like_built_in_ones(tmp_path: Path) -> None:
    packages = tmp_path / "site"
    packages.mkdir()
    write_package(packages, "plug_of_tests", MODULE)
    done = rlvr_command("train", "--config=plug.yaml", *WORDS, "run.name=plugged", path=packages, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs" / "plugged"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["plug/value"] for row in rows] == [3.0, 3.0]
    assert [row["plug/norm"] for row in rows] == [2 * row["grad_norm"] for row in rows]
    assert (folder / "seen.txt").read_text().split("\n")[:2] == ["rl 0", "rl 1"]
    stored = (folder / "resolved.yaml").read_text()
    kept = ("plug_optimizer", "plug_env", "plug_algorithm", "factor: 2.0", "plug_loss", "strength: 0.5", "plug_sampler")
    assert all(name in stored for name in kept) and "plug_sampler notes versions" in done.stdout + done.stderr
    again = rlvr_command("train", "--config=plug.yaml", *WORDS, "run.name=plugged", path=packages, cwd=tmp_path)
    assert again.returncode == 0 and "finished" in again.stdout + again.stderr
    without = rlvr_command("train", "--config=plug.yaml", *WORDS, "run.name=plugged", cwd=tmp_path)
    assert without.returncode == 2 and "plug_" in without.stderr and "Traceback" not in without.stderr


def test_imports_of_a_config_come_before_its_names_and_stay_with_the_run(tmp_path: Path) -> None:
    (tmp_path / "my_names.py").write_text(MODULE)
    words = ["train", "--config=plug.yaml", *WORDS, "run.name=imported"]
    refused = rlvr_command(*words, cwd=tmp_path)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    done = rlvr_command(*words, "imports=[my_names]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rlvr.load_run(tmp_path / "runs" / "imported").settings["imports"] == ["my_names"]
    assert rlvr_command("evaluate", "runs/imported", cwd=tmp_path).returncode == 0


def test_a_plug_in_is_imported_when_a_name_is_unknown_and_not_before(packages: Path) -> None:
    write_package(packages, "plug_late", "import rlvr\nrlvr.register_reward('plug_late')(lambda p, r, m: 1.0)\n")
    resolve_reward("exact_match")
    assert "plug_late" not in sys.modules
    assert resolve_reward("plug_late").name == "plug_late"


def test_data_may_be_the_name_of_an_environment_of_a_package_or_of_an_imported_module(packages: Path) -> None:
    text = "import rlvr\nrlvr.register_environment('{0}')(lambda: rlvr.resolve_environment('toy'))\n"
    write_package(packages, "plug_tasks", text.format("plug_tasks"))
    (packages / "plug_module.py").write_text(text.format("plug_more_tasks"))
    assert settings_of(packages, data="plug_tasks")["env.name"] == "plug_tasks"
    given = settings_of(packages, data="plug_more_tasks", imports=["plug_module"])
    assert given["env.name"] == "plug_more_tasks" and given["imports"] == ["plug_module"]
    with pytest.raises(ValueError, match=r"data='plug_task'.* no environment; .*did you mean 'plug_tasks'"):
        settings_of(packages, data="plug_task")


def test_an_entry_point_may_be_a_function(packages: Path) -> None:
    text = "import rlvr\ndef begin():\n    rlvr.register_reward('plug_begun')(lambda p, r, m: 1.0)\n"
    write_package(packages, "plug_function", text, "plug_function:begin")
    assert resolve_reward("plug_begun").name == "plug_begun"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "import rlvr\nvalue = 1 / 0\n",
            r"plug_bad.*of the package plug_bad-package.*ZeroDivisionError.*plug_bad.py:2",
        ),
        ("def broken(:\n", r"SyntaxError.*plug_bad.py:1"),
        ("import no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(.*plug_bad.py:1"),
        ("import rlvr\nrlvr.register_reward('math')(lambda p, r, m: 1.0)\n", r"'math' is already registered by .*rlvr"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
    ],
)
def test_an_unknown_name_says_what_was_wrong_with_a_plug_in(packages: Path, text: str, said: str) -> None:
    write_package(packages, "plug_bad", text)
    with pytest.raises(ValueError, match=f"(?s)unknown reward 'plug_other'.*{said}"):
        resolve_reward("plug_other")
    with pytest.raises(ValueError, match=f"(?s)'plug_other' is unknown.*{said}"):
        resolve_algorithm("plug_other")
    with pytest.raises(ValueError, match=f"(?s)plug_other.* is unknown.*{said}"):
        OPTIMIZERS.find("plug_other")


def test_a_failing_plug_in_keeps_no_other_from_its_names(packages: Path) -> None:
    write_package(packages, "plug_bad", "raise RuntimeError('first in the order of names')\n")
    write_package(packages, "plug_good", "import rlvr\nrlvr.register_reward('plug_good')(lambda p, r, m: 1.0)\n")
    assert resolve_reward("plug_good").name == "plug_good"


def test_a_plug_in_may_need_a_name_of_a_later_one(packages: Path) -> None:
    needs = "import rlvr\nrlvr.resolve_reward('plug_zz')\nrlvr.register_reward('plug_aa')(lambda p, r, m: 1.0)\n"
    write_package(packages, "plug_aa", needs)
    write_package(packages, "plug_zz", "import rlvr\nrlvr.register_reward('plug_zz')(lambda p, r, m: 1.0)\n")
    assert resolve_reward("plug_aa").name == "plug_aa" and plugins.load_plugins() == []


def test_ctrl_c_while_plug_ins_are_imported_ends_nothing_for_good(packages: Path) -> None:
    stops = (
        "import builtins\nif not hasattr(builtins, 'stopped_once'):\n    builtins.stopped_once = 1\n"
        "    raise KeyboardInterrupt\n"
    )
    write_package(packages, "plug_stops", stops)
    write_package(packages, "plug_then", "import rlvr\nrlvr.register_reward('plug_then')(lambda p, r, m: 1.0)\n")
    with pytest.raises(KeyboardInterrupt):
        resolve_reward("plug_then")
    assert resolve_reward("plug_then").name == "plug_then"


def test_two_packages_with_one_name_are_named(packages: Path) -> None:
    for module in ("plug_one", "plug_two"):
        write_package(
            packages,
            module,
            f"import rlvr\ndef {module}(prompt, response, meta): ...\nrlvr.register_reward('plug_same')({module})\n",
        )
    assert resolve_reward("plug_same").spec.function.__module__ == "plug_one"
    (failure,) = plugins.load_plugins()
    assert "plug_two" in failure and "already registered by plug_one" in failure


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("[no_such_module]", "imports: 'no_such_module' failed to import: ModuleNotFoundError"),
        ("['a b']", "imports: 'a b' is not of the form 'package.module'"),
        ("[3]", "imports: 3 is not of the form"),
    ],
)
def test_wrong_imports_are_one_message(given: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load("arithmetic", None, [f"imports={given}"])


def test_a_class_is_registered_by_its_base(packages: Path) -> None:
    @rlvr.register
    class Mine(AdamW):
        name = "test_registered"

    assert OPTIMIZERS.find("test_registered") is Mine and not OPTIMIZERS.is_built_in("test_registered")
    with pytest.raises(ValueError, match=r"test_registered.* is registered already, by .*Mine; give .*Other"):

        @rlvr.register
        class Other(AdamW):
            name = "test_registered"

    nothing: Any = int
    with pytest.raises(ValueError, match="expected a subclass of Advantage, Loss, Optimizer"):
        rlvr.register(nothing)


FAMILY = """
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


class OwnConfig(Qwen3Config):
    model_type = "family_of_tests"


class OwnForCausalLM(Qwen3ForCausalLM):
    config_class = OwnConfig


AutoConfig.register("family_of_tests", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
"""


@pytest.mark.slow
def test_a_model_family_of_one_s_own_is_trained_and_loaded_again(tmp_path: Path) -> None:
    (tmp_path / "own_family.py").write_text(FAMILY)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("model_type: qwen3", "model_type: family_of_tests"))
    words = ["train", "--config=tiny.yaml", "run.name=own"]
    refused = rlvr_command(*words, cwd=tmp_path)
    assert refused.returncode == 2 and "family_of_tests" in refused.stderr and "Traceback" not in refused.stderr
    done = rlvr_command(*words, "imports=[own_family]", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert rlvr_command("evaluate", "runs/own", cwd=tmp_path).returncode == 0
