"""The state folder of a Tinker server as a dashboard source: its runs with checkpoints and metrics, read beside it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra [train] is not installed")

from rlvr.service.dashboard.page_templates import render_page
from rlvr.service.dashboard.pages.curve_file import curve_file
from rlvr.service.dashboard.pages.rollouts_page import rollouts_page
from rlvr.service.dashboard.pages.work_pages import overview, work_page
from rlvr.service.dashboard.tinker_source import TinkerSource
from rlvr.tinker_server.backend.request_futures import JsonResult, ProtoResult
from rlvr.tinker_server.backend.storage.server_store import RECORDS
from rlvr.tinker_server.protocol.proto import ForwardBackwardOutput
from tests.kit.dashboard_fixtures import EVIL
from tests.kit.dashboard_html import links, read_main, read_words
from tests.kit.tinker_backend import MODEL, BackendClient, ServerFactory


def test_the_runs_of_a_server_are_shown_with_the_metrics_that_their_clients_got(tmp_path: Path):
    servers = ServerFactory(tmp_path)
    backend = servers(snapshot_steps=1, snapshot_share=100.0)
    client, other = BackendClient(backend), BackendClient(backend, "bo")
    source = TinkerSource(tmp_path)
    empty = source.revision()
    assert source.works() == ([], 0) and "No run yet" in read_words(overview(source, {}))
    client.make()
    other.make()
    losses, steps = dict[float, float](), dict[float, dict[str, float]]()
    for seq in (1, 3, 5):
        gradient, step = client.wait(client.gradients(seq)), client.wait(client.step(seq + 1))
        assert isinstance(gradient, ProtoResult) and isinstance(step, JsonResult)
        losses[seq] = ForwardBackwardOutput.FromString(gradient.body).metrics["loss:sum"]
        steps[seq + 1] = step.value["metrics"]
    client.save_weights(7, "a-name")
    servers.close()
    assert source.revision() != empty
    works, total = source.works()
    assert total == 2 and {work.id for work in works} == {client.run, other.run}
    work = source.work(client.run)
    assert work is not None and work.figures["checkpoints"] == "1" and work.figures["API key"] == "anna"
    assert work.about == f"{MODEL}, rank 4" and work.live and source.work("none") is None
    charts = {chart.title: {x: y for x, y, *_ in chart.lines[0].points} for chart in source.charts(client.run)}
    assert charts["loss:sum"] == losses
    for name in steps[2]:
        assert charts[name] == {seq: metrics[name] for seq, metrics in steps.items()}
    assert source.charts(other.run) == [] and source.texts(other.run) == [("Checkpoints", "none yet")]
    page = work_page(source, {"work": client.run})
    assert "weights/a-name: after request 7" in read_words(page) and "rollout" not in read_words(page)
    name, text = curve_file(source, {"page": f"/ui/run/{client.run}", "title": "loss:sum"}) or ("", "")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    assert name == "loss-sum.csv" and [float(row[0]) for row in rows] == [1, 3, 5]
    assert [float(row[-1]) for row in rows] == pytest.approx(list(losses.values())), text
    assert any(client.run.replace(":", "%3A") in link for link in links(overview(source, {})))
    assert rollouts_page(source, {}).status == 200 and source.detail("1") is None


def test_hostile_records_break_no_page(tmp_path: Path):
    servers = ServerFactory(tmp_path)
    client = BackendClient(servers())
    client.make()
    servers.close()
    with sqlite3.connect(tmp_path / RECORDS) as db:
        db.execute("UPDATE models SET metadata = ?, base_model = ?, owner = ?", [EVIL] * 3)
        row = [client.run, "weights", EVIL, EVIL, 3, 0.0, None, 0, None, "{}", 0]
        db.execute(f"INSERT INTO checkpoints VALUES ({', '.join('?' * 11)})", row)
        for seq, body in enumerate((b'{"metrics": {"a": NaN, "b": 1e400, "' + EVIL.encode()[:8] + b'": 1}}', b"[1]")):
            db.execute("INSERT INTO results VALUES (?, ?, '', 'json', ?, 0)", [client.run, 1 + seq, body])
    db.close()
    source = TinkerSource(tmp_path)
    page = work_page(source, {"work": client.run})
    assert page.status == 200 and "\u202e" not in str(read_main(page)) and "<script>window" not in render_page(page)
    assert [chart.title for chart in source.charts(client.run)] == ["<script>"]


def test_a_file_that_is_no_record_of_a_server_is_named(tmp_path: Path):
    (tmp_path / RECORDS).write_text("text")
    with pytest.raises(ValueError, match="is not the records of a Tinker server"):
        TinkerSource(tmp_path)
