"""A run folder and a store with known contents for the tests of the dashboard, and a real browser for its pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Outcome, Score, StopReason, Task, Trajectory
from rlvr.store import Experience, ExperienceStore, Session, Status, open_store
from rlvr.tracking import MetricsLog
from rlvr.training import rollout_rows
from rlvr.training.evaluate import Evaluation
from rlvr.training.judged_tasks import JudgedTask, TaskResult

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    f"--{flag}"
    for flag in (
        "headless=new", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking",
        "disable-component-update", "disable-sync",
    )
]  # fmt: skip
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>`${window.hacked = 1}` \u202eevil\x07"
WORDS = ["=", "1", "2", "\n", "<end>"]


def metric_row(step: int) -> dict[str, float | str]:
    share = 0.1 * step
    return {
        "phase": "rl", "step": step, "reward": 0.3 + share, "env/all/correct": 0.2 + share, "entropy": 1 - share,
        "frac_reward_zero_std": 0.25, "frac_groups_with_signal": 0.75,
        "env/all/by_group/frac_mixed": 0.75, "env/all/by_group/frac_all_good": 0.25,
        "env/all/by_group/frac_all_bad": 0.0, "grad_norm": 0.5,
    }  # fmt: skip


def answer(step: int, place: int) -> Trajectory:
    """Answers in odd places pass; the one in place 3 is hostile."""
    passed = place % 2 == 1
    score = Score(1.0, Outcome.PASSED) if passed else Score(0.0, Outcome.FAILED, "wrong_value", {"boxed": 1.0})
    return Trajectory(
        prompt=f"{place // 2} + {step} = ?", prompt_tokens=[1], response=EVIL if place == 3 else "= 1\n2",
        response_tokens=[0, 1, 3, 2, 4], logprobs=[-0.1, -2.0, -0.0, -5.0, -0.2], reward=score.value,
        advantage=0.5 if passed else -0.5, group_id=f"{step}/{place // 2}", rollout_id=f"{step}/{place}",
        task=Task(id=f"sum-{place // 2}", prompt=""), scores={"exact": score},
        stop_reason=StopReason.LENGTH if place == 0 else StopReason.STOP, policy_fingerprint=f"policy@{step}",
    )  # fmt: skip


def make_run(folder: Path, steps: int = 4, answers: int = 4) -> Path:
    """Write the folder of a run of `steps` steps with the code that writes real ones."""
    from tokenizers import Tokenizer, decoders, models

    (folder / "rollouts").mkdir(parents=True)
    (folder / "checkpoints" / "rl-000002").mkdir(parents=True)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<end>"))
    core.decoder = decoders.Fuse()  # type: ignore[assignment]
    core.save(str(folder / "checkpoints" / "rl-000002" / "tokenizer.json"))
    (folder / "resolved.yaml").write_text("training: {steps: 10}\nmodel: {name: null}\n")
    (folder / "journal.jsonl").write_text('{"event": "run"}\n')
    for step in range(steps):
        add_step(folder, step, answers)
    return folder


def conversations() -> list[Trajectory]:
    """An agent's episode of three branches: two go on from the first turn, which calls a tool, and one begins anew."""

    def says(turn: int, text: str, **more: Any) -> dict[str, Any]:
        return {"role": "assistant", "content": text, "turn": turn, **more}

    call = {"function": {"name": "weather", "arguments": {"city": "Bern", "days": [1, 2], "note": EVIL}}}
    told = [
        {"role": "system", "content": "Tools: weather(city)."},
        {"role": "user", "content": "Rain in Bern?"},
        says(0, "", tool_calls=[call]),
        {"role": "tool", "name": "weather", "content": "Rain, 12 degrees.\nWind: 3"},
    ]
    histories = [
        ([*told, says(1, "Yes, it rains.")], [0.5, 1.0]),
        ([{"role": "user", "content": "Summarize: rain."}, says(2, "Wet.")], [0.25]),
        ([*told, {"role": "user", "content": "Sure?"}, says(3, "No rain.")], [0.0]),
    ]
    made = answer(1, 1)
    return [
        replace(
            made, rollout_id="9/0", group_id="9/0", messages=messages, turn_credits=credits,
            turn_starts=list(range(len(credits))),
        )
        for messages, credits in histories
    ]  # fmt: skip


def add_conversations(folder: Path, step: int) -> None:
    rows = "".join(rollout_rows.trajectory_row(t) for t in conversations())
    with (folder / "rollouts" / f"rl-{step:06d}.jsonl").open("a") as file:
        file.write(rows)


def add_step(folder: Path, step: int, answers: int = 4) -> None:
    rows = "".join(rollout_rows.trajectory_row(answer(step, place)) for place in range(answers))
    (folder / "rollouts" / f"rl-{step:06d}.jsonl").write_text(rows)
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append(metric_row(step))


def add_evaluations(folder: Path, before: dict[str, int], after: dict[str, int], samples: int = 4) -> None:
    """The evaluations of a run: how many completions of each task passed. A task is of the level before its dash."""
    (folder / "evaluations").mkdir(exist_ok=True)
    for stage, passed in (("baseline", before), ("final", after)):
        results = [
            TaskResult(id, id.partition("-")[0], count, samples, count / samples, {}, {"kind": id[-1]})
            for id, count in passed.items()
        ]
        evaluation = Evaluation(results, samples)
        (folder / "evaluations" / f"{stage}.json").write_text(json.dumps(evaluation.to_json()))
        rows = [
            row
            for id, count in passed.items()
            for row in rollout_rows.heldout_rows(_judge(id, count, samples), "exact", 4)
        ]
        (folder / "evaluations" / f"{stage}.jsonl").write_text("".join(rows))


