"""The inbox of a flow: its unreceived events in commit order.

send               an event into the inbox, or to a waiting receive
take_mail          a new receive takes the oldest event of its types
return_received    the events of receives that the code had cancelled go back
return_unseen      the events that the code of an ended run has not seen go back
"""

from __future__ import annotations

from msgspec.structs import replace

from holdfast import codec
from holdfast.config import KEY_BYTES_MAX, MESSAGE_BYTES_MAX
from holdfast.durable import load_limits
from holdfast.durable.load_limits import BYTES
from holdfast.durable.validation import check_name
from holdfast.errors import KeyConflict, KeyTooLarge, NotFound, ValueTooLarge
from holdfast.flows.model import (
    RECEIVE,
    FlowEndedError,
    FlowId,
    MailRow,
    OpenStep,
    decode_mail,
    pack_int,
)
from holdfast.flows.records import Forked, StepCompleted, decode_record
from holdfast.flows.states import ENDED, FlowState
from holdfast.flows.unit_of_work import FlowUnit, OpenFlow
from holdfast.store import blobs, tuples
from holdfast.store.api import Txn, operation
from holdfast.store.prefix_scan import iter_rows

# Rows of an inbox that are read at once. The first row usually matches.
MAIL_PAGE = 16


@operation("flows.send")
def send(txn: Txn, universe: str, flow_seq: int, generation: int, mail: MailRow) -> int:
    """Put an event into the inbox of a flow, or give it to a waiting receive. Returns its number."""
    if len(mail.value) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what="event", bytes=len(mail.value), bytes_max=MESSAGE_BYTES_MAX)
    unit = FlowUnit(txn, universe)
    flow = unit.load(flow_seq)
    if flow.body.generation != generation:
        raise NotFound(what="flow", flow=str(FlowId(generation, flow_seq)))
    key = unit.keys.mail_keys + tuples.pack((flow_seq, mail.key)) if mail.key else b""
    if key and (row := txn.get(key)) is not None:
        number, digest = codec.unpack(row)
        if digest != codec.digest(mail.type.encode(), mail.value):
            raise KeyConflict(what="event", flow=flow_seq, key=mail.key)
        return int(number)
    if flow.head.state in ENDED:
        raise FlowEndedError(
            what="flow",
            flow=str(FlowId(generation, flow_seq)),
            state=FlowState(flow.head.state).name,
        )
    _judge(unit, flow, mail)
    number = flow.head.mail + 1
    flow.head = replace(flow.head, mail=number)
    if key:
        check_name("key", mail.key)
        if len(key) > KEY_BYTES_MAX:
            raise KeyTooLarge(what="event", key=mail.key[:64], bytes_max=KEY_BYTES_MAX)
        txn.put(key, codec.pack([number, codec.digest(mail.type.encode(), mail.value)]))
    _deliver(unit, flow, number, replace(mail, sent_ns=unit.now_ns))
    unit.close()
    return number


def _judge(unit: FlowUnit, flow: OpenFlow, mail: MailRow) -> None:
    """Refuse a new event with Overloaded if it would exceed a load limit of inboxes. A waiting receive takes its event at
    once, so that event is never refused."""
    limits = unit.tasks.load_limits
    if limits is None or not (limits.flow_inbox or limits.bytes_in_flight):
        return
    if _find_receiver(unit, flow, mail.type) is not None:
        return
    depth = flow.head.unread + 1
    if limits.flow_inbox and depth > limits.flow_inbox:
        id = str(FlowId(flow.body.generation, flow.seq))
        raise load_limits.refuse("flow_inbox", unit.universe, depth, limits.flow_inbox, flow=id)
    if limits.bytes_in_flight:
        found = load_limits.counted(unit.txn, unit.universe, BYTES) + len(mail.value)
        if found > limits.bytes_in_flight:
            raise load_limits.refuse(BYTES, unit.universe, found, limits.bytes_in_flight)


