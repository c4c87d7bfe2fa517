"""Tasks over HTTP: submit, lease, heartbeat, complete, fail, list, cancel, redrive, readiness."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast import store as stores
from holdfast.app.tasks import task
from holdfast.clock import S, SimClock
from holdfast.leadership import leader_lease, worker_registry
from holdfast.ops.http import worker_registry as http_worker_registry
from holdfast.ops.http.server import HttpServer
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.store import LmdbStore
from holdfast.store.memory_backend import MemoryBackend
from holdfast.tasks import checkpoint, operations
from holdfast.tasks import leases as tasks_leases
from holdfast.tasks.model import QUEUE_TOPICS, QueueLimits, TaskSpec, get_counts, keys_of
from holdfast.tasks.operations import TaskToSubmit
from tests.ops.http_rig import (
    TOKEN,
    UNIVERSE,
    HttpRig,
    JsonClient,
    client,
    post_request,
    rig,
    server,
)
from tests.process.watch import until

__all__ = ["client", "rig", "server"]

pytestmark = pytest.mark.timeout(60)


# -- submit ----------------------------------------------------------------------------------------


def test_submit_returns_the_task_id_and_location(client: JsonClient) -> None:
    response = client.post(
        "/v1/tasks", {"name": "resize", "args": ["a.png", 80], "kwargs": {"crop": True}}
    )
    assert (response.status, response.document) == (201, {"id": "1-1"})
    assert response.headers["location"] == "/v1/tasks/1-1"
    shown = client.task("1-1")
    assert (shown["state"], shown["where"], shown["name"]) == ("WAITING", "ready", "resize")
    assert (shown["args"], shown["kwargs"]) == (["a.png", 80], {"crop": True})


def test_submit_of_a_batch_returns_all_ids(client: JsonClient) -> None:
    tasks = [{"name": "add", "args": [n]} for n in range(3)]
    assert client.post("/v1/tasks", {"tasks": tasks}).document == {"ids": ["1-1", "1-2", "1-3"]}


def test_submit_of_a_batch_with_one_invalid_task_submits_none(client: JsonClient) -> None:
    tasks = [{"name": "add"}, {"name": "add", "options": {"attempts": 0}}]
    response = client.post("/v1/tasks", {"tasks": tasks})
    assert (response.status, response.document["code"]) == (422, "invalid")
    assert client.get("/v1/tasks").document["tasks"] == []


def test_submit_options_are_stored_with_the_task(client: JsonClient) -> None:
    id = client.submit("add", queue="slow", priority=7, attempts=2, expiries_max=9, limit_key="k")
    shown = client.task(id)
    assert (shown["queue"], shown["priority"], shown["limit_key"]) == ("slow", 7, "k")
    assert (shown["attempts"], shown["expiries_max"]) == (2, 9)


def test_submit_with_the_same_key_returns_the_same_task(client: JsonClient) -> None:
    first = client.submit("add", 1, key="once")
    assert client.submit("add", 1, key="once") == first


def test_submit_with_the_same_key_and_other_arguments_is_a_key_conflict(client: JsonClient) -> None:
    client.submit("add", 1, key="once")
    response = client.post("/v1/tasks", {"name": "add", "args": [2], "options": {"key": "once"}})
    assert (response.status, response.document["code"]) == (409, "key_conflict")
    assert response.document["retryable"] is False


def test_submit_after_blocks_until_the_dependency_completes(client: JsonClient) -> None:
    first = client.submit("add")
    second = client.submit("add", after=[first])
    assert client.task(second)["where"] == "blocked"
    [granted] = client.lease(limit=10)
    assert granted["id"] == first
    client.complete(granted["lease"])
    assert [task["id"] for task in client.lease()] == [second]


def test_submit_after_accepts_positions_in_the_batch(client: JsonClient) -> None:
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
def test_submit_after_with_an_invalid_dependency_is_refused(
    client: JsonClient, after: list[Any], status: int, code: str
) -> None:
    client.submit("add")
    response = client.post("/v1/tasks", {"name": "add", "options": {"after": after}})
    assert (response.status, response.document["code"]) == (status, code)


def test_submit_of_a_declared_task_uses_its_declared_options(rig: HttpRig) -> None:
    @task(queue="images", attempts=7)
    def resize(path: str, width: int) -> str:
        return f"{path} {width}"

    client = rig.client(rig.serve(declared={"resize": resize}))
    shown = client.task(client.submit("resize", "a.png", 80))
    assert (shown["queue"], shown["attempts"]) == ("images", 7)
    shown = client.task(client.submit("resize", "a.png", 80, queue="other"))
    assert (shown["queue"], shown["attempts"]) == ("other", 7)


def test_submit_of_a_declared_task_checks_its_arguments(rig: HttpRig) -> None:
    @task
    def resize(path: str, width: int) -> str:
        return f"{path} {width}"

    client = rig.client(rig.serve(declared={"resize": resize}))
    for args in (["a.png"], ["a.png", "wide"], [1, 2, 3]):
        response = client.post("/v1/tasks", {"name": "resize", "args": args})
        assert (response.status, response.document["code"]) == (422, "invalid"), args


# -- lease and report ------------------------------------------------------------------------------


def test_lease_response_contains_the_call_and_the_lease(client: JsonClient) -> None:
    id = client.submit("add", 1, 2, lease_s=30)
    [granted] = client.lease()
    assert granted["id"] == id
    assert granted["lease"] == "1-1-1"
    assert (granted["name"], granted["args"], granted["kwargs"]) == ("add", [1, 2], {})
    assert (granted["attempt"], granted["suspect"]) == (1, False)
    assert granted["idempotency_key"] == f"task-{id}"
    assert 0 < granted["expires_in_s"] <= granted["lease_s"] == 30


def test_complete_stores_the_result(client: JsonClient) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    assert client.complete(granted["lease"], {"sum": [3, None, 1.5]}) == "COMMITTED"
    shown = client.task(id)
    assert (shown["state"], shown["result"]) == ("COMPLETED", {"sum": [3, None, 1.5]})


def test_repeated_complete_is_committed_again(client: JsonClient) -> None:
    client.submit("add")
    [granted] = client.lease()
    assert [client.complete(granted["lease"]) for _ in range(2)] == ["COMMITTED"] * 2


def test_complete_with_a_lost_lease_is_cancelled(client: JsonClient) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    client.post(f"/v1/tasks/{id}/cancel")
    assert client.complete(granted["lease"]) == "CANCELLED"


def test_complete_with_an_unknown_lease_is_rejected(client: JsonClient) -> None:
    client.submit("add")
    assert client.complete("1-1-1") == "REJECTED"
    client.lease()
    assert client.complete("1-9-1") == "REJECTED"
    assert client.complete("1-1-9") == "REJECTED"


def test_complete_of_a_batch_answers_each_report(client: JsonClient) -> None:
    first, second = client.submit("add"), client.submit("add")
    granted = client.lease(limit=2)
    client.post(f"/v1/tasks/{second}/cancel")
    reports = [{"lease": grant["lease"], "result": 1} for grant in granted]
    reports.append({"lease": "1-50-1", "result": 1})
    response = client.post("/v1/tasks/complete", {"worker": "w", "reports": reports})
    assert response.document == {"answers": ["COMMITTED", "CANCELLED", "REJECTED"]}
    assert client.task(first)["state"] == "COMPLETED"


def test_complete_with_a_lease_of_a_future_generation_is_rejected(client: JsonClient) -> None:
    client.submit("add")
    [granted] = client.lease()
    other = granted["lease"].replace("1-", "7-", 1)
    assert client.complete(other) == "REJECTED"
    assert client.complete(granted["lease"]) == "COMMITTED"


def test_fail_retries_the_task_until_its_attempts_are_used(client: JsonClient) -> None:
    id = client.submit("add", attempts=2)
    for attempt in (1, 2):
        [granted] = client.lease(wait_s=20)
        assert granted["attempt"] == attempt
        assert client.fail(granted["lease"], reason="down", error="no answer") == "COMMITTED"
    shown = client.task(id)
    assert (shown["state"], shown["reason"], shown["error"]) == ("FAILED", "down", "no answer")


def test_fail_with_end_refused_fails_the_task_without_retry(client: JsonClient) -> None:
    id = client.submit("add", attempts=5)
    [granted] = client.lease()
    assert client.fail(granted["lease"], end="refused", error="never") == "COMMITTED"
    assert client.task(id)["state"] == "FAILED"


def test_fail_with_end_released_counts_no_failure(client: JsonClient) -> None:
    id = client.submit("add", attempts=1)
    [granted] = client.lease()
    assert client.fail(granted["lease"], end="released") == "COMMITTED"
    shown = client.task(id)
    assert (shown["where"], shown["failures"], shown["expiries"]) == ("ready", 0, 0)


def test_heartbeat_extends_the_lease_and_stores_progress(client: JsonClient) -> None:
    id = client.submit("add", lease_s=30)
    [granted] = client.lease()
    heartbeat = {"lease": granted["lease"], "progress": {"done": 5}}
    [extended] = client.post("/v1/tasks/heartbeat", {"leases": [heartbeat]}).document["leases"]
    assert (extended["lease"], extended["answer"]) == (granted["lease"], "COMMITTED")
    assert 0 < extended["expires_in_s"] <= 30
    assert client.task(id)["progress"] == {"done": 5}


def test_heartbeat_reports_lost_and_unknown_leases(client: JsonClient) -> None:
    client.submit("add")
    second = client.submit("add")
    leases = [one["lease"] for one in client.lease(limit=2)]
    client.post(f"/v1/tasks/{second}/cancel")
    requested = [{"lease": one} for one in [*leases, "1-77-1", "1-1-500"]]
    replies = client.post("/v1/tasks/heartbeat", {"leases": requested}).document["leases"]
    assert [one["answer"] for one in replies] == ["COMMITTED", "CANCELLED", "REJECTED", "REJECTED"]
    assert [one["expires_in_s"] > 0 for one in replies] == [True, False, False, False]


def test_expired_lease_is_granted_to_the_next_waiting_worker(client: JsonClient) -> None:
    id = client.submit("add", lease_s=0.05, expiries_max=2)
    [first] = client.lease("one")
    [second] = client.lease("two", wait_s=20)
    assert (second["id"], second["attempt"], second["suspect"]) == (id, 2, True)
    assert client.complete(first["lease"]) == "CANCELLED"


def test_suspect_task_is_leased_alone(rig: HttpRig, client: JsonClient) -> None:
    suspect = client.submit("bad", lease_s=0.05, expiries_max=2)
    client.lease("one")
    until(lambda: rig.store.transact(operations.maintain, UNIVERSE, 10), "the lease ends")
    client.submit("good")
    response = client.post("/v1/tasks/lease", {"worker": "w", "limit": 10, "alone": False})
    assert [task["name"] for task in response.document["tasks"]] == ["good"]
    assert response.document["suspects"] is True
    client.submit("good")
    assert [task["id"] for task in client.lease(limit=10)] == [suspect]


def test_lease_takes_tasks_from_the_named_queues_only(client: JsonClient) -> None:
    client.submit("a", queue="a")
    expected = client.submit("b", queue="b")
    assert [task["id"] for task in client.lease(queues=["b", "c"], limit=5)] == [expected]


def test_lease_takes_tasks_with_the_named_names_only(client: JsonClient) -> None:
    a, b = client.submit("a"), client.submit("b")
    assert [task["id"] for task in client.lease(names=["b", "c"], limit=5)] == [b]
    assert client.task(a)["where"] == "stray"
    assert [task["id"] for task in client.lease(limit=5)] == [a]


# -- long polls ------------------------------------------------------------------------------------


def test_lease_long_poll_returns_no_tasks_after_wait_s(client: JsonClient) -> None:
    assert client.lease(wait_s=0.05) == []


def test_lease_long_poll_gets_a_task_submitted_while_waiting(
    rig: HttpRig, server: HttpServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=30)
        until(lambda: waiting_requests(server) == 1, "somebody waits")
        id = rig.client(server).submit("add")
        assert [task["id"] for task in waiting.result(20)] == [id]


def test_lease_long_poll_gets_a_task_submitted_by_another_process(
    rig: HttpRig, server: HttpServer
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, queues=["other"], wait_s=30)
        until(lambda: waiting_requests(server) == 1, "somebody waits")
        spec = TaskSpec("add", queue="other")
        rig.store.transact(operations.submit, UNIVERSE, spec, [TaskToSubmit(b"\x92\x90\x80")])
        assert [task["name"] for task in waiting.result(20)] == ["add"]


def test_lease_long_poll_gets_a_delayed_task_when_due(client: JsonClient) -> None:
    id = client.submit("add", delay_s=0.2)
    assert client.task(id)["where"] == "delayed"
    assert client.lease() == []
    assert [task["id"] for task in client.lease(wait_s=20)] == [id]


def test_lease_long_polls_each_get_a_task(rig: HttpRig, server: HttpServer) -> None:
    many = 24
    with ThreadPoolExecutor(many) as pool:
        polls = [
            pool.submit(rig.client(server).lease, f"w-{n}", queues=["a", "b"][n % 2 :], wait_s=30)
            for n in range(many)
        ]
        until(lambda: waiting_requests(server) == many, "all of them wait")
        tasks = [{"name": "add", "options": {"queue": "b"}} for _ in range(many)]
        ids = rig.client(server).post("/v1/tasks", {"tasks": tasks}).document["ids"]
        granted = [task["id"] for poll in polls for task in poll.result(30)]
    assert sorted(granted) == sorted(ids)


def test_lease_long_polls_get_tasks_of_their_names(rig: HttpRig, server: HttpServer) -> None:
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
            assert [granted["name"] for granted in poll.result(20)] == [name]


def test_lease_long_poll_gets_a_task_when_the_concurrency_limit_allows(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    rig.store.transact(operations.set_limits, UNIVERSE, "default", QueueLimits(concurrency=1))
    client.submit("add")
    second = client.submit("add")
    [first] = client.lease()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(rig.client(server).lease, wait_s=30)
        until(lambda: waiting_requests(server) == 1, "somebody waits")
        client.complete(first["lease"])
        assert [granted["id"] for granted in waiting.result(20)] == [second]


def test_lease_request_of_a_paused_queue_is_empty_until_the_resume(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    pause = operations.set_queue_paused
    assert rig.store.transact(pause, UNIVERSE, "default", True)
    id = client.submit("add")
    assert client.lease() == []
    with ThreadPoolExecutor(1) as pool:
        poll = pool.submit(rig.client(server).lease, wait_s=30)
        until(lambda: waiting_requests(server) == 1, "the request waits")
        assert rig.store.transact(pause, UNIVERSE, "default", False)
        assert [granted["id"] for granted in poll.result(20)] == [id]


def test_lease_long_poll_of_a_closed_connection_is_granted_nothing(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    with rig.raw(server) as raw:
        raw.send(post_request("/v1/tasks/lease", {"worker": "gone", "wait_s": 30}))
        until(lambda: waiting_requests(server) == 1, "somebody waits")
    id = client.submit("add")
    [granted] = client.lease("here", wait_s=20)
    assert (granted["id"], granted["attempt"]) == (id, 1)
    until(lambda: waiting_requests(server) == 0, "nobody waits any more")


def test_undelivered_leases_are_released_without_counting_an_attempt(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    """Grants race with the close of the connection. In either order no attempt is counted."""
    ids = {client.submit("add", attempts=1, expiries_max=1) for _ in range(20)}
    for _ in range(40):
        with rig.raw(server) as raw:
            raw.send(post_request("/v1/tasks/lease", {"worker": "gone", "limit": 5}))
    until(lambda: not server.busy, "all of them are served")
    granted = {grant["id"] for grant in client.lease("here", limit=100)}
    not_granted = ids - granted
    # A response sent before the close was noticed counts as delivered. Its lease expires.
    assert all(client.task(id)["where"] in ("leased", "ready") for id in not_granted)
    assert all(client.task(id)["expiries"] == client.task(id)["failures"] == 0 for id in ids)


def test_task_get_with_wait_s_returns_when_the_task_ends(
    rig: HttpRig, server: HttpServer, client: JsonClient
) -> None:
    ids = [client.submit("add"), client.submit("add")]
    granted = client.lease(limit=2)
    with ThreadPoolExecutor(4) as pool:
        waiting = [
            pool.submit(rig.client(server).task, f"{id}?wait_s=30") for id in ids for _ in range(2)
        ]
        until(lambda: server.busy == 4, "all of them wait")
        client.complete(granted[0]["lease"], 7)
        assert [future.result(20)["result"] for future in waiting[:2]] == [7, 7]
        assert not any(future.done() for future in waiting[2:])
        client.post(f"/v1/tasks/{ids[1]}/cancel")
        assert [future.result(20)["state"] for future in waiting[2:]] == ["DEAD", "DEAD"]


def test_task_get_returns_the_current_state_after_wait_s(client: JsonClient) -> None:
    assert client.task(f"{client.submit('add')}?wait_s=0.05")["state"] == "WAITING"


@pytest.mark.parametrize("wait_s", ["x", "-1", "61", "nan", ""])
def test_task_get_rejects_an_invalid_wait_s(client: JsonClient, wait_s: str) -> None:
    response = client.get(f"/v1/tasks/{client.submit('add')}?wait_s={wait_s}")
    assert (response.status, response.document["code"]) == (422, "invalid")


# -- list, cancel and redrive ----------------------------------------------------------------------


def test_task_list_filters_by_state_queue_and_name(client: JsonClient) -> None:
    a, b = client.submit("a", queue="x"), client.submit("b", queue="y")
    client.submit("a", queue="y")
    [granted] = client.lease(queues=["x"])
    client.complete(granted["lease"])

    def ids(query: str) -> list[str]:
        return [task["id"] for task in client.get(f"/v1/tasks?{query}").document["tasks"]]

    assert ids("state=completed") == [a]
    assert ids("queue=y&name=b") == [b]
    assert ids("state=ready") == [b, "1-3"]
    assert ids("") == ["1-3", b, a]


def test_task_list_continues_from_its_cursor(client: JsonClient) -> None:
    client.post("/v1/tasks", {"tasks": [{"name": "add"}] * 5})
    ids: list[str] = []
    path = "/v1/tasks?state=ready&limit=2"
    for _ in range(3):
        page = client.get(path).document
        ids += [task["id"] for task in page["tasks"]]
        path = f"/v1/tasks?state=ready&limit=2&cursor={page['cursor']}"
    assert page["cursor"] is None
    assert ids == [f"1-{n}" for n in range(1, 6)]


def test_queues_list_returns_counts_and_limits(rig: HttpRig, client: JsonClient) -> None:
    client.submit("add")
    rig.store.transact(operations.set_limits, UNIVERSE, "default", QueueLimits(concurrency=3))
    [queue] = client.get("/v1/queues").document["queues"]
    assert (queue["queue"], queue["ready"], queue["waiting"]) == ("default", 1, 1)
    assert (queue["concurrency"], queue["per_key"]) == (3, None)


@pytest.mark.parametrize("query", ["state=lost", "limit=x", "limit=-1", "limit=1001", "cursor=%20"])
def test_task_list_rejects_invalid_query_parameters(client: JsonClient, query: str) -> None:
    response = client.get(f"/v1/tasks?{query}")
    assert (response.status, response.document["code"]) == (422, "invalid")


def test_cancel_makes_the_task_dead_and_heartbeat_reports_it(client: JsonClient) -> None:
    id = client.submit("add")
    [granted] = client.lease()
    response = client.post(f"/v1/tasks/{id}/cancel", {"reason": "changed our mind"})
    assert response.document == {"id": id, "cancelled": True}
    assert client.post(f"/v1/tasks/{id}/cancel").document["cancelled"] is False
    shown = client.task(id)
    assert (shown["state"], shown["reason"]) == ("DEAD", "changed our mind")
    heartbeat = {"leases": [{"lease": granted["lease"]}]}
    [reply] = client.post("/v1/tasks/heartbeat", heartbeat).document["leases"]
    assert reply["answer"] == "CANCELLED"


def test_redrive_of_a_dead_task_creates_one_linked_task(client: JsonClient) -> None:
    id = client.submit("add")
    client.post(f"/v1/tasks/{id}/cancel")
    response = client.post(f"/v1/tasks/{id}/redrive")
    assert (response.status, response.document["redrive_of"]) == (201, id)
    new = response.document["id"]
    assert client.task(id)["redriven_by"] == new
    assert client.task(new)["redrive_of"] == id
    assert client.post(f"/v1/tasks/{id}/redrive").document["id"] == new


def test_redrive_of_a_waiting_task_is_refused(client: JsonClient) -> None:
    response = client.post(f"/v1/tasks/{client.submit('add')}/redrive")
    assert (response.status, response.document["code"]) == (422, "invalid")


@pytest.mark.parametrize(
    ("id", "status", "code"),
    [("1-1", 404, "not_found"), ("x", 422, "bad_task_id"), ("01-1", 422, "bad_task_id")],
)
def test_unknown_or_malformed_task_id_is_refused(
    client: JsonClient, id: str, status: int, code: str
) -> None:
    for response in (
        client.get(f"/v1/tasks/{id}"),
        client.post(f"/v1/tasks/{id}/cancel"),
        client.post(f"/v1/tasks/{id}/redrive"),
    ):
        assert (response.status, response.document["code"]) == (status, code)


# -- health ----------------------------------------------------------------------------------------


def test_healthz_needs_no_token(rig: HttpRig) -> None:
    client = rig.client(rig.serve(TOKEN))
    assert client.get("/healthz").document == {"ok": True}


def test_readyz_lists_the_blockers(client: JsonClient) -> None:
    response = client.get("/readyz")
    assert (response.status, response.document["ready"]) == (503, False)
    assert [blocker["reason"] for blocker in response.document["reasons"]] == ["authority_missing"]


def test_readyz_is_200_with_a_leader(rig: HttpRig, client: JsonClient) -> None:
    rig.store.transact(leader_lease.acquire, UNIVERSE, "leader", "one", 60 * S)
    response = client.get("/readyz")
    assert (response.status, response.document["ready"]) == (200, True)


def test_readyz_without_the_token_hides_the_reasons(rig: HttpRig) -> None:
    server = rig.serve(TOKEN)
    assert rig.client(server).get("/readyz").document == {"ready": False}
    assert rig.client(server, TOKEN).get("/readyz").document["universe"] == UNIVERSE


def test_worker_is_registered_while_its_long_poll_waits(rig: HttpRig, server: HttpServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        client = rig.client(server)
        waiting = pool.submit(client.lease, "patient", wait_s=30)
        record = until(
            lambda: rig.store.read(worker_registry.find, UNIVERSE, "patient"),
            "the worker is registered",
        )
        assert (record.roles, record.incarnation) == (("task",), "http")
        rig.client(server).submit("add")
        assert len(waiting.result(30)) == 1


def test_expired_http_workers_are_removed_from_the_registry() -> None:
    """Only HTTP workers are removed. Other workers unregister in their own process."""
    clock = SimClock()
    store = InProcessStore("memory:", MemoryBackend(), clock)
    store.transact(worker_registry.heartbeat, UNIVERSE, "gone", "http", ("task",))
    store.transact(worker_registry.heartbeat, UNIVERSE, "process", "1", ("task",))
    clock.advance(http_worker_registry.EXPIRED_NS)
    store.transact(worker_registry.heartbeat, UNIVERSE, "here", "http", ("task",))
    clock.advance(S)
    assert store.transact(http_worker_registry._remove_expired, UNIVERSE) == 1
    assert [record.worker for record in store.read(worker_registry.list_registered, UNIVERSE)] == [
        "here",
        "process",
    ]


def test_lease_expires_all_overdue_leases_before_granting(
    rig: HttpRig, client: JsonClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the expiry takes several commits: the client sends one request."""
    monkeypatch.setattr(tasks_leases, "EXPIRED_MAX", 3)
    for _ in range(20):
        client.submit("add", lease_s=2, expiries_max=9)
    assert sum(len(client.lease(limit=2)) for _ in range(10)) == 20
    over_ns = rig.store.now_ns() + 2 * S
    until(lambda: rig.store.now_ns() >= over_ns, "all are overdue")
    assert [granted["attempt"] for granted in client.lease(limit=1)] == [2]
    assert rig.store.read(get_counts, keys_of(UNIVERSE), "default").leased == 1