def _judge(id: str, passed: int, samples: int) -> JudgedTask:
    task = Task(id, f"prompt of {id}", {"answer": "42"}, level=id.partition("-")[0])
    made = [
        replace(
            answer(0, int(sample < passed)),
            prompt=task.prompt_text,
            response=f"{id}, sample {sample}: {EVIL}",
            task=task,
        )
        for sample in range(samples)
    ]
    return JudgedTask(task, made, 0)


def experience(session: str, iteration: int, sample: int = 0, text: str = "def f(): ...", **more: Any) -> Experience:
    passed = iteration > 1
    scores = {
        "code": {"value": float(passed), "outcome": "passed" if passed else "failed", "reason": "" if passed else
                 "assertion", "parts": {"tests": 0.5}, "detail": "assert f(0) == 1"},
        "draft": {"value": 0.9, "outcome": "passed", "reason": "", "parts": {}},
    }  # fmt: skip
    given: dict[str, Any] = {
        "outcome": "passed" if passed else "failed", "confidence": 0.4 * iteration, "reward": 0.5 * iteration,
        "scores": scores, "num_tokens": 7, "action": "direct", "advantage": 0.25,
        "feedback": {"detailed_feedback": "test 2 failed", "suggestions": ["Handle zero."]},
    }  # fmt: skip
    task = more.pop("task_id", f"task_{session}")
    return Experience(session, task, iteration, "Write f.", text, sample, **(given | more))


def fill_store(url: str) -> ExperienceStore:
    """Sessions `a` (done, two iterations), `b` (failed), `c` (running, with a hostile answer)."""
    store = open_store(url)
    done: dict[str, Any] = {"final_solution": "def f(): return 1", "final_confidence": 0.8, "iterations": 2}
    store.add_session(
        Session("a", "task_a", "Write f.", {"context": "Python"}, status=Status.DONE, created=100, **done)
    )
    error = {"code": "endpoint_unreachable", "message": "no answer after 5 tries"}
    store.add_session(Session("b", "task_b", "Write g.", status=Status.FAILED, created=200, error=error))
    store.add_session(Session("c", "task_c", "Write h.", status=Status.RUNNING, created=300, iterations=1))
    store.add_experiences([experience("a", 1), experience("a", 2), experience("b", 1), experience("c", 1, text=EVIL)])
    return store


@contextmanager
def running(*command: str, cwd: Path) -> Iterator[str]:
    """Start a server in a process; returns the address from its first line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUNBUFFERED": "1"}
    env.pop("PYTEST_CURRENT_TEST", None)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    said: list[str] = []
    try:
        for text in process.stdout:
            said.append(text)
            if " at http://" in text:
                break
        else:
            raise AssertionError(f"the server ended: {''.join(said)}")
        rest = threading.Thread(target=lambda: said.extend(process.stdout or ()))  # or its pipe would fill up
        rest.start()
        yield said[-1].split(" at ")[1].split()[0]
        process.terminate()
        process.wait(20)
        rest.join(5)
        assert "Traceback" not in "".join(said), "".join(said)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Browser:
    """Chromium with an empty profile. `problems` collects errors and requests to other origins."""

    def __init__(self, context: Any) -> None:
        self.page, self.problems = context.new_page(), list[str]()
        self.requests: list[str] = []
        self.page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("websocket", lambda socket: self.requests.append(socket.url))

    def open(self, address: str) -> Any:
        self.page.goto(address)
        self.page.wait_for_selector("#main")
        return self.page

    def wait_until_idle(self, base: str) -> None:
        """Nothing went wrong and nothing was asked of anybody else; checked at the end of a test."""
        host = base.split("//")[1]
        assert [url for url in self.requests if url.split("//")[1].split("/")[0] != host] == []
        assert self.problems == []


def cut_elements(page: Any) -> list[str]:
    """The beginnings of elements that reach beyond the window, and whether the page scrolls sideways."""
    return page.evaluate("""[...document.querySelectorAll('#main *')].filter(e =>
        !e.closest('svg, .text-block') && e.getBoundingClientRect().right > innerWidth + 1
    ).map(e => e.outerHTML.slice(0, 100)).concat(
        document.documentElement.scrollWidth > innerWidth ? ['the page is wider than the window'] : [])""")


@contextmanager
def chromium(folder: Path) -> Iterator[Any]:
    """A browser; the test is skipped without one."""
    if not CHROMIUM.exists():
        pytest.skip(f"no {CHROMIUM} here (Debian's package chromium)")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as started:
        context = started.chromium.launch_persistent_context(
            folder, executable_path=CHROMIUM, args=FLAGS, viewport={"width": 1366, "height": 768}
        )
        try:
            yield context
        finally:
            context.close()


@pytest.fixture(scope="module", name="context")
def browser_context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser for the tests of a file, which imports this fixture and the next one."""
    with chromium(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(name="browser")
def browser_page(context: Any) -> Iterator[Browser]:
    """A page of it, closed after the test."""
    found = Browser(context)
    yield found
    found.page.close()
