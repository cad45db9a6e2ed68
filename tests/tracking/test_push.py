"""`rlvr push`: a run's weights and a card of its summary, in a folder or at a hub."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlvr.cli.main import run
from rlvr.cli.model_card import CardSource, model_card
from rlvr.cli.push_command import call_within
from tests.kit.tiny_run import TINY

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, runs/tiny, that nothing may change."""
    home = tmp_path_factory.mktemp("push")
    (home / "tiny.yaml").write_text(TINY)
    assert run(["train", f"--config={home / 'tiny.yaml'}", f"run.root={home / 'runs'}"]) == 0
    return home / "runs" / "tiny"


@pytest.fixture
def home(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a copy of the run."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished, tmp_path / "runs" / "tiny")
    return tmp_path


def summary_of(home: Path) -> dict[str, Any]:
    return json.loads((home / "runs" / "tiny" / "summary.json").read_text())


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def refusal(capsys: Any, *words: str) -> str:
    assert run(["push", *words]) == 2
    return capsys.readouterr().err


def test_a_folder_holds_the_weights_without_their_optimizer_and_the_card(home: Path, capsys: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlvr.engine.policy import tensors_sha256

    assert run(["push", "runs/tiny", "./out"]) == 0
    assert "final-000003 of runs/tiny and its model card are at out" in capsys.readouterr().out
    names = {path.name for path in (home / "out").iterdir()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not {"optimizer.safetensors", "policy.json", "checksums.json"} & names
    model, summary = AutoModelForCausalLM.from_pretrained(home / "out"), summary_of(home)
    assert tensors_sha256(dict(model.named_parameters())) == summary["weights_sha256"]
    assert AutoTokenizer.from_pretrained(home / "out").encode("1 + 2")


def test_the_card_says_what_was_trained_and_with_what_result(home: Path) -> None:
    from huggingface_hub import ModelCard

    assert run(["push", "runs/tiny", "./out"]) == 0
    card = (home / "out" / "README.md").read_text()
    assert ModelCard.load(home / "out" / "README.md").data.to_dict() == front_matter(card)
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlvr", "reinforcement-learning", "grpo"],
    }
    summary = summary_of(home)
    before, after = (
        f"{100 * e['value']:.1f}% [{100 * e['low']:.1f}, {100 * e['high']:.1f}]"
        for e in (summary["baseline"]["pass@1"], summary["final"]["pass@1"])
    )
    assert f"| Pass Rate (pass@1) | {before} | {after} |" in card
    assert f"p = {summary['p_value']:.4f}" in card or "p < 0.0001" in card
    assert "8 held-out tasks, 2 completions each" in card and "a qwen3 with random weights" in card
    assert f"| SHA-256 of the weights | `{summary['weights_sha256']}` |" in card
    assert (
        "| Seed | 3 |" in card and "| Verifier | `combined` |" in card and "| Environment | `rpn_arithmetic` |" in card
    )
    settings = yaml.safe_load(card.rsplit("```yaml\n", 1)[1].split("```")[0])
    assert settings["seed"] == 3 and settings["training"]["steps"] == 3
    assert not {"tracking", "run", "engine", "model"} & settings.keys()


def card_of(home: Path, **changes: Any) -> str:
    """The card of the run with other settings, given by dotted keys with _ for the dot."""
    from rlvr.config import read

    folder = home / "runs" / "tiny"
    settings = read(folder / "resolved.yaml")
    for key, value in changes.items():
        section, _, name = key.partition("_")
        settings[section][name] = value
    return model_card(CardSource("tiny", settings, None, folder / "checkpoints" / "final-000003", "math"), "me/it")


def test_a_base_model_of_the_hub_is_named_and_a_local_one_is_not_in_the_front_matter(home: Path) -> None:
    card = card_of(home, model_name="Qwen/Qwen3-0.6B")
    assert front_matter(card)["base_model"] == "Qwen/Qwen3-0.6B" and "trained from [Qwen/Qwen3-0.6B](" in card
    card = card_of(home, model_name="/home/someone/models/mine")
    assert "base_model" not in front_matter(card) and "a local model, `mine`" in card and "someone" not in card


def test_a_card_has_no_password_and_no_folder_of_this_machine(home: Path) -> None:
    kwargs = {"path": "/home/someone/rows.jsonl", "url": "https://me:secret@host/x", "parts": ["~/y/z.json"]}
    card = card_of(home, env_kwargs=kwargs)
    assert not re.search("someone|secret|~/y", card)
    settings = yaml.safe_load(card.rsplit("```yaml\n", 1)[1].split("```")[0])
    assert settings["env"]["kwargs"] == {"path": ".../rows.jsonl", "url": "https://***@host/x", "parts": [".../z.json"]}


def test_a_card_has_no_secret_of_the_settings(home: Path) -> None:
    kwargs = {"extra_body": {"api_key": "sk-SECRET", "max_tokens": 7}, "url": "https://host/v1?api_key=sk-SECRET"}
    card = card_of(home, env_kwargs=kwargs)
    settings = yaml.safe_load(card.rsplit("```yaml\n", 1)[1].split("```")[0])
    assert "SECRET" not in card
    assert settings["env"]["kwargs"] == {
        "extra_body": {"api_key": "***", "max_tokens": 7},
        "url": "https://host/v1?***",
    }


def test_a_run_without_a_summary_says_that_nothing_was_measured(home: Path) -> None:
    (home / "runs" / "tiny" / "summary.json").unlink()
    assert run(["push", "runs/tiny", "./out"]) == 0
    assert "were not evaluated" in (home / "out" / "README.md").read_text()


def test_the_best_checkpoint_is_the_one_that_its_pointer_names(home: Path, capsys: Any) -> None:
    assert "this run has no best checkpoint" in refusal(capsys, "runs/tiny", "./out", "--checkpoint", "best")
    checkpoints = home / "runs" / "tiny" / "checkpoints"
    [other] = [path for path in checkpoints.iterdir() if path.name not in ("final-000003", "best.json")]
    (checkpoints / "best.json").write_text(json.dumps({"checkpoint": other.name}))
    assert run(["push", "runs/tiny", "./out", "--checkpoint", "best"]) == 0
    card = (home / "out" / "README.md").read_text()
    own = json.loads((other / "policy.json").read_text())["weights_sha256"]
    assert f"`{own}`" in card and f"| Checkpoint | `{other.name}` |" in card
    (other / "model.safetensors").write_bytes(b"")
    assert "checksum" in refusal(capsys, "runs/tiny", "./again", "--checkpoint", "best")


def test_a_card_says_that_its_numbers_are_of_other_weights(home: Path) -> None:
    """Of an earlier checkpoint; of the last one they are its own."""
    words = ["training.mode=sft", "sft.steps=3", "run.name=sft", "env.kwargs.flaw=0.0"]
    (home / "tiny.yaml").write_text(TINY)
    assert run(["train", "--config=tiny.yaml", *words]) == 0
    checkpoints = home / "runs" / "sft" / "checkpoints"
    earlier = next(path for path in sorted(checkpoints.iterdir()) if path.is_dir() and path.name != "final-000003")
    (checkpoints / "best.json").write_text(json.dumps({"checkpoint": earlier.name}))
    sums = [json.loads((path / "policy.json").read_text())["weights_sha256"] for path in checkpoints.glob("*-*/")]
    assert len(set(sums)) == len(sums) > 1, "each step changed the weights"
    assert run(["push", "runs/sft", "./best", "--checkpoint", "best"]) == run(["push", "runs/sft", "./last"]) == 0
    best, last = ((home / name / "README.md").read_text() for name in ("best", "last"))
    assert f"the numbers of the run's last weights. This model is its checkpoint `{earlier.name}`" in best
    assert "These are the numbers of" not in last


def test_a_damaged_last_checkpoint_is_refused_and_named(home: Path, capsys: Any) -> None:
    """There is an older one, which must not be pushed in its place."""
    (home / "runs" / "tiny" / "checkpoints" / "final-000003" / "model.safetensors").write_bytes(b"")
    text = refusal(capsys, "runs/tiny", "./out")
    assert "final-000003 is damaged" in text and "--checkpoint best" in text and "resume" in text
    assert not (home / "out").exists()


def test_a_run_older_than_the_names_of_algorithms_has_the_algorithm_it_trained_with(home: Path) -> None:
    place = home / "runs" / "tiny" / "resolved.yaml"
    settings = yaml.safe_load(place.read_text())
    del settings["prompt"], settings["rollout"]["temperature"]
    place.write_text(yaml.safe_dump(settings))
    assert run(["push", "runs/tiny", "./out"]) == 0
    card = (home / "out" / "README.md").read_text()
    assert "grpo_original" in front_matter(card)["tags"] and "| Algorithm | `grpo_original` |" in card
    shown = yaml.safe_load(card.rsplit("```yaml\n", 1)[1].split("```")[0])
    assert shown["prompt"]["chat"] == "off" and shown["rollout"]["temperature"] == 1.0


@pytest.mark.parametrize(
    ("base", "public"),
    [("/home/someone/base", "base"), ("~/base", "base"), ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"), (None, None)],
)
def test_a_pushed_adapter_names_its_base_without_folders(home: Path, base: str | None, public: str | None) -> None:
    from rlvr.core.files import sha256

    folder = home / "runs" / "tiny" / "checkpoints" / "final-000003"
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "base_model_name_or_path": base}))
    sums = json.loads((folder / "checksums.json").read_text())
    sums["adapter_config.json"] = sha256(folder / "adapter_config.json")
    (folder / "checksums.json").write_text(json.dumps(sums))
    assert run(["push", "runs/tiny", "./out"]) == 0
    pushed = json.loads((home / "out" / "adapter_config.json").read_text())
    assert pushed == {"r": 4, "base_model_name_or_path": public}


