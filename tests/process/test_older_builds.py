"""Processes of two schema versions on one store: an older process decides nothing by rules that it does not know.

The older build is a real one (`older_build`): it grants the tasks of a paused queue, and its handshake has no version.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast as hf
from holdfast import store as stores
from holdfast.errors import SchemaMismatch
from holdfast.store.schema import SCHEMA_VERSION
from holdfast.tasks import operations
from holdfast.tasks.task_list import list_tasks
from tests.postgres import fresh_url
from tests.process.conftest import LIMITS
from tests.process.older_build import OLDER, make_older_build, run_python, start_worker
from tests.process.refusal_checks import refused
from tests.process.watch import until, writer_of, writers_of
from tests.processes import Proc

pytestmark = pytest.mark.timeout(120)

MODULES = ("holdfast.store.lmdb.protocol", "holdfast.store.schema")
OPEN = "from holdfast import store\nwith store.open({url!r}) as opened: print('attached')"
STOP_OLDER = "processes of two versions use the store: stop those of the older one"


@hf.task
def add(a: int, b: int) -> int:
    return a + b


app = hf.App("shop", tasks=[add])


@pytest.fixture
def older(tmp_path: Path) -> Path:
    return make_older_build(tmp_path)


@pytest.fixture
def older_store(older: Path, home: Path) -> Iterator[Path]:
    """A store of the older build, with its running writer."""
    code = (
        f"from holdfast import store\nopened = store.open({str(home)!r})\nprint('ready')\ninput()"
    )
    line = [sys.executable, "-c", code]
    with Proc.spawn(line, env={"PYTHONPATH": str(older)}, fresh=True):
        yield home


@pytest.mark.spec("DESIGN", "4", "a client of an older schema version is refused by a newer writer")
def test_client_of_an_older_build_is_refused_by_a_newer_writer(older: Path, home: Path) -> None:
    with stores.open(home, limits=LIMITS) as store:
        proc = run_python(older, OPEN.format(url=str(home)))
        assert "attached" not in proc.lines
        [line] = [line for line in proc.errors if "schema_mismatch" in line]
        assert f"found={list(SCHEMA_VERSION)}" in line
        assert STOP_OLDER in line
        store.transact(operations.set_queue_paused, "shop", "default", True)


@pytest.mark.spec("DESIGN", "4", "a client of a newer schema version refuses an older writer")
def test_client_refuses_the_writer_of_an_older_build(older_store: Path) -> None:
    with refused(SchemaMismatch, says=STOP_OLDER):
        stores.open(older_store, limits=LIMITS)
    assert writers_of(older_store)


@pytest.mark.spec(
    "DESIGN", "6", "a worker that does not know the pause gets no task of a paused queue"
)
@pytest.mark.deep
@pytest.mark.parametrize("kind", ["lmdb", "postgresql"])
def test_worker_of_an_older_build_gets_no_task_of_a_paused_queue(
    older: Path, home: Path, kind: str
) -> None:
    """It runs while a process of this version opens the store: a rolling upgrade."""
    url = str(home) if kind == "lmdb" else fresh_url(empty=True)
    with start_worker(older, url) as worker:
        run_python(
            older,
            f"import mixed_app as m\nm.app.open({url!r}, roles=()).submit(m.add, 1, 2).result(60)",
        )
        if kind == "lmdb":
            # A newer process needs a writer of its version. The worker attaches to it when it continues.
            worker.stop()
            writer_of(home).kill()
        with app.open(url, roles=()) as rt:
            rt.store.transact(operations.set_queue_paused, "shop", "default", True)
            task = rt.submit(add, 3, 4)
            if kind == "lmdb":
                worker.cont()
            until(
                lambda: any("schema_mismatch" in line for line in worker.errors), "the refusal", 60
            )
            [row] = rt.store.read(list_tasks, "shop", "ready").rows
            assert (str(row.id), row.status.attempt) == (task.id, 0)
            rt.store.transact(operations.set_queue_paused, "shop", "default", False)
            with app.open(url, roles=("task",)):
                assert task.result(60) == 7


def test_the_older_build_differs_by_its_version(older: Path) -> None:
    code = "from holdfast.store import schema\nprint(schema.SCHEMA_VERSION)"
    assert run_python(older, code).lines == [str(OLDER)]
    assert OLDER < SCHEMA_VERSION
