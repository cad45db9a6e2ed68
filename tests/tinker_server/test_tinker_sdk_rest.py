"""The real SDK's REST client against a real server: each call works or is refused by name, and none is forgotten."""

from __future__ import annotations

import gc
import inspect
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tinker", reason="the extra [tinker] is not installed")
pytest.importorskip("fastapi", reason="the extra [serve] is not installed")

import tinker
from tinker import types

from tests.kit.tinker_model import write_model
from tests.kit.tinker_server import TinkerServer

pytestmark = [
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),  # the SDK's connections
    pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning"),
    pytest.mark.filterwarnings("ignore:RestClient.search_sessions is experimental"),
    pytest.mark.timeout(240),
]
NAME = "tiny"

# Every public call of the SDK's clients, by where it is tried; what it does without asking the server is `local`.
TRIED = {
    "ServiceClient": {
        "here": {"close", "copy_weights", "get_server_capabilities", "create_rest_client"},
        "test_tinker_custom_loss": {"create_custom_loss"},
        "test_tinker_sdk": {
            "create_lora_training_client", "create_sampling_client", "create_training_client_from_state",
            "create_training_client_from_state_with_optimizer",
        },
        "local": {"get_console_url", "get_telemetry"},
    },
    "TrainingClient": {
        "here": {"save_weights_external"},
        "test_tinker_sdk": {
            "create_sampling_client", "forward", "forward_backward", "get_info", "get_tokenizer", "load_state",
            "load_state_with_optimizer", "optim_step", "save_state",
            "save_weights_and_get_sampling_client", "save_weights_for_sampler",
        },
        "test_tinker_custom_loss": {"forward_backward_custom"},
        "local": {"get_console_url", "get_telemetry"},
    },
    "SamplingClient": {
        "test_tinker_sdk": {
            "sample", "compute_logprobs", "get_tokenizer", "get_base_model", "get_sampler_handle",
            "from_sampler_handle", "create",
        },
        "local": {"get_telemetry", "on_queue_state_change"},
    },
    "RestClient": {
        "here": {
            "assign_session_project", "copy_weights", "delete_checkpoint", "delete_checkpoint_from_tinker_path",
            "export_session_trace", "get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage",
            "get_external_weights_urls", "get_sampler", "get_server_capabilities", "get_session", "get_training_run",
            "get_training_run_by_tinker_path", "get_weights_info_by_tinker_path", "list_checkpoints", "list_sessions",
            "list_training_runs", "list_user_checkpoints", "publish_checkpoint_from_tinker_path", "search_sessions",
            "set_checkpoint_ttl_from_tinker_path", "unpublish_checkpoint_from_tinker_path", "whoami",
        },
        "local": {"get_telemetry"},
    },
    "AdminClient": {
        "here": {"get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage"},
        "local": {"get_telemetry"},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerServer]:
    folder = tmp_path_factory.mktemp("rest")
    write_model(folder / "model")
    with TinkerServer({NAME: folder / "model"}, folder / "state") as running:
        yield running


@pytest.fixture(scope="module")
def service(server: TinkerServer) -> Iterator[Any]:
    made = tinker.ServiceClient(
        base_url=server.url, api_key=server.key, user_metadata={"who": "a test"}, display_name="a name"
    )
    yield made
    made.close("interrupted", "over").result()
    del made
    gc.collect()  # here, where its warnings are expected


@pytest.fixture(scope="module")
def rest(server: TinkerServer) -> Any:
    return tinker.RestClient(base_url=server.url, api_key=server.key)


@pytest.fixture(scope="module")
def trainer(service: Any) -> Any:
    return service.create_lora_training_client(base_model=NAME, rank=4, user_metadata={"run": "one"}).result()


def test_no_call_of_the_sdk_is_forgotten() -> None:
    for name, groups in TRIED.items():
        kind = getattr(tinker, name)
        public = {n for n, member in inspect.getmembers(kind, callable) if not n.startswith("_")}
        listed = set().union(*groups.values())
        assert {n for n in public if not n.endswith("_async")} == listed, name  # the _async twins are the same calls
        for place in groups.keys() - {"local"}:
            file = Path(__file__).with_name(f"{place}.py") if place != "here" else Path(__file__)
            text = file.read_text(encoding="utf-8")
            assert {n for n in groups.get(place, set()) if f".{n}(" not in text and n != "create"} == set()


def test_capabilities_and_identity(rest: Any, service: Any, server: TinkerServer) -> None:
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length, model.trainable) == (NAME, 512, True)
    assert service.get_server_capabilities().supported_models[0].model_name == NAME
    assert service.create_rest_client().get_server_capabilities().result().supported_models == [model]
    with pytest.raises(RuntimeError, match="JWT"):  # the SDK asks this of servers that give out tokens only
        rest.whoami().result()
    with urllib.request.urlopen(f"{server.url}/api/v1/healthz") as answer:
        assert answer.read() == b'{"status":"ok"}'


