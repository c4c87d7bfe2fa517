"""What a fork takes over of its parent's wishes: nothing, or what its policies say."""

from __future__ import annotations

from typing import Any

import pytest

import holdfast as hf
from holdfast.clock import S
from holdfast.durable import journal
from holdfast.errors import Invalid
from holdfast.ops import service
from holdfast.world.host import SnapshotPolicy
from tests.roles.rig import Rig
from tests.roles.shop import Buyer, Dropped, Ordered, Repeated, Slept, Unset, Woken

MODULES = ("holdfast.world.inherit", "holdfast.world.fork", "holdfast.world.answers")


def forked(rig: Rig, parent: hf.WorldHandle[Buyer], **policy: Any) -> hf.WorldHandle[Buyer]:
    child = parent.fork("child", **policy)
    rig.assign(child)
    return child


# -- effects -------------------------------------------------------------------------------------


def test_by_default_a_child_inherits_nothing(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    child = forked(rig, ada)
    rig.work(rig.pool(), seconds=20)
    rig.work(rig.timer_worker())
    assert ada.state().told == ["ok done 1"]
    assert child.state().told == child.state().woken == []


def test_fail_answers_each_open_intent_in_the_child_alone(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Ordered(tag="b"))
    child = forked(rig, ada, effects="fail")
    rig.think()
    assert child.state().told == ["error dropped_by_fork 0 a", "error dropped_by_fork 0 b"]
    rig.work(rig.pool())
    assert ada.state().told == ["ok done 1 a", "ok done 1 b"]
    assert len(rig.outside.calls) == 2
    assert len(child.state().told) == 2


def test_reissue_wants_each_anew_under_another_identity(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", tag="a"))
    child = forked(rig, ada, effects="reissue")
    rig.work(rig.pool())
    assert ada.state().told == ["ok done 1 a"]
    assert child.state().told == ["ok done 1 a again"]
    assert [call.args for call in rig.outside.calls] == [("tea",), ("tea",)]
    assert len(rig.outside.keys) == 2


def test_an_intent_that_had_its_receipt_by_then_is_not_open(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="done"))
    rig.work(rig.pool())
    ada.send(Ordered(tag="open"))
    rig.think()
    child = forked(rig, ada, effects="fail")
    rig.think()
    assert child.state().told == ["ok done 1 done", "error dropped_by_fork 0 open"]


def test_an_intent_that_was_answered_after_that_entry_was_open_then(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    rig.work(rig.pool())
    assert ada.height() == 2
    child = forked(rig, ada, at=1, effects="reissue")
    rig.work(rig.pool())
    assert child.state().told == ["ok done 1 a again"]
    assert ada.state().told == ["ok done 1 a"]


def test_an_intent_that_came_after_that_entry_is_none_of_the_childs(rig: Rig) -> None:
    ada = rig.buyer("ada", Woken(), Ordered())
    child = forked(rig, ada, at=1, effects="fail")
    rig.think()
    assert child.state().told == []


def test_a_cancelled_intent_is_over_when_its_receipt_is_there(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped())
    child = forked(rig, ada, effects="reissue")
    rig.work(rig.pool())
    assert ada.state().told == child.state().told == ["error cancelled 0"]


def test_a_reissued_intent_with_a_key_is_what_the_child_would_want_under_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"))
    child = forked(rig, ada, effects="reissue")
    child.send(Ordered(key="k"))
    rig.work(rig.pool())
    assert len(child.state().told) == 1
    assert len(rig.outside.calls) == 2


def test_forking_again_gives_nothing_twice(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    for _ in range(3):
        child = forked(rig, ada, effects="reissue", timers="keep")
    rig.work(rig.pool())
    rig.work(rig.timer_worker(), seconds=20)
    assert (len(child.state().told), child.state().woken) == (1, [""])


@pytest.mark.parametrize("policy", ["fail", "reissue"])
def test_what_was_cancelled_by_then_is_answered_so_in_the_child(rig: Rig, policy: str) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Dropped())
    child = forked(rig, ada, at=2, effects=policy)
    rig.work(rig.pool())
    assert child.state().told == ["error cancelled 0 a"]
    assert rig.outside.calls == []


@pytest.mark.parametrize("policy", ["fail", "reissue"])
def test_what_was_refused_by_then_is_answered_so_in_the_child(rig: Rig, policy: str) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"))
    rig.work(rig.pool())
    ada.send(Ordered("milk", key="k", tag="m"))
    rig.think()
    child = forked(rig, ada, at=3, effects=policy)
    rig.work(rig.pool())
    assert child.state().told == ada.state().told == ["ok done 1", "error key_conflict 0 m"]


def test_a_child_that_drops_effects_is_not_told_what_was_cancelled(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Dropped(), Slept(60))
    child = forked(rig, ada, at=2, timers="keep")
    rig.think()
    assert child.state().told == []


def test_the_key_of_a_reissued_intent_stands_for_it_in_the_child(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", key="k"))
    child = forked(rig, ada, effects="reissue")
    child.send(Ordered("milk", key="k", tag="m"))
    rig.work(rig.pool())
    assert child.state().told == ["error key_conflict 0 m", "ok done 1 again"]


def test_what_was_reissued_can_be_cancelled_by_the_intent_that_the_child_knows(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Ordered(key="k", tag="b"))
    child = forked(rig, ada, effects="reissue")
    child.send(Dropped(0))
    child.send(Dropped(1))
    rig.work(rig.pool())
    assert child.state().told == ["error cancelled 0 a again", "error cancelled 0 b again"]
    assert ada.state().told == ["ok done 1 a", "ok done 1 b"]


def test_a_child_cannot_cancel_what_is_its_parents_alone(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = forked(rig, ada, effects="fail")
    child.send(Dropped())
    rig.work(rig.pool())
    assert ada.state().told == ["ok done 1 a"]
    assert child.state().told == ["error dropped_by_fork 0 a"]


# -- forks of forks ------------------------------------------------------------------------------


def grandchild(rig: Rig, child: hf.WorldHandle[Buyer], **policy: Any) -> hf.WorldHandle[Buyer]:
    made = child.fork("grandchild", **policy)
    rig.assign(made)
    return made


def test_a_fork_of_a_fork_takes_over_what_the_child_wanted_itself(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="ada"))
    child = forked(rig, ada)
    child.send(Ordered(tag="child"))
    rig.think()
    made = grandchild(rig, child, effects="fail")
    rig.think()
    assert made.state().told == ["error dropped_by_fork 0 child"]


def test_a_fork_of_a_fork_takes_over_what_the_child_was_given(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered("tea", tag="a"), Slept(60, "k", "x"))
    child = forked(rig, ada, effects="reissue", timers="keep")
    made = grandchild(rig, child, effects="reissue", timers="keep")
    rig.work(rig.pool())
    rig.work(rig.timer_worker(), seconds=70)
    assert [call.args for call in rig.outside.calls] == [("tea",)] * 3
    assert len(rig.outside.keys) == 3
    assert made.state().told == child.state().told == ["ok done 1 a again"]
    assert made.state().woken == child.state().woken == ["x"]


def test_what_a_fork_was_refused_its_own_fork_is_refused_too(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = forked(rig, ada, effects="fail")
    made = grandchild(rig, child, effects="reissue")
    rig.work(rig.pool())
    assert made.state().told == ["error dropped_by_fork 0 a"]
    assert len(rig.outside.calls) == 1


def test_what_a_fork_has_read_its_own_fork_is_not_told_again(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"), Slept(10, "k", "x"))
    child = forked(rig, ada, effects="reissue", timers="keep")
    rig.work(rig.pool())
    rig.work(rig.timer_worker(), seconds=20)
    made = grandchild(rig, child, effects="fail", timers="keep")
    rig.work(rig.timer_worker(), seconds=20)
    assert made.state().told == ["ok done 1 a again"]
    assert made.state().woken == ["x"]


def test_a_fork_of_a_fork_can_cancel_by_the_intents_of_both_before_it(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"), Ordered(tag="a"))
    child = forked(rig, ada, effects="reissue")
    # Under its key the child knows it by an intent of its own, too.
    child.send(Ordered(key="k"))
    child.send(Ordered(tag="b"))
    rig.think()
    made = grandchild(rig, child, effects="reissue")
    for n in range(4):
        made.send(Dropped(n))
    rig.work(rig.pool())
    assert [said.split()[1] for said in made.state().told] == ["cancelled"] * 3
    assert all(said.startswith("ok") for said in (*ada.state().told, *child.state().told))


def test_what_a_fork_cancelled_is_not_reissued_for_its_own_fork(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = forked(rig, ada, effects="reissue")
    child.send(Dropped())
    rig.think()
    made = grandchild(rig, child, at=2, effects="reissue")
    rig.work(rig.pool())
    assert made.state().told == ["error cancelled 0 a again"]
    assert len(rig.outside.calls) == 1


def test_a_fork_of_a_fork_that_drops_gets_nothing(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(), Slept(10))
    child = forked(rig, ada, effects="reissue", timers="keep")
    made = grandchild(rig, child)
    rig.work(rig.pool())
    rig.work(rig.timer_worker(), seconds=20)
    assert made.state().told == made.state().woken == []


def test_a_delay_that_has_fired_in_the_child_since_fires_in_its_fork_at_once(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    child = forked(rig, ada, timers="keep")
    rig.work(rig.timer_worker(), seconds=70)
    assert child.state().woken == ["x"]
    made = grandchild(rig, child, at=1, timers="keep")
    rig.work(rig.timer_worker())
    assert made.state().woken == ["x"]


def test_a_timer_that_repeats_goes_on_in_a_fork_of_a_fork(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated("0 * * * *"))
    child = forked(rig, ada, timers="keep")
    rig.clock.advance(3600 * S)
    rig.work(rig.timer_worker())
    made = grandchild(rig, child, timers="keep")
    rig.clock.advance(3600 * S)
    rig.work(rig.timer_worker())
    assert (len(child.state().woken), len(made.state().woken)) == (2, 2)


def test_a_key_that_was_reissued_is_no_new_wish_in_a_fork_of_the_fork(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered(key="k"))
    child = forked(rig, ada, effects="reissue")
    rig.work(rig.pool())
    child.send(Ordered(key="k"))
    rig.think()
    grandchild(rig, child, effects="reissue")
    rig.work(rig.pool())
    assert len(rig.outside.calls) == 2


def test_a_fork_that_has_lived_for_long_can_be_forked_with_its_wishes(rig: Rig) -> None:
    """However many snapshots it has made since, the state that it began with is kept."""
    ada = rig.buyer("ada", Ordered(tag="a"))
    child = forked(rig, ada, effects="reissue")
    rig.host = rig.worker(idle_s=1e6, incarnation="2", snapshots=SnapshotPolicy(1, keep=1))
    rig.expire()
    for n in range(5):
        child.send(Woken(str(n)))
        rig.think()
    assert child.state(at=3).woken == ["0", "1"]
    made = grandchild(rig, child, effects="fail")
    rig.think()
    assert made.state().told == ["error dropped_by_fork 0 a again"]


# -- timers --------------------------------------------------------------------------------------


def test_kept_timers_fire_for_both_when_the_parents_is_due(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    rig.clock.advance(40 * S)
    child = forked(rig, ada, timers="keep")
    worker = rig.timer_worker()
    rig.work(worker, seconds=15)
    assert child.state().woken == []
    rig.work(worker, seconds=10)
    assert child.state().woken == ada.state().woken == ["x"]


def test_the_childs_timer_is_its_own(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(60, "k", "x"))
    child = forked(rig, ada, timers="keep")
    child.send(Unset("k"))
    rig.think()
    rig.work(rig.timer_worker(), seconds=70)
    assert (ada.state().woken, child.state().woken) == (["x"], [])


def test_timers_that_were_over_by_then_are_not_kept(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1, "a", "fired"), Slept(60, "b"), Unset("b"), Slept(60, "c", "c"))
    worker = rig.timer_worker()
    rig.work(worker, seconds=2)
    child = forked(rig, ada, timers="keep")
    rig.work(worker, seconds=70)
    assert child.state().woken == ["fired", "c"]


def test_a_timer_that_has_fired_since_that_entry_fires_in_the_child_at_once(rig: Rig) -> None:
    ada = rig.buyer("ada", Slept(1, "a", "x"))
    worker = rig.timer_worker()
    rig.work(worker, seconds=2)
    child = forked(rig, ada, at=1, timers="keep")
    rig.work(worker)
    assert child.state().woken == ["x"]
    assert ada.state().woken == ["x"]


def test_a_timer_that_repeats_goes_on_in_the_child(rig: Rig) -> None:
    ada = rig.buyer("ada", Repeated("0 * * * *"))
    worker = rig.timer_worker()
    rig.clock.advance(3600 * S)
    rig.work(worker)
    child = forked(rig, ada, timers="keep")
    rig.clock.advance(3600 * S)
    rig.work(worker)
    assert (len(ada.state().woken), len(child.state().woken)) == (2, 2)


# -- refused ------------------------------------------------------------------------------------


def test_a_world_whose_journal_was_cut_off_is_refused_and_loses_nothing_silently(rig: Rig) -> None:
    rig.host = rig.worker(idle_s=1e6, snapshots=SnapshotPolicy(1, keep=1))
    ada = rig.buyer("ada", Ordered(), Woken(), Woken())
    while rig.store.transact(journal.truncate, rig.subject(ada), 100):
        pass
    before = rig.rows()
    with pytest.raises(Invalid, match="does not reach back"):
        ada.fork("child", effects="fail")
    assert rig.rows() == before


def test_without_the_code_only_drop_is_possible(rig: Rig) -> None:
    ada = rig.buyer("ada", Ordered())
    before = rig.rows()
    with pytest.raises(Invalid, match="give the app"):
        service.world_fork(rig.store, "shop", rig.id(ada), "child", effects="fail")
    assert rig.rows() == before
