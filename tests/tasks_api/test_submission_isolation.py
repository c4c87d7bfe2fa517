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
from holdfast.app.submission import SUBMIT_BATCH_MAX, _ThreadSubmission
from holdfast.durable import journal
from holdfast.errors import HoldfastError, Invalid, KeyTooLarge
from holdfast.ops.http.auth import RequestGuard, parse_address
from holdfast.ops.http.server import HttpServer
from holdfast.ops.http.task_routes import TaskApi
from holdfast.store.api import Store
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec, get_counts, keys_of
from holdfast.tasks.operations import TaskToSubmit
from tests.case_ids import stable_repr
from tests.ops.http_rig import JsonClient
from tests.postgres import fresh_url
from tests.process.watch import until

CALLERS = 64
ROUNDS = 10
# One call in REFUSED_INTERVAL is refused.
REFUSED_INTERVAL = 100


@hf.task
def note(n: int) -> int:
    return n


# Each name is within its bound. Together with the universe they exceed the key size of every store, which only
# the operation can check.
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


def count_waiting(store: Store) -> int:
    return int(store.read(get_counts, keys_of("jobs"), "default").waiting)


def log_entries(store: Store) -> int:
    """Number of log entries: one per commit that created tasks."""
    return int(store.read(journal.head, keys_of("jobs").subject).height)


def is_refused(number: int) -> bool:
    return number % REFUSED_INTERVAL == REFUSED_INTERVAL // 2


def check_answers(store: Store, answers: dict[int, Any]) -> None:
    """Check that every valid call has a distinct task and every refused call its own KeyTooLarge."""
    accepted = {number for number in answers if not is_refused(number)}
    failed = {number for number in answers if isinstance(answers[number], Exception)}
    assert failed == set(answers) - accepted
    assert {type(answers[number]) for number in failed} == {KeyTooLarge}
    assert len({answers[number] for number in accepted}) == len(accepted) == count_waiting(store)


def test_refused_submit_of_one_thread_does_not_fail_other_threads(rt: hf.Runtime) -> None:
    answers: dict[int, Any] = {}
    start = threading.Barrier(CALLERS)

    def submit(caller: int) -> None:
        start.wait()
        for number in range(caller * ROUNDS, (caller + 1) * ROUNDS):
            try:
                task = refused_note if is_refused(number) else note
                answers[number] = rt.submit(task, number).id
            except HoldfastError as error:
                answers[number] = error

    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(submit, range(CALLERS)))
    assert len(answers) == CALLERS * ROUNDS
    check_answers(rt.store, answers)


def test_refused_submit_async_does_not_fail_other_coroutines(rt: hf.Runtime) -> None:
    async def submit(number: int) -> Any:
        try:
            task = refused_note if is_refused(number) else note
            return (await rt.submit_async(task, number)).id
        except HoldfastError as error:
            return error

    async def submit_all() -> list[Any]:
        return await asyncio.gather(*map(submit, range(CALLERS * ROUNDS)))

    check_answers(rt.store, dict(enumerate(asyncio.run(submit_all()))))


def test_refused_submit_over_http_does_not_fail_other_requests(rt: hf.Runtime) -> None:
    address = parse_address("127.0.0.1:0")
    answers: dict[int, Any] = {}

    def submit(caller: int) -> None:
        with JsonClient(server) as client:
            for number in range(caller * ROUNDS, (caller + 1) * ROUNDS):
                options = {"queue": "q" * 200, "limit_key": "l" * 200} if is_refused(number) else {}
                answer = client.post(
                    "/v1/tasks", {"name": "note", "args": [number], "options": options}
                )
                if answer.status == 201:
                    answers[number] = answer.document["id"]
                else:
                    assert answer.document["code"] == KeyTooLarge.code
                    answers[number] = KeyTooLarge()

    with (
        HttpServer(
            lambda server: TaskApi(server, rt.store, "jobs", app.tasks),
            address=address,
            guard=RequestGuard(address, ""),
        ) as server,
        ThreadPoolExecutor(CALLERS) as pool,
    ):
        list(pool.map(submit, range(CALLERS)))
    assert len(answers) == CALLERS * ROUNDS
    check_answers(rt.store, answers)


def test_coalesced_async_submits_stay_one_commit_when_some_are_refused(rt: hf.Runtime) -> None:
    """Resubmitting each task alone would also isolate errors, but needs a commit per task."""
    count = 300
    assert count <= SUBMIT_BATCH_MAX

    async def submit_all() -> list[Any]:
        calls = [refused_note if is_refused(number) else note for number in range(count)]
        return await asyncio.gather(
            *(rt.submit_async(task, number) for number, task in enumerate(calls)),
            return_exceptions=True,
        )

    before = log_entries(rt.store)
    answers = asyncio.run(submit_all())
    assert [isinstance(answer, KeyTooLarge) for answer in answers] == [
        is_refused(number) for number in range(count)
    ]
    assert log_entries(rt.store) == before + 1


def test_coalesced_thread_submits_stay_one_commit_when_one_is_refused(rt: hf.Runtime) -> None:
    """The test holds the leader, so that all threads wait before the first commit."""
    coalescer = rt.submitter._coalescer
    leader = _ThreadSubmission(note.spec, TaskToSubmit(b""))
    leader.is_leader = coalescer._has_leader = True
    answers: list[Any] = []

    def submit(number: int) -> None:
        try:
            task = refused_note if number == 3 else note
            answers.append(rt.submit(task, number).id)
        except KeyTooLarge as error:
            answers.append(error)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(CALLERS)]
    for thread in threads:
        thread.start()
    until(lambda: len(coalescer._waiting) == CALLERS, "all wait")
    before = log_entries(rt.store)
    coalescer._leave(leader)
    for thread in threads:
        thread.join(60)
    assert sum(isinstance(answer, KeyTooLarge) for answer in answers) == 1
    assert len(answers) == CALLERS
    assert count_waiting(rt.store) == CALLERS - 1
    assert log_entries(rt.store) == before + 1


@pytest.mark.parametrize(
    ("new", "why"),
    [
        (TaskToSubmit(b"", key="k"), "key"),
        (TaskToSubmit(b"", after=(1,)), "after"),
        (TaskToSubmit(b"", after=(-1,)), "after"),
    ],
    ids=stable_repr,
)
def test_submit_each_rejects_keys_and_dependencies(new: TaskToSubmit, why: str) -> None:
    with hf.App("jobs", tasks=[note]).open("memory:", roles=()) as rt:
        rt.submit(note, 1)
        result = rt.store.transact(
            operations.submit_each, "jobs", [TaskSpec("note")], [0, 0], [new, TaskToSubmit(b"")]
        )
        assert [error[:2] for error in result.refused] == [(0, Invalid.code)]
        assert result.refused[0][2]["what"] == why
        assert result.seqs == [0, 2]