@pytest.mark.slow
def test_an_adapter_names_its_library_and_its_base(home: Path, capsys: Any) -> None:
    model = "model: {name: ./base, device: cpu, lora: {rank: 4}}\nrollout:"
    (home / "lora.yaml").write_text(re.sub("model:.*?rollout:", model, TINY, flags=re.DOTALL))
    assert run(["push", "runs/tiny", "./base"]) == 0
    assert run(["train", "--config=lora.yaml", "sft.steps=0", "training.steps=1", "run.name=adapter"]) == 0
    capsys.readouterr()
    assert run(["push", "runs/adapter", "./out"]) == 0
    assert "its base model, ./base, is not one of the hub" in capsys.readouterr().out
    card = (home / "out" / "README.md").read_text()
    assert front_matter(card)["library_name"] == "peft" and "lora" in front_matter(card)["tags"]
    assert (
        "A LoRA adapter of rank 4, trained from a local model, `base`" in card and "PeftModel.from_pretrained" in card
    )
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in (home / "out").iterdir()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs/tiny", "name"], ["'name'", "OWNER/REPO", "./"]),
        (["runs/tiny", "a/b/c"], ["OWNER/REPO"]),
        (["runs/tiny", "./runs"], ["not an empty folder"]),
        (["runs/tiny", "./out", "--private"], ["--private", "leave it out"]),
        (["runs", "./out"], ["not a run folder"]),
    ],
)
def test_a_mistake_is_said_before_anything_is_written(
    home: Path, capsys: Any, words: list[str], said: list[str]
) -> None:
    text = refusal(capsys, *words)
    assert all(part in text for part in said), text
    assert not (home / "out").exists()


