"""The models of RLVR_MODEL and --demo: a run, a pretrained folder, a Tinker server; each learns."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import pytest

from rlvr.core.types import Task
from rlvr.envs.prompt import PromptOptions, encode_prompt
from rlvr.envs.rpn_arithmetic import RPNArithmetic
from rlvr.service.generators.engine_generator import EngineGenerator, EngineOptions, find_unknown_words
from rlvr.service.learning.session_learner import LearnerOptions
from rlvr.service.models.served_models import ServedModel, check_name, open_model, train_demo
from rlvr.service.service_options import SessionRequest
from rlvr.store.records import Status
from tests.kit.code_rows import chat_tokenizer, model_folder
from tests.kit.prompt_cases import ENABLE_THINKING, first, rows, with_template
from tests.kit.session_fixtures import open_sessions, run_session, settings_of
from tests.kit.tinker_server import TinkerServer

QUICK = (
    "training.mode=sft",
    "sft.steps=3",
    "sft.until=0",
    "evaluation.tasks=4",
    "evaluation.samples=1",
    "env.kwargs.p=7",
)
SHORT = SessionRequest("short", "Say little.", verifiers=(("length", 1.0, {"at_most": 12, "unit": "characters"}),))


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
    """(health, `learning`, the answers to one fixed prompt afterwards) of a service's run."""
    async with open_sessions(settings_of(state), generator=engine(given, state)) as sessions:
        health = await ready(sessions.generator)
        assert health["state"] == "ready", health
        for number in range(sessions_of_it):
            session, answer = await run_session(sessions, SHORT, max_iterations=2, seed=number)
            assert session.status is Status.DONE, session.error
            assert answer["metrics"]["policy_entropy"] > 0
        fixed, _ = await run_session(sessions, SHORT, max_iterations=1, seed=99, learn=False)
        answers = sessions.store.experiences(session_id=fixed.id)
        for one in answers:  # its tokens can be kept apart by who made them: the dashboard shades them
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


@pytest.mark.slow
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


def test_words_outside_a_fixed_vocabulary_are_found():
    from rlvr.engine.tokenizer import build_tokenizer

    tokenizer = build_tokenizer("words", ["2", "3", "+"], end="<end>", pad="<pad>")
    assert find_unknown_words(Task("sum", "2 plus 3 + plus many"), tokenizer) == ["plus", "many"]


@pytest.mark.slow
def test_the_demo_is_trained_once_and_its_environment_makes_and_judges_tasks(tmp_path: Path):
    progress: list[str] = []
    run = train_demo(tmp_path, progress.append, QUICK)
    assert progress[0] == "training 0%" and (run / "summary.json").exists()
    progress.clear()
    assert train_demo(tmp_path, progress.append, QUICK) == run and progress == []

    async def work() -> None:
        state = tmp_path / "state"
        async with open_sessions(settings_of(state), generator=engine(str(run), state)) as sessions:
            assert (await ready(sessions.generator))["name"] == "run demo"
            session, answer = await run_session(sessions, SessionRequest("sum", "2 3 +"), max_iterations=2)
            assert session.status is Status.DONE
            assert answer["training_data"][0]["prompt"] == "<boe> 2 3 +"
            assert answer["training_data"][0]["verifier_feedback"]["detailed_feedback"].startswith("combined:")
            strange, _ = await run_session(sessions, SessionRequest("sum", "two plus three"))
            assert strange.error is not None and strange.error["code"] == "prompt_not_understood"
            assert "has others: 'two', 'plus', 'three'; use its words only" in strange.error["message"]

    asyncio.run(work())


@pytest.mark.slow
def test_stopping_the_demo_ends_its_training_and_a_failure_names_the_log(tmp_path: Path):
    class Enough(Exception):
        pass

    def progress(text: str) -> None:
        if (tmp_path / "demo" / "resolved.yaml").exists():
            raise Enough

    with pytest.raises(Enough):
        train_demo(tmp_path, progress, ("training.mode=sft", "sft.steps=100000"))
    with pytest.raises(ValueError, match=r"exit code 2\).*demo\.log"):
        train_demo(tmp_path / "other", lambda text: None, ("sft.stepps=3",))


@pytest.mark.parametrize("chat", ["auto", "on", "off"])
def test_a_run_s_model_reads_prompts_as_in_its_run(chat: str):
    class Client:
        def get_tokenizer(self) -> Any:
            return chat_tokenizer()

    client: Any = Client()
    assert ServedModel(client, "run", "local", prompt=PromptOptions(chat)).prompt_writer.is_chat == (chat != "off")


def test_a_run_s_model_reads_a_user_s_prompt_after_the_examples_of_its_run():
    class Client:
        def get_tokenizer(self) -> Any:
            return with_template(ENABLE_THINKING)

    client: Any = Client()
    options = PromptOptions(system="Add.", thinking="off", examples=1)
    source = rows("1 + 1?", "2 + 2?")
    task = ServedModel(client, "run", "local", source, prompt=options).prompt_writer.write(Task("own", "3 + 1?"))
    assert client.get_tokenizer().decode(encode_prompt(task, client.get_tokenizer())) == (
        f"<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n{first(source).prompt}<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\n3 + 1?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_a_folder_without_a_model_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="neither a run"):
        open_model(str(tmp_path), tmp_path / "policy")
    (tmp_path / "resolved.yaml").write_text("seed: 1\n")
    with pytest.raises(ValueError, match="no complete checkpoint"):
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
def test_a_typed_expression_becomes_a_task_of_the_environment(text: str, prompt: str | None, answer: str | None):
    task = RPNArithmetic(13, ["+", "-", "*"], (1, 3)).parse_task(text)
    assert (task and task.prompt, task and task.meta["answer"]) == (prompt, answer)


def test_a_misspelled_path_is_refused_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    for mistaken in ("runs/mein", "runs/service/demo", "./model", "/no/such/model", "~/no-such-model"):
        with pytest.raises(ValueError, match=r"RLVR_MODEL=.*folder"):
            check_name(mistaken)
    for fine in ("runs/mine", "gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "tinker:Qwen/Qwen3-8B", "tinker://run/weights/a"):
        check_name(fine)
