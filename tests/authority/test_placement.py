"""Placement: the same for everyone, balanced, and nothing moves that need not."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.authority.placement import Move, Why, choose, plan

MODULES = ("holdfast.authority.placement",)

WORLDS = [f"world-{n}" for n in range(1000)]
WORKERS = [f"worker-{n}" for n in range(10)]

NAMES = st.text(min_size=1, max_size=8)
HOSTS = st.lists(NAMES, min_size=1, max_size=8, unique=True)
WORLD_IDS = st.lists(NAMES, max_size=30, unique=True)


def placed(worlds: list[str], workers: list[str]) -> dict[str, str | None]:
    return {world: choose(world, workers) for world in worlds}


def carried_out(assigned: dict[str, str | None], moves: list[Move]) -> dict[str, str | None]:
    return {**assigned, **{move.world_id: move.target for move in moves}}


# -- choosing ------------------------------------------------------------------------------------


def test_without_workers_there_is_no_choice() -> None:
    assert choose("w", []) is None


def test_the_choice_is_the_same_in_every_release() -> None:
    assert [choose(f"world-{n}", WORKERS) for n in range(4)] == [
        "worker-2",
        "worker-0",
        "worker-5",
        "worker-8",
    ]


@given(world=NAMES, workers=HOSTS, seed=st.randoms(use_true_random=False))
def test_the_order_of_workers_does_not_matter(world: str, workers: list[str], seed: object) -> None:
    shuffled = list(workers)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose(world, shuffled) == choose(world, workers)


def test_a_thousand_worlds_are_balanced_over_ten_workers() -> None:
    load = Counter(placed(WORLDS, WORKERS).values())
    assert set(load) == set(WORKERS)
    # A fair die gives 100 each with a deviation of 9.5: four of those either way.
    assert all(62 <= count <= 138 for count in load.values()), load


@given(tags=st.lists(NAMES, min_size=10, max_size=10, unique=True))
@settings(max_examples=20)
def test_whatever_the_workers_are_called_the_load_is_balanced(tags: list[str]) -> None:
    load = Counter(placed(WORLDS, tags).values())
    assert all(45 <= load[tag] <= 160 for tag in tags), load


# -- moving --------------------------------------------------------------------------------------


@given(worlds=WORLD_IDS, workers=HOSTS, new=NAMES)
def test_a_worker_that_comes_takes_worlds_and_moves_no_other(
    worlds: list[str], workers: list[str], new: str
) -> None:
    moves = plan(placed(worlds, workers), [*workers, new], {})
    assert {move.target for move in moves} <= {new}


@given(worlds=WORLD_IDS, workers=HOSTS)
def test_a_worker_that_goes_leaves_its_own_worlds_and_moves_no_other(
    worlds: list[str], workers: list[str]
) -> None:
    before = placed(worlds, workers)
    *left, gone = workers
    moves = plan(before, left, {})
    assert {move.source for move in moves} <= {gone}
    if left:
        assert {move.world_id for move in moves} == {w for w in worlds if before[w] == gone}


def test_a_tenth_worker_takes_about_a_tenth() -> None:
    moves = plan(placed(WORLDS, WORKERS[:9]), WORKERS, {})
    assert 62 <= len(moves) <= 138
    assert {(move.target, move.why) for move in moves} == {(WORKERS[9], Why.REBALANCED)}


@given(worlds=WORLD_IDS, before=HOSTS, workers=HOSTS, data=st.data())
def test_a_plan_that_was_carried_out_leaves_nothing_to_do(
    worlds: list[str], before: list[str], workers: list[str], data: st.DataObject
) -> None:
    assigned = {w: data.draw(st.sampled_from([None, *before, *workers])) for w in worlds}
    pins = {w: data.draw(st.sampled_from([*before, *workers])) for w in worlds[::3]}
    after = carried_out(assigned, plan(assigned, workers, pins))
    assert plan(after, workers, pins) == []
    assert all(after[w] == pins.get(w, choose(w, workers)) for w in worlds)


def test_worlds_leave_a_worker_that_may_not_host_any_more() -> None:
    assigned: dict[str, str | None] = {"x": "dead", "y": "draining", "z": "fine"}
    assert plan(assigned, ["fine"], {}) == [
        Move("x", "dead", "fine", Why.WORKER_GONE),
        Move("y", "draining", "fine", Why.WORKER_GONE),
    ]


def test_a_pin_outweighs_every_weight() -> None:
    home = choose("x", WORKERS)
    other = next(worker for worker in WORKERS if worker != home)
    assert plan({"x": home}, WORKERS, {"x": other}) == [Move("x", home, other, Why.PINNED)]
    assert plan({"x": other}, WORKERS, {"x": other}) == []


def test_a_pinned_world_waits_for_its_worker() -> None:
    assert plan({"x": "gone"}, WORKERS, {"x": "gone"}) == []


def test_without_workers_nothing_moves() -> None:
    assert plan({"x": "gone", "y": None}, [], {}) == []


def test_what_nobody_hosts_moves_first() -> None:
    home = {world: choose(world, WORKERS) for world in "abcd"}
    other = {world: next(w for w in WORKERS if w != home[world]) for world in "abcd"}
    assigned = {"a": other["a"], "b": home["b"], "c": "gone", "d": None}
    moves = plan(assigned, WORKERS, {"b": other["b"]})
    assert [(move.world_id, move.why) for move in moves] == [
        ("d", Why.UNASSIGNED),
        ("c", Why.WORKER_GONE),
        ("b", Why.PINNED),
        ("a", Why.REBALANCED),
    ]
