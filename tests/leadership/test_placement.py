"""Placement of worlds on workers: deterministic, balanced, with a minimum of moves."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.leadership.placement import MoveReason, PlacementMove, choose_worker, plan_moves

MODULES = ("holdfast.leadership.placement",)

WORLDS = [f"world-{n}" for n in range(1000)]
WORKERS = [f"worker-{n}" for n in range(10)]

NAMES = st.text(min_size=1, max_size=8)
HOSTS = st.lists(NAMES, min_size=1, max_size=8, unique=True)
WORLD_IDS = st.lists(NAMES, max_size=30, unique=True)


def place_worlds(worlds: list[str], workers: list[str]) -> dict[str, str | None]:
    return {world: choose_worker(world, workers) for world in worlds}


def apply_moves(
    assigned: dict[str, str | None], moves: list[PlacementMove]
) -> dict[str, str | None]:
    return {**assigned, **{move.world_id: move.target for move in moves}}


# -- choose_worker -------------------------------------------------------------------------------


def test_choose_worker_without_workers_returns_none() -> None:
    assert choose_worker("w", []) is None


def test_choose_worker_is_stable_across_releases() -> None:
    assert [choose_worker(f"world-{n}", WORKERS) for n in range(4)] == [
        "worker-2",
        "worker-0",
        "worker-5",
        "worker-8",
    ]


@given(world=NAMES, workers=HOSTS, seed=st.randoms(use_true_random=False))
def test_choose_worker_does_not_depend_on_worker_order(
    world: str, workers: list[str], seed: object
) -> None:
    shuffled = list(workers)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert choose_worker(world, shuffled) == choose_worker(world, workers)


def test_a_thousand_worlds_are_balanced_over_ten_workers() -> None:
    load = Counter(place_worlds(WORLDS, WORKERS).values())
    assert set(load) == set(WORKERS)
    # A uniform draw gives 100 each with a standard deviation of 9.5. The bounds are four of them.
    assert all(62 <= count <= 138 for count in load.values()), load


@given(tags=st.lists(NAMES, min_size=10, max_size=10, unique=True))
@settings(max_examples=20)
def test_load_is_balanced_for_any_worker_names(tags: list[str]) -> None:
    load = Counter(place_worlds(WORLDS, tags).values())
    assert all(45 <= load[tag] <= 160 for tag in tags), load


# -- plan_moves ----------------------------------------------------------------------------------


@given(worlds=WORLD_IDS, workers=HOSTS, new=NAMES)
def test_plan_for_a_new_worker_moves_worlds_only_to_it(
    worlds: list[str], workers: list[str], new: str
) -> None:
    moves = plan_moves(place_worlds(worlds, workers), [*workers, new], {})
    assert {move.target for move in moves} <= {new}


@given(worlds=WORLD_IDS, workers=HOSTS)
def test_plan_for_a_departed_worker_moves_only_its_worlds(
    worlds: list[str], workers: list[str]
) -> None:
    before = place_worlds(worlds, workers)
    *left, gone = workers
    moves = plan_moves(before, left, {})
    assert {move.source for move in moves} <= {gone}
    if left:
        assert {move.world_id for move in moves} == {w for w in worlds if before[w] == gone}


def test_plan_moves_about_a_tenth_to_a_tenth_worker() -> None:
    moves = plan_moves(place_worlds(WORLDS, WORKERS[:9]), WORKERS, {})
    assert 62 <= len(moves) <= 138
    assert {(move.target, move.why) for move in moves} == {(WORKERS[9], MoveReason.REBALANCED)}


@given(worlds=WORLD_IDS, before=HOSTS, workers=HOSTS, data=st.data())
def test_plan_is_empty_after_its_moves_are_applied(
    worlds: list[str], before: list[str], workers: list[str], data: st.DataObject
) -> None:
    assigned = {w: data.draw(st.sampled_from([None, *before, *workers])) for w in worlds}
    pins = {w: data.draw(st.sampled_from([*before, *workers])) for w in worlds[::3]}
    after = apply_moves(assigned, plan_moves(assigned, workers, pins))
    assert plan_moves(after, workers, pins) == []
    assert all(after[w] == pins.get(w, choose_worker(w, workers)) for w in worlds)


def test_plan_moves_worlds_off_dead_and_draining_workers() -> None:
    assigned: dict[str, str | None] = {"x": "dead", "y": "draining", "z": "fine"}
    assert plan_moves(assigned, ["fine"], {}) == [
        PlacementMove("x", "dead", "fine", MoveReason.WORKER_GONE),
        PlacementMove("y", "draining", "fine", MoveReason.WORKER_GONE),
    ]


def test_pin_overrides_the_rendezvous_weight() -> None:
    home = choose_worker("x", WORKERS)
    other = next(worker for worker in WORKERS if worker != home)
    assert plan_moves({"x": home}, WORKERS, {"x": other}) == [
        PlacementMove("x", home, other, MoveReason.PINNED)
    ]
    assert plan_moves({"x": other}, WORKERS, {"x": other}) == []


def test_a_pinned_world_waits_for_its_worker() -> None:
    assert plan_moves({"x": "gone"}, WORKERS, {"x": "gone"}) == []


def test_plan_without_workers_is_empty() -> None:
    assert plan_moves({"x": "gone", "y": None}, [], {}) == []


def test_plan_moves_unassigned_worlds_first() -> None:
    home = {world: choose_worker(world, WORKERS) for world in "abcd"}
    other = {world: next(w for w in WORKERS if w != home[world]) for world in "abcd"}
    assigned = {"a": other["a"], "b": home["b"], "c": "gone", "d": None}
    moves = plan_moves(assigned, WORKERS, {"b": other["b"]})
    assert [(move.world_id, move.why) for move in moves] == [
        ("d", MoveReason.UNASSIGNED),
        ("c", MoveReason.WORKER_GONE),
        ("b", MoveReason.PINNED),
        ("a", MoveReason.REBALANCED),
    ]
