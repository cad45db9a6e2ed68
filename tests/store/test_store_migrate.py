"""A database of an older version is brought up to date with its rows; one of a newer version is left alone."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from rlvr.store import Experience, Session, open_store
from rlvr.store.connections import Database
from rlvr.store.migrate import MIGRATIONS, VERSION_TABLE, main, migrate
from rlvr.store.tables import HEAD, KNOWN_VERSIONS, metadata

OPEN = "import sys; from rlvr.store import open_store; print(open_store(sys.argv[1]).count())"


def made_by(url: str, revision: str) -> Database:
    """A database as the migrations up to `revision` leave it."""
    database = Database(url)
    with database.write() as connection:
        migrate(connection, revision)
    return database


def shape(database: Database) -> dict[str, Any]:
    """Columns, keys and indexes of every table, in no order."""
    told: dict[str, Any] = {}
    with database.read() as connection:
        inspector = sa.inspect(connection)
        for table in inspector.get_table_names():
            told[table] = {
                "columns": {c["name"]: (str(c["type"]), c["nullable"]) for c in inspector.get_columns(table)},
                "primary": inspector.get_pk_constraint(table)["constrained_columns"],
                "unique": {tuple(u["column_names"]) for u in inspector.get_unique_constraints(table)},
                "foreign": [(f["referred_table"], f["options"]) for f in inspector.get_foreign_keys(table)],
                "indexes": {
                    i["name"]: (i["column_names"], str(i.get("dialect_options", {}).get("sqlite_where", "")))
                    for i in inspector.get_indexes(table)
                },
            }
    return told


def test_the_versions_are_those_of_the_migrations():
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    script = ScriptDirectory.from_config(config)
    assert script.get_current_head() == HEAD
    assert tuple(reversed([revision.revision for revision in script.walk_revisions()])) == KNOWN_VERSIONS


def test_the_tables_are_what_the_migrations_make(store_url: str):
    database = made_by(store_url, HEAD)
    with database.read() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": VERSION_TABLE})
        assert compare_metadata(context, metadata) == []
    migrated = shape(database)
    with database.write() as connection:
        for table in reversed(metadata.sorted_tables):
            connection.execute(sa.text(f"DROP TABLE {table.name}"))
        connection.execute(sa.text(f"DROP TABLE {VERSION_TABLE}"))
    with closing(open_store(store_url)) as store:
        assert shape(store) == migrated
    database.close()


def test_a_database_of_the_first_version_is_migrated_with_its_rows(store_url: str):
    database = made_by(store_url, "0001")
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO rlvr_sessions (id, task_id, prompt, request, kind, name, owner, instance, status, created, "
            "heartbeat, iterations, converged, metrics) VALUES ('s', 't', 'p', '{\"a\":1}', 'train', '', '', '', "
            "'done', 5, 5, 1, false, '{}')"
        )
        connection.exec_driver_sql(
            "INSERT INTO rlvr_experiences (session_id, task_id, sample, iteration, prompt, generated_output, feedback, "
            "scores, outcome, reward, action, stop_reason, num_tokens, policy_version, policy_fingerprint, priority, "
            "seconds, created) "
            "VALUES ('s', 't', 0, 1, 'p', 'o', '{}', '{}', 'passed', 1.25, '', '', 3, 0, '', 1, 0.5, 6)"
        )
    database.close()
    store = open_store(store_url)
    session, [experience] = store.session("s"), store.experiences()
    assert session is not None and session.request == {"a": 1} and session.created == 5.0
    assert (experience.reward, experience.verified_reward, experience.rating, experience.ratings) == (
        1.25,
        1.25,
        None,
        0,
    )
    assert store.rate(experience.id or 0, "ann", 1.0) is not None
    store.close()
    with closing(open_store(store_url)) as again:
        assert again.count() == 1


def test_old_answers_get_what_they_were_asked_for_and_what_verified_them(store_url: str):
    """A training session with feedback on a wrong answer, an evaluation, and a training run, of version 0002."""
    database = made_by(store_url, "0002")
    sessions = [
        ("train", "train", '{"prompt":"\\"learn\\":false","learn":true}', '{"verified_by":["code","draft"]}'),
        ("evaluate", "train", '{"learn":false}', "{}"),
        ("run", "run", "{}", "{}"),
    ]
    scores = (
        '{"code":{"outcome":"failed","reason":"timeout+assertion"},"draft":{"outcome":"failed","reason":"timeout"}}'
    )
    with database.write() as connection:
        for id, kind, request, metrics in sessions:
            connection.execute(
                sa.text(
                    "INSERT INTO rlvr_sessions (id, task_id, prompt, request, kind, name, owner, instance, status, "
                    "created, heartbeat, iterations, converged, metrics) VALUES (:id, 't', 'p', :request, :kind, '', "
                    "'', '', 'done', 5, 5, 1, false, :metrics)"
                ),
                {"id": id, "kind": kind, "request": request, "metrics": metrics},
            )
            connection.execute(
                sa.text(
                    "INSERT INTO rlvr_experiences (session_id, task_id, sample, iteration, prompt, generated_output, "
                    "feedback, scores, outcome, action, stop_reason, num_tokens, policy_version, policy_fingerprint, "
                    "step, priority, seconds, created) VALUES (:id, 't', 0, 1, 'p', 'o', '{}', :scores, 'failed', '', "
                    "'', 3, 0, '', :step, 1, 0.5, 6)"
                ),
                {"id": id, "scores": scores, "step": 0 if kind == "run" else None},
            )
        errors = "(experience_id, code, task_id) SELECT id, 'timeout', 't' FROM rlvr_experiences"
        connection.execute(sa.text(f"INSERT INTO rlvr_error_types {errors}"))
    database.close()
    with closing(open_store(store_url)) as store:
        found = {e.session_id: (e.kind, e.verified_by) for e in store.experiences()}
        assert found == {"train": ("train", "code+draft"), "evaluate": ("evaluate", ""), "run": ("run", "")}
        assert {(one.verified_by, one.verifier, one.answers) for one in store.count_errors(9)} == {
            ("code+draft", "code", 1), ("", "code", 1),
        }  # fmt: skip


def test_old_sessions_get_their_verdict_and_their_kind(store_url: str):
    """Of version 0003: the best answer of `good` passed, that of `evaluated` failed with a high confidence."""
    database = made_by(store_url, "0003")
    answers = [("good", 1, 0.5, "failed"), ("good", 2, 1.0, "passed"), ("evaluated", 1, 0.875, "failed")]
    with database.write() as connection:
        for id, learn, confidence in (("good", "true", 1.0), ("evaluated", "false", 0.875), ("none", "true", None)):
            connection.execute(
                sa.text(
                    "INSERT INTO rlvr_sessions (id, task_id, prompt, request, kind, name, owner, instance, status, "
                    "created, heartbeat, iterations, final_confidence, converged, metrics) VALUES (:id, 't', 'p', "
                    ":request, 'train', '', '', '', 'done', 5, 5, 1, :confidence, false, '{}')"
                ),
                {"id": id, "request": f'{{"learn":{learn}}}', "confidence": confidence},
            )
        for id, iteration, confidence, outcome in answers:
            connection.execute(
                sa.text(
                    "INSERT INTO rlvr_experiences (session_id, task_id, sample, iteration, prompt, generated_output, "
                    "feedback, scores, outcome, confidence, action, stop_reason, num_tokens, policy_version, "
                    "policy_fingerprint, priority, seconds, created) VALUES (:id, 't', 0, :iteration, 'p', 'o', '{}', "
                    "'{}', :outcome, :confidence, '', '', 3, 0, '', 1, 0.5, 6)"
                ),
                {"id": id, "iteration": iteration, "confidence": confidence, "outcome": outcome},
            )
    database.close()
    with closing(open_store(store_url)) as store:
        found = {s.id: (s.kind, s.outcome, s.is_solved) for s in store.sessions()}
    assert found == {
        "good": ("train", "passed", True),
        "evaluated": ("evaluate", "failed", False),
        "none": ("train", "", None),
    }


def test_a_database_of_a_newer_version_is_refused_and_left_alone(store_url: str):
    open_store(store_url).close()
    database = Database(store_url)
    with database.write() as connection:
        connection.execute(sa.text(f"UPDATE {VERSION_TABLE} SET version_num = '0999'"))
    before = shape(database)
    with pytest.raises(ValueError, match=r"written by a newer rlvr: its tables are of version 0999.*another database"):
        open_store(store_url)
    assert shape(database) == before
    database.close()


def test_a_table_of_our_name_that_is_not_ours_is_refused(store_url: str):
    database = Database(store_url)
    with database.write() as connection:
        connection.execute(sa.text("CREATE TABLE rlvr_states (x INTEGER)"))
        connection.execute(sa.text("CREATE TABLE others (x INTEGER)"))
    with pytest.raises(ValueError, match="has a table rlvr_states that rlvr did not make"):
        open_store(store_url)
    database.close()


@pytest.mark.parametrize("start", [pytest.param("empty", marks=pytest.mark.slow), "0001"])
def test_instances_that_start_at_once_all_come_up(store_url: str, start: str):
    if start != "empty":
        made_by(store_url, start).close()
    started = [
        subprocess.Popen([sys.executable, "-c", OPEN, store_url], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    for process in started:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, b"0\n"), err.decode()


@pytest.mark.parametrize("revision", KNOWN_VERSIONS)
def test_every_migration_goes_back_to_what_was_there(store_url: str, revision: str):
    """Each one is undone and done again: the tables are those of before, both times."""
    before = KNOWN_VERSIONS[KNOWN_VERSIONS.index(revision) - 1] if revision != KNOWN_VERSIONS[0] else "base"
    database = made_by(store_url, before) if before != "base" else Database(store_url)
    old = shape(database)
    with database.write() as connection:
        migrate(connection, revision)
    new = shape(database)
    with database.write() as connection:
        migrate(connection, before, back=True)
    back = shape(database)
    back.pop(VERSION_TABLE) if before == "base" else None
    assert back == old != new
    with database.write() as connection:
        migrate(connection, revision)
    assert shape(database) == new
    database.close()


def test_a_database_taken_back_keeps_its_rows_and_is_migrated_again(store_url: str):
    with closing(open_store(store_url)) as store:
        store.add_session(Session("s", "t", "p", created=5.0))
        [id] = store.add_experiences([Experience("s", "t", 1, "p", "o", reward=1.5)])
        store.rate(id, "ann", 0.0)
        assert store.experiences()[0].reward == pytest.approx(1.2)
    assert main([store_url, "0001"]).endswith(f"revision {HEAD} -> 0001")
    assert main([store_url, "0001"]).endswith("revision 0001 -> 0001")
    with pytest.raises(ValueError, match="is of revision 0001; expected 0002"):
        main([store_url, "0002"])
    with closing(open_store(store_url)) as store:
        session, [experience] = store.session("s"), store.experiences()
        assert session is not None and session.created == 5.0
        assert (experience.id, experience.reward, experience.ratings) == (id, 1.5, 0), "people's part is gone"


def test_the_command_takes_a_database_back(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'store.sqlite'}"
    open_store(url).close()
    words = [sys.executable, "-W", "error", "-m", "rlvr.store"]
    done = subprocess.run([*words, url, "0001"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith(f"revision {HEAD} -> 0001\n"), done.stderr
    wrong = subprocess.run([*words, url, "0007"], capture_output=True, text=True, timeout=120)
    assert wrong.returncode == 1 and wrong.stderr.startswith("rlvr.store: revision '0007' is unknown")


@pytest.mark.parametrize(
    ("arguments", "said"), [([], "a database, and a revision"), (["x.db", "0007"], "'0007'.*0001")]
)
def test_a_wrong_way_back_is_refused(arguments: list[str], said: str, tmp_path: Path):
    with pytest.raises(ValueError, match=said):
        main([str(tmp_path / argument) if argument == "x.db" else argument for argument in arguments])
