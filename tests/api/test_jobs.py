"""Jobs: actions on a selection, in bounded commits, with progress, pace and cancel."""

from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from msgspec.structs import replace

from holdfast import failpoints
from holdfast import store as stores
from holdfast.clock import SYSTEM, S, SimClock
from holdfast.config import DEDUPE_RETENTION_NS
from holdfast.durable import dedupe
from holdfast.durable import lease as leases
from holdfast.durable.lease import Lease
from holdfast.errors import (
    CommitUnknown,
    Fenced,
    HoldfastError,
    IllegalTransition,
    Invalid,
    NotFound,
    StoreFull,
    WriterLost,
)
from holdfast.ops.jobs import model, steps
from holdfast.ops.jobs.model import TooManyJobs
from holdfast.ops.jobs.runner import KEY_EXPIRY_NS, KEYS_PER_COMMIT, RENEW_NS, JobRunner
from holdfast.ops.jobs.states import JOB_TRANSITIONS, JobEvent, JobState
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.world.redrive import failed_events_queue
from tests.api.rig import ACTOR, TICKS_MAX, ApiRig
from tests.process.watch import until

MODULES = (
    "holdfast.ops.api.jobs",
    "holdfast.ops.jobs.actions",
    "holdfast.ops.jobs.model",
    "holdfast.ops.jobs.runner",
    "holdfast.ops.jobs.states",
    "holdfast.ops.jobs.steps",
)
READY = {"state": "ready"}


def submit(rig: ApiRig, count: int, queue: str = "default") -> list[str]:
    tasks = [{"name": "print", "options": {"queue": queue}} for _ in range(count)]
    return list(rig.post("/v1/tasks", {"tasks": tasks})["ids"])


def create(rig: ApiRig, action: str = "tasks.cancel", **fields: Any) -> Any:
    return rig.post("/v1/jobs", {"action": action, "selection": READY, **fields})


def states(rig: ApiRig, ids: list[str]) -> list[str]:
    return [rig.get(f"/v1/tasks/{id}")["state"] for id in ids]


class Hand:
    """Runs the pages of a job one by one."""

    def __init__(self, rig: ApiRig, id: str, holder: str = "hand") -> None:
        self.rig, self.number = rig, int(id)
        self.lease: Lease = rig.store.transact(
            leases.acquire, self.job().resource, holder, holder, 60 * S
        )

    def job(self) -> model.Job:
        return self.rig.store.read(model.get, self.rig.universe, self.number)

    def step(self) -> int:
        return steps.step(self.rig.store, self.job(), self.lease)

    def finish(self) -> Any:
        for _ in range(TICKS_MAX):
            if not self.job().row.is_running:
                return self.rig.get(f"/v1/jobs/{self.number}")
            self.step()
        raise AssertionError("the job does not end")


# -- requests --------------------------------------------------------------------------------------


def test_created_job_is_shown(rig: ApiRig) -> None:
    made = create(rig, rate_per_s=50, limit=3)
    assert (made["id"], made["state"], made["actor"]) == ("1", "running", ACTOR)
    assert (made["rate_per_s"], made["limit"], made["processed"]) == (50, 3, 0)
    assert rig.get("/v1/jobs/1") == made
    [entry] = rig.audit_entries()
    assert (entry.action, entry.detail) == ("create_job", "tasks.cancel state=ready")


def test_repeated_creation_is_the_same_job(rig: ApiRig) -> None:
    body = {"action": "tasks.cancel", "selection": READY}
    first = rig.post("/v1/jobs", body, key="k")
    assert rig.post("/v1/jobs", body, key="k") == first
    assert [job["id"] for job in rig.pages("/v1/jobs")] == ["1"]