def test_runs_and_checkpoints_are_listed_changed_and_deleted(rest: Any, trainer: Any) -> None:
    run = trainer.model_id
    first = trainer.save_state("first", user_metadata={"note": "kept"}).result().path
    second = trainer.save_weights_for_sampler("second").result().path

    found = rest.get_training_run(run).result()
    assert (found.base_model, found.lora_rank, found.user_metadata) == (NAME, 4, {"run": "one"})
    assert found.last_checkpoint.tinker_path == first and found.last_sampler_checkpoint.tinker_path == second
    assert rest.get_training_run_by_tinker_path(first).result().training_run_id == run
    page = rest.list_training_runs(limit=1).result()
    assert [r.training_run_id for r in page.training_runs] == [run] and page.cursor.total_count == 1

    listed = {c.checkpoint_id: c for c in rest.list_checkpoints(run).result().checkpoints}
    assert set(listed) == {"weights/first", "sampler_weights/second"}
    assert listed["weights/first"].user_metadata == {"note": "kept"} and listed["weights/first"].size_bytes > 0
    assert {c.tinker_path for c in rest.list_user_checkpoints().result().checkpoints} == {first, second}
    info = rest.get_weights_info_by_tinker_path(first).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (NAME, 4, True)

    def state() -> Any:
        return next(c for c in rest.list_checkpoints(run).result().checkpoints if c.tinker_path == first)

    rest.publish_checkpoint_from_tinker_path(first).result()
    assert state().public
    rest.unpublish_checkpoint_from_tinker_path(first).result()
    assert not state().public
    rest.set_checkpoint_ttl_from_tinker_path(first, 7_200).result()
    left = state().expires_at - datetime.now(UTC)
    assert timedelta(hours=1, minutes=50) < left <= timedelta(hours=2)
    rest.set_checkpoint_ttl_from_tinker_path(first, None).result()
    assert state().expires_at is None

    rest.delete_checkpoint_from_tinker_path(first).result()
    rest.delete_checkpoint(run, "sampler_weights/second").result()
    assert rest.list_checkpoints(run).result().checkpoints == []
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.delete_checkpoint_from_tinker_path(first).result()


def test_sessions_and_samplers_are_looked_up(rest: Any, service: Any, trainer: Any) -> None:
    sampler = service.create_sampling_client(base_model=NAME).result()
    session = trainer.model_id.rsplit(":train:", 1)[0]
    assert session in rest.list_sessions().result().sessions
    found = rest.get_session(session).result()
    assert found.training_run_ids == [trainer.model_id] and found.display_name == "a name"
    assert found.user_metadata == {"who": "a test"}
    (known,) = found.sampler_ids
    assert rest.get_sampler(known).result().base_model == NAME
    assert sampler.get_base_model() == NAME


def test_weights_download_as_files_that_peft_reads(rest: Any, trainer: Any, tmp_path: Path) -> None:
    saved = trainer.save_weights_external("away", ttl_seconds=3_600).result()
    urls = rest.get_external_weights_urls(saved.path).result().urls
    assert {"adapter_model.safetensors", "adapter_config.json"} <= set(urls)
    for name, url in urls.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url) as answer:  # no key: the address is the permission
            (tmp_path / name).write_bytes(answer.read())
    from peft import LoraConfig
    from safetensors.numpy import load_file

    assert LoraConfig.from_pretrained(str(tmp_path)).r == 4
    assert len(load_file(tmp_path / "adapter_model.safetensors")) > 0
    with pytest.raises(urllib.error.HTTPError, match="403"):
        url = urls["adapter_config.json"]
        urllib.request.urlopen(url.replace("adapter_config.json", "adapter_model.safetensors"))
    rest.delete_checkpoint_from_tinker_path(saved.path).result()


