"""Why a timer of a world has not fired: its due time, a retry, its dead letter, or a missing worker."""

from __future__ import annotations

from holdfast.blockers import worlds
from holdfast.blockers.answer import Blocker, WhyAnswer, answer, blocker
from holdfast.blockers.effects import UNSERVED_NS
from holdfast.clock import S
from holdfast.durable import item as items
from holdfast.durable.item import keys_of, pack_int
from holdfast.errors import NotFound
from holdfast.store.api import Txn
from holdfast.world import timers


def explain(txn: Txn, universe: str, id: str, wall_ns: int) -> WhyAnswer:
    """Explain the timer `Type/name/KEY`."""
    type, _, rest = id.partition("/")
    name, _, key = rest.partition("/")
    record = worlds.find(txn, universe, f"{type}/{name}")
    slot = timers.find_slot(txn, universe, record.world_id, key)
    if slot is None:
        why = "no timer with this key is pending: it fired, was cancelled, or was never set"
        raise NotFound(what="timer", timer=id[:200], universe=universe, why=why)
    queue = slot.queue(universe)
    keys, packed_seq = keys_of(queue), pack_int(slot.seq)
    if txn.get(keys.items + packed_seq) is None:
        flag = " --calendar" if slot.calendar else ""
        names = {"seq": str(slot.seq), "flag": flag, "universe": universe}
        return answer("timer", id, "dead", [blocker("timer_dead", "a dead letter", names=names)])
    item = items.load_item(txn, keys, packed_seq)
    now_ns = wall_ns if slot.calendar else txn.now_ns
    if item.failures:
        text = (
            f"attempt {item.failures} failed, {item.code}: {item.error.partition(chr(10))[0][:200]}"
        )
        return answer(
            "timer", id, "delayed", [blocker("waits_for_retry", text, until=item.not_before_ns)]
        )
    return answer("timer", id, "pending", [due_blocker(item.not_before_ns, now_ns, "the timer")])


def due_blocker(due_ns: int, now_ns: int, what: str) -> Blocker:
    """The blocker of something that a timer worker fires at a time."""
    if now_ns < due_ns:
        clock = "due in" if due_ns - now_ns < 3600 * S else "due in about"
        text = f"{what} is {clock} {_duration_text(due_ns - now_ns)}"
        return blocker("waits_for_due_time", text, until=due_ns)
    late = _duration_text(now_ns - due_ns)
    if now_ns - due_ns >= UNSERVED_NS:
        return blocker(
            "no_timer_worker", f"{what} is overdue by {late}, and no worker fired it", due_ns
        )
    return blocker("waits_in_queue", f"{what} is due since {late}", due_ns)


def _duration_text(duration_ns: int) -> str:
    seconds = duration_ns / S
    if seconds < 120:
        return f"{seconds:,.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.0f} h"
