"""Task submission: submit, submit_many, submit_all and map, their options and rejected input."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

import holdfast as hf
from holdfast.app.submission import SUBMIT_BATCH_MAX
from holdfast.clock import SimClock
from holdfast.errors import Invalid, KeyConflict, NotFound, StoreBusy, ValueTooLarge
from holdfast.store.in_process import InProcessStore
from holdfast.tasks.ids import BadTaskId
from holdfast.tasks.model import get_counts, keys_of
from holdfast.tasks.operations import CyclicDependency
from tests.case_ids import stable_repr
from tests.tasks_api.conftest import OpenApp
from tests.world.rig import FaultyBackend

MODULES = ("holdfast.app.submission", "holdfast.app.tasks", "holdfast.app.runtime")


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


def count_waiting(rt: hf.Runtime, queue: str = "default") -> int:
    return rt.store.read(get_counts, keys_of("jobs"), queue).waiting


# -- submit --------------------------------------------------------------------------------------


def test_submit_runs_a_task_and_returns_its_result(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    handle = rt.submit(add, 1, b=2)
    assert handle.result(30) == 3
    assert handle.status().state == "COMPLETED"
    assert rt.task(handle.id).result(30) == 3


def test_submit_passes_arguments_unchanged(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(show)
    arguments = [None, True, -5, 2.5, "ä\x00", b"\xff", [1, [2]], {"a": {"b": 3}}]
    assert rt.submit(show, *arguments, named=[1], other={"x": None}).result(30) == [
        arguments,
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
def test_submit_rejects_arguments_that_do_not_match_the_signature(
    open_without_worker: OpenApp, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    rt = open_without_worker(add)
    with pytest.raises(Invalid) as caught:
        rt.submit(add, *args, **named)
    assert (caught.value.what, caught.value.task) == ("task arguments", "add")
    assert count_waiting(rt) == 0


def make_recursive_list() -> list[Any]:
    items: list[Any] = []
    items.append(items)
    return items


@pytest.mark.parametrize(
    "value",
    [object(), lambda: 1, "half \ud800", 1 << 70, make_recursive_list(), {(1, 2): object()}, 1j],
    ids=lambda value: type(value).__name__,
)
def test_submit_rejects_arguments_that_cannot_be_stored(
    open_without_worker: OpenApp, value: Any
) -> None:
    rt = open_without_worker(show)
    for call in ({"args": (value,), "named": {}}, {"args": (), "named": {"x": value}}):
        with pytest.raises(Invalid) as caught:
            rt.submit(show, *call["args"], **call["named"])  # type: ignore[misc]
        assert caught.value.what == "task arguments"
    assert count_waiting(rt) == 0


@pytest.mark.parametrize("size", [4 * 1024 * 1024, 50_000_000])
def test_submit_rejects_too_large_arguments(open_without_worker: OpenApp, size: int) -> None:
    rt = open_without_worker(show)
    with pytest.raises(ValueTooLarge) as caught:
        rt.submit(show, b"x" * size)
    assert caught.value.bytes > size
    assert count_waiting(rt) == 0


def test_submit_accepts_arguments_of_some_megabytes(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(show)
    large = b"x" * (4 * 1024 * 1024 - 1_000)
    assert rt.submit(show.options(), large).status().state in ("WAITING", "LEASED", "COMPLETED")
    [[returned], _] = rt.submit(show, large[:1_000_000]).result(30)
    assert len(returned) == 1_000_000


@pytest.mark.parametrize("wrong", [elsewhere, print, None, "add", add.fn], ids=stable_repr)
def test_submit_rejects_objects_that_are_not_tasks_of_the_app(
    open_without_worker: OpenApp, wrong: Any
) -> None:
    rt = open_without_worker(add)
    for submit in (
        lambda: rt.submit(wrong),
        lambda: rt.submit_many(wrong, [()]),
        lambda: rt.map(wrong, [1]),
    ):
        with pytest.raises(Invalid) as caught:
            submit()
        assert caught.value.what == "task"


def test_submit_rejects_another_task_of_the_same_name(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
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
def test_options_rejects_an_invalid_option(options: dict[str, Any]) -> None:
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
def test_submit_rejects_an_unknown_dependency(
    open_without_worker: OpenApp, after: Any, error: type[Exception]
) -> None:
    rt = open_without_worker(add)
    with pytest.raises(error):
        rt.submit(add.options(after=after), 1)
    assert count_waiting(rt) == 0


def test_options_apply_to_one_submit_only(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    assert rt.submit(add.options(queue="other", priority=3), 1).status().queue == "other"
    assert rt.submit(add, 1).status().queue == "default"


# -- keys ----------------------------------------------------------------------------------------


def test_same_key_and_arguments_return_the_same_task(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add, keyed)
    first = rt.submit(add.options(key="k"), 1)
    assert rt.submit(add, 1, key="k").id == first.id
    assert rt.submit(add.options(key="k", priority=5), 1).id == first.id
    assert rt.submit(add, 1, key="other").id != first.id
    assert count_waiting(rt) == 2


def test_same_key_with_other_arguments_raises_key_conflict(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    first = rt.submit(add, 1, key="k")
    with pytest.raises(KeyConflict) as caught:
        rt.submit(add, 2, key="k")
    assert f"1-{caught.value.task}" == first.id


def test_submit_all_compares_the_arguments_of_a_key_by_value(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    keyed = add.options(key="k"), add.options(key="l")
    first = [rt.submit(call, 1).id for call in keyed]
    batch = [call.call(1, 1) for call in keyed]
    assert [handle.id for handle in rt.submit_all([*batch, add.plain.call(5)])][:2] == first
    with pytest.raises(KeyConflict):
        rt.submit_all([*batch, keyed[0].call(a=2)])
    assert count_waiting(rt) == 3


def test_key_is_scoped_by_task_name(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add, double)
    assert rt.submit(add, 1, key="k").id != rt.submit(double, 1, key="k").id


def test_parameter_named_key_is_passed_to_the_function(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(keyed)
    assert rt.submit(keyed, key="mine").result(30) == "mine"
    assert rt.submit(keyed.options(key="k"), key="mine").result(30) == "mine"


def test_submit_with_the_key_of_a_completed_task_returns_its_result(
    open_with_worker: OpenApp,
) -> None:
    rt = open_with_worker(add)
    first = rt.submit(add, 1, key="k")
    assert first.result(30) == 2
    repeated = rt.submit(add, 1, key="k")
    assert (repeated.id, repeated.result(0)) == (first.id, 2)


def test_same_key_in_several_threads_is_one_task(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    task_ids: list[str] = []

    def submit() -> None:
        for n in range(20):
            task_ids.append(rt.submit(add, n, key=f"k{n}").id)

    threads = [threading.Thread(target=submit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(task_ids), len(set(task_ids)), count_waiting(rt)) == (160, 20, 20)


# -- submit_many and map -------------------------------------------------------------------------


def test_submit_many_keeps_the_order_of_its_calls(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    count = 2 * SUBMIT_BATCH_MAX + 10
    handles = rt.submit_many(add, ((n, n) for n in range(count)))
    assert len({handle.id for handle in handles}) == count
    assert [handle.result(60) for handle in handles[:3] + handles[-3:]] == [
        2 * n for n in [0, 1, 2, count - 3, count - 2, count - 1]
    ]


@pytest.mark.parametrize(
    "wrong",
    [(1, 2, 3), ("one",), (), "ab", 5, None, {"a": 1}, (object(),)],
    ids=stable_repr,
)
def test_submit_many_checks_all_arguments_before_it_submits(
    open_without_worker: OpenApp, wrong: Any
) -> None:
    rt = open_without_worker(add)
    many = [(n,) for n in range(SUBMIT_BATCH_MAX + 1)]
    with pytest.raises(Invalid):
        rt.submit_many(add, [*many, wrong])
    assert count_waiting(rt) == 0


def test_submit_many_submits_nothing_when_its_iterable_raises(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)

    def broken() -> Iterator[tuple[int]]:
        for n in range(SUBMIT_BATCH_MAX + 1):
            yield (n,)
        raise OSError("the file ends here")

    with pytest.raises(OSError, match="the file ends here"):
        rt.submit_many(add, broken())
    assert count_waiting(rt) == 0


def test_submit_many_map_and_submit_all_accept_no_tasks(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    assert rt.submit_many(add, []) == []
    assert list(rt.map(add, [])) == []
    assert rt.submit_all([]) == []


def test_submit_many_rejects_a_key(open_without_worker: OpenApp) -> None:
    with pytest.raises(Invalid) as caught:
        open_without_worker(add).submit_many(add.options(key="k"), [(1,), (2,)])
    assert caught.value.what == "key"


def test_submit_many_splits_large_tasks_into_several_commits(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(show)
    handles = rt.submit_many(show, [(n, b"x" * 1_000_000) for n in range(12)])
    assert [handle.result(60)[0][0] for handle in handles] == list(range(12))


def test_map_yields_results_in_order(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add, double)
    assert list(rt.map(add, range(50))) == [n + 1 for n in range(50)]
    assert list(rt.map(double, range(50), timeout=30)) == [2 * n for n in range(50)]


def test_map_submits_before_iteration(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
    rt.map(add, [1, 2, 3])
    assert count_waiting(rt) == 3


def test_map_raises_a_task_error_at_its_position(open_with_worker: OpenApp) -> None:
    @hf.task(attempts=1)
    def even(n: int) -> int:
        if n % 2:
            raise ValueError(f"{n} is odd")
        return n

    results = open_with_worker(even).map(even, [0, 1, 2])
    assert next(results) == 0
    with pytest.raises(hf.TaskFailedError) as caught:
        next(results)
    assert caught.value.error == "ValueError: 1 is odd"


# -- submit_all ----------------------------------------------------------------------------------


def test_submit_all_resolves_dependencies_by_key_in_any_order(open_with_worker: OpenApp) -> None:
    order: list[str] = []

    @hf.task
    def step(name: str) -> None:
        order.append(name)

    rt = open_with_worker(step)
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
def test_submit_all_rejects_a_dependency_cycle(
    open_without_worker: OpenApp, edges: dict[str, list[str]]
) -> None:
    rt = open_without_worker(add)
    calls = [add.options(key=key, after=after).call(1) for key, after in edges.items()]
    with pytest.raises(CyclicDependency):
        rt.submit_all([add.options().call(5), *calls])
    assert count_waiting(rt) == 0


def test_submit_all_accepts_a_diamond_of_dependencies(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    handles = rt.submit_all(
        [
            add.options(key="end", after=["left", "right"]).call(4),
            add.options(key="left", after=["start"]).call(2),
            add.options(key="right", after=["left", "start"]).call(3),
            add.options(key="start").call(1),
        ]
    )
    assert [handle.result(30) for handle in handles] == [5, 3, 4, 2]


def test_submit_all_accepts_a_long_dependency_chain(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    chain = [add.options(key="0").call(0)]
    chain += [add.options(key=f"{n}", after=[f"{n - 1}"]).call(n) for n in range(1, 200)]
    assert rt.submit_all(reversed(chain))[0].result(60) == 200


def test_submit_all_submits_nothing_when_one_call_is_invalid(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add)
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
    assert count_waiting(rt) == 0


def test_submit_all_rejects_an_ambiguous_dependency_key(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(add, double)
    with pytest.raises(Invalid) as caught:
        rt.submit_all(
            [
                add.options(key="k").call(1),
                double.options(key="k").call(1),
                add.options(after=["k"]).call(2),
            ]
        )
    assert caught.value.what == "after"
    assert count_waiting(rt) == 0


def test_submit_all_accepts_handles_and_keys_as_dependencies(open_with_worker: OpenApp) -> None:
    rt = open_with_worker(add)
    before = rt.submit(add, 1)
    [last, _] = rt.submit_all(
        [
            add.options(after=[before, "k"]).call(3),
            add.options(key="k", after=before.id).call(2),
        ]
    )
    assert last.result(30) == 4


# -- concurrent callers --------------------------------------------------------------------------


def test_submits_of_many_threads_are_all_stored(open_without_worker: OpenApp) -> None:
    rt = open_without_worker(show)
    task_ids: list[str] = []

    def submit(thread: int) -> None:
        for n in range(50):
            task_ids.append(rt.submit(show.options(priority=thread % 3), thread, n).id)

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(task_ids), len(set(task_ids)), count_waiting(rt)) == (800, 800, 800)


def test_submits_of_many_coroutines_are_all_stored(open_with_worker: OpenApp) -> None:
    import asyncio

    rt = open_with_worker(add, double)

    async def submit_and_await(n: int) -> int:
        result: int = await (await rt.submit_async(double if n % 2 else add, n))
        return result

    async def all_of_them() -> list[int]:
        return await asyncio.gather(*(submit_and_await(n) for n in range(200)))

    assert asyncio.run(all_of_them()) == [2 * n if n % 2 else n + 1 for n in range(200)]


def test_submit_raises_store_busy_to_every_caller_of_a_failed_commit() -> None:
    """Every caller retries after StoreBusy, so that each submission ends as one task."""
    backend = FaultyBackend()
    rt: hf.Runtime = hf.App("jobs", tasks=[show]).open(
        InProcessStore("memory:", backend, SimClock()), roles=()
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
    assert count_waiting(rt) == 160
