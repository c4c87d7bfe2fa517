"""The database schema of the store and its migrations.

Relations in the first schema of the connection's search path:

    holdfast_row       key, value: every row of the store, in byte order
    holdfast_commit    one row for each of the last commits: time, client, and for the last few thousand
                       the written keys (null: any key)
    holdfast_schema    the number of the last migration

A `bytea` index compares bytes as unsigned, which is the order of the store's keys.

A commit is one statement: `holdfast_apply` takes the lock, records the commit, writes the rows, notifies. The record
makes an optimistic commit safe: if another process committed first, the number is taken, the statement changes
nothing and returns null. `holdfast_enter` takes the lock for the rest of the transaction.

Migrations are numbered, applied in order under a separate lock, and never changed after a release. A process of an
older release continues after a migration, so a migration must keep every relation that it uses.
"""

from __future__ import annotations

from typing import LiteralString

from holdfast.errors import NotFound, SchemaMismatch
from holdfast.store.postgres.statements import PostgresConnection

_APPLY: LiteralString = """
    CREATE FUNCTION holdfast_apply(
        lock bigint, number bigint, at_ns bigint, client bytea, named boolean, put_keys bytea[],
        put_values bytea[], new_keys bytea[], new_values bytea[], gone bytea[], channel text, said text,
        until_us bigint, forget bigint
    ) RETURNS bigint LANGUAGE plpgsql AS $$
    DECLARE
        now_us bigint;
    BEGIN
        PERFORM pg_advisory_xact_lock(lock);
        now_us := (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
        -- Others were first, or it comes too late for the time it was made with. No error: it is usual.
        IF until_us > 0 AND now_us > until_us
           OR number - 1 <> coalesce((SELECT max(no) FROM holdfast_commit), 0) THEN
            RETURN NULL;
        END IF;
        INSERT INTO holdfast_commit VALUES
            (number, at_ns, client, CASE WHEN named THEN put_keys || new_keys || gone END);
        IF cardinality(put_keys) > 0 THEN
            INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(put_keys, put_values)
            ON CONFLICT (key) DO UPDATE SET value = excluded.value;
        END IF;
        IF cardinality(new_keys) > 0 THEN
            BEGIN
                -- It costs half of what it costs to look first, and they are new, most likely.
                INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(new_keys, new_values);
            EXCEPTION WHEN unique_violation THEN
                INSERT INTO holdfast_row (key, value) SELECT * FROM unnest(new_keys, new_values)
                ON CONFLICT (key) DO UPDATE SET value = excluded.value;
            END;
        END IF;
        IF cardinality(gone) > 0 THEN
            DELETE FROM holdfast_row WHERE key = ANY (gone);
        END IF;
        IF said <> '' THEN
            PERFORM pg_notify(channel, said);
        END IF;
        IF forget > 0 THEN
            DELETE FROM holdfast_commit WHERE no <= forget;
        END IF;
        RETURN now_us;
    END $$
"""

_V1: tuple[LiteralString, ...] = (
    """
    CREATE TABLE holdfast_row (key bytea PRIMARY KEY, value bytea NOT NULL)
    WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 20000,
          autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0,
          autovacuum_analyze_scale_factor = 0.2)
    """,
    # Values are small packed records: compression costs more than it saves.
    "ALTER TABLE holdfast_row ALTER COLUMN value SET STORAGE EXTERNAL",
    """
    CREATE TABLE holdfast_commit (
        no bigint PRIMARY KEY, at_ns bigint NOT NULL, client bytea NOT NULL, keys bytea[])
    WITH (autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 5000,
          autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_vacuum_cost_delay = 0)
    """,
    "ALTER TABLE holdfast_commit ALTER COLUMN keys SET STORAGE EXTERNAL",
    """
    CREATE FUNCTION holdfast_enter(lock bigint) RETURNS bigint LANGUAGE plpgsql AS $$
    BEGIN
        PERFORM pg_advisory_xact_lock(lock);
        RETURN (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;
    END $$
    """,
    _APPLY,
)

# A process that is 2,000 commits behind clears its local state and reads no keys (`local_state`). Older records need
# no keys: they serve only to resolve in-doubt commits. Under load the keys of 20,000 commits are twice as large as all
# rows of tasks that are retained for a minute.
_CLEAR_OLD_KEYS: LiteralString = """
        IF number % 1000 = 0 THEN
            UPDATE holdfast_commit SET keys = NULL
            WHERE no > number - 5000 AND no <= number - 2000 AND keys IS NOT NULL;
        END IF;
"""

# No query selects by these columns, so no plan needs their statistics. To collect those of `keys`, the server unpacks
# millions of keys: ANALYZE took a quarter of each minute under load. While it runs, its snapshot keeps VACUUM from
# removing dead rows of the other table.
_V2: tuple[LiteralString, ...] = (
    "ALTER TABLE holdfast_commit ALTER COLUMN keys SET STATISTICS 0",
    "ALTER TABLE holdfast_row ALTER COLUMN value SET STATISTICS 0",
    _APPLY.replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION").replace(
        "        IF forget > 0 THEN", _CLEAR_OLD_KEYS + "        IF forget > 0 THEN"
    ),
)

_SCHEMA_EXISTS = "SELECT EXISTS (SELECT FROM pg_class WHERE relname = 'holdfast_schema' AND pg_table_is_visible(oid))"

MIGRATIONS: tuple[tuple[LiteralString, ...], ...] = (_V1, _V2)
VERSION = len(MIGRATIONS)


def migrate(connection: PostgresConnection, *, bootstrap: bool) -> None:
    """Migrate the database to this release. Without `bootstrap` the store must exist."""
    version = _read_version(connection)
    if version == VERSION:
        return
    if version is None and not bootstrap:
        raise NotFound(what="store", why="no Holdfast store in this database, and bootstrap is off")
    if version is None or version < VERSION:
        with connection.transaction():
            # A concurrent migration waits here and then finds the work done.
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('holdfast schema'))")
            version = _read_version(connection) or 0
            if version == 0:
                connection.execute("CREATE TABLE holdfast_schema (version integer NOT NULL)")
                connection.execute("INSERT INTO holdfast_schema VALUES (0)")
            for statements in MIGRATIONS[version:]:
                for statement in statements:
                    connection.execute(statement)
            if version < VERSION:
                connection.execute("UPDATE holdfast_schema SET version = %s", (VERSION,))
    if version > VERSION:
        why = "a newer release created or migrated this store: upgrade holdfast"
        raise SchemaMismatch(found=version, expected=VERSION, why=why)


def _read_version(connection: PostgresConnection) -> int | None:
    # Not with to_regclass: a session caches a negative result, even after its transaction waited for the
    # transaction that created the table.
    row = connection.execute(_SCHEMA_EXISTS).fetchone()
    if row is None or not row[0]:
        return None
    row = connection.execute("SELECT version FROM holdfast_schema").fetchone()
    return None if row is None else int(row[0])
