"""Tasks over HTTP: submit, lease, heartbeat, complete, fail, look, steer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.tasks import task
from holdfast.authority import authority, workers
from holdfast.clock import S, SimClock
from holdfast.ops.http import roll
from holdfast.ops.http.server import HttpServer
from holdfast.store.lmdb import LmdbStore
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryBackend
from holdfast.tasks import checkpoint, coordinator, lease
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import QUEUE_TOPICS, Limits, Spec, counts_of, keys_of
from tests.ops.http_rig import TOKEN, UNIVERSE, Client, Rig, client, request, rig, server
from tests.process.watch import until

__all__ = ["client", "rig", "server"]

pytestmark = pytest.mark.timeout(60)


# -- submit ----------------------------------------------------------------------------------------


def test_a_submitted_task_is_named_and_shown(client: Client) -> None:
    answer = client.post(
        "/v1/tasks", {"name": "resize", "args": ["a.png", 80], "kwargs": {"crop": True}}
    )
    assert (answer.status, answer.document) == (201, {"id": "1-1"})
    assert answer.headers["location"] == "/v1/tasks/1-1"
    shown = client.task("1-1")
    assert (shown["state"], shown["where"], shown["name"]) == ("WAITING", "ready", "resize")
    assert (shown["args"], shown["kwargs"]) == (["a.png", 80], {"crop": True})


def test_a_batch_is_submitted_whole(client: Client) -> None:
    tasks = [{"name": "add", "args": [n]} for n in range(3)]
    assert client.post("/v1/tasks", {"tasks": tasks}).document == {"ids": ["1-1", "1-2", "1-3"]}


def test_a_batch_with_one_bad_task_submits_none(client: Client) -> None:
    tasks = [{"name": "add"}, {"name": "add", "options": {"attempts": 0}}]
    answer = client.post("/v1/tasks", {"tasks": tasks})
    assert (answer.status, answer.document["code"]) == (422, "invalid")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_options_are_what_the_task_has(client: Client) -> None:
    id = client.submit("add", queue="slow", priority=7, attempts=2, expiries_max=9, limit_key="k")
    shown = client.task(id)
    assert (shown["queue"], shown["priority"], shown["limit_key"]) == ("slow", 7, "k")
    assert (shown["attempts"], shown["expiries_max"]) == (2, 9)


def test_the_same_key_is_the_same_task(client: Client) -> None:
    first = client.submit("add", 1, key="once")
    assert client.submit("add", 1, key="once") == first


def test_the_same_key_with_other_arguments_is_a_conflict(client: Client) -> None:
    client.submit("add", 1, key="once")
    answer = client.post("/v1/tasks", {"name": "add", "args": [2], "options": {"key": "once"}})
    assert (answer.status, answer.document["code"]) == (409, "key_conflict")
    assert answer.document["retryable"] is False


def test_a_task_waits_for_those_it_comes_after(client: Client) -> None:
    first = client.submit("add")
    second = client.submit("add", after=[first])
    assert client.task(second)["where"] == "blocked"
    [granted] = client.lease(limit=10)
    assert granted["id"] == first
    client.complete(granted["lease"])
    assert [one["id"] for one in client.lease()] == [second]


def test_tasks_of_a_batch_wait_for_each_other_by_position(client: Client) -> None:
    tasks = [{"name": "a"}, {"name": "b", "options": {"after": [0]}}]
    first, second = client.post("/v1/tasks", {"tasks": tasks}).document["ids"]
    assert client.task(second)["after"] == [first]


@pytest.mark.parametrize(
    ("after", "status", "code"),
    [
        (["1-99"], 404, "not_found"),
        (["2-1"], 404, "not_found"),
        (["what"], 422, "bad_task_id"),
        ([0], 422, "cyclic_dependency"),
        ([5], 422, "cyclic_dependency"),
        ([-1], 422, "invalid"),
    ],
)
def test_a_dependency_that_cannot_be_is_refused(
    client: Client, after: list[Any], status: int, code: str
) -> None:
    client.submit("add")
    answer = client.post("/v1/tasks", {"name": "add", "options": {"after": after}})
    assert (answer.status, answer.document["code"]) == (status, code)


def test_a_declared_task_has_what_is_declared(rig: Rig) -> None:
    @task(queue="images", attempts=7)
    def resize(path: str, width: int) -> str:
        return f"{path} {width}"

    client = rig.client(rig.serve(declared={"resize": resize}))
    shown = client.task(client.submit("resize", "a.png", 80))
    assert (shown["queue"], shown["attempts"]) == ("images", 7)
    shown = client.task(client.submit("resize", "a.png", 80, queue="other"))
    assert (shown["queue"], shown["attempts"]) == ("other", 7)


def test_arguments_that_do_not_fit_a_declared_task_are_refused(rig: Rig) -> None:
    @task
    def resize(path: str, width: int) -> str:
        return f"{path} {width}"

    client = rig.client(rig.serve(declared={"resize": resize}))
    for args in (["a.png"], ["a.png", "wide"], [1, 2, 3]):
        answer = client.post("/v1/tasks", {"name": "resize", "args": args})
        assert (answer.status, answer.document["code"]) == (422, "invalid"), args


# -- work ------------------------------------------------------------------------------------------


def test_a_grant_says_all_that_a_worker_needs(client: Client) -> None:
    id = client.submit("add", 1, 2, lease_s=30)
    [granted] = client.lease()
    assert granted["id"] == id
    assert granted["lease"] == "1-1-1"
    assert (granted["name"], granted["args"], granted["kwargs"]) == ("add", [1, 2], {})
    assert (granted["attempt"], granted["suspect"]) == (1, False)
    assert granted["idempotency_key"] == f"task-{id}"
    assert 0 < granted["expires_in_s"] <= granted["lease_s"] == 30


def test_a_completed_task_has_its_result(client: Client) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    assert client.complete(granted["lease"], {"sum": [3, None, 1.5]}) == "COMMITTED"
    shown = client.task(id)
    assert (shown["state"], shown["result"]) == ("COMPLETED", {"sum": [3, None, 1.5]})


def test_the_same_completion_again_is_committed_again(client: Client) -> None:
    client.submit("add")
    [granted] = client.lease()
    assert [client.complete(granted["lease"]) for _ in range(2)] == ["COMMITTED"] * 2


def test_a_completion_under_a_lost_lease_is_cancelled(client: Client) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    client.post(f"/v1/tasks/{id}/cancel")
    assert client.complete(granted["lease"]) == "CANCELLED"


def test_a_completion_under_a_lease_that_never_was_is_rejected(client: Client) -> None:
    client.submit("add")
    assert client.complete("1-1-1") == "REJECTED"
    client.lease()
    assert client.complete("1-9-1") == "REJECTED"
    assert client.complete("1-1-9") == "REJECTED"


def test_reports_in_a_batch_are_answered_one_by_one(client: Client) -> None:
    first, second = client.submit("add"), client.submit("add")
    granted = client.lease(limit=2)
    client.post(f"/v1/tasks/{second}/cancel")
    reports = [{"lease": one["lease"], "result": 1} for one in granted]
    reports.append({"lease": "1-50-1", "result": 1})
    answer = client.post("/v1/tasks/complete", {"worker": "w", "reports": reports})
    assert answer.document == {"answers": ["COMMITTED", "CANCELLED", "REJECTED"]}
    assert client.task(first)["state"] == "COMPLETED"


def test_a_lease_of_a_generation_to_come_was_never_given(client: Client) -> None:
    client.submit("add")
    [granted] = client.lease()
    other = granted["lease"].replace("1-", "7-", 1)
    assert client.complete(other) == "REJECTED"
    assert client.complete(granted["lease"]) == "COMMITTED"


def test_a_failed_task_is_tried_again_until_its_attempts_are_used(client: Client) -> None:
    id = client.submit("add", attempts=2)
    for attempt in (1, 2):
        [granted] = client.lease(wait_s=20)
        assert granted["attempt"] == attempt
        assert client.fail(granted["lease"], reason="down", error="no answer") == "COMMITTED"
    shown = client.task(id)
    assert (shown["state"], shown["reason"], shown["error"]) == ("FAILED", "down", "no answer")


def test_a_refused_task_fails_at_once(client: Client) -> None:
    id = client.submit("add", attempts=5)
    [granted] = client.lease()
    assert client.fail(granted["lease"], end="refused", error="never") == "COMMITTED"
    assert client.task(id)["state"] == "FAILED"


def test_a_released_task_counts_nothing(client: Client) -> None:
    id = client.submit("add", attempts=1)
    [granted] = client.lease()
    assert client.fail(granted["lease"], end="released") == "COMMITTED"
    shown = client.task(id)
    assert (shown["where"], shown["failures"], shown["expiries"]) == ("ready", 0, 0)


def test_a_heartbeat_keeps_a_lease_and_says_how_far_it_is(client: Client) -> None:
    id = client.submit("add", lease_s=30)
    [granted] = client.lease()
    beat = {"lease": granted["lease"], "progress": {"done": 5}}
    [kept] = client.post("/v1/tasks/heartbeat", {"leases": [beat]}).document["leases"]
    assert (kept["lease"], kept["answer"]) == (granted["lease"], "COMMITTED")
    assert 0 < kept["expires_in_s"] <= 30
    assert client.task(id)["progress"] == {"done": 5}


def test_a_heartbeat_tells_of_leases_that_are_lost_or_never_were(client: Client) -> None:
    client.submit("add")
    second = client.submit("add")
    leases = [one["lease"] for one in client.lease(limit=2)]
    client.post(f"/v1/tasks/{second}/cancel")
    asked = [{"lease": one} for one in [*leases, "1-77-1", "1-1-500"]]
    told = client.post("/v1/tasks/heartbeat", {"leases": asked}).document["leases"]
    assert [one["answer"] for one in told] == ["COMMITTED", "CANCELLED", "REJECTED", "REJECTED"]
    assert [one["expires_in_s"] > 0 for one in told] == [True, False, False, False]


def test_a_lease_that_ran_out_goes_to_the_next_who_waits(client: Client) -> None:
    id = client.submit("add", lease_s=0.05, expiries_max=2)
    [first] = client.lease("one")
    [second] = client.lease("two", wait_s=20)
    assert (second["id"], second["attempt"], second["suspect"]) == (id, 2, True)
    assert client.complete(first["lease"]) == "CANCELLED"


def test_a_suspect_is_granted_by_itself(rig: Rig, client: Client) -> None:
    suspect = client.submit("bad", lease_s=0.05, expiries_max=2)
    client.lease("one")
    until(lambda: rig.store.transact(coordinator.maintain, UNIVERSE, 10), "the lease ends")
    client.submit("good")
    answer = client.post("/v1/tasks/lease", {"worker": "w", "limit": 10, "alone": False})
    assert [one["name"] for one in answer.document["tasks"]] == ["good"]
    assert answer.document["suspects"] is True
    client.submit("good")
    assert [one["id"] for one in client.lease(limit=10)] == [suspect]


def test_leases_come_from_the_queues_that_were_named(client: Client) -> None:
    client.submit("a", queue="a")
    wanted = client.submit("b", queue="b")
    assert [one["id"] for one in client.lease(queues=["b", "c"], limit=5)] == [wanted]


def test_leases_are_of_the_names_that_were_asked_for(client: Client) -> None:
    a, b = client.submit("a"), client.submit("b")
    assert [one["id"] for one in client.lease(names=["b", "c"], limit=5)] == [b]
    assert client.task(a)["where"] == "stray"
    assert [one["id"] for one in client.lease(limit=5)] == [a]


# -- long polls ------------------------------------------------------------------------------------


def test_a_poll_ends_empty_when_its_time_is_up(client: Client) -> None:
    assert client.lease(wait_s=0.05) == []


def test_a_poll_gets_a_task_that_is_submitted_meanwhile(rig: Rig, server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=30)
        until(lambda: _standing(server) == 1, "somebody waits")
        id = rig.client(server).submit("add")
        assert [one["id"] for one in waiting.result(20)] == [id]


def test_a_poll_gets_a_task_that_was_submitted_elsewhere(rig: Rig, server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, queues=["other"], wait_s=30)
        until(lambda: _standing(server) == 1, "somebody waits")
        spec = Spec("add", queue="other")
        rig.store.transact(coordinator.submit, UNIVERSE, spec, [New(b"\x92\x90\x80")])
        assert [one["name"] for one in waiting.result(20)] == ["add"]


def test_a_poll_gets_a_task_whose_time_has_come(client: Client) -> None:
    id = client.submit("add", delay_s=0.2)
    assert client.task(id)["where"] == "delayed"
    assert client.lease() == []
    assert [one["id"] for one in client.lease(wait_s=20)] == [id]


def test_every_one_of_many_polls_gets_a_task(rig: Rig, server: HttpServer) -> None:
    many = 24
    with ThreadPoolExecutor(many) as pool:
        polls = [
            pool.submit(rig.client(server).lease, f"w-{n}", queues=["a", "b"][n % 2 :], wait_s=30)
            for n in range(many)
        ]
        until(lambda: _standing(server) == many, "all of them wait")
        tasks = [{"name": "add", "options": {"queue": "b"}} for _ in range(many)]
        ids = rig.client(server).post("/v1/tasks", {"tasks": tasks}).document["ids"]
        granted = [one["id"] for poll in polls for one in poll.result(30)]
    assert sorted(granted) == sorted(ids)


def test_polls_for_different_names_get_what_they_know(rig: Rig, server: HttpServer) -> None:
    names = ["a", "b", "c"]
    with ThreadPoolExecutor(len(names)) as pool:
        polls = {
            name: pool.submit(rig.client(server).lease, name, names=[name], wait_s=30)
            for name in names
        }
        until(lambda: server.busy == len(names), "all of them wait")
        for name in reversed(names):
            rig.client(server).submit(name)
        for name, poll in polls.items():
            assert [one["name"] for one in poll.result(20)] == [name]


def test_a_poll_at_a_full_queue_gets_its_task_when_there_is_room(
    rig: Rig, server: HttpServer, client: Client
) -> None:
    rig.store.transact(coordinator.limit, UNIVERSE, "default", Limits(concurrency=1))
    client.submit("add")
    second = client.submit("add")
    [first] = client.lease()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=30)
        until(lambda: _standing(server) == 1, "somebody waits")
        client.complete(first["lease"])
        assert [one["id"] for one in waiting.result(20)] == [second]


def test_whoever_hung_up_is_granted_nothing(rig: Rig, server: HttpServer, client: Client) -> None:
    with rig.raw(server) as raw:
        raw.send(request("/v1/tasks/lease", {"worker": "gone", "wait_s": 30}))
        until(lambda: _standing(server) == 1, "somebody waits")
    id = client.submit("add")
    [granted] = client.lease("here", wait_s=20)
    assert (granted["id"], granted["attempt"]) == (id, 1)
    until(lambda: _standing(server) == 0, "nobody waits any more")


def test_what_could_not_be_delivered_is_given_back_uncounted(
    rig: Rig, server: HttpServer, client: Client
) -> None:
    """Granted while its worker was hanging up: whichever came first, no attempt may be lost."""
    ids = {client.submit("add", attempts=1, expiries_max=1) for _ in range(20)}
    for _ in range(40):
        with rig.raw(server) as raw:
            raw.send(request("/v1/tasks/lease", {"worker": "gone", "limit": 5}))
    until(lambda: not server.busy, "all of them are served")
    granted = {one["id"] for one in client.lease("here", limit=100)}
    taken = ids - granted
    # What went out before the hang-up was noticed is on its way: the lease ends that.
    assert all(client.task(id)["where"] in ("leased", "ready") for id in taken)
    assert all(client.task(id)["expiries"] == client.task(id)["failures"] == 0 for id in ids)


def test_whoever_waits_for_a_task_is_told_when_it_ends(
    rig: Rig, server: HttpServer, client: Client
) -> None:
    ids = [client.submit("add"), client.submit("add")]
    granted = client.lease(limit=2)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(rig.client(server).task, f"{id}?wait_s=30") for id in ids for _ in range(2)
        ]
        until(lambda: server.busy == 4, "all of them wait")
        client.complete(granted[0]["lease"], 7)
        assert [one.result(20)["result"] for one in waiting[:2]] == [7, 7]
        assert not any(one.done() for one in waiting[2:])
        client.post(f"/v1/tasks/{ids[1]}/cancel")
        assert [one.result(20)["state"] for one in waiting[2:]] == ["DEAD", "DEAD"]


def test_whoever_waits_for_a_task_that_does_not_end_is_shown_it_as_it_is(client: Client) -> None:
    assert client.task(f"{client.submit('add')}?wait_s=0.05")["state"] == "WAITING"


@pytest.mark.parametrize("wait_s", ["x", "-1", "61", "nan", ""])
def test_waiting_for_a_task_has_bounds(client: Client, wait_s: str) -> None:
    answer = client.get(f"/v1/tasks/{client.submit('add')}?wait_s={wait_s}")
    assert (answer.status, answer.document["code"]) == (422, "invalid")


# -- look and steer --------------------------------------------------------------------------------


def test_tasks_are_listed_by_state_queue_and_name(client: Client) -> None:
    a, b = client.submit("a", queue="x"), client.submit("b", queue="y")
    client.submit("a", queue="y")
    [granted] = client.lease(queues=["x"])
    client.complete(granted["lease"])

    def ids(query: str) -> list[str]:
        return [one["id"] for one in client.get(f"/v1/tasks?{query}").document["tasks"]]

    assert ids("state=completed") == [a]
    assert ids("queue=y&name=b") == [b]
    assert ids("state=ready") == [b, "1-3"]
    assert ids("") == ["1-3", b, a]


def test_a_list_goes_on_from_its_cursor(client: Client) -> None:
    client.post("/v1/tasks", {"tasks": [{"name": "add"}] * 5})
    found: list[str] = []
    path = "/v1/tasks?state=ready&limit=2"
    for _ in range(3):
        page = client.get(path).document
        found += [one["id"] for one in page["tasks"]]
        path = f"/v1/tasks?state=ready&limit=2&cursor={page['cursor']}"
    assert page["cursor"] is None
    assert found == [f"1-{n}" for n in range(1, 6)]


def test_queues_tell_their_counts_and_limits(rig: Rig, client: Client) -> None:
    client.submit("add")
    rig.store.transact(coordinator.limit, UNIVERSE, "default", Limits(concurrency=3))
    [queue] = client.get("/v1/queues").document["queues"]
    assert (queue["queue"], queue["ready"], queue["waiting"]) == ("default", 1, 1)
    assert (queue["concurrency"], queue["per_key"]) == (3, None)


@pytest.mark.parametrize(
    "query", ["states=ready", "state=lost", "limit=x", "limit=-1", "limit=1001", "cursor=%20"]
)
def test_a_list_of_something_else_is_refused(client: Client, query: str) -> None:
    answer = client.get(f"/v1/tasks?{query}")
    assert (answer.status, answer.document["code"]) == (422, "invalid")


def test_a_cancelled_task_is_dead_and_its_worker_is_told(client: Client) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    answer = client.post(f"/v1/tasks/{id}/cancel", {"reason": "changed our mind"})
    assert answer.document == {"id": id, "cancelled": True}
    assert client.post(f"/v1/tasks/{id}/cancel").document["cancelled"] is False
    shown = client.task(id)
    assert (shown["state"], shown["reason"]) == ("DEAD", "changed our mind")
    beat = {"leases": [{"lease": granted["lease"]}]}
    [told] = client.post("/v1/tasks/heartbeat", beat).document["leases"]
    assert told["answer"] == "CANCELLED"


def test_a_dead_task_is_redriven_as_another(client: Client) -> None:
    id = client.submit("add")
    client.post(f"/v1/tasks/{id}/cancel")
    answer = client.post(f"/v1/tasks/{id}/redrive")
    assert (answer.status, answer.document["redrive_of"]) == (201, id)
    new = answer.document["id"]
    assert client.task(id)["redriven_by"] == new
    assert client.task(new)["redrive_of"] == id
    assert client.post(f"/v1/tasks/{id}/redrive").document["id"] == new


def test_a_task_that_waits_is_not_redriven(client: Client) -> None:
    answer = client.post(f"/v1/tasks/{client.submit('add')}/redrive")
    assert (answer.status, answer.document["code"]) == (422, "invalid")


@pytest.mark.parametrize(
    ("id", "status", "code"),
    [("1-1", 404, "not_found"), ("x", 422, "bad_task_id"), ("01-1", 422, "bad_task_id")],
)
def test_a_task_that_is_not_there(client: Client, id: str, status: int, code: str) -> None:
    for answer in (
        client.get(f"/v1/tasks/{id}"),
        client.post(f"/v1/tasks/{id}/cancel"),
        client.post(f"/v1/tasks/{id}/redrive"),
    ):
        assert (answer.status, answer.document["code"]) == (status, code)


# -- health ----------------------------------------------------------------------------------------


def test_health_needs_no_token(rig: Rig) -> None:
    client = rig.client(rig.serve(TOKEN))
    assert client.get("/healthz").document == {"ok": True}


def test_readiness_tells_the_exact_blockers(client: Client) -> None:
    answer = client.get("/readyz")
    assert (answer.status, answer.document["ready"]) == (503, False)
    assert [one["reason"] for one in answer.document["reasons"]] == ["authority_missing"]


def test_readiness_is_200_when_somebody_leads(rig: Rig, client: Client) -> None:
    rig.store.transact(authority.acquire, UNIVERSE, "leader", "one", 60 * S)
    answer = client.get("/readyz")
    assert (answer.status, answer.document["ready"]) == (200, True)


def test_without_the_token_readiness_is_a_word(rig: Rig) -> None:
    server = rig.serve(TOKEN)
    assert rig.client(server).get("/readyz").document == {"ready": False}
    assert rig.client(server, TOKEN).get("/readyz").document["universe"] == UNIVERSE


def test_a_worker_is_listed_while_its_request_waits(rig: Rig, server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        client = rig.client(server)
        waits = pool.submit(client.lease, "patient", wait_s=30)
        record = until(
            lambda: rig.store.read(workers.find, UNIVERSE, "patient"), "the worker is registered"
        )
        assert (record.roles, record.incarnation) == (("task",), "http")
        rig.client(server).submit("add")
        assert len(waits.result(30)) == 1


def test_workers_that_were_silent_for_long_are_removed() -> None:
    """Those that came over HTTP: another worker is its own process's to unregister."""
    clock = SimClock()
    store = LocalStore("memory:", MemoryBackend(), clock)
    store.transact(workers.heartbeat, UNIVERSE, "gone", "http", ("task",))
    store.transact(workers.heartbeat, UNIVERSE, "process", "1", ("task",))
    clock.advance(roll.FORGOTTEN_NS)
    store.transact(workers.heartbeat, UNIVERSE, "here", "http", ("task",))
    clock.advance(S)
    assert store.transact(roll._sweep, UNIVERSE) == 1
    assert [one.worker for one in store.read(workers.known, UNIVERSE)] == ["here", "process"]


