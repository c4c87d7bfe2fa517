"""Pending effects and timers of a fork: dropped by default, or inherited by policy."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.errors import Invalid
from holdfast.ops import world_operations
from holdfast.world.host import SnapshotPolicy
from tests.workers.rig import WorkerRig
from tests.workers.shop import Buyer, Dropped, Ordered, Repeated, Slept, Unset, Woken

MODULES = (
    "holdfast.world.fork_inheritance",
    "holdfast.world.fork",
    "holdfast.world.synthetic_receipts",
)


def fork_child(
    rig: WorkerRig, parent: hf.WorldHandle[Buyer], **policy: Any
) -> hf.WorldHandle[Buyer]:
    child = parent.fork("child", **policy)
    rig.assign(child)
    return child


# -- effects -------------------------------------------------------------------------------------


def test_fork_inherits_no_effect_and_no_timer_by_default(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    child = fork_child(rig, ada)
    rig.run_until_idle(rig.pool(), seconds=20)
    rig.run_until_idle(rig.timer_worker())
    assert ada.state().told == ["ok done 1"]
    assert child.state().told == child.state().woken == []


def test_fork_effects_fail_gives_error_receipts_in_the_child_only(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Ordered(tag="b"))
    child = fork_child(rig, ada, effects="fail")
    rig.run_worlds()
    assert child.state().told == ["error dropped_by_fork 0 a", "error dropped_by_fork 0 b"]
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["ok done 1 a", "ok done 1 b"]
    assert len(rig.fake_service.calls) == 2
    assert len(child.state().told) == 2


def test_fork_effects_reissue_makes_new_intents(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered("tea", tag="a"))
    child = fork_child(rig, ada, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["ok done 1 a"]
    assert child.state().told == ["ok done 1 a again"]
    assert [call.args for call in rig.fake_service.calls] == [("tea",), ("tea",)]
    assert len(rig.fake_service.keys) == 2


def test_fork_does_not_fail_an_intent_with_a_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="done"))
    rig.run_until_idle(rig.pool())
    ada.send(Ordered(tag="open"))
    rig.run_worlds()
    child = fork_child(rig, ada, effects="fail")
    rig.run_worlds()
    assert child.state().told == ["ok done 1 done", "error dropped_by_fork 0 open"]


def test_fork_reissues_an_intent_answered_after_the_fork_height(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    rig.run_until_idle(rig.pool())
    assert ada.height() == 2
    child = fork_child(rig, ada, at=1, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert child.state().told == ["ok done 1 a again"]
    assert ada.state().told == ["ok done 1 a"]


def test_fork_ignores_an_intent_made_after_the_fork_height(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Woken(), Ordered())
    child = fork_child(rig, ada, at=1, effects="fail")
    rig.run_worlds()
    assert child.state().told == []


def test_fork_does_not_reissue_an_intent_with_a_cancelled_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped())
    child = fork_child(rig, ada, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert ada.state().told == child.state().told == ["error cancelled 0"]


def test_fork_reissued_intent_keeps_its_key_in_the_child(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"))
    child = fork_child(rig, ada, effects="reissue")
    child.send(Ordered(key="k"))
    rig.run_until_idle(rig.pool())
    assert len(child.state().told) == 1
    assert len(rig.fake_service.calls) == 2


def test_repeated_fork_reissues_nothing_twice(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    for _ in range(3):
        child = fork_child(rig, ada, effects="reissue", timers="keep")
    rig.run_until_idle(rig.pool())
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert (len(child.state().told), child.state().woken) == (1, [""])


@pytest.mark.parametrize("policy", ["fail", "reissue"])
def test_fork_answers_a_cancelled_intent_as_cancelled(rig: WorkerRig, policy: str) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Dropped())
    child = fork_child(rig, ada, at=2, effects=policy)
    rig.run_until_idle(rig.pool())
    assert child.state().told == ["error cancelled 0 a"]
    assert rig.fake_service.calls == []


@pytest.mark.parametrize("policy", ["fail", "reissue"])
def test_fork_answers_a_rejected_intent_with_its_error(rig: WorkerRig, policy: str) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"))
    rig.run_until_idle(rig.pool())
    ada.send(Ordered("milk", key="k", tag="m"))
    rig.run_worlds()
    child = fork_child(rig, ada, at=3, effects=policy)
    rig.run_until_idle(rig.pool())
    assert child.state().told == ada.state().told == ["ok done 1", "error key_conflict 0 m"]


def test_fork_without_effects_gets_no_cancelled_receipt(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped(), Slept(60))
    child = fork_child(rig, ada, at=2, timers="keep")
    rig.run_worlds()
    assert child.state().told == []


def test_fork_reissued_key_conflicts_with_other_parameters(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"))
    child = fork_child(rig, ada, effects="reissue")
    child.send(Ordered("milk", key="k", tag="m"))
    rig.run_until_idle(rig.pool())
    assert child.state().told == ["error key_conflict 0 m", "ok done 1 again"]


def test_fork_cancels_a_reissued_intent_by_the_parents_intent(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Ordered(key="k", tag="b"))
    child = fork_child(rig, ada, effects="reissue")
    child.send(Dropped(0))
    child.send(Dropped(1))
    rig.run_until_idle(rig.pool())
    assert child.state().told == ["error cancelled 0 a again", "error cancelled 0 b again"]
    assert ada.state().told == ["ok done 1 a", "ok done 1 b"]


def test_fork_cannot_cancel_an_intent_of_its_parent(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = fork_child(rig, ada, effects="fail")
    child.send(Dropped())
    rig.run_until_idle(rig.pool())
    assert ada.state().told == ["ok done 1 a"]
    assert child.state().told == ["error dropped_by_fork 0 a"]


# -- forks of forks ------------------------------------------------------------------------------


def fork_grandchild(
    rig: WorkerRig, child: hf.WorldHandle[Buyer], **policy: Any
) -> hf.WorldHandle[Buyer]:
    made = child.fork("grandchild", **policy)
    rig.assign(made)
    return made


def test_second_fork_inherits_intents_of_the_child(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="ada"))
    child = fork_child(rig, ada)
    child.send(Ordered(tag="child"))
    rig.run_worlds()
    made = fork_grandchild(rig, child, effects="fail")
    rig.run_worlds()
    assert made.state().told == ["error dropped_by_fork 0 child"]


def test_second_fork_inherits_intents_and_timers_the_child_inherited(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered("tea", tag="a"), Slept(60, "k", "x"))
    child = fork_child(rig, ada, effects="reissue", timers="keep")
    made = fork_grandchild(rig, child, effects="reissue", timers="keep")
    rig.run_until_idle(rig.pool())
    rig.run_until_idle(rig.timer_worker(), seconds=70)
    assert [call.args for call in rig.fake_service.calls] == [("tea",)] * 3
    assert len(rig.fake_service.keys) == 3
    assert made.state().told == child.state().told == ["ok done 1 a again"]
    assert made.state().woken == child.state().woken == ["x"]


def test_second_fork_keeps_dropped_by_fork_receipts(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = fork_child(rig, ada, effects="fail")
    made = fork_grandchild(rig, child, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert made.state().told == ["error dropped_by_fork 0 a"]
    assert len(rig.fake_service.calls) == 1


def test_second_fork_does_not_repeat_applied_receipts_and_timers(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Slept(10, "k", "x"))
    child = fork_child(rig, ada, effects="reissue", timers="keep")
    rig.run_until_idle(rig.pool())
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    made = fork_grandchild(rig, child, effects="fail", timers="keep")
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert made.state().told == ["ok done 1 a again"]
    assert made.state().woken == ["x"]


def test_second_fork_cancels_by_intents_of_parent_and_grandparent(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"), Ordered(tag="a"))
    child = fork_child(rig, ada, effects="reissue")
    # The key gives the child an intent alias for the same effect.
    child.send(Ordered(key="k"))
    child.send(Ordered(tag="b"))
    rig.run_worlds()
    made = fork_grandchild(rig, child, effects="reissue")
    for n in range(4):
        made.send(Dropped(n))
    rig.run_until_idle(rig.pool())
    assert [said.split()[1] for said in made.state().told] == ["cancelled"] * 3
    assert all(said.startswith("ok") for said in (*ada.state().told, *child.state().told))


def test_second_fork_does_not_reissue_intents_the_child_cancelled(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = fork_child(rig, ada, effects="reissue")
    child.send(Dropped())
    rig.run_worlds()
    made = fork_grandchild(rig, child, at=2, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert made.state().told == ["error cancelled 0 a again"]
    assert len(rig.fake_service.calls) == 1


def test_second_fork_without_policy_inherits_nothing(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    child = fork_child(rig, ada, effects="reissue", timers="keep")
    made = fork_grandchild(rig, child)
    rig.run_until_idle(rig.pool())
    rig.run_until_idle(rig.timer_worker(), seconds=20)
    assert made.state().told == made.state().woken == []


def test_second_fork_fires_a_delay_that_is_overdue_immediately(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    child = fork_child(rig, ada, timers="keep")
    rig.run_until_idle(rig.timer_worker(), seconds=70)
    assert child.state().woken == ["x"]
    made = fork_grandchild(rig, child, at=1, timers="keep")
    rig.run_until_idle(rig.timer_worker())
    assert made.state().woken == ["x"]


def test_recurring_timer_continues_in_a_second_fork(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated("0 * * * *"))
    child = fork_child(rig, ada, timers="keep")
    rig.clock.advance(3600 * S)
    rig.run_until_idle(rig.timer_worker())
    made = fork_grandchild(rig, child, timers="keep")
    rig.clock.advance(3600 * S)
    rig.run_until_idle(rig.timer_worker())
    assert (len(child.state().woken), len(made.state().woken)) == (2, 2)


def test_second_fork_does_not_reissue_a_finished_key(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"))
    child = fork_child(rig, ada, effects="reissue")
    rig.run_until_idle(rig.pool())
    child.send(Ordered(key="k"))
    rig.run_worlds()
    fork_grandchild(rig, child, effects="reissue")
    rig.run_until_idle(rig.pool())
    assert len(rig.fake_service.calls) == 2


def test_fork_with_many_snapshots_can_be_forked_with_its_effects(rig: WorkerRig) -> None:
    """The initial state of a fork is kept after any number of later snapshots."""
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = fork_child(rig, ada, effects="reissue")
    rig.world_worker = rig.worker(idle_s=1e6, incarnation="2", snapshots=SnapshotPolicy(1, keep=1))
    rig.advance_clock()
    for n in range(5):
        child.send(Woken(str(n)))
        rig.run_worlds()
    assert child.state(at=3).woken == ["0", "1"]
    made = fork_grandchild(rig, child, effects="fail")
    rig.run_worlds()
    assert made.state().told == ["error dropped_by_fork 0 a again"]


# -- timers --------------------------------------------------------------------------------------


def test_fork_timers_keep_fires_for_parent_and_child_at_the_same_time(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    rig.clock.advance(40 * S)
    child = fork_child(rig, ada, timers="keep")
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=15)
    assert child.state().woken == []
    rig.run_until_idle(worker, seconds=10)
    assert child.state().woken == ada.state().woken == ["x"]


def test_fork_cancels_its_kept_timer_independently(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    child = fork_child(rig, ada, timers="keep")
    child.send(Unset("k"))
    rig.run_worlds()
    rig.run_until_idle(rig.timer_worker(), seconds=70)
    assert (ada.state().woken, child.state().woken) == (["x"], [])


def test_fork_does_not_keep_fired_or_cancelled_timers(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1, "a", "fired"), Slept(60, "b"), Unset("b"), Slept(60, "c", "c"))
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=2)
    child = fork_child(rig, ada, timers="keep")
    rig.run_until_idle(worker, seconds=70)
    assert child.state().woken == ["fired", "c"]


def test_fork_fires_an_overdue_timer_immediately(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Slept(1, "a", "x"))
    worker = rig.timer_worker()
    rig.run_until_idle(worker, seconds=2)
    child = fork_child(rig, ada, at=1, timers="keep")
    rig.run_until_idle(worker)
    assert child.state().woken == ["x"]
    assert ada.state().woken == ["x"]


def test_recurring_timer_continues_in_a_fork(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Repeated("0 * * * *"))
    worker = rig.timer_worker()
    rig.clock.advance(3600 * S)
    rig.run_until_idle(worker)
    child = fork_child(rig, ada, timers="keep")
    rig.clock.advance(3600 * S)
    rig.run_until_idle(worker)
    assert (len(ada.state().woken), len(child.state().woken)) == (2, 2)


# -- rejected forks -----------------------------------------------------------------------------


def test_fork_effects_of_a_truncated_journal_is_invalid(rig: WorkerRig) -> None:
    rig.world_worker = rig.worker(idle_s=1e6, snapshots=SnapshotPolicy(1, keep=1))
    ada = rig.buyer("ada", Ordered(), Woken(), Woken())
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    before = rig.rows()
    with pytest.raises(Invalid, match="does not reach back"):
        ada.fork("child", effects="fail")
    assert rig.rows() == before


def test_fork_effects_without_the_app_is_invalid(rig: WorkerRig) -> None:
    ada = rig.buyer("ada", Ordered())
    before = rig.rows()
    with pytest.raises(Invalid, match="give the app"):
        world_operations.world_fork(rig.store, "shop", rig.id(ada), "child", effects="fail")
    assert rig.rows() == before
