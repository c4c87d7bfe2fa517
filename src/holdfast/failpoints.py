"""Failpoints: named places in the product where a test injects an error, a delay or an observation.

    if failpoints.armed:
        failpoints.hit("postgres.send", connection)

    with failpoints.on("postgres.send", raises=ConnectionError("cut"), times=1) as point:
        ...
    assert point.hits == 1

- `POINTS` lists every name. A tidy rule compares it with the product and with the tests.
- Only a call of `on` in the same process arms a point. No option, environment variable, message or stored row does.
  The product never calls `on`.
- A point adds an error or a call at its place. It never replaces a result, so the product code around it always runs.
- While no point is armed, a place costs one attribute load and one branch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Name -> what the product does there. In parentheses: the arguments of the place.
POINTS: dict[str, str] = {
    "budget.reserve": "the writer starts to reserve the costs of an effect (world)",
    "codec.convert": "a value is about to be converted to an annotated type (type)",
    "cron.find_zone": "the rule of a recurring timer or schedule is about to look up its time zone (zone)",
    "dispatch.log_transition": "a transition of a dispatch is about to be committed (request id, transition)",
    "dispatch.prompt_typed": "the prompt of a dispatch was typed, its outcome is not logged (request)",
    "dispatch.transition_logged": "a transition of a dispatch was committed (request id, transition)",
    "dispatcher.advance_cursor": "the leader was notified, the cursor is about to be committed (logged events)",
    "flows.committed": "a worker committed records of a flow, no further step has begun (commit)",
    "flows.read_listed": "a list of flows is about to read a flow of its index (seq)",
    "http.handle": "the handler of an HTTP request is about to run (request)",
    "http.long_poll.read": "the long poll listener is about to read the store",
    "http.long_poll.subscribe": "a long poll is about to replace the subscription (topics)",
    "http.long_poll.wait": "the long poll listener is about to wait for a notification",
    "jobs.page": "a page of a job was selected and is about to be applied (job)",
    "ledger.cancel_logged": "the ledger service logged a cancellation, the record of the run is unchanged (run id)",
    "ledger.load_run": "a reader is about to load the scheduler of a run from its log (run id)",
    "lmdb.check_pages": "an open is about to check the whole LMDB file (page reader)",
    "lmdb.connect": "a client is about to connect to or start a writer (connection)",
    "lmdb.lock_reader": "a process is about to lock a byte of the reader table (file descriptor)",
    "lmdb.poll": "the reading thread is about to poll its connection (connection)",
    "lmdb.reader_exists": "a waiting thread found a reader and is not yet listed as a sleeper (client)",
    "lmdb.resubscribe": "a reconnected client is about to send its topics to the new writer (client)",
    "lmdb.send": "a client is about to send a frame to the writer (connection)",
    "memory.commit": "the memory backend is about to commit (transaction)",
    "memory.rows_put": "the memory backend wrote rows of an uncommitted transaction (transaction)",
    "postgres.fetch": "a statement is about to run on a pooled read connection (pool, statement)",
    "postgres.part_sent": "an earlier part of a large commit was sent (connection, rows)",
    "postgres.presence_locked": "a session took the shared presence lock (connection)",
    "postgres.refresh": "a reader is about to apply remote commits (coalesced reads)",
    "postgres.row_read": "the committer read a missing row and has not cached it (key)",
    "postgres.send": "the commit statement is about to be sent (connection, values, more statements)",
    "postgres.sent": "the server has answered the commit statement (connection)",
    "postgres.snapshot": "a function is about to run on a server snapshot (store)",
    "redo_log.append": "a commit is about to be logged (log)",
    "redo_log.base_pinned": "a recovery holds the snapshot of its base (snapshot)",
    "redo_log.begin_epoch": "a checkpoint is about to write the header of its epoch (log)",
    "redo_log.checkpoint_started": "a checkpoint gave its sync job to the sync thread (log)",
    "redo_log.checkpoint_wait": "a thread is about to wait for the running checkpoint (log)",
    "redo_log.commit_replayed": "a recovery replayed a commit (commit number)",
    "redo_log.header_read": "a recovery read the header of one log file (path of the store)",
    "redo_log.meta_restored": "a recovery restored the meta pages of the base (path of the store)",
    "redo_log.open": "a log was created in memory and has written no header (log)",
    "redo_log.read_records": "a recovery is about to read the records of both logs (path of the store, base)",
    "redo_log.replay": "a recovery is about to replay the log (recovery)",
    "redo_log.replay_commit": "a recovery is about to replay a commit (commit number)",
    "redo_log.replayed": "a recovery replayed the log and synced the file (recovery)",
    "redo_log.restore_meta": "a recovery is about to restore the meta pages of the base (path of the store)",
    "runner.read_payloads": "a runner claimed items and is about to read their large payloads (claims)",
    "runner.ticked": "a tick of a runner loop has ended (runner)",
    "runner.wait": "an idle loop is about to wait for its store subscription",
    "sim.commit": "the simulator is about to choose the fault of a commit (commit number, loss-prone)",
    "spark.adopt_page": "the ledger service is about to adopt the outcomes of a page (page)",
    "spark.build_pull_job": "the driver is about to build a pull job (tasks)",
    "spark.check_output": "an executor is about to check that it can write the output (part assignment)",
    "spool.read": "an object of the spool is about to be read (spool object)",
    "task_worker.report": "a task worker is about to commit reports alone (reports)",
    "task_worker.report_and_lease": "a task worker is about to commit reports and lease requests (worker)",
    "tasks.list_scan": "a task list is about to scan its index (state filter)",
    "tmux.press_key": "a key is about to be pressed in a pane (tmux client, key)",
    "world.ask_wait": "the caller of `ask` is about to wait for the reply (world handle)",
    "world.inboxes_read": "a world worker read the inboxes of its worlds (worker)",
    "world.submit_cycles": "a world worker is about to submit prepared cycles (worker)",
}

# Whether any point is armed. A place checks it before it calls `hit`.
armed = False

_points: dict[str, Failpoint] = {}
_lock = threading.Lock()


class Failpoint:
    """An armed point. `hits` counts how often the product reached it while it was armed."""

    def __init__(
        self,
        name: str,
        raises: BaseException | type[BaseException] | None,
        calls: Callable[..., object] | None,
        times: int | None,
    ) -> None:
        self.name = name
        self.hits = 0
        self._raises = raises
        self._calls = calls
        self._times = times

    def _hit(self, args: tuple[object, ...]) -> None:
        with _lock:
            self.hits += 1
            is_over = self._times is not None and self.hits > self._times
        if is_over:
            return
        # Outside the lock: the function may block, or reach a point itself.
        if self._calls is not None:
            self._calls(*args)
        if self._raises is not None:
            raise self._raises


@contextmanager
def on(
    name: str,
    *,
    raises: BaseException | type[BaseException] | None = None,
    calls: Callable[..., object] | None = None,
    times: int | None = None,
) -> Iterator[Failpoint]:
    """Arm a point in the block, in all threads of this process.

    The point calls the function with the arguments of its place, then raises the error. After `times` hits it does
    neither. Without both it only counts.
    """
    if name not in POINTS:
        raise ValueError(f"unknown failpoint: {name}")
    point = Failpoint(name, raises, calls, times)
    _arm(point)
    try:
        yield point
    finally:
        _disarm(name)


def hit(name: str, *args: object) -> None:
    """Run the action of a point if it is armed. Only for product code that has checked `armed`."""
    point = _points.get(name)
    if point is not None:
        point._hit(args)


def armed_names() -> list[str]:
    """The names of the armed points."""
    return sorted(_points)


def disarm_all() -> None:
    """Disarm every point, also a point whose block has not ended."""
    for name in armed_names():
        _disarm(name)


def _arm(point: Failpoint) -> None:
    global armed
    with _lock:
        if point.name in _points:
            raise ValueError(f"the failpoint is armed already: {point.name}")
        _points[point.name] = point
        armed = True


def _disarm(name: str) -> None:
    global armed
    with _lock:
        _points.pop(name, None)
        armed = bool(_points)
