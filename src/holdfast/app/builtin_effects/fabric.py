"""`hf.fabric.send`: mail between worlds, as an effect.

    cx.send(Audit, "main", Seen(3))                    # the common form
    cx.do(hf.fabric.send.options(key="k"), params)     # the same, with control over every field

    @hf.on(hf.fabric.send)                             # or hf.sent: handles the delivery receipts
    def delivered(self, receipt: hf.Receipt[hf.fabric.FabricSendReceipt], cx: hf.Context) -> None: ...

The runtime delivers mail itself, without an effect worker. The parameters and the receipt follow document
004 (`sys/FabricSendParams@1`, `sys/FabricSendReceipt@1`). A destination may also be given by name. `dump`
encodes a payload; `app.encode_event` returns the schema and bytes of an event.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from holdfast import codec
from holdfast.app.definitions import Call, Effect, Receipt
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
from holdfast.messages import IntentReceipt as StoredReceipt
from holdfast.world.context import EffectCall

__all__ = [
    "FABRIC_PARAMS", "FABRIC_RECEIPT", "INBOX", "TYPED_EVENT", "FabricSendParams",
    "FabricSendReceipt", "Send", "WorldName", "dump", "send",
]  # fmt: skip

# There is no `timeout_s`, because no effect worker calls it.
_OPTIONS = ("key", "priority", "tag")


class Send(Effect[[FabricSendParams | Mapping[str, Any]], FabricSendReceipt]):
    """The mail effect. Its only argument is `FabricSendParams`, or a mapping of its fields."""

    def __init__(self) -> None:
        super().__init__(FABRIC_SEND, _never_called)

    def call(self, args: tuple[Any, ...], options: dict[str, Any]) -> EffectCall:
        unknown = sorted(options.keys() - set(_OPTIONS))
        if unknown:
            raise Invalid(what="option", found=unknown, expected=list(_OPTIONS))
        if len(args) != 1 or not isinstance(args[0], FabricSendParams | Mapping):
            raise Invalid(what="effect arguments", kind=FABRIC_SEND, expected=FABRIC_PARAMS)
        [argument] = args
        try:
            params = (
                argument if isinstance(argument, FabricSendParams) else FabricSendParams(**argument)
            )
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
        """Decode a receipt. It has a value for every status; cancelled or dead mail has no inbox position."""
        if stored.value:
            value = codec.unpack_as(FabricSendReceipt, stored.value)
        else:
            value = FabricSendReceipt("error", stored.intent_hash, "")
        return Receipt(
            status=stored.status.value,
            value=value,
            code=stored.code,
            error=stored.error,
            attempts=stored.attempts,
            tag=stored.tag,
            cost=stored.cost,
            intent_hash=stored.intent_hash,
            redrive_of=stored.redrive_of,
        )


def dump(payload: Any) -> bytes:
    """Encode a payload for `payload_cbor`."""
    try:
        return codec.pack_value(payload)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise Invalid(what="payload", why=str(error)) from None


def _never_called(call: Call, params: Any) -> NoReturn:
    raise AssertionError("mail is delivered by the runtime")


send = Send()
sent = send