def test_a_request_is_granted_when_all_overdue_leases_have_expired(
    rig: Rig, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if that takes several commits: the client asks once."""
    monkeypatch.setattr(lease, "EXPIRED_MAX", 3)
    for _ in range(20):
        client.submit("add", lease_s=2, expiries_max=9)
    assert sum(len(client.lease(limit=2)) for _ in range(10)) == 20
    over_ns = rig.store.now_ns() + 2 * S
    until(lambda: rig.store.now_ns() >= over_ns, "all are overdue")
    assert [one["attempt"] for one in client.lease(limit=1)] == [2]
    assert rig.store.read(counts_of, keys_of(UNIVERSE), "default").leased == 1


def test_a_server_alone_forgets_tasks_as_fast_as_they_end(rig: Rig, client: Client) -> None:
    """Without a worker of ours: each of them is named by a row of its own."""
    ids = [client.submit("add", retain_s=0.01) for _ in range(60)]
    for granted in client.lease(limit=60):
        client.complete(granted["lease"])
    until(lambda: client.get(f"/v1/tasks/{ids[-1]}").status == 404, "the last one is forgotten")
    assert {client.get(f"/v1/tasks/{id}").status for id in ids} == {404}


def test_a_server_alone_makes_checkpoints_while_tasks_end(rig: Rig, client: Client) -> None:
    """Also while there is always a task to be forgotten."""
    error = "e" * 4_000
    while rig.store.read(checkpoint.due_in, UNIVERSE) is False:
        tasks = [{"name": "add", "options": {"retain_s": 0}} for _ in range(200)]
        client.post("/v1/tasks", {"tasks": tasks})
        leases = [granted["lease"] for granted in client.lease(limit=200)]
        reports = [{"lease": one, "end": "refused", "error": error} for one in leases]
        client.post("/v1/tasks/fail", {"worker": "w", "reports": reports})
    until(
        lambda: rig.store.read(checkpoint.current, UNIVERSE).latest.number,
        "the log has a checkpoint",
    )


def _standing(server: HttpServer) -> int:
    """How many requests wait for a task."""
    return server.busy


def test_requests_for_ever_new_queues_make_a_bounded_number_of_topics(tmp_path: Path) -> None:
    """Each topic that is watched takes memory in the client of the store and in its writer."""
    with stores.open(tmp_path / "data") as store:
        assert isinstance(store, LmdbStore)
        made = Rig(store)
        try:
            client = made.client(made.serve())
            for n in range(30):
                names = [f"queue-{n}-{more}" for more in range(100)]
                assert client.lease(queues=names, wait_s=0.05) == []
        finally:
            made.close()
        # One more rings for the server itself.
        assert 100 <= len(store._link._watches) <= QUEUE_TOPICS + 1
