"""A flow to start, and the checks of what cannot be stored."""

from __future__ import annotations

from functools import lru_cache

from holdfast.codec import Record
from holdfast.config import KEY_BYTES_MAX, MESSAGE_BYTES_MAX
from holdfast.durable.validation import check_name, check_time, check_ttl
from holdfast.errors import Invalid, KeyTooLarge, ValueTooLarge
from holdfast.flows.model import FlowSpec, Parent, keys_of
from holdfast.flows.unit_of_work import activation_spec
from holdfast.store import tuples
from holdfast.tasks import submit


class NewFlow(Record, frozen=True):
    """A flow to start."""

    spec: FlowSpec
    args: bytes
    key: str = ""
    parent: Parent | None = None
    tag: str = ""
    # The trace context of the start.
    trace: bytes = b""


def check_new(universe: str, new_flow: NewFlow) -> None:
    check_spec(new_flow.spec)
    if new_flow.tag:
        check_name("tag", new_flow.tag)
    if len(new_flow.args) > MESSAGE_BYTES_MAX:
        raise ValueTooLarge(what="arguments", bytes=len(new_flow.args), bytes_max=MESSAGE_BYTES_MAX)
    if new_flow.key:
        check_name("key", new_flow.key)
        key = keys_of(universe).keys + tuples.pack((new_flow.spec.name, new_flow.key))
        if len(key) > KEY_BYTES_MAX:
            raise KeyTooLarge(what="flow", key=new_flow.key[:64], bytes_max=KEY_BYTES_MAX)


@lru_cache(1024)
def check_spec(spec: FlowSpec) -> None:
    check_name("flow", spec.name)
    submit.check_spec(activation_spec(spec))
    check_time("timeout_ns", spec.timeout_ns)
    check_ttl(spec.lease_ns)
    check_time("retain_ns", spec.retain_ns)
    if not 1 <= spec.attempts <= 1_000_000:
        raise Invalid(what="attempts", found=spec.attempts, min=1, max=1_000_000)
