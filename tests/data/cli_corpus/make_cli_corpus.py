"""Make `store.tar.gz`, `attempts` and `corpus.json`: a store, and the JSON output of every command over it.

Run it with the code of commit 6fd48d3, the last one before the rename, not with the code beside it:

    git worktree add ../former 6fd48d3
    cd ../former && make setup && .venv/bin/python <this file>

It fills a store, waits until its leases have expired, and runs all commands twice over two copies of the store. The
test `tests/cli/test_json_corpus.py` runs the same commands with the present code over a third copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), os.getcwd()]


def _load_app() -> ModuleType:
    """Load the application with a relative file name, because the store keeps the traceback of a failed event."""
    module = ModuleType("corpus_app")
    sys.modules["corpus_app"] = module
    source = (HERE / "corpus_app.py").read_text("utf-8")
    exec(compile(source, "corpus_app.py", "exec"), module.__dict__)
    return module


corpus_app = _load_app()

from corpus_run import merge_runs, run_command  # noqa: E402

UNIVERSE = "grid"
LETTERS = "letters"
LEASES_EXPIRED_S = 70
STORE_FILES = ("data.mdb", "redo.0", "redo.1")


def fill(path: Path) -> dict[str, str]:
    """Fill a store, and return the ids that the commands name. The process must exit without a close."""
    roles = ("orchestrator", "world", "adapter", "timer", "task")
    rt = corpus_app.app.open(
        str(path), roles=roles, worker="w1", kinds=["card.charge"], queues=["default"]
    )
    first = rt.world(corpus_app.Meter, "first")
    for value in (1, 2, 3):
        first.send(corpus_app.ReadingTaken(value))
    first.send(corpus_app.InvoiceWanted(500))
    first.send(corpus_app.InvoiceWanted(-5))
    first.wait_for(lambda state: state.invoices == 2)
    second = rt.world(corpus_app.Meter, "second")
    second.send(corpus_app.ReadingTaken(7))
    second.send(corpus_app.ReadingRefused(8))
    second.send(corpus_app.ReadingTaken(9))
    second.wait_for(lambda state: state.total == 16)
    for name in ("paused", "deleted"):
        rt.world(corpus_app.Meter, name).send(corpus_app.ReadingTaken(1))
        rt.world(corpus_app.Meter, name).wait_for(lambda state: state.total == 1)
    rt.world(corpus_app.Meter, "paused").pause()
    rt.world(corpus_app.Meter, "deleted").delete()
    done = rt.submit(corpus_app.add, 20, right=22)
    failed = rt.submit(corpus_app.divide.options(key="by-zero"), 1, 0)
    assert done.result(timeout=30) == 42
    while failed.status().state.lower() not in ("failed", "dead"):
        time.sleep(0.05)
    waiting = rt.submit(corpus_app.report.options(priority=3), "weekly")
    keyed = rt.submit(corpus_app.report.options(limit_key="late"), "yearly")
    blocked = rt.submit(corpus_app.report.options(after=[waiting]), "summary")
    cancelled = rt.submit(corpus_app.report, "cancelled")
    cancelled.cancel()
    _fill_with_former_internals(rt)
    _open.append(rt)
    return {
        "done": done.id,
        "failed": failed.id,
        "waiting": waiting.id,
        "keyed": keyed.id,
        "blocked": blocked.id,
        "cancelled": cancelled.id,
        "world": first.record().world_id,
        "dead_intent": _first_intent(path, "card.charge", "dead"),
        "ready_intent": _first_intent(path, "letter.print", "ready"),
        "writer": str(rt.store._link.welcome.pid),
    }


def _first_intent(path: Path, kind: str, state: str) -> str:
    argv = ["effects", "list", kind, "--state", state, "--store", str(path), "--json"]
    intent: str = run_command(argv, {})["document"]["intents"][0]["intent"]
    return intent


def _fill_with_former_internals(rt: Any) -> None:
    """Rows that no public name makes: dispatches, dead letters of a plain queue, and stage runs."""
    from holdfast.authority.dispatch_log import DispatchLog
    from holdfast.authority.outcome import DispatchOutcomeReason
    from holdfast.durable import queue
    from holdfast.ledger.classes import ErrorClass
    from tests.cli.stage_runs import StageRun

    log = DispatchLog(rt.store, UNIVERSE)
    log.request("r1", "work:0.1", {"world": "first"})
    log.tried("r1")
    log.concluded("r1", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    log.request("r2", "leader")
    log.concluded("r2", DispatchOutcomeReason.LEADER_MISSING, retries_left=0)
    log.request("r3", "gone")
    log.concluded("r3", DispatchOutcomeReason.TARGET_MISSING, retries_left=2)
    log.request("r4", "work:0.2")
    log.tried("r4")
    log.concluded("r4", DispatchOutcomeReason.CONFIRMED, retries_left=0)
    rt.store.transact(queue.put_many, LETTERS, [b"one", b"two \xff", b"three"])
    for claim in rt.store.transact(queue.claim, LETTERS, "pool", 2, 10**9):
        rt.store.transact(queue.bury, claim, "refused", f"letter {claim.seq} is unreadable")
    failing = {3: (ErrorClass.INPUT, "empty text"), 14: (ErrorClass.SCHEMA, "no label")}
    StageRun(rt.store, "labels", 40, failing).finish()
    begun = StageRun(rt.store, "prices", 30)
    begun.work(12)
    begun.commit()
    begun.tell()
    begun.leave()


def record_attempts(path: Path) -> None:
    """Record three successful attempts for `holdfast replay`."""
    from holdfast import store as stores
    from holdfast.durable import queue
    from holdfast.runner import Recorder, Runner

    path.unlink(missing_ok=True)
    with stores.open("memory:") as store, Recorder(path) as recorder:
        store.transact(queue.put_many, LETTERS, [b"a", b"b", b"c"])
        runner = Runner(
            store, LETTERS, corpus_app.accept, worker="w", replay=recorder, bootstrap=True
        )
        runner.boot()
        assert runner.tick().done == 3


def commands(ids: dict[str, str]) -> list[list[str]]:
    """All commands in order. The last ones change rows that earlier ones show."""
    on_store = [
        *_read_commands(ids),
        *_changing_commands(ids),
        "backup {tmp}/backup",
        "verify",
        "store rebuild --universe grid --dry-run",
        "store rebuild --universe grid",
        "store restored",
    ]
    others = [
        "restore {tmp}/backup --store {tmp}/restored",
        "store info --store {tmp}/restored",
        "store copy --keep {store} {tmp}/copied",
        "store info --store {tmp}/copied",
        "store copy {tmp}/copied {tmp}/moved",
        "store info --store {tmp}/copied",
        "store info --store {tmp}/missing",
        "verify --store {damaged}",
        "store rebuild --universe grid --dry-run --store {damaged}",
        "store rebuild --universe grid --store {damaged}",
        "verify --store {damaged}",
        "replay {data}/attempts --handler corpus_app:accept",
        "replay {data}/attempts --handler corpus_app:refuse",
        "replay {data}/attempts --handler corpus_app:missing",
        "tasks list --state unknown --store {store}",
    ]
    return [
        *([*line.split(), "--store", "{store}", "--json"] for line in on_store),
        *([*line.split(), "--json"] for line in others),
    ]


def _read_commands(ids: dict[str, str]) -> list[str]:
    states = ("waiting", "ready", "delayed", "blocked", "leased", "completed", "failed", "dead")
    return [
        "worlds list",
        "worlds list Meter --limit 1",
        "worlds list Meter --after first",
        "worlds list Unknown",
        *(f"worlds show Meter/{name}" for name in ("first", "second", "paused", "deleted", "none")),
        f"worlds show {ids['world']}",
        "worlds state Meter/first --app corpus_app:app",
        "worlds state Meter/first --app corpus_app:app --at 2",
        "worlds state Meter/first --app corpus_app:app --at 99",
        "worlds journal Meter/first",
        "worlds journal Meter/second --app corpus_app:app",
        "worlds journal Meter/first --from 2 --limit 1",
        "workers",
        "workers list --universe grid",
        "authority show --universe grid",
        "authority show --universe none",
        "ready",
        "ready --universe grid",
        "verify",
        "verify --app corpus_app:app --jobs 1",
        "verify --app changed_app:app --jobs 1",
        "store info",
        "tasks list",
        *(f"tasks list --state {state}" for state in states),
        "tasks list --queue reports --limit 1",
        "tasks list --name add",
        *(f"tasks show {ids[name]}" for name in ("done", "failed", "waiting", "keyed")),
        *(f"tasks show {ids[name]}" for name in ("blocked", "cancelled")),
        "tasks show task-unknown",
        "tasks limit reports",
        "effects list",
        "effects list card.charge --state dead",
        "effects list letter.print",
        "effects list unknown.kind",
        f"effects show {ids['dead_intent']}",
        f"effects show {ids['ready_intent']}",
        "effects show 00ff",
        "timers list",
        "timers list --limit 1",
        "timers show Meter/first notice",
        "timers show Meter/first daily",
        "timers show Meter/first unknown",
        "dispatch list",
        *(f"dispatch list --status {s}" for s in ("pending", "notified", "delivered", "failed")),
        "dispatch show r1",
        "dispatch show r2",
        "dispatch show unknown",
        "dispatch leader",
        "runs list",
        "runs show labels",
        "runs show prices",
        "runs show unknown",
        "runs failed labels",
        "runs failed labels --class input",
        "dead list",
        f"dead list {LETTERS}",
        f"dead list {LETTERS} --code refused --limit 1",
        f"dead show {LETTERS} 1",
        f"dead show {LETTERS} 2",
        f"dead show {LETTERS} 99",
    ]


def _changing_commands(ids: dict[str, str]) -> list[str]:
    return [
        "workers drain w1",
        "workers",
        "workers undrain w1",
        "workers drain unknown",
        "authority mark-stale --universe grid",
        "authority force-release --universe grid --reason test",
        "authority show --universe grid",
        "tasks cancel --all --queue reports --dry-run",
        f"tasks cancel {ids['waiting']} --reason late",
        f"tasks cancel {ids['waiting']}",
        f"tasks show {ids['waiting']}",
        "tasks redrive --all --dry-run",
        f"tasks redrive {ids['failed']}",
        f"tasks redrive {ids['done']}",
        "tasks limit reports --concurrency 3 --per-key 1",
        "tasks limit reports",
        "tasks list",
        "effects redrive card.charge --all --dry-run",
        "effects redrive card.charge --all",
        "effects list card.charge",
        "timers redrive --all --dry-run",
        "timers redrive --all",
        "dispatch deliver r1",
        "dispatch deliver r2",
        "dispatch fail r4 --reason no",
        "dispatch leader work:0.9 --cli tmux",
        "dispatch leader",
        "dispatch rewind 1",
        "dispatch leader --forget",
        "dispatch rewind 0",
        "dispatch rewind 99999",
        "runs retry labels",
        "runs cancel prices",
        "runs show prices",
        "runs prune --keep 1 --dry-run",
        "runs prune --keep 1",
        f"dead redrive {LETTERS} 1 --dry-run",
        f"dead redrive {LETTERS} 1",
        f"dead drop {LETTERS} 2",
        f"dead drop {LETTERS} 99",
        "dead list",
        "worlds fork Meter/first copy --at 2",
        "worlds fork Meter/first copy --at 7",
        "worlds fork Meter/first copy2 --effects drop --timers keep --app corpus_app:app",
        "worlds show Meter/copy",
        "worlds pause Meter/first",
        "worlds pause Meter/first",
        "worlds show Meter/first",
        "worlds resume Meter/first",
        "worlds delete Meter/copy",
        "worlds purge Meter/second",
        "worlds purge Meter/paused --force",
        "worlds list",
    ]


def run_all(archive: Path, ids: dict[str, str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        places = {name: Path(made, name) for name in ("store", "damaged", "tmp")} | {"data": HERE}
        with tarfile.open(archive) as tar:
            tar.extractall(made, filter="data")
        places["tmp"].mkdir()
        return [run_command(argv, places) for argv in commands(ids)]


def make_store(archive: Path) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as made:
        store, told = Path(made, "store"), Path(made, "ids.json")
        # A child process exits without a close, so its leases and its worker row remain.
        child = os.fork()
        if not child:
            ids = fill(store)
            told.write_text(json.dumps(ids))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ids = json.loads(told.read_text())
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(ids.pop("writer")), signal.SIGTERM)
        time.sleep(2)  # the writer closes its log
        # The last commit is later than every lease, so that all leases have expired in store time on any machine.
        time.sleep(LEASES_EXPIRED_S)
        change_rows(store, _put_letter)
        damaged = Path(made, "damaged")
        damaged.mkdir(mode=0o700)
        for file in STORE_FILES:
            shutil.copy(store / file, damaged / file)
        change_rows(damaged, _damage)
        with tarfile.open(archive, "w:gz") as tar:
            for path in (store, damaged):
                for file in STORE_FILES:
                    tar.add(path / file, f"{path.name}/{file}", filter=_anonymous)
    return ids


def change_rows(path: Path, change: Callable[[Any], None]) -> None:
    """Commit one transaction, and end the writer."""
    from holdfast import store as stores

    with stores.open(path) as store:
        store.transact(change)
        writer = store._link.welcome.pid
    os.kill(writer, signal.SIGTERM)
    time.sleep(2)  # the writer closes its log


def _put_letter(txn: Any) -> None:
    from holdfast.durable import queue

    queue.put(txn, LETTERS, b"four")


def _damage(txn: Any) -> None:
    """Change two derived rows, so that `verify` and `store rebuild` find differences."""
    from holdfast import codec
    from holdfast.durable import item
    from holdfast.store import schema
    from holdfast.store.schema import Space

    txn.put((int(Space.WORLD), UNIVERSE, "c", "active"), schema.int_bytes(9))
    txn.put((int(Space.QUEUE), LETTERS, "n"), codec.pack(item.Counts(2, 0, 0, 7, 0)))


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mode = 0o600
    return info


_open: list[Any] = []


def main() -> None:
    archive = HERE / "store.tar.gz"
    os.chdir(HERE)
    ids = make_store(archive)
    record_attempts(HERE / "attempts")
    first = run_all(archive, ids)
    time.sleep(5)
    records = [merge_runs(*pair) for pair in zip(first, run_all(archive, ids), strict=True)]
    (HERE / "corpus.json").write_text(
        json.dumps(records, indent=1, ensure_ascii=False) + "\n", "utf-8"
    )
    shutil.rmtree(HERE / "__pycache__", ignore_errors=True)


if __name__ == "__main__":
    main()
