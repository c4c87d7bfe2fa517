"""Names of stored operations: items of schema 0.2 run the operations of their former names, and no name disappears."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import queue
from holdfast.durable.queue import DeadLetter
from holdfast.errors import Invalid
from holdfast.store import api
from holdfast.store import open as open_store
from holdfast.store.api import Store, find_operation
from holdfast.store.operation_names import FORMER_NAMES, MODULES
from holdfast.world.intents import effect_queue
from tests import probe_operations
from tests.data import make_store_0_2 as former
from tests.store.former_store import CLOSED, KILLED, data_lines, unpack_store

WAIT_S = 60.0


@pytest.fixture(params=[CLOSED, KILLED])
def path(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return unpack_store(tmp_path, request.param, monkeypatch)


def dead_letter_of(store: Store, name: str) -> DeadLetter:
    """Claim the only item of a queue, let it die and return its dead letter."""
    [claim] = store.transact(queue.claim, name, "a worker", 10, 60 * S)
    store.transact(queue.dead_letter, claim.token, "declined", "no money")
    [letter] = store.read(queue.list_dead, name)
    return letter


def test_items_of_a_0_2_store_run_the_operations_of_their_former_names(path: Path) -> None:
    charges = effect_queue(former.UNIVERSE, former.EFFECT)
    with former.app.open(str(path), roles=("orchestrator", "world")) as rt:
        order = rt.world(former.Order, "order-1")
        assert (order.state().cents, order.state().outcome) == (600, "")
        assert dead_letter_of(rt.store, charges).on_dead == former.ON_DEAD_EFFECT
        assert dead_letter_of(rt.store, former.LETTERS).on_dead == former.ON_DEAD_LETTER
        # The operation of the effect puts an error receipt into the inbox of the world.
        received = order.wait_for(lambda state: state.outcome, timeout=WAIT_S)
        assert received.outcome == "error: declined"
        # The operation of the letter puts a notice into the queue of notices.
        notices = rt.store.read(queue.peek, f"{former.LETTERS}/notices", 10)
        assert [payload for _, payload in notices] == [b"declined"]


def test_effects_timers_and_tasks_of_a_0_2_store_are_completed(path: Path) -> None:
    with former.app.open(str(path)) as rt:
        order = rt.world(former.Order, "order-1")
        done = order.wait_for(lambda state: state.outcome and state.reminder, timeout=WAIT_S)
        assert (done.outcome, done.reminder) == ("booked 600", "pay")
        task: hf.TaskHandle[int] = rt.task("1-1")
        assert task.result(WAIT_S) == 42


def test_every_former_name_resolves() -> None:
    assert sorted(FORMER_NAMES) == data_lines("former_operation_names.txt")
    kept = set(data_lines("operation_names.txt"))
    for former_name, name in FORMER_NAMES.items():
        assert name in kept
        assert find_operation(former_name) is find_operation(name), former_name


def test_every_operation_keeps_its_name() -> None:
    """A name is stored: add new names to the list, and never remove or change one."""
    for modules in MODULES.values():
        for module in modules:
            importlib.import_module(module)
    own = [op for op in api._operations.values() if op.fn.__module__.startswith("holdfast.")]
    names = sorted({op.name for op in own})
    assert names == data_lines("operation_names.txt")
    for op in own:
        prefix = op.name.partition(".")[0]
        assert op.fn.__module__ in MODULES[prefix], op.name


@pytest.mark.parametrize(
    "name",
    [
        "os:system",
        "builtins:eval",
        "os.system",
        "holdfast.cli.main:main",
        "holdfast.store.lmdb.store:LmdbStore",
        "queue.no_such_operation",
        "queue.",
        ".claim",
        "",
    ],
)
def test_an_unknown_name_is_invalid(name: str) -> None:
    with pytest.raises(Invalid) as raised:
        find_operation(name)
    assert raised.value.code == "invalid"
    assert (raised.value.fields["what"], raised.value.fields["name"]) == ("operation", name)


# Runs in a new process, in which no other test has imported anything. `trap` is on its path.
IMPORTS_NOTHING = """
import sys
from holdfast.errors import Invalid
from holdfast.store.api import find_operation

before = set(sys.modules)
for name in ("trap:run", "trap.run", "os:system", "builtins:eval", "holdfast.cli.main:main", "trap.a:b.c"):
    try:
        find_operation(name)
    except Invalid:
        continue
    raise AssertionError(name)
assert set(sys.modules) == before, set(sys.modules) - before
print("nothing")
"""


def test_an_unknown_name_imports_nothing(tmp_path: Path) -> None:
    (tmp_path / "trap.py").write_text("raise SystemExit('imported')")
    ran = subprocess.run(
        [sys.executable, "-c", IMPORTS_NOTHING],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.strip() == "nothing", ran.stderr


@pytest.mark.usefixtures("probe_writers")
def test_writer_started_with_probes_knows_the_probe_operations(tmp_path: Path) -> None:
    with open_store(tmp_path / "store") as store:
        assert store.transact(probe_operations.now) > 0


def test_environment_cannot_add_operations_to_a_shipped_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executed = tmp_path / "executed"
    module = tmp_path / "probe_operations.py"
    probes = Path(probe_operations.__file__).read_text()
    module.write_text(f"{probes}\nopen({str(executed)!r}, 'w').close()\n")
    # The variable by which a former writer loaded a file.
    monkeypatch.setenv("HOLDFAST_TEST_OPERATIONS", str(module))
    with open_store(tmp_path / "store") as store, pytest.raises(Invalid) as raised:
        store.transact(probe_operations.now)
    assert raised.value.fields["name"] == "probe.now"
    assert not executed.exists()


def test_shipped_package_has_no_test_operations() -> None:
    assert "probe" not in MODULES
    assert not [name for name in FORMER_NAMES.values() if name.startswith("probe.")]
