"""Databases on servers that cannot be used: what is said names the database without its password, and what to do."""

from __future__ import annotations

import pathlib
import socket

import pytest

import postgres_server
from det_command import run_det
from determined import errors, tracking


def said_of(location: str | pathlib.Path) -> str:
    with pytest.raises(errors.DatabaseException) as raised:
        tracking.Slots(location)
    with pytest.raises(errors.DatabaseException):
        tracking.TrackingReader(location).experiments()
    said = str(raised.value)
    assert "secret" not in said
    assert "\n" not in said
    return said


def execute(url: str, *statements: str) -> None:
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (("tests@", "nobody:secret@"), ['role "nobody" does not exist', "createuser"]),
        (("/test_", "/other_"), ["does not exist", "createdb"]),
        (("host=", "host=/nowhere"), ["cannot be used", "No such file", "start the server"]),
        (("postgresql", "mysql"), ["of a kind that cannot keep the record", "postgresql://user@host/name"]),
        (
            ("tests@", "tests:secret@localhost:port"),
            ["is not the location of a database", "postgresql://user@host/name"],
        ),
    ],
)
def test_a_location_that_leads_nowhere_is_named_with_what_to_do(
    change: tuple[str, str], parts: list[str], postgresql_database: str
) -> None:
    said = said_of(postgresql_database.replace(*change, 1))
    assert not [part for part in parts if part not in said], said


def test_a_port_where_nobody_listens_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    said = said_of(f"postgresql://me:secret@127.0.0.1:{port}/name")
    assert f"me:***@127.0.0.1:{port}/name" in said
    assert "refused" in said


def test_a_server_that_says_nothing_is_given_up_when_the_connection_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        said = said_of(f"postgresql://me:secret@127.0.0.1:{silent.getsockname()[1]}/name?connect_timeout=2")
    assert "timeout" in said


@pytest.mark.process
def test_a_wrong_password_is_refused_and_not_shown() -> None:
    with postgres_server.server() as server:
        rules = server.folder / "data" / "pg_hba.conf"
        rules.write_text("local all careful scram-sha-256\nlocal all all trust\n")
        execute(server.url, "CREATE ROLE careful LOGIN PASSWORD 'right'", "SELECT pg_reload_conf()")
        careful = server.url.replace("tests@", "careful:{}@")
        said = said_of(careful.format("secret"))
        assert "password authentication failed" in said
        assert ".pgpass" in said
        execute(server.url, "GRANT CREATE ON SCHEMA public TO careful")
        tracking.Slots(careful.format("right")).close()


def test_a_role_that_may_not_create_tables_is_told_so(postgresql_database: str) -> None:
    execute(postgresql_database, "CREATE ROLE guest LOGIN", "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        with pytest.raises(errors.DatabaseException, match=r"permission denied.*GRANT CREATE"):
            tracking.Slots(postgresql_database.replace("tests@", "guest@"))
    finally:
        execute(postgresql_database, "DROP ROLE guest")


def test_the_database_of_another_program_is_left_alone(postgresql_database: str) -> None:
    execute(postgresql_database, "CREATE TABLE invoices (id INT)")
    assert "a database of another program (it has the tables invoices)" in said_of(postgresql_database)


def test_a_database_of_a_newer_version_is_refused(postgresql_database: str) -> None:
    tracking.Slots(postgresql_database).close()
    execute(postgresql_database, "UPDATE schema_version SET version = 99")
    assert "schema version 99" in said_of(postgresql_database)


def test_a_database_that_cannot_hold_all_text_is_refused(postgresql_database: str) -> None:
    name = f"latin_{postgresql_database.split('/')[3].partition('?')[0]}"
    execute(postgresql_database, f"CREATE DATABASE {name} ENCODING 'LATIN1' TEMPLATE template0")
    try:
        with pytest.raises(errors.DatabaseException, match=r"encoding LATIN1.*--encoding=UTF8"):
            tracking.Slots(postgresql_database.replace("/test_", "/latin_test_"))
    finally:
        execute(postgresql_database, f"DROP DATABASE {name}")


def test_det_works_on_a_server_and_leaves_its_backup_to_it(
    postgresql_database: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DET_DATABASE", postgresql_database.replace("tests@", "tests:secret@"))
    assert run_det("experiment", "list").exit_code == 0
    assert run_det("doctor").exit_code == 0
    refused = run_det("backup", tmp_path / "copy.db")
    assert refused.exit_code == 1
    assert "pg_dump" in refused.stderr
    assert "secret" not in refused.output
