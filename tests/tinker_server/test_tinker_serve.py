"""`rlvr serve engine`: mistakes are told before a model is loaded, and a stop leaves everything on disk."""

from __future__ import annotations

import gc
import json
import socket
from pathlib import Path

import pytest

from rlvr.cli.main import run
from rlvr.core.files import new_folder
from rlvr.tinker_server.serve_engine import named_models
from rlvr.training.journal import Checkpoint, Journal, Position
from rlvr.web.auth import ApiKeys
from rlvr.web.server import bind_socket, check_exposure
from tests.kit.model_shell import write_model_shell
from tests.kit.server_process import FRESH
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer

pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(240)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Something that looks like a model's folder; nothing here gets as far as reading it."""
    return write_model_shell(tmp_path / "model")


def test_a_model_is_named_by_its_folder_or_by_name(model: Path) -> None:
    assert named_models([str(model)]) == {str(model): str(model)}
    assert named_models([f"Qwen/Qwen3-8B={model}", "hub/name", "other=hub/name"]) == {
        "Qwen/Qwen3-8B": str(model), "hub/name": "hub/name", "other": "hub/name",
    }  # fmt: skip
    odd = model.rename(model.with_name("a=b"))
    assert named_models([str(odd)]) == {str(odd): str(odd)}


def test_a_training_run_is_named_by_its_folder_and_one_checkpoint_by_its_own(tmp_path: Path) -> None:
    run = tmp_path / "runs"
    run.mkdir()
    (run / "resolved.yaml").write_text("{}")
    with pytest.raises(ValueError, match=r"--model=.*no checkpoint yet"):
        named_models([f"mine={run}"])
    with Journal(run) as journal:
        for step in (1, 2):
            with new_folder(run / "checkpoints" / f"rl-{step}") as folder:
                write_model_shell(folder)
            journal.checkpoint(Checkpoint(Position(0, step), f"checkpoints/rl-{step}"), keep=2)
    assert named_models([f"mine={run}"]) == {"mine": str(run)}, "served_runs.py finds the newest with each request"
    first = run / "checkpoints" / "rl-1"
    assert named_models([f"mine={first}"]) == {"mine": str(first)}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "."], "no config.json"),
        (["--model", "./nowhere"], "there is no such folder"),
        (["--model", "a=./modle"], "there is no such folder (did you mean 'model'?)"),
        (
            ["--model", "model/nowhere"],
            "model/nowhere is not a folder with a model (there is no such folder)",
        ),  # and is not asked for on the hub
        (["--model", "=x"], "name=folder"),
        (["--model", "MODEL", "--model", "MODEL"], "twice"),
        (["--model", "MODEL", "--alias", "stable_reinforce"], "name=loss"),
        (["--model", "MODEL", "--alias", "stable_reinforce=no_loss"], "cispo"),
        (["--model", "MODEL", "--alias", "ppo=cispo"], "stable_reinforce=<"),
        (["--model", "MODEL", "--host", "0.0.0.0"], "RLVR_API_KEYS"),
        (["--model", "MODEL", "--host", "not a host"], "IP address"),
        (["--model", "MODEL", "--keys", "./no-file"], "key file"),
        (["--model", "MODEL", "--log-level", "loud"], "log filter"),
        (["--model", "MODEL", "engine.cache_tokens=-1"], "engine.cache_tokens=-1"),
        (["--model", "MODEL", "limits.gap_second=3"], "did you mean limits.gap_seconds?"),
        (
            ["--model", "MODEL", "limits.gap_seconds=0"],
            "limits.gap_seconds: 0 (an integer) given (from the command line)",
        ),
        (["--model", "MODEL", "limits.max_rank=many"], "expected an integer"),
        (["--model", "MODEL", "engine.micro_tokens=0"], "expected at least 1"),
        (["--model", "MODEL", "micro_tokens=8"], "did you mean engine.micro_tokens?"),
        (["--model", "MODEL", "--config", "./no-file"], "no-file does not exist"),
        (["--model", "MODEL", "--prot", "3"], "--port"),
        (["--model", "MODEL", "--port", "99999"], "--port"),
        (["--model", "MODEL", "--port", "TAKEN"], "--port"),
        (["--model", "MODEL", "--port", "0", "--state", "model/config.json"], "--state model/config.json"),
    ],
)
def test_a_mistake_is_one_message_before_anything_is_loaded(
    options: list[str], said: str, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RLVR_API_KEYS", raising=False)
    monkeypatch.chdir(model.parent)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        real = {"MODEL": str(model), "TAKEN": str(taken.getsockname()[1])}
        port = [] if "--port" in options else ["--port", "0"]
        assert run(["serve", "engine", *port, *(real.get(part, part) for part in options)]) == 2
    told = capsys.readouterr().err
    assert said in told and "Traceback" not in told


def test_other_machines_need_a_key() -> None:
    check_exposure("0.0.0.0", ApiKeys(["tml-some-key"]))
    for host in ("127.0.0.1", "127.3.2.1", "::1", "localhost"):
        check_exposure(host, ApiKeys([]))
    for host in ("0.0.0.0", "::", "10.0.0.1"):
        with pytest.raises(ValueError, match="API key"):
            check_exposure(host, ApiKeys([]))
    with bind_socket("::1", 0) as listening:
        assert listening.family == socket.AF_INET6


@pytest.mark.slow
def test_a_client_continues_after_a_restart(tmp_path: Path) -> None:
    """The same client, over a restart: it waits, and its next step is on the weights it left."""
    tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
    write_model(tmp_path / "model")
    row = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4},
    )
    server = TinkerServer({"tiny": tmp_path / "model"}, tmp_path / "state")
    server.command = FRESH  # nothing may rest on what two forks of one process have in common
    with server:
        assert "listening at http://127.0.0.1:" in server.said and "TINKER_BASE_URL=" in server.said
        service = tinker.ServiceClient(base_url=server.url, api_key=server.key)
        trainer = service.create_lora_training_client(base_model="tiny", rank=4).result()
        trainer.forward_backward([row], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        sampler = trainer.save_weights_and_get_sampling_client().result()
        before = trainer.forward([row], "cross_entropy").result().metrics["loss:sum"]
        scores = sampler.compute_logprobs(row.model_input).result()
        trainer.forward_backward([row], "cross_entropy").result()  # accumulated, and not stepped on yet

        assert server.stop() == 0
        assert "written to disk" in server.said and "Traceback" not in server.said
        server.start()

        assert trainer.forward([row], "cross_entropy").result().metrics["loss:sum"] == before
        assert sampler.compute_logprobs(row.model_input).result() == scores
        assert trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result().metrics["grad_norm"] > 0
        assert trainer.forward([row], "cross_entropy").result().metrics["loss:sum"] < before
        service.close("success").result()
        lines = [json.loads(line) for line in server.log().splitlines()]
        assert {"event", "level", "time"} <= set(lines[0])
        assert not [line for line in lines if line["level"] == "error"]
    del service, trainer, sampler
    gc.collect()  # here, where its warnings are expected