@pytest.mark.parametrize(
    "fields",
    [
        {"action": "tasks.explode"},
        {"selection": {}},
        {"selection": {"state": "failed"}},
        {"selection": {**READY, "name": "print"}},
        {"action": "dead.drop", "selection": {"queue": "elsewhere/failed-events"}},
        {"action": "worlds.pause", "selection": {}},
        {"rate_per_s": 0},
        {"rate_per_s": 1e9},
        {"rate_per_s": 1e-310},
        {"rate_per_s": model.RATE_PER_S_MIN / 2},
        {"rate_per_s": float("inf")},
        {"rate_per_s": float("nan")},
        {"limit": -1},
        {"more": 1},
    ],
)
def test_bad_job_is_refused(rig: ApiRig, fields: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        create(rig, **fields)
    assert rig.pages("/v1/jobs") == []
    assert rig.audit_entries() == []


def test_jobs_are_listed_newest_first_in_pages(rig: ApiRig) -> None:
    for _ in range(3):
        create(rig)
    for limit in (1, 2, 3):
        assert [job["id"] for job in rig.pages("/v1/jobs", limit=limit)] == ["3", "2", "1"]


def fill(rig: ApiRig, count: int, ends: bool) -> None:
    """Create jobs in one commit."""
    row = model.JobRow("tasks.cancel", READY, ACTOR, 1)

    def create_all(txn: Txn) -> None:
        for _ in range(count):
            job = model.create(txn, rig.universe, row)
            if ends:
                model.cancel(txn, rig.universe, job.number)

    rig.store.transact(create_all)


def test_running_jobs_are_bounded(rig: ApiRig) -> None:
    fill(rig, model.RUNNING_MAX, ends=False)
    with pytest.raises(TooManyJobs):
        create(rig)
    rig.post("/v1/jobs/1/cancel")
    assert create(rig)["id"] == str(model.RUNNING_MAX + 1)
    rig.store.transact(cancel_all, rig.universe)


def cancel_all(txn: Txn, universe: str) -> None:
    for job in model.list_running(txn, universe):
        model.cancel(txn, universe, job.number)


def test_only_the_last_ended_jobs_are_kept(rig: ApiRig) -> None:
    create(rig)
    fill(rig, model.JOBS_KEPT + 1, ends=True)
    found = [int(job["id"]) for job in rig.pages("/v1/jobs", limit=1000)]
    assert found == [*range(model.JOBS_KEPT + 2, 2, -1), 1]
    rig.post("/v1/jobs/1/cancel")


def test_unknown_job_is_not_found(rig: ApiRig) -> None:
    for id in ("0", "9"):
        with pytest.raises(NotFound):
            rig.get(f"/v1/jobs/{id}")
        with pytest.raises(NotFound):
            rig.post(f"/v1/jobs/{id}/cancel")
        with pytest.raises(NotFound):
            rig.post(f"/v1/jobs/{id}/pace", {"rate_per_s": 1})
    with pytest.raises(Invalid):
        rig.get("/v1/jobs/x")


def test_every_transition_of_a_job_is_in_the_table() -> None:
    for state in JobState:
        for event in JobEvent:
            if state is JobState.RUNNING:
                assert JOB_TRANSITIONS.next(state, event) is not JobState.RUNNING
            else:
                with pytest.raises(IllegalTransition):
                    JOB_TRANSITIONS.next(state, event)


# -- pages -----------------------------------------------------------------------------------------


def test_job_processes_its_selection_in_pages(rig: ApiRig) -> None:
    ids, others = submit(rig, 7), submit(rig, 1, "paper")
    job = create(rig, selection={**READY, "queue": "default"}, rate_per_s=30)
    hand = Hand(rig, job["id"])
    assert hand.step() == 3
    assert states(rig, ids) == ["DEAD"] * 3 + ["WAITING"] * 4
    assert rig.get("/v1/jobs/1")["processed"] == 3
    ended = hand.finish()
    assert (ended["state"], ended["processed"], ended["refused"]) == ("done", 7, 0)
    assert states(rig, [*ids, *others]) == ["DEAD"] * 7 + ["WAITING"]
    assert ended["ended_ns"] >= ended["created_ns"]
    entry = rig.audit_entries()[-1]
    assert (entry.action, entry.subject, entry.actor) == ("end_job", "job/1", ACTOR)
    assert entry.detail == "7 processed, 0 refused"


def test_subjects_that_came_after_the_job_are_not_selected(rig: ApiRig) -> None:
    before = submit(rig, 2)
    hand = Hand(rig, create(rig)["id"])
    after = submit(rig, 2)
    assert hand.finish()["processed"] == 2
    assert states(rig, before + after) == ["DEAD", "DEAD", "WAITING", "WAITING"]


def test_limit_bounds_the_processed_subjects(rig: ApiRig) -> None:
    ids = submit(rig, 5)
    assert Hand(rig, create(rig, limit=2)["id"]).finish()["processed"] == 2
    assert states(rig, ids).count("DEAD") == 2


def test_cancelled_job_processes_nothing_more(rig: ApiRig) -> None:
    ids = submit(rig, 5)
    hand = Hand(rig, create(rig, rate_per_s=20)["id"])
    hand.step()
    stale = hand.job()
    assert rig.post("/v1/jobs/1/cancel") == {"id": "1", "cancelled": True}
    assert rig.post("/v1/jobs/1/cancel") == {"id": "1", "cancelled": False}
    steps.step(rig.store, stale, hand.lease)
    assert states(rig, ids).count("DEAD") == 2
    assert rig.get("/v1/jobs/1")["state"] == "cancelled"


def test_process_without_the_lease_changes_nothing(rig: ApiRig) -> None:
    ids = submit(rig, 2)
    hand = Hand(rig, create(rig)["id"])
    rig.store.transact(leases.force_release, hand.job().resource, "test")
    with pytest.raises(Fenced):
        hand.step()
    assert states(rig, ids) == ["WAITING", "WAITING"]
    assert Hand(rig, "1", "other").finish()["processed"] == 2


def test_refused_subject_is_counted_and_other_subjects_are_processed(rig: ApiRig) -> None:
    path = failed_events_queue(rig.universe)
    for _ in range(3):
        rig.post("/v1/worlds/ShopAccount/ada/send", {"type": "DepositRefused"})
    rig.run_worlds()
    hand = Hand(rig, create(rig, "dead.redrive", selection={"queue": path})["id"])

    def drop_first(job: model.Job) -> None:
        rig.post(f"/v1/dead/{quote(path, safe='')}/1/drop")

    with failpoints.on("jobs.page", calls=drop_first, times=1):
        hand.step()
    ended = rig.get("/v1/jobs/1")
    assert (ended["state"], ended["processed"], ended["refused"]) == ("done", 2, 1)
    assert ended["refusals"][0]["subject"] == "1"
    assert "not_found" in ended["refusals"][0]["why"]


# -- actions ---------------------------------------------------------------------------------------


def test_dead_tasks_are_redriven(rig: ApiRig) -> None:
    ids = submit(rig, 3)
    Hand(rig, create(rig)["id"]).finish()
    job = create(rig, "tasks.redrive", selection={"state": "dead"})
    assert Hand(rig, job["id"]).finish()["processed"] == 3
    assert all(rig.get(f"/v1/tasks/{id}")["redriven_by"] for id in ids)
    again = create(rig, "tasks.redrive", selection={"state": "dead"})
    assert Hand(rig, again["id"]).finish()["processed"] == 0


def test_flows_are_cancelled(rig: ApiRig) -> None:
    for n in range(3):
        rig.post("/v1/flows", {"name": "order", "args": ["book", n]})
    job = create(rig, "flows.cancel", selection={"state": "running"}, rate_per_s=20)
    assert Hand(rig, job["id"]).finish()["processed"] == 3
    assert all(flow["cancelled"] for flow in rig.pages("/v1/flows"))


@pytest.mark.parametrize(("verb", "status"), [("pause", "paused"), ("delete", "deleted")])
def test_worlds_of_a_type_are_changed(rig: ApiRig, verb: str, status: str) -> None:
    ids = [
        rig.post("/v1/worlds", {"type": "ShopAccount", "name": name})["world_id"]
        for name in ("a", "b", "c")
    ]
    other = rig.post("/v1/worlds", {"type": "ShopAudit", "name": "a"})["world_id"]
    job = create(rig, f"worlds.{verb}", selection={"type": "ShopAccount"}, rate_per_s=20)
    assert Hand(rig, job["id"]).finish()["processed"] == 3
    found = [rig.get(f"/v1/worlds/by-id/{id}")["status"] for id in [*ids, other]]
    assert found == [*[status] * 3, "active"]
    if verb == "pause":
        job = create(rig, "worlds.resume", selection={"type": "ShopAccount"})
        assert Hand(rig, job["id"]).finish()["processed"] == 3
        assert rig.get(f"/v1/worlds/by-id/{ids[0]}")["status"] == "active"


def test_dead_letters_are_dropped(rig: ApiRig) -> None:
    path = failed_events_queue(rig.universe)
    for _ in range(5):
        rig.post("/v1/worlds/ShopAccount/ada/send", {"type": "DepositRefused"})
    rig.run_worlds()
    job = create(rig, "dead.drop", selection={"queue": path}, rate_per_s=20)
    assert Hand(rig, job["id"]).finish()["processed"] == 5
    assert rig.pages("/v1/dead") == []


# -- runner ----------------------------------------------------------------------------------------


def wait_for(rig: ApiRig, id: str) -> Any:
    until_ns = SYSTEM.mono_ns() + 30 * S
    since = rig.store.wait(model.TOPIC, 0, 0.0)
    while (job := rig.get(f"/v1/jobs/{id}"))["state"] == "running":
        assert SYSTEM.mono_ns() < until_ns
        since = rig.store.wait(model.TOPIC, since, 0.5)
    return job


def test_runner_runs_new_jobs_until_it_is_stopped(rig: ApiRig) -> None:
    ids = submit(rig, 25)
    runner = JobRunner(rig.store)
    runner.start()
    try:
        job = create(rig, rate_per_s=1_000)
        assert wait_for(rig, job["id"])["processed"] == 25
    finally:
        runner.request_stop()
        runner.join(30)
    assert not runner.running
    assert runner.failure is None
    assert states(rig, ids) == ["DEAD"] * 25


def test_runner_keeps_the_pace_of_a_job(rig: ApiRig) -> None:
    submit(rig, 6)
    create(rig, rate_per_s=20)
    clock = SimClock()
    runner = JobRunner(rig.store, clock)
    processed = []
    for _ in range(4):
        runner.tick()
        processed.append(rig.get("/v1/jobs/1")["processed"])
        clock.advance(S // 20)
    assert processed == [2, 2, 4, 4]
    rig.post("/v1/jobs/1/pace", {"rate_per_s": 1_000})
    runner.tick()
    assert rig.get("/v1/jobs/1")["state"] == "done"
    runner.shut_down()


def test_second_runner_leaves_a_held_job_and_continues_it_later(rig: ApiRig) -> None:
    submit(rig, 4)
    create(rig, rate_per_s=20)
    clock = SimClock()
    first, second = JobRunner(rig.store, clock), JobRunner(rig.store, clock)
    first.tick()
    second.tick()
    assert rig.get("/v1/jobs/1")["processed"] == 2
    first.shut_down()
    for _ in range(TICKS_MAX):
        clock.advance(2 * S)
        second.tick()
        if rig.get("/v1/jobs/1")["state"] != "running":
            break
    assert rig.get("/v1/jobs/1")["processed"] == 4
    second.shut_down()


def test_job_with_an_unknown_action_fails(rig: ApiRig) -> None:
    """Other code may have created the job."""
    create(rig)
    job = rig.store.read(model.get, rig.universe, 1)
    rig.store.transact(model.save, job._replace(row=replace(job.row, action="tasks.explode")))
    runner = JobRunner(rig.store)
    runner.tick()
    runner.shut_down()
    shown = rig.get("/v1/jobs/1")
    assert shown["state"] == "failed"
    assert "tasks.explode" in shown["error"]


@pytest.mark.parametrize("rate_per_s", [1e-310, 0, float("inf"), float("nan"), -1])
def test_pace_outside_its_bounds_is_refused(rig: ApiRig, rate_per_s: float) -> None:
    create(rig)
    with pytest.raises(Invalid):
        rig.post("/v1/jobs/1/pace", {"rate_per_s": rate_per_s})
    assert rig.get("/v1/jobs/1")["rate_per_s"] == model.RATE_PER_S
    rig.post("/v1/jobs/1/cancel")


def test_changed_pace_applies_to_the_wait_for_the_next_page(rig: ApiRig) -> None:
    submit(rig, 6)
    create(rig, rate_per_s=model.RATE_PER_S_MIN)
    clock = SimClock()
    runner = JobRunner(rig.store, clock)
    runner.tick()
    clock.advance(S)
    runner.tick()
    assert rig.get("/v1/jobs/1")["processed"] == 1
    rig.post("/v1/jobs/1/pace", {"rate_per_s": 100})
    runner.tick()
    assert rig.get("/v1/jobs/1")["state"] == "done"
    runner.shut_down()


def test_second_runner_does_not_speed_up_a_slow_job() -> None:
    """The first runner keeps its lease while the job waits for its pace."""
    clock = SimClock()
    with stores.open("memory:", clock=clock) as store, ApiRig(store, "slow") as slow:
        submit(slow, 3)
        create(slow, rate_per_s=model.RATE_PER_S_MIN)
        first, second = JobRunner(store, clock), JobRunner(store, clock)
        for _ in range(30):
            first.tick()
            assert 0 < first.sleep_s() <= RENEW_NS / S
            second.tick()
            clock.advance(S)
        assert slow.get("/v1/jobs/1")["processed"] == 1


# -- errors of one job -----------------------------------------------------------------------------


def store_rate(rig: ApiRig, number: int, rate_per_s: float) -> None:
    """Store a pace that requests cannot have, as an older version did."""
    job = rig.store.read(model.get, rig.universe, number)
    rig.store.transact(model.save, job._replace(row=replace(job.row, rate_per_s=rate_per_s)))


@pytest.mark.parametrize("rate_per_s", [1e-310, float("nan"), -1.0])
def test_stored_pace_of_another_version_does_not_stop_the_jobs(
    rig: ApiRig, rate_per_s: float
) -> None:
    submit(rig, 2, "slow")
    ids = submit(rig, 3, "fast")
    create(rig, selection={**READY, "queue": "slow"})
    create(rig, selection={**READY, "queue": "fast"})
    store_rate(rig, 1, rate_per_s)
    runner = JobRunner(rig.store)
    runner.start()
    try:
        assert wait_for(rig, "2")["processed"] == 3
        assert runner.running
    finally:
        rig.post("/v1/jobs/1/cancel")
        runner.request_stop()
        runner.join(30)
    assert runner.failure is None
    assert states(rig, ids) == ["DEAD"] * 3


def in_first_job(error: Exception) -> Callable[[model.Job], None]:
    def raise_in(job: model.Job) -> None:
        if job.number == 1:
            raise error

    return raise_in


def test_error_in_one_job_fails_this_job_only(
    rig: ApiRig, caplog: pytest.LogCaptureFixture
) -> None:
    submit(rig, 2)
    create(rig)
    create(rig)
    runner = JobRunner(rig.store)
    with failpoints.on("jobs.page", calls=in_first_job(OverflowError("too far"))):
        runner.tick()
    runner.shut_down()
    failed, done = rig.get("/v1/jobs/1"), rig.get("/v1/jobs/2")
    assert (failed["state"], failed["error"]) == ("failed", "OverflowError: too far")
    assert (done["state"], done["processed"]) == ("done", 2)
    assert "job failed: " in caplog.text


@pytest.mark.parametrize(
    "error", [StoreFull(what="disk"), WriterLost(what="writer"), CommitUnknown(what="commit")]
)
def test_error_of_the_store_postpones_the_job_and_no_other(
    rig: ApiRig, error: HoldfastError
) -> None:
    submit(rig, 2)
    create(rig, limit=1)
    create(rig, limit=1)
    clock = SimClock()
    runner = JobRunner(rig.store, clock)
    with failpoints.on("jobs.page", calls=in_first_job(error)):
        runner.tick()
    found = [rig.get(f"/v1/jobs/{id}")["state"] for id in (1, 2)]
    assert found == ["running", "done"]
    assert 0 < runner.sleep_s() <= 1
    clock.advance(S)
    runner.tick()
    runner.shut_down()
    assert rig.get("/v1/jobs/1")["state"] == "done"


def test_lost_lease_of_a_job_that_fails_does_not_stop_the_runner(rig: ApiRig) -> None:
    submit(rig, 2)
    create(rig)
    create(rig)

    def take_lease_and_fail(job: model.Job) -> None:
        if job.number == 1:
            rig.store.transact(leases.force_release, job.resource, "taken by the test")
            raise Invalid(what="page")

    runner = JobRunner(rig.store)
    with failpoints.on("jobs.page", calls=take_lease_and_fail):
        runner.tick()
    found = [rig.get(f"/v1/jobs/{id}")["state"] for id in (1, 2)]
    assert found == ["running", "done"]
    runner.tick()
    runner.shut_down()
    assert rig.get("/v1/jobs/1")["state"] == "done"


def test_failed_runner_is_logged_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
    with stores.open("memory:") as store, ApiRig(store, "shop") as rig:
        create(rig)
        job = store.read(model.get, "shop", 1)
        key = schema.key_prefix(Space.JOB, "shop", "j", 1)
        store.transact(lambda txn: txn.put(key, b"\xff"))
        runner = JobRunner(store)
        runner.start()
        try:
            until(lambda: "job runner failed: " in caplog.text, "the line")
            store.transact(model.save, job)
            assert wait_for(rig, "1")["state"] == "done"
        finally:
            runner.request_stop()
            runner.join(30)
    assert runner.failure is None


def test_stop_request_ends_a_failed_runner_without_a_restart() -> None:
    with stores.open("memory:") as store, ApiRig(store, "shop") as rig:
        create(rig)
        key = schema.key_prefix(Space.JOB, "shop", "j", 1)
        store.transact(lambda txn: txn.put(key, b"\xff"))
        runner = JobRunner(store)
        runner.start()
        until(lambda: runner.failure is not None, "the failure")
        runner.request_stop()
        runner.join(30)
        assert not runner.running


# -- idempotency keys ------------------------------------------------------------------------------


def test_runner_removes_expired_idempotency_keys_of_every_universe() -> None:
    clock = SimClock()
    with stores.open("memory:", clock=clock) as store:
        scopes = [dedupe.request_scope(name) for name in ("a", "b")]
        for scope in scopes:
            remember_keys(store, scope, KEYS_PER_COMMIT + 1)
        remember_keys(store, "a/effects", 1)
        runner = JobRunner(store, clock)
        clock.advance(DEDUPE_RETENTION_NS)
        remember_keys(store, scopes[0], 1, "new")
        assert runner.tick() is False
        assert count_keys(store, scopes[0]) == KEYS_PER_COMMIT + 2
        clock.advance(KEY_EXPIRY_NS)
        assert runner.sleep_s() <= KEY_EXPIRY_NS / S
        assert runner.tick() is True
        assert [count_keys(store, scope) for scope in scopes] == [2, 1]
        assert runner.tick() is False
        assert [count_keys(store, scope) for scope in scopes] == [1, 0]
        assert count_keys(store, "a/effects") == 1


def remember_keys(store: Store, scope: str, count: int, prefix: str = "k") -> None:
    def remember(txn: Txn) -> None:
        for number in range(count):
            dedupe.remember(txn, scope, f"{prefix}{number}", b"h", b"v")

    store.transact(remember)


def count_keys(store: Store, scope: str) -> int:
    prefix = schema.key_prefix(Space.DEDUPE, scope, "k")
    return len(store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix))))