def test_weights_at_a_server_are_refused_with_their_address(home: Path, capsys: Any) -> None:
    from rlvr.training.journal import store_remote_path

    checkpoints = home / "runs" / "tiny" / "checkpoints"
    shutil.rmtree(checkpoints / "final-000003")
    store_remote_path(checkpoints / "final-000003", "tinker://run/weights/7")
    assert "tinker://run/weights/7" in refusal(capsys, "runs/tiny", "./out")


# --- the hub -----------------------------------------------------------------------------------------------------


class FakeHub:
    """The part of the hub's HTTP that a commit needs: large files by LFS, small ones in the commit itself."""

    def __init__(self, *, exists_public: bool = False, forbidden: bool = False) -> None:
        self.exists_public, self.forbidden = exists_public, forbidden
        self.created: dict[str, Any] = {}
        self.objects: dict[str, bytes] = {}
        self.files: dict[str, bytes] = {}
        self.tokens: set[str] = set()
        self.yaml_checked = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.handle_request()

            def do_POST(self) -> None:
                self.handle_request()

            def do_PUT(self) -> None:
                self.handle_request()

            def handle_request(self) -> None:
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b"".join(iter(self.read_chunk, b""))
                else:
                    body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                hub.tokens.add(self.headers.get("Authorization", ""))
                status, answer = hub.answer(self.command, self.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def read_chunk(self) -> bytes:
                size = int(self.rfile.readline(), 16)
                chunk = self.rfile.read(size)
                self.rfile.readline()
                return chunk

            def log_message(self, format: str, *args: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path.startswith("/lfs/"):
            assert hashlib.sha256(body).hexdigest() == path[5:]
            self.objects[path[5:]] = body
            return 200, {}
        sent = json.loads(body) if body and "/commit/" not in path else {}
        match method, path:
            case "GET", "/api/whoami-v2":
                return 200, {"name": "me", "type": "user"}
            case "POST", "/api/repos/create" if self.forbidden:
                return 403, {"error": "You don't have the rights to create a model under this namespace"}
            case "POST", "/api/repos/create":
                self.created = sent
                return (409 if self.exists_public else 200), {"url": f"{self.url}/me/it"}
            case "GET", "/api/models/me/it" if self.created:
                private = not self.exists_public and self.created.get("visibility") == "private"
                return 200, {"id": "me/it", "private": private}
            case "POST", "/api/validate-yaml":
                self.yaml_checked = bool(front_matter(sent["content"])["tags"])
                return 200, {"errors": [], "warnings": []}
            case "POST", "/api/models/me/it/preupload/main":
                modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in sent["files"]}
                return 200, {"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]}
            case "POST", "/me/it.git/info/lfs/objects/batch":
                upload = [{**o, "actions": {"upload": {"href": f"{self.url}/lfs/{o['oid']}"}}} for o in sent["objects"]]
                return 200, {"transfer": "basic", "objects": upload}
            case "POST", "/api/models/me/it/commit/main":
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                    elif line["key"] == "lfsFile":
                        self.files[line["value"]["path"]] = self.objects[line["value"]["oid"]]
                return 200, {"commitUrl": f"{self.url}/me/it/commit/1", "commitOid": "1" * 40}
        return 404, {"error": f"no {method} {path} here"}


@pytest.fixture
def hubs() -> Iterator[list[FakeHub]]:
    made: list[FakeHub] = []
    yield made
    for hub in made:
        hub.server.shutdown()
        hub.server.server_close()


def push_to(
    endpoint: str, home: Path, *words: str, token: str | None = "hf_secret"
) -> subprocess.CompletedProcess[str]:
    """`rlvr push` in a process of its own, since the hub's client reads its variables when it is imported."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
    env |= {"HF_TOKEN": token} if token else {}
    command = [sys.executable, "-m", "rlvr", "push", "runs/tiny", "me/it", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=home, env=env, timeout=60)


def test_the_hub_gets_the_files_and_the_card(home: Path, hubs: list[FakeHub]) -> None:
    hubs.append(hub := FakeHub())
    done = push_to(hub.url, home, "--private")
    assert done.returncode == 0, done.stderr
    assert f"{hub.url}/me/it" in done.stdout
    assert hub.created["name"] == "it" and hub.created["organization"] == "me"
    assert hub.created["visibility"] == "private" and hub.yaml_checked
    checkpoint = home / "runs" / "tiny" / "checkpoints" / "final-000003"
    assert hub.files["model.safetensors"] == (checkpoint / "model.safetensors").read_bytes()
    assert hub.files["tokenizer.json"] == (checkpoint / "tokenizer.json").read_bytes()
    assert b'from_pretrained("me/it")' in hub.files["README.md"] and "optimizer.safetensors" not in hub.files
    assert "Bearer hf_secret" in hub.tokens


@pytest.mark.slow
def test_a_public_repository_is_not_taken_for_a_private_one(home: Path, hubs: list[FakeHub]) -> None:
    hubs.append(hub := FakeHub(exists_public=True))
    done = push_to(hub.url, home, "--private")
    assert done.returncode == 2 and "me/it exists and is public" in done.stderr and hub.files == {} == hub.objects
    assert push_to(hub.url, home).returncode == 0 and "README.md" in hub.files


@pytest.mark.slow
def test_a_refusal_of_the_hub_is_one_message(home: Path, hubs: list[FakeHub]) -> None:
    hubs.append(hub := FakeHub(forbidden=True))
    done = push_to(hub.url, home)
    assert done.returncode == 2 and "me/it: the hub answered 403" in done.stderr and "Traceback" not in done.stderr
    assert "hf_secret" not in done.stderr + done.stdout


def test_without_a_token_the_message_says_how_to_get_one(home: Path) -> None:
    done = push_to("http://127.0.0.1:9", home, token=None)
    assert done.returncode == 2 and "hf auth login" in done.stderr and "HF_TOKEN" in done.stderr


@pytest.mark.slow
def test_a_hub_that_refuses_the_connection_is_said_at_once(home: Path) -> None:
    done = push_to("http://127.0.0.1:9", home)
    assert done.returncode == 2 and "the hub cannot be reached" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_said(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        done = push_to(f"http://127.0.0.1:{silent.getsockname()[1]}", home)
    assert done.returncode == 2 and "did not answer within 5 seconds" in done.stderr


def test_a_call_that_does_not_come_back_is_left_after_its_time() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"http://hub did not answer within 0\.1 seconds"):
        call_within(0.1, lambda: time.sleep(30), "http://hub")
    assert time.monotonic() - began < 15
    with pytest.raises(KeyError, match="own"):
        call_within(15, lambda: {}["own"], "http://hub")
