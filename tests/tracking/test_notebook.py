"""A real notebook in a real kernel: training, its live view, tables, pictures and tokens, and the stop button."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlvr
from rlvr.tracking.notebook_progress import NotebookProgress
from tests.kit.packages import need_package

need_package("nbclient", "the extra [dev] is not installed")
need_package("ipykernel", "the extra [dev] is not installed")

NOTEBOOK = Path(rlvr.__file__).parents[1] / "examples" / "notebook.ipynb"
SLOW_REWARD = """
import time
from pathlib import Path
import rlvr

def slow(prompt, response, meta):
    if not Path("quick").exists():
        time.sleep(0.05)
    return float("answer" in response)

def train():
    return rlvr.train(
        data="toy", reward=slow, client="mock", max_tokens=8, steps=40, group_size=4, prompts_per_step=2,
        evaluation={"tasks": 2, "samples": 2}, name="stopped",
    )
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the kernel's own files and for the runs."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_progress_is_one_output_that_is_redrawn_escaped_and_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel is sent; the slow tests below look at a real one."""
    sent, step = list[str](), [0]

    class Handle:
        def update(self, data: dict[str, str], raw: bool) -> None:
            assert raw
            sent.append(data["text/html"])

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        sent.append(data["text/html"])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    for interval, shown in ((0.0, 4), (1e9, 2)):
        sent.clear()
        progress = NotebookProgress(lambda: f"step <{step[0]}>", interval)
        progress.start()
        for step[0] in (1, 2):
            progress.refresh()
        progress.stop()
        assert len(sent) == shown and sent[-1] == "" and "step &lt;" in sent[0] and "<1>" not in "".join(sent)


@pytest.mark.slow
def test_the_example_notebook_runs_and_shows_what_it_says(home: Path) -> None:
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    client = nbclient.NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(home)}}
    )
    client.execute()
    shown = {cell.source.splitlines()[-1]: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    trained = shown['run = rlvr.train(config="demo", name="notebook")']
    assert not [output for output in trained if output.get("name") == "stderr" and "Warning" in output.text]
    assert "FINAL RESULTS" in text_of(trained) and "\x1b" not in text_of(trained), (
        "plain text, without control characters"
    )
    assert (
        not text_of(shown["run"])
        and "data:image/png;base64," in html_of(shown["run"])
        and "pass@1 after" in html_of(shown["run"])
    )
    assert "data:image/png;base64," in html_of(shown["run.plot_groups(step=5)"])
    assert "nats, p = " in html_of(shown["run.show_tokens(step=5, index=0)"])
    assert html_of(shown["compared"]).count("<tr") == 11
    assert "data:image/png;base64," in html_of(shown['rlvr.plot_seeds(runs, "reward")'])
    assert rlvr.load_run(home / "runs" / "notebook").summary["final"]["pass@1"]["value"] > 0.8


def text_of(outputs: Any) -> str:
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def html_of(outputs: Any) -> str:
    return "".join(output.get("data", {}).get("text/html", "") for output in outputs)


@pytest.fixture
def kernel(home: Path) -> Iterator[tuple[Any, Any]]:
    """(manager, client) of a kernel that works in `home`."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(home))
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(kernel: tuple[Any, Any], code: str, hook: Any = lambda message: None) -> tuple[dict[str, Any], list[Any]]:
    """(the kernel's reply, the messages of the cell)."""
    messages: list[Any] = []

    def keep(message: Any) -> None:
        messages.append(message)
        hook(message)

    return kernel[1].execute_interactive(code, output_hook=keep, timeout=120)["content"], messages


@pytest.mark.slow
def test_the_view_is_one_output_and_stop_keeps_what_was_done(kernel: tuple[Any, Any], home: Path) -> None:
    assert execute(kernel, SLOW_REWARD)[0]["status"] == "ok"
    drawn: list[str] = []

    def stop_in_the_middle(message: Any) -> None:
        if message["msg_type"] in ("display_data", "update_display_data"):
            drawn.append(message["content"]["data"]["text/plain"])
            if len(drawn) < 100 and re.search(r"rl .*\b[3-9]/40", drawn[-1]):
                drawn.extend([""] * 100)  # once
                kernel[0].interrupt_kernel()

    reply, messages = execute(kernel, "run = train()", stop_in_the_middle)
    assert reply["status"] == "error" and reply["ename"] == "RunInterruptedError"
    opened = [m["content"]["transient"]["display_id"] for m in messages if m["msg_type"] == "display_data"]
    updated = {m["content"]["transient"]["display_id"] for m in messages if m["msg_type"] == "update_display_data"}
    assert updated <= set(opened) and len(opened) <= 3, "drawn in place, one output for each view"
    stopped = rlvr.load_run(home / "runs" / "stopped")
    done = len(stopped.metrics)
    assert 3 <= done < 40 and not stopped.is_finished
    (home / "quick").touch()
    reply, messages = execute(kernel, "run = train()\nprint(run.is_finished, len(run.metrics))")
    printed = "".join(m["content"]["text"] for m in messages if m["msg_type"] == "stream")
    assert reply["status"] == "ok" and "True 40" in printed and f"resuming: rl, {done} steps done" in printed