def _deliver(unit: FlowUnit, flow: OpenFlow, number: int, mail: MailRow) -> None:
    """Give an event to a waiting receive, or put it into the inbox under its number."""
    receiver = _find_receiver(unit, flow, mail.type)
    if receiver is None:
        value, blob = unit.inline_or_blob(mail.value)
        stored = replace(mail, value=value, blob=blob, counted=True)
        unit.txn.put(unit.keys.mail + tuples.pack((flow.seq, number)), codec.pack(stored))
        unit.count_event(flow, 1, len(mail.value), mail.sent_ns)
        return
    name, occurrence, step = receiver
    unit.delete_open(flow, name, occurrence, step)
    unit.append_value(flow, received(name, occurrence, step, number, mail))
    unit.wake(flow)


def return_unseen(unit: FlowUnit, flow: OpenFlow, known: int, unseen: int) -> None:
    """Deliver again the events that the code of the ended run has not seen."""
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    rows = unit.txn.scan(prefix + pack_int(known + 1), prefix + pack_int(known + unseen + 1))
    for _, row in rows:
        record = decode_record(row).record
        if isinstance(record, StepCompleted) and record.mail:
            _deliver_again(unit, flow, record)


def return_received(unit: FlowUnit, flow: OpenFlow, receives: set[tuple[str, int]]) -> None:
    """Deliver again the events that came for receives which the code had cancelled. An event goes back once: later its
    number is in the inbox, or another receive has it. The events that a fork took over stay with its parent."""
    if not receives:
        return
    prefix = unit.keys.records_of(flow.seq, flow.head.run)
    returned: dict[int, StepCompleted] = {}
    # No fork: nothing was taken over. `Forked(0, 0)` would take over the first record of the run.
    forked = Forked(0)
    for index, (_, row) in enumerate(unit.txn.scan(prefix, tuples.prefix_end(prefix))):
        record = decode_record(row).record
        if isinstance(record, Forked):
            forked = record
        elif isinstance(record, StepCompleted) and record.mail and not forked.took(index, record):
            if (record.name, record.occurrence) in receives:
                returned[record.mail] = record
            else:
                returned.pop(record.mail, None)
    for number, record in returned.items():
        if unit.txn.get(unit.keys.mail + tuples.pack((flow.seq, number))) is None:
            _deliver_again(unit, flow, record)


def _deliver_again(unit: FlowUnit, flow: OpenFlow, record: StepCompleted) -> None:
    packed = blobs.get(unit.txn, record.blob) if record.blob else record.value
    type, value = codec.unpack(packed)
    _deliver(unit, flow, record.mail, MailRow(type, value, sent_ns=unit.now_ns))


def _find_receiver(unit: FlowUnit, flow: OpenFlow, type: str) -> tuple[str, int, OpenStep] | None:
    """Return the receive that was called first among the ones that accept the type."""
    if not flow.head.open_steps:
        return None
    receivers = [
        found
        for found in unit.open_steps(flow)
        if found[2].kind == RECEIVE and type in found[2].types
    ]
    return min(receivers, key=lambda found: found[2].position, default=None)


def take_mail(unit: FlowUnit, flow: OpenFlow, types: tuple[str, ...]) -> tuple[int, MailRow] | None:
    """Remove and return the oldest event of these types, with its number."""
    if not flow.head.mail:
        return None
    prefix = unit.keys.mail + pack_int(flow.seq)
    for key, row in iter_rows(unit.txn, prefix, MAIL_PAGE):
        mail = decode_mail(row)
        if mail.type in types:
            unit.txn.delete(key)
            if mail.blob:
                value = blobs.get(unit.txn, mail.blob)
                blobs.release.fn(unit.txn, mail.blob)
                mail = replace(mail, value=value, blob=b"")
            if mail.counted:
                unit.count_event(flow, -1, len(mail.value), mail.sent_ns)
            return tuples.unpack_last_int(key, len(prefix)), mail
    return None


def received(
    name: str, occurrence: int, step: OpenStep, number: int, mail: MailRow
) -> StepCompleted:
    value = codec.pack([mail.type, mail.value])
    return StepCompleted(
        name, occurrence, step.position, step.digest, value, began_ns=step.began_ns, mail=number
    )
