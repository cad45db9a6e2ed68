"""What RLVR_MODEL and --demo name becomes a model that learns: a run, a pretrained folder, a Tinker server."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from rlvr.envs.math import RPNArithmetic
from rlvr.service.loop.engine import EngineGenerator, EngineOptions
from rlvr.service.loop.learning import LearnerOptions
from rlvr.service.loop.models import check_name, open_model, train_demo
from rlvr.service.options import Request
from rlvr.store.records import Status
from tests.code_rows import model_folder
from tests.sessions_here import opened, settings_of, worked
from tests.tinker_server import TinkerServer

QUICK = (
    "training.mode=sft",
    "sft.steps=3",
    "sft.until=0",
    "evaluation.tasks=4",
    "evaluation.samples=1",
    "env.kwargs.p=7",
)
SHORT = Request("short", "Say little.", verifiers=(("length", 1.0, {"at_most": 12, "unit": "characters"}),))


def engine(given: str, state: Path, **options: Any) -> EngineGenerator:
    return EngineGenerator(
        lambda folder, say: open_model(given, folder, seed=3),
        state / "policy",
        EngineOptions(samples=6, max_tokens=8),
        LearnerOptions(batch_size=4, **options),
    )


async def ready(generator: Any) -> dict[str, Any]:
    while generator.health()["state"] == "loading":
        await asyncio.sleep(0.02)
    return generator.health()


async def life(given: str, state: Path, sessions_of_it: int) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """(health, what was learned, the answers to one fixed question afterwards) of a service's life."""
    async with opened(settings_of(state), generator=engine(given, state)) as sessions:
        health = await ready(sessions.generator)
        assert health["state"] == "ready", health
        for number in range(sessions_of_it):
            session, answer = await worked(sessions, SHORT, max_iterations=2, seed=number)
            assert session.status is Status.DONE, session.error
            assert answer["metrics"]["policy_entropy"] > 0
        fixed, _ = await worked(sessions, SHORT, max_iterations=1, seed=99, learn=False)
        answers = sessions.store.experiences(session_id=fixed.id)
        for one in answers:  # its tokens can be told apart by who made them: the dashboard shades them
            whole = sessions.generator.decode(one.tokens or [])
            assert one.tokens and whole and one.generated_output.partition("\ufffd")[0] in whole
        said = [e.generated_output for e in answers]
        return health, sessions.generator.learning(), said


def test_a_pretrained_folder_gets_an_adapter_that_learns_in_conversations_and_survives_restarts(tmp_path: Path):
    folder = str(model_folder(tmp_path / "model"))
    health, fresh, before = asyncio.run(life(folder, tmp_path / "state", 0))
    assert (health["kind"], health["name"], health["learns"]) == ("local", folder, "weights")
    assert fresh["updates"] == 0
    _, learned, after = asyncio.run(life(folder, tmp_path / "state", 4))
    assert learned["updates"] >= 1 and learned["training_loss"] is not None
    assert after != before  # the adapter moved
    _, again, later = asyncio.run(life(folder, tmp_path / "state", 0))
    assert again["updates"] - learned["updates"] in (0, 1)  # what had been gathered as the service stopped
    assert later == after or again["updates"] > learned["updates"]
    assert (tmp_path / "state" / "policy" / "learner.json").exists()
    saved = next((tmp_path / "state" / "policy").glob("step-*"))
    assert (saved / "adapter_model.safetensors").exists()  # peft's format: it loads elsewhere


@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK leaves its connections to the collector
def test_a_tinker_server_trains_the_adapter_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("tinker")
    folder = model_folder(tmp_path / "model")
    with TinkerServer({str(folder): folder}, tmp_path / "served") as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        given = f"tinker:{folder}"
        health, learned, after = asyncio.run(life(given, tmp_path / "state", 3))
        assert (health["kind"], learned["updates"] >= 1) == ("tinker", True)
        _, again, later = asyncio.run(life(given, tmp_path / "state", 0))
        assert again["updates"] - learned["updates"] in (0, 1)
        assert later == after or again["updates"] > learned["updates"]
    gc.collect()


def test_the_demo_is_trained_once_with_its_progress_and_its_environment_poses_and_judges(tmp_path: Path):
    told: list[str] = []
    run = train_demo(tmp_path, told.append, QUICK)
    assert told[0] == "training 0%" and (run / "summary.json").exists()
    told.clear()
    assert train_demo(tmp_path, told.append, QUICK) == run and told == []

    async def work() -> None:
        state = tmp_path / "state"
        async with opened(settings_of(state), generator=engine(str(run), state)) as sessions:
            assert (await ready(sessions.generator))["name"] == "run demo"
            session, answer = await worked(sessions, Request("sum", "2 3 +"), max_iterations=2)
            assert session.status is Status.DONE
            assert answer["training_data"][0]["prompt"] == "<boe> 2 3 +"
            assert answer["training_data"][0]["verifier_feedback"]["detailed_feedback"].startswith("combined:")
            strange, _ = await worked(sessions, Request("sum", "two plus three"))
            assert strange.error is not None and strange.error["code"] == "prompt_not_understood"

    asyncio.run(work())


def test_a_demo_that_is_stopped_while_it_trains_ends_its_process_and_one_that_fails_says_why(tmp_path: Path):
    class Enough(Exception):
        pass

    def progress(text: str) -> None:
        if (tmp_path / "demo" / "resolved.yaml").exists():
            raise Enough

    with pytest.raises(Enough):
        train_demo(tmp_path, progress, ("training.mode=sft", "sft.steps=100000"))
    with pytest.raises(ValueError, match=r"could not be trained \(exit code 2\).*demo\.log"):
        train_demo(tmp_path / "other", lambda text: None, ("sft.stepps=3",))


def test_what_is_no_model_is_told_so(tmp_path: Path):
    with pytest.raises(ValueError, match="neither a run"):
        open_model(str(tmp_path), tmp_path / "policy")
    (tmp_path / "resolved.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="no whole checkpoint yet"):
        open_model(str(tmp_path), tmp_path / "policy")


@pytest.mark.parametrize(
    ("text", "prompt", "answer"),
    [
        ("7 8 +", "<boe> 7 8 +", "2"),
        ("<boe> 7 8 + 2 *", "<boe> 7 8 + 2 *", "4"),
        ("7 +", None, None),
        ("7 8", None, None),
        ("7 8 + +", None, None),
        ("13 1 +", None, None),
        ("What is 7 + 8?", None, None),
        ("", None, None),
        ("7", None, None),
        ("1 1 + 1 + 1 + 1 +", "<boe> 1 1 + 1 + 1 + 1 +", "5"),  # longer than what the run had, and known all the same
    ],
)
def test_an_expression_that_a_person_writes_becomes_a_task_of_the_environment(
    text: str, prompt: str | None, answer: str | None
):
    task = RPNArithmetic(13, ["+", "-", "*"], (1, 3)).posed(text)
    assert (task and task.prompt, task and task.meta["answer"]) == (prompt, answer)


def test_a_path_with_a_typing_error_is_refused_at_once_and_never_sought_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for mistaken in ("runs/mein", "runs/service/demo", "./model", "/no/such/model", "~/no-such-model"):
        with pytest.raises(ValueError, match="there is no such folder"):
            check_name(mistaken)
    for fine in ("runs/mine", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "tinker:Qwen/Qwen3-8B", "tinker://run/weights/a"):
        check_name(fine)
