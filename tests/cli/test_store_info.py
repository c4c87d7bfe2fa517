"""`holdfast store info`."""

from pathlib import Path

from holdfast import store as stores
from holdfast.cli.store import queue_counts
from holdfast.config import OUTCOMES_KEPT
from holdfast.durable import queue
from holdfast.ops.store_size import last_commit_no
from holdfast.store.api import Store
from holdfast.store.schema import Space
from tests.cli.conftest import RunCommand


def test_store_info_prints_queue_counts(run: RunCommand, path: Path, letters: list[int]) -> None:
    result = run("store", "info", "--store", path)
    assert result.code == 0
    assert result.out.splitlines()[-2].split() == [
        "queue", "ready", "delayed", "claimed", "dead", "done",
    ]  # fmt: skip
    assert result.out.splitlines()[-1].split() == ["mail", "1", "0", "0", "3", "0"]


def test_store_info_as_json(run: RunCommand, path: Path, store: Store, letters: list[int]) -> None:
    document = run("store", "info", "--store", f"lmdb:{path}", "--json").document
    assert document["url"] == store.url
    assert document["generation"] == store.generation
    assert document["commit_no"] == 5
    assert document["bytes"] > 0
    assert document["queues"] == [
        {"queue": "mail", "ready": 1, "delayed": 0, "claimed": 0, "dead": 3, "done": 0}
    ]


def test_store_info_rejects_a_memory_url(run: RunCommand) -> None:
    assert run("store", "info", "--store", "memory:").error.startswith("invalid: ")


def test_last_commit_no_is_correct_after_the_outcome_ring_wraps() -> None:
    with stores.open("memory:") as store:
        assert store.read(last_commit_no) == 0
        for n in range(1, OUTCOMES_KEPT + 3):
            store.transact(lambda txn: txn.put((int(Space.APP_STATE), "sim"), b""))
            if n in (1, 2, OUTCOMES_KEPT - 1, OUTCOMES_KEPT, OUTCOMES_KEPT + 1):
                assert store.read(last_commit_no) == n


def test_queue_counts_lists_queues_in_name_order() -> None:
    names = ["a", "a\0b", "b", "ä"]
    with stores.open("memory:") as store:
        for name in names:
            store.transact(queue.put_many, name, [b"x"] * 3)
        queues = store.read(queue_counts, 100)
        assert [name for name, _ in queues] == names
        assert {counts.ready for _, counts in queues} == {3}
        assert [name for name, _ in store.read(queue_counts, 2)] == names[:2]
