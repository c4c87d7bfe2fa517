"""Submitting tasks: one, many, different ones at once, with options; and everything that is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.app.submitting import SUBMIT_BATCH
from holdfast.clock import SimClock
from holdfast.errors import Invalid, KeyConflict, NotFound, StoreBusy, ValueTooLarge
from holdfast.store.local import LocalStore
from holdfast.tasks.coordinator import CyclicDependency
from holdfast.tasks.ids import BadTaskId
from holdfast.tasks.rows import counts_of, keys_of
from tests.naming import named
from tests.tasks_api.conftest import Open
from tests.world.rig import FaultyBackend

MODULES = ("holdfast.app.submitting", "holdfast.app.tasks", "holdfast.app.runtime")


@hf.task
def add(a: int, b: int = 1) -> int:
    return a + b


@hf.task
def show(*args: Any, **named: Any) -> list[Any]:
    return [list(args), named]


@hf.task
def keyed(key: str) -> str:
    return key


@hf.task
async def double(n: int) -> int:
    return 2 * n


@hf.task
def elsewhere() -> None: ...


def waiting(rt: hf.Runtime, queue: str = "default") -> int:
    return rt.store.read(counts_of, keys_of("jobs"), queue).waiting


# -- one -----------------------------------------------------------------------------------------


def test_a_task_is_submitted_run_and_its_result_fetched(running: Open) -> None:
    rt = running(add)
    handle = rt.submit(add, 1, b=2)
    assert handle.result(30) == 3
    assert handle.status().state == "COMPLETED"
    assert rt.task(handle.id).result(30) == 3


def test_arguments_come_as_they_were_sent(running: Open) -> None:
    rt = running(show)
    given = [None, True, -5, 2.5, "ä\x00", b"\xff", [1, [2]], {"a": {"b": 3}}]
    assert rt.submit(show, *given, named=[1], other={"x": None}).result(30) == [
        given,
        {"named": [1], "other": {"x": None}},
    ]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((), {}),
        ((1, 2, 3), {}),
        ((1,), {"c": 1}),
        ((1,), {"a": 1}),
        (("one",), {}),
        ((1.5,), {}),
        ((None,), {}),
        ((1,), {"b": "two"}),
    ],
)
def test_arguments_that_do_not_fit_the_function_are_refused_at_once(
    resting: Open, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    rt = resting(add)
    with pytest.raises(Invalid) as caught:
        rt.submit(add, *args, **named)
    assert (caught.value.what, caught.value.task) == ("task arguments", "add")
    assert waiting(rt) == 0


def itself() -> list[Any]:
    found: list[Any] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, "half \ud800", 1 << 70, itself(), {(1, 2): object()}, 1j],
    ids=lambda value: type(value).__name__,
)
def test_arguments_that_cannot_be_stored_are_refused_at_once(resting: Open, value: Any) -> None:
    rt = resting(show)
    for call in ({"args": (value,), "named": {}}, {"args": (), "named": {"x": value}}):
        with pytest.raises(Invalid) as caught:
            rt.submit(show, *call["args"], **call["named"])  # type: ignore[misc]
        assert caught.value.what == "task arguments"
    assert waiting(rt) == 0


@pytest.mark.parametrize("size", [4 * 1024 * 1024, 50_000_000])
def test_arguments_that_are_too_large_are_refused_at_once(resting: Open, size: int) -> None:
    rt = resting(show)
    with pytest.raises(ValueTooLarge) as caught:
        rt.submit(show, b"x" * size)
    assert caught.value.bytes > size
    assert waiting(rt) == 0


def test_arguments_of_some_megabytes_are_taken(running: Open) -> None:
    rt = running(show)
    large = b"x" * (4 * 1024 * 1024 - 1_000)
    assert rt.submit(show.options(), large).status().state in ("WAITING", "LEASED", "COMPLETED")
    [[back], _] = rt.submit(show, large[:1_000_000]).result(30)
    assert len(back) == 1_000_000


@pytest.mark.parametrize("wrong", [elsewhere, print, None, "add", add.fn], ids=named)
def test_what_is_no_task_of_the_app_is_not_submitted(resting: Open, wrong: Any) -> None:
    rt = resting(add)
    for submit in (
        lambda: rt.submit(wrong),
        lambda: rt.submit_many(wrong, [()]),
        lambda: rt.map(wrong, [1]),
    ):
        with pytest.raises(Invalid) as caught:
            submit()
        assert caught.value.what == "task"


def test_another_task_of_the_same_name_is_not_the_apps(resting: Open) -> None:
    rt = resting(add)
    with pytest.raises(Invalid):
        rt.submit(hf.task(name="add")(lambda: None))


# -- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"key": 5},
        {"key": ""},
        {"key": "k" * 201},
        {"key": "half \ud800"},
        {"delay_s": -1},
        {"delay_s": "5"},
        {"delay_s": float("nan")},
        {"delay_s": 1e12},
        {"delay_s": None},
        {"priority": 1.5},
        {"priority": True},
        {"priority": 1 << 40},
        {"queue": ""},
        {"queue": None},
        {"queue": "half \ud800"},
        {"limit_key": 5},
        {"limit_key": "k" * 201},
        {"after": 5},
        {"no_such_option": 1},
        {"lease_s": 5},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        add.options(**options)


@pytest.mark.parametrize(
    ("after", "error"),
    [
        (["1-99"], NotFound),
        (["2-1"], NotFound),
        ("1-99", NotFound),
        (["some words"], BadTaskId),
        ([5], Invalid),
        ([None], Invalid),
    ],
)
def test_a_task_after_one_that_is_not_there_is_refused(
    resting: Open, after: Any, error: type[Exception]
) -> None:
    rt = resting(add)
    with pytest.raises(error):
        rt.submit(add.options(after=after), 1)
    assert waiting(rt) == 0


def test_options_of_one_call_do_not_stay_with_the_task(resting: Open) -> None:
    rt = resting(add)
    assert rt.submit(add.options(queue="other", priority=3), 1).status().queue == "other"
    assert rt.submit(add, 1).status().queue == "default"


# -- keys ----------------------------------------------------------------------------------------


def test_the_same_key_and_arguments_are_the_same_task(resting: Open) -> None:
    rt = resting(add, keyed)
    first = rt.submit(add.options(key="k"), 1)
    assert rt.submit(add, 1, key="k").id == first.id
    assert rt.submit(add.options(key="k", priority=5), 1).id == first.id
    assert rt.submit(add, 1, key="other").id != first.id
    assert waiting(rt) == 2


def test_the_same_key_with_other_arguments_is_a_conflict(resting: Open) -> None:
    rt = resting(add)
    first = rt.submit(add, 1, key="k")
    with pytest.raises(KeyConflict) as caught:
        rt.submit(add, 2, key="k")
    assert f"1-{caught.value.task}" == first.id


def test_tasks_of_different_names_do_not_share_their_keys(resting: Open) -> None:
    rt = resting(add, double)
    assert rt.submit(add, 1, key="k").id != rt.submit(double, 1, key="k").id


def test_a_function_with_a_parameter_called_key_gets_it(running: Open) -> None:
    rt = running(keyed)
    assert rt.submit(keyed, key="mine").result(30) == "mine"
    assert rt.submit(keyed.options(key="k"), key="mine").result(30) == "mine"


def test_a_key_that_is_done_answers_with_its_result(running: Open) -> None:
    rt = running(add)
    first = rt.submit(add, 1, key="k")
    assert first.result(30) == 2
    again = rt.submit(add, 1, key="k")
    assert (again.id, again.result(0)) == (first.id, 2)


def test_a_key_means_one_task_for_many_threads(resting: Open) -> None:
    rt = resting(add)
    found: list[str] = []

    def submit() -> None:
        for n in range(20):
            found.append(rt.submit(add, n, key=f"k{n}").id)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(found), len(set(found)), waiting(rt)) == (160, 20, 20)


# -- many ----------------------------------------------------------------------------------------


def test_many_tasks_are_submitted_in_their_order(running: Open) -> None:
    rt = running(add)
    count = 2 * SUBMIT_BATCH + 10
    handles = rt.submit_many(add, ((n, n) for n in range(count)))
    assert len({handle.id for handle in handles}) == count
    assert [handle.result(60) for handle in handles[:3] + handles[-3:]] == [
        2 * n for n in [0, 1, 2, count - 3, count - 2, count - 1]
    ]


@pytest.mark.parametrize(
    "wrong", [(1, 2, 3), ("one",), (), "ab", 5, None, {"a": 1}, (object(),)], ids=named
)
def test_all_arguments_are_checked_before_any_task_is_submitted(resting: Open, wrong: Any) -> None:
    rt = resting(add)
    many = [(n,) for n in range(SUBMIT_BATCH + 1)]
    with pytest.raises(Invalid):
        rt.submit_many(add, [*many, wrong])
    assert waiting(rt) == 0


def test_an_iterable_that_raises_leaves_nothing_behind(resting: Open) -> None:
    rt = resting(add)

    def broken() -> Iterator[tuple[int]]:
        for n in range(SUBMIT_BATCH + 1):
            yield (n,)
        raise OSError("the file ends here")

    with pytest.raises(OSError, match="the file ends here"):
        rt.submit_many(add, broken())
    assert waiting(rt) == 0


def test_no_tasks_are_no_tasks(resting: Open) -> None:
    rt = resting(add)
    assert rt.submit_many(add, []) == []
    assert list(rt.map(add, [])) == []
    assert rt.submit_all([]) == []


def test_many_tasks_cannot_have_one_key(resting: Open) -> None:
    with pytest.raises(Invalid) as caught:
        resting(add).submit_many(add.options(key="k"), [(1,), (2,)])
    assert caught.value.what == "key"


def test_large_tasks_are_submitted_in_as_many_commits_as_they_need(running: Open) -> None:
    rt = running(show)
    handles = rt.submit_many(show, [(n, b"x" * 1_000_000) for n in range(12)])
    assert [handle.result(60)[0][0] for handle in handles] == list(range(12))


def test_map_gives_results_in_the_order_of_its_values(running: Open) -> None:
    rt = running(add, double)
    assert list(rt.map(add, range(50))) == [n + 1 for n in range(50)]
    assert list(rt.map(double, range(50), timeout=30)) == [2 * n for n in range(50)]


def test_map_submits_before_anybody_asks_for_a_result(resting: Open) -> None:
    rt = resting(add)
    rt.map(add, [1, 2, 3])
    assert waiting(rt) == 3


def test_an_error_in_map_is_raised_where_its_result_would_be(running: Open) -> None:
    @hf.task(attempts=1)
    def even(n: int) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n

    results = running(even).map(even, [0, 1, 2])
    assert next(results) == 0
    with pytest.raises(hf.TaskFailedError) as caught:
        next(results)
    assert caught.value.error == "ValueError: 1 is odd"


# -- different ones at once ----------------------------------------------------------------------


def test_tasks_name_each_other_by_key_in_any_order(running: Open) -> None:
    order: list[str] = []

    @hf.task
    def step(name: str) -> None:
        order.append(name)

    rt = running(step)
    handles = rt.submit_all(
        [
            step.options(key="roof", after=["walls", "beams"]).call("roof"),
            step.options(key="walls", after=["ground"]).call("walls"),
            step.options(key="ground").call("ground"),
            step.options(key="beams", after=["walls"]).call("beams"),
        ]
    )
    handles[0].result(30)
    assert order == ["ground", "walls", "beams", "roof"]
    assert [handle.status().state for handle in handles] == ["COMPLETED"] * 4


@pytest.mark.parametrize(
    "edges",
    [{"a": ["a"]}, {"a": ["b"], "b": ["a"]}, {"a": ["b"], "b": ["c"], "c": ["d"], "d": ["b"]}],
    ids=str,
)
def test_a_circle_of_tasks_is_refused_whole(resting: Open, edges: dict[str, list[str]]) -> None:
    rt = resting(add)
    calls = [add.options(key=key, after=after).call(1) for key, after in edges.items()]
    with pytest.raises(CyclicDependency):
        rt.submit_all([add.options().call(5), *calls])
    assert waiting(rt) == 0


def test_a_diamond_is_no_circle(running: Open) -> None:
    rt = running(add)
    handles = rt.submit_all(
        [
            add.options(key="end", after=["left", "right"]).call(4),
            add.options(key="left", after=["start"]).call(2),
            add.options(key="right", after=["left", "start"]).call(3),
            add.options(key="start").call(1),
        ]
    )
    assert [handle.result(30) for handle in handles] == [5, 3, 4, 2]


def test_a_long_chain_of_tasks_is_no_circle(running: Open) -> None:
    rt = running(add)
    chain = [add.options(key="0").call(0)]
    chain += [add.options(key=f"{n}", after=[f"{n - 1}"]).call(n) for n in range(1, 200)]
    assert rt.submit_all(reversed(chain))[0].result(60) == 200


def test_one_wrong_task_of_several_keeps_all_of_them_out(resting: Open) -> None:
    rt = resting(add)
    for wrong, error in (
        (add.options(after=["1-99"]).call(1), NotFound),
        (add.options(after=["no such key"]).call(1), BadTaskId),
        (elsewhere.options().call(), Invalid),
        (add, Invalid),
        (None, Invalid),
    ):
        with pytest.raises(error):
            rt.submit_all([add.options().call(1), wrong])  # type: ignore[list-item]
    with pytest.raises(Invalid):
        add.options().call("one")
    assert waiting(rt) == 0


def test_a_key_that_two_different_tasks_have_names_neither(resting: Open) -> None:
    rt = resting(add, double)
    with pytest.raises(Invalid) as caught:
        rt.submit_all(
            [
                add.options(key="k").call(1),
                double.options(key="k").call(1),
                add.options(after=["k"]).call(2),
            ]
        )
    assert caught.value.what == "after"
    assert waiting(rt) == 0


def test_handles_of_before_may_be_named_beside_keys(running: Open) -> None:
    rt = running(add)
    before = rt.submit(add, 1)
    [last, _] = rt.submit_all(
        [
            add.options(after=[before, "k"]).call(3),
            add.options(key="k", after=before.id).call(2),
        ]
    )
    assert last.result(30) == 4


# -- many callers --------------------------------------------------------------------------------


def test_submissions_of_many_threads_all_arrive(resting: Open) -> None:
    rt = resting(show)
    found: list[str] = []

    def submit(thread: int) -> None:
        for n in range(50):
            found.append(rt.submit(show.options(priority=thread % 3), thread, n).id)

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(found), len(set(found)), waiting(rt)) == (800, 800, 800)


def test_submissions_of_many_coroutines_all_arrive(running: Open) -> None:
    import asyncio

    rt = running(add, double)

    async def one(n: int) -> int:
        found: int = await (await rt.submit_async(double if n % 2 else add, n))
        return found

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(one(n) for n in range(200)))

    assert asyncio.run(all_of_them()) == [2 * n if n % 2 else n + 1 for n in range(200)]


def test_a_store_that_is_busy_is_told_to_all_whose_tasks_it_has_not_taken() -> None:
    """Whoever is told tries again; so in the end there is one task for each submission."""
    backend = FaultyBackend()
    rt: hf.Runtime = hf.App("jobs", tasks=[show]).open(
        LocalStore("memory:", backend, SimClock()), roles=()
    )
    backend.arm({at: StoreBusy() for at in range(1, 200, 3)})
    refused: list[int] = []

    def submit(thread: int) -> None:
        for n in range(20):
            while True:
                try:
                    rt.submit(show, thread, n)
                except StoreBusy:
                    refused.append(n)
                else:
                    break

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert refused
    assert waiting(rt) == 160