def test_server_without_workers_deletes_expired_results(rig: HttpRig, client: JsonClient) -> None:
    """No worker process runs. Each task has its own retention row."""
    ids = [client.submit("add", retain_s=0.01) for _ in range(60)]
    for granted in client.lease(limit=60):
        client.complete(granted["lease"])
    until(lambda: client.get(f"/v1/tasks/{ids[-1]}").status == 404, "the last one is forgotten")
    assert {client.get(f"/v1/tasks/{id}").status for id in ids} == {404}


def test_server_without_workers_writes_checkpoints(rig: HttpRig, client: JsonClient) -> None:
    """Also while there is always an expired task to delete."""
    error = "e" * 4_000
    while rig.store.read(checkpoint.is_due_in, UNIVERSE) is False:
        tasks = [{"name": "add", "options": {"retain_s": 0}} for _ in range(200)]
        client.post("/v1/tasks", {"tasks": tasks})
        leases = [granted["lease"] for granted in client.lease(limit=200)]
        reports = [{"lease": lease_id, "end": "refused", "error": error} for lease_id in leases]
        client.post("/v1/tasks/fail", {"worker": "w", "reports": reports})
    until(
        lambda: rig.store.read(checkpoint.read_index, UNIVERSE).latest.number,
        "the log has a checkpoint",
    )


def waiting_requests(server: HttpServer) -> int:
    """The number of requests in progress."""
    return server.busy


def test_long_polls_of_new_queues_watch_a_bounded_number_of_topics(tmp_path: Path) -> None:
    """Each watched topic uses memory in the store client and in the writer process."""
    with stores.open(tmp_path / "data") as store:
        assert isinstance(store, LmdbStore)
        http_rig = HttpRig(store)
        try:
            client = http_rig.client(http_rig.serve())
            for n in range(30):
                names = [f"queue-{n}-{more}" for more in range(100)]
                assert client.lease(queues=names, wait_s=0.05) == []
        finally:
            http_rig.close()
        # One more: the jobs of the API.
        assert 100 <= len(store._client.topics) <= QUEUE_TOPICS + 1
