"""One caller's refused request never changes another caller's answer (W3), on every store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import holdfast as hf
from holdfast.app.submitting import SUBMIT_BATCH, _Single
from holdfast.durable import journal
from holdfast.errors import HoldfastError, Invalid, KeyTooLarge
from holdfast.ops.http.guard import Guard, address_of
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.tasks import TaskApi
from holdfast.store.api import Store
from holdfast.tasks import coordinator
from holdfast.tasks.coordinator import New
from holdfast.tasks.rows import Spec, counts_of, keys_of
from tests.naming import named
from tests.ops.http_rig import Client
from tests.postgres import fresh_url
from tests.process.watch import until

CALLERS = 64
ROUNDS = 10
# One call in so many is refused.
REFUSED_EACH = 100


@hf.task
def note(n: int) -> int:
    return n


# Both names are within their bounds. Together they make a key that no store can hold: only the operation,
# which knows the universe, refuses it.
refused_note = note.options(queue="q" * 200, limit_key="l" * 200)
app = hf.App("jobs", tasks=[note])


@pytest.fixture(params=["memory", "lmdb", "postgres"])
def rt(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[hf.Runtime]:
    urls: dict[str, Callable[[], Any]] = {
        "memory": lambda: "memory:",
        "lmdb": lambda: str(tmp_path / "data"),
        "postgres": fresh_url,
    }
    with app.open(urls[request.param](), roles=()) as runtime:
        yield runtime


def waiting(store: Store) -> int:
    return int(store.read(counts_of, keys_of("jobs"), "default").waiting)


def log_entries(store: Store) -> int:
    """One for each commit that created tasks."""
    return int(store.read(journal.head, keys_of("jobs").subject).height)


def is_refused(number: int) -> bool:
    return number % REFUSED_EACH == REFUSED_EACH // 2


def check(store: Store, found: dict[int, Any]) -> None:
    """Every innocent call has a task of its own, and each of the others its own refusal."""
    innocent = {number for number in found if not is_refused(number)}
    failed = {number for number in found if isinstance(found[number], Exception)}
    assert failed == set(found) - innocent
    assert {type(found[number]) for number in failed} == {KeyTooLarge}
    assert len({found[number] for number in innocent}) == len(innocent) == waiting(store)


def test_a_refused_submission_of_one_thread_fails_no_other_thread(rt: hf.Runtime) -> None:
    found: dict[int, Any] = {}
    start = threading.Barrier(CALLERS)

    def submit(caller: int) -> None:
        start.wait()
        for number in range(caller * ROUNDS, (caller + 1) * ROUNDS):
            try:
                wanted = refused_note if is_refused(number) else note
                found[number] = rt.submit(wanted, number).id
            except HoldfastError as error:
                found[number] = error

    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(submit, range(CALLERS)))
    assert len(found) == CALLERS * ROUNDS
    check(rt.store, found)


def test_a_refused_submission_of_one_coroutine_fails_no_other_coroutine(rt: hf.Runtime) -> None:
    async def submit(number: int) -> Any:
        try:
            wanted = refused_note if is_refused(number) else note
            return (await rt.submit_async(wanted, number)).id
        except HoldfastError as error:
            return error

    async def submit_all() -> list[Any]:
        return await asyncio.gather(*map(submit, range(CALLERS * ROUNDS)))

    check(rt.store, dict(enumerate(asyncio.run(submit_all()))))


def test_a_refused_submission_over_http_fails_no_other_request(rt: hf.Runtime) -> None:
    address = address_of("127.0.0.1:0")
    found: dict[int, Any] = {}

    def submit(caller: int) -> None:
        with Client(server) as client:
            for number in range(caller * ROUNDS, (caller + 1) * ROUNDS):
                options = {"queue": "q" * 200, "limit_key": "l" * 200} if is_refused(number) else {}
                answer = client.post(
                    "/v1/tasks", {"name": "note", "args": [number], "options": options}
                )
                if answer.status == 201:
                    found[number] = answer.document["id"]
                else:
                    assert answer.document["code"] == KeyTooLarge.code
                    found[number] = KeyTooLarge()

    with (
        HttpServer(
            lambda server: TaskApi(server, rt.store, "jobs", app.tasks),
            address=address,
            guard=Guard(address, ""),
        ) as server,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        list(pool.map(submit, range(CALLERS)))
    assert len(found) == CALLERS * ROUNDS
    check(rt.store, found)


def test_joined_submissions_stay_one_commit_when_some_are_refused(rt: hf.Runtime) -> None:
    """Resubmitting each by itself would isolate them too, at the price of a commit each."""
    count = 300
    assert count <= SUBMIT_BATCH

    async def submit_all() -> list[Any]:
        calls = [refused_note if is_refused(number) else note for number in range(count)]
        return await asyncio.gather(
            *(rt.submit_async(wanted, number) for number, wanted in enumerate(calls)),
            return_exceptions=True,
        )

    before = log_entries(rt.store)
    found = asyncio.run(submit_all())
    assert [isinstance(one, KeyTooLarge) for one in found] == [
        is_refused(number) for number in range(count)
    ]
    assert log_entries(rt.store) == before + 1


def test_joined_threads_stay_one_commit_when_one_is_refused(rt: hf.Runtime) -> None:
    """Nothing is committed before all of them wait."""
    submitter = rt.submitter
    leader = _Single(note.spec, New(b""))
    leader.leads = submitter._led = True
    found: list[Any] = []

    def submit(number: int) -> None:
        try:
            wanted = refused_note if number == 3 else note
            found.append(rt.submit(wanted, number).id)
        except KeyTooLarge as error:
            found.append(error)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    until(lambda: len(submitter._waiting) == CALLERS, "all wait")
    before = log_entries(rt.store)
    submitter._abandon(leader)
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(one, KeyTooLarge) for one in found) == 1
    assert len(found) == CALLERS
    assert waiting(rt.store) == CALLERS - 1
    assert log_entries(rt.store) == before + 1


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (New(b"", key="k"), "key"),
        (New(b"", after=(1,)), "after"),
        (New(b"", after=(-1,)), "after"),
    ],
    ids=named,
)
def test_joined_submissions_hold_no_key_and_no_dependency(new: New, why: str) -> None:
    with hf.App("jobs", tasks=[note]).open("memory:", roles=()) as rt:
        rt.submit(note, 1)
        each = rt.store.transact(
            coordinator.submit_each, "jobs", [Spec("note")], [0, 0], [new, New(b"")]
        )
        assert [error[:2] for error in each.refused] == [(0, Invalid.code)]
        assert each.refused[0][2]["what"] == why
        assert each.seqs == [0, 2]