def test_weights_are_copied_into_a_project_and_outlive_their_source(
    rest: Any, service: Any, trainer: Any, server: TinkerServer
) -> None:
    """The copy has the source's kind, name and metadata, is sampled from and loaded, and cannot be trained."""
    tokens = types.ModelInput.from_ints([5, 6, 7, 8])
    state = trainer.save_state("to-copy", user_metadata={"note": "kept"}).result().path
    sampled = trainer.save_weights_for_sampler("to-sample").result().path
    base = service.create_sampling_client(model_path=sampled).result().compute_logprobs(tokens).result()

    there = tinker.ServiceClient(base_url=server.url, api_key=server.key, project_id="archive")
    copies = [
        rest.copy_weights(state, "archive", ttl_seconds=7_200).result(),
        there.copy_weights(sampled).result(),
    ]
    runs = rest.list_training_runs(project_id="archive").result()
    assert [f"tinker://{run.training_run_id}" for run in runs.training_runs] == [
        copy.rpartition("/")[0].rpartition("/")[0] for copy in reversed(copies)
    ]
    assert runs.cursor.total_count == 2
    listed = {one.tinker_path: one for one in rest.list_user_checkpoints().result().checkpoints}
    assert set(listed) >= set(copies) and copies[0].endswith("/weights/to-copy")
    assert listed[copies[0]].user_metadata == {"note": "kept"} and listed[copies[0]].expires_at is not None
    assert listed[copies[1]].expires_at is None and listed[copies[1]].size_bytes > 0
    for path in (state, sampled):
        rest.delete_checkpoint_from_tinker_path(path).result()
    found = service.create_sampling_client(model_path=copies[1]).result().compute_logprobs(tokens).result()
    assert found == base
    again = service.create_training_client_from_state_with_optimizer(copies[0]).result()
    assert again.get_info().lora_rank == 4
    copied = runs.training_runs[0].training_run_id
    assert rest.get_training_run(copied).result().base_model == NAME
    trainer_of_copy = again
    trainer_of_copy._guaranteed_model_id = lambda: copied
    with pytest.raises(tinker.BadRequestError, match=r"is a copy of tinker://.*cannot be trained"):
        trainer_of_copy.save_state("x").result()
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.copy_weights(state, "archive").result()
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds 60"):
        rest.copy_weights(copies[0], "archive", ttl_seconds=60).result()
    there.close("success").result()


def test_sessions_are_searched_and_given_a_project(rest: Any, server: TinkerServer) -> None:
    def make(name: str, **metadata: str) -> tuple[Any, str]:
        made = tinker.ServiceClient(
            base_url=server.url, api_key=server.key, user_metadata=metadata or None, display_name=name,
            project_id="research" if "Nightly" in name else None,
        )  # fmt: skip
        return made, made.holder.get_session_id()

    made = [make("Nightly run one", sort="a"), make("Nightly run two", sort="b"), make("another", sort="a")]
    clients, ids = [client for client, _ in made], [session for _, session in made]
    clients[1].close("errored", "why").result()

    def search(**how: Any) -> list[str]:
        page = rest.search_sessions(types.SessionSearchRequest(**how)).result()
        assert page.next_cursor is None
        return [one.session_id for one in page.sessions if one.session_id in ids]

    assert search() == ids[::-1]  # newest first
    assert search(display_name="run NIGHTLY") == ids[1::-1] and search(display_name="nightlyrun") == []
    assert search(user_metadata={"sort": "a"}) == [ids[2], ids[0]]
    assert search(user_metadata={"sort": "a", "more": "x"}) == []
    assert search(session_id=ids[0]) == [ids[0]] and search(session_id="unknown") == []
    assert search(session_id=ids[2], display_name="two") == [ids[2], ids[1]]
    assert search(statuses=[types.ActiveSessionStatusQuery()]) == [ids[2], ids[0]]
    assert search(statuses=[types.ClientFinishedSessionStatusQuery(reasons=["errored"])]) == [ids[1]]
    assert search(statuses=[types.ClientFinishedSessionStatusQuery(reasons=["success"])]) == []
    assert search(project_ids=["research"]) == ids[1::-1] and search(project_ids=["unknown"]) == []
    assert search(owner=types.AccessibleSearchOwner()) == ids[::-1]
    assert search(owner=types.UserSearchOwner(owner_urns=["urn:rlvr:owner:local"])) == ids[::-1]
    assert search(owner=types.UserSearchOwner(owner_urns=["someone"])) == []
    rest.assign_session_project(ids[2], "research").result()
    assert search(project_ids=["research"]) == ids[::-1]
    with pytest.raises(tinker.NotFoundError, match="unknown"):
        rest.assign_session_project("some session", "research").result()

    pages: list[Any] = []
    request = types.SessionSearchRequest(project_ids=["research"], limit=1)
    while True:
        page = rest.search_sessions(request).result()
        pages += page.sessions
        if page.next_cursor is None:
            break
        request = request.model_copy(update={"cursor": page.next_cursor})
    assert [one.session_id for one in pages] == ids[::-1]
    finished = pages[1]
    assert (finished.status.type, finished.status.reason.type) == ("client_finished", "errored")
    assert (finished.display_name, finished.user_metadata, finished.owner) == (
        "Nightly run two",
        {"sort": "b"},
        "local",
    )
    assert (finished.checkpoints_count, finished.project_id) == (0, "research")
    for client in (clients[0], clients[2]):
        client.close("success").result()
    del made, clients
    gc.collect()


