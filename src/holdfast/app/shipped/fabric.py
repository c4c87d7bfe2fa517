"""`hf.fabric.send`: mail between worlds, as an effect.

    cx.send(Audit, "main", Seen(3))                    # the usual way
    cx.do(hf.fabric.send.options(key="k"), params)     # the same, with every field in hand

    @hf.on(hf.fabric.send)                             # or hf.sent: who cares for the receipts
    def told(self, receipt: hf.Receipt[hf.fabric.FabricSendReceipt], cx: hf.Context) -> None: ...

The runtime delivers mail itself, so no adapter of yours has to do it. The parameters and the receipt
are those of document 004 (`sys/FabricSendParams@1`, `sys/FabricSendReceipt@1`); a destination may be
named, too. `dump` makes the bytes of a payload; `app.encode_event` the schema and bytes of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast import codec
from holdfast.app.declare import Call, Effect, Receipt
from holdfast.errors import Invalid
from holdfast.messages import (
    FABRIC_PARAMS,
    FABRIC_RECEIPT,
    FABRIC_SEND,
    INBOX,
    TYPED_EVENT,
    FabricSendParams,
    FabricSendReceipt,
    WorldName,
)
from holdfast.messages import Receipt as StoredReceipt
from holdfast.world.context import EffectCall

__all__ = [
    "FABRIC_PARAMS", "FABRIC_RECEIPT", "INBOX", "TYPED_EVENT", "FabricSendParams",
    "FabricSendReceipt", "Send", "WorldName", "dump", "send",
]  # fmt: skip

# It is not called by us, so it has no time of its own.
_OPTIONS = ("key", "priority", "tag")


class Send(Effect[[FabricSendParams], FabricSendReceipt]):
    """The effect. Its one argument is `FabricSendParams`, or a mapping of its fields."""

    def __init__(self) -> None:
        super().__init__(FABRIC_SEND, _delivered_by_the_runtime)

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise Invalid(what="option", found=unknown, expected=list(_OPTIONS))
        if len(args) != 1 or not isinstance(args[0], FabricSendParams | Mapping):
            raise Invalid(what="effect arguments", kind=FABRIC_SEND, expected=FABRIC_PARAMS)
        [given] = args
        try:
            params = given if isinstance(given, FabricSendParams) else FabricSendParams(**given)
            packed = codec.pack(params)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise Invalid(what=FABRIC_PARAMS, why=str(error)) from None
        codec.unpack_as(FabricSendParams, packed)
        return EffectCall(
            FABRIC_SEND,
            packed,
            options.get("priority", 0),
            0,
            options.get("tag", ""),
            options.get("key"),
        )

    def receipt(self, stored: StoredReceipt) -> Receipt[FabricSendReceipt]:
        """Its value is there whatever the status. Mail that was cancelled or given up has no place."""
        if stored.value:
            value = codec.unpack_as(FabricSendReceipt, stored.value)
        else:
            value = FabricSendReceipt("error", stored.intent_hash, "")
        return Receipt(
            stored.status.value,
            value,
            stored.code,
            stored.error,
            stored.attempts,
            stored.tag,
            stored.cost,
            stored.intent_hash,
            stored.redrive_of,
        )


def dump(payload: Any) -> bytes:
    """The bytes of a payload, for `payload_cbor`."""
    try:
        return codec.pack_value(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what="payload", why=str(error)) from None


def _delivered_by_the_runtime(call: Call, params: Any) -> NoReturn:
    raise AssertionError("mail is delivered by the runtime")


send = Send()
sent = send
