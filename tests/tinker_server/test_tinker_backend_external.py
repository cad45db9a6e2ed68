"""Weights taken away from the Tinker server: as they are, or encrypted with age; the cookbook's download of them."""

from __future__ import annotations

import gc
import importlib
import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("google.protobuf")
pytest.importorskip("pyrage", reason="the extra [serve] is not installed")

from rlvr.tinker_server.backend.request_futures import JsonResult
from rlvr.tinker_server.backend.runs.run_operations import SaveExternal
from tests.kit.tinker_backend import BackendClient, ServerFactory, assert_failed, train
from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer

pyrage: Any = importlib.import_module("pyrage")  # it has no types


def test_files_are_encrypted_to_their_recipients_only(new_server: ServerFactory) -> None:
    client = BackendClient(backend := new_server())
    client.make()
    train(client, 1, seed=0)
    keys = [pyrage.x25519.Identity.generate() for _ in range(3)]
    recipients = [str(key.to_public()) for key in keys[:2]]
    assert isinstance(client.do(4, SaveExternal("plain")), JsonResult)
    told = client.do(5, SaveExternal("hidden", recipients=recipients))
    plain = backend.queries.external_files("anna", client.run, "plain")
    hidden = backend.queries.external_files("anna", client.run, "hidden")
    assert set(hidden) == {f"{name}.age" for name in plain} and "adapter_model.safetensors" in plain
    assert isinstance(told, JsonResult) and told.value["size_bytes"] >= sum(f.stat().st_size for f in hidden.values())
    for name, file in plain.items():
        secret = hidden[f"{name}.age"].read_bytes()
        assert [pyrage.decrypt(secret, [key]) for key in keys[:2]] == [file.read_bytes()] * 2
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(secret, [keys[2]])


@pytest.mark.parametrize("wrong", ["age1none", "AGE-SECRET-KEY-1", "ssh-ed25519 none", "", "me@example.org"])
def test_an_invalid_key_is_named_and_nothing_is_saved(new_server: ServerFactory, wrong: str) -> None:
    client = BackendClient(backend := new_server())
    client.make()
    good = str(pyrage.x25519.Identity.generate().to_public())
    assert_failed(client.do(1, SaveExternal("out", recipients=[good, wrong])), repr(wrong), "age1...")
    assert_failed(client.do(2, SaveExternal("out", recipients=[good] * 11)), "at most 10")
    assert backend.queries.checkpoints("anna")["checkpoints"] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # the SDK's connections
@pytest.mark.timeout(240)
def test_the_cookbook_downloads_a_training_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own way: a run from the checkpoint, an export encrypted for this download, which is then deleted."""
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    tinker = pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
    weights = pytest.importorskip("tinker_cookbook.weights", reason="tinker-cookbook is not installed")
    pytest.importorskip("fastapi", reason="the extra [serve] is not installed")
    from safetensors.numpy import load_file

    write_model(tmp_path / "model")
    row = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3, 4]),
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5], "weights": [1.0] * 4},
    )
    with TinkerServer({"tiny": tmp_path / "model"}, tmp_path / "state") as server:
        monkeypatch.setenv("TINKER_API_KEY", server.key)
        service = tinker.ServiceClient(base_url=server.url)
        trainer = service.create_lora_training_client(base_model="tiny", rank=4).result()
        trainer.forward_backward([row], "cross_entropy").result()
        trainer.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
        saved = trainer.save_state("mine").result().path
        exported = trainer.save_weights_external("plain").result().path
        for path, name in ((saved, "a"), (exported, "b")):
            weights.download(tinker_path=path, output_dir=str(tmp_path / name), base_url=server.url)
        service.close("success").result()
        rest = tinker.RestClient(base_url=server.url)
        left = {c.checkpoint_id for c in rest.list_user_checkpoints().result().checkpoints}
        assert left == {"weights/mine", "external_weights/plain"}
    del service, trainer, rest
    gc.collect()  # here, where its warnings are expected
    a, b = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("a", "b"))
    assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a) and any(a[key].any() for key in a)