def test_the_storage_of_checkpoints_is_counted_by_project(server: TinkerServer, trainer: Any) -> None:
    admin = tinker.AdminClient(base_url=server.url, api_key=server.key)

    def measure() -> Any:
        found = admin.get_current_checkpoint_storage_usage().result()
        assert found.effective_rate_usd_per_gigabyte_month is None
        return next((one for one in found.data if one.project_id is None), None)

    before = measure()
    trainer.save_state("counted").result()
    after, own = measure(), admin.get_current_checkpoint_storage_usage("no project").result()
    assert after.checkpoint_count == (before.checkpoint_count if before else 0) + 1
    assert after.size_gigabytes == after.size_bytes / 1e9 > 0 and own.data == []
    for call in (admin.get_audit_log, lambda: admin.get_billing_usage(NOW - timedelta(hours=2), NOW)):
        with pytest.raises(tinker.BadRequestError, match="does not support"):
            call().result()


NOW = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
NOT_OFFERED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("audit", lambda service, rest: rest.get_audit_log()),
    ("billing", lambda service, rest: rest.get_billing_usage(NOW - timedelta(hours=2), NOW - timedelta(hours=1))),
    ("traces", lambda service, rest: rest.export_session_trace("some session")),
    ("access tokens", lambda service, rest: rest.copy_weights("tinker://a/weights/b", "p", weights_access_token="t")),
    (
        "access tokens",
        lambda service, rest: service.create_training_client_from_state(
            "tinker://a/weights/b", weights_access_token="t"
        ),
    ),
]


@pytest.mark.parametrize(("said", "call"), NOT_OFFERED, ids=[f"{i} {row[0]}" for i, row in enumerate(NOT_OFFERED)])
def test_unsupported_calls_are_refused_by_name_at_once(said: str, call: Any, service: Any, rest: Any) -> None:
    begun = time.monotonic()
    with pytest.raises(tinker.BadRequestError, match=said):
        call(service, rest).result()
    assert time.monotonic() - begun < 10


def test_the_auth_commands_of_the_sdk_get_answers(
    server: TinkerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tinker auth login` checks a key and stores it, `status` finds the server by it, `logout` removes it."""
    from click.testing import CliRunner
    from tinker.cli.__main__ import main_cli

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)

    def auth(word: str, typed: str = "") -> Any:
        return CliRunner().invoke(main_cli, ["auth", word], input=typed)

    refused = auth("login", "no key of the SDK\n")
    assert refused.exit_code != 0 and "'tml-'" in f"{refused.exception} {vars(refused.exception)}"
    assert "Logged in as local (rlvr serve engine)" in auth("login", f"{server.key}\n").output
    assert "Tinker accessible: yes" in auth("status").output
    assert "Removed credential 'local'" in auth("logout").output
    gc.collect()
