"""Calls from intents to flows, which are a higher layer.

The module of flows is imported by name for an intent that starts a flow, in the process that applies commits.

    start                a new flow whose parent is the intent; None if its key has other arguments
    answer_if_ended      deliver the receipt of a flow that has already ended
    cancel               cancel a flow whose intent has its receipt
    idempotency_digest   the digest of the intent that started a flow
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from holdfast.messages import Intent
from holdfast.store.api import Txn

MODULE = "holdfast.flows.world_callbacks"


def start(txn: Txn, intent: Intent) -> int | None:
    return cast(int | None, _callbacks().start(txn, intent))


def answer_if_ended(txn: Txn, intent: Intent, seq: int) -> None:
    _callbacks().answer_if_ended(txn, intent, seq)


def cancel(txn: Txn, universe: str, seq: int) -> None:
    _callbacks().cancel(txn, universe, seq)


def idempotency_digest(txn: Txn, universe: str, seq: int) -> bytes | None:
    return cast(bytes | None, _callbacks().idempotency_digest(txn, universe, seq))


def _callbacks() -> Any:
    return importlib.import_module(MODULE)
