"""Concurrent calls of one operation: the store commits them in one batch, or nearly so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.store.api import Store, unwrap
from holdfast.store.in_process import InProcessStore
from holdfast.store.lmdb.protocol import build_request, resolve_deferred


def call_in_one_batch(store: Store, operation: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Return the results or errors of the calls, in the order of `calls`.

    An in-process store gets the calls as one engine batch of independent clients. Any other store gets them inside
    `batched()`.
    """
    if not isinstance(store, InProcessStore):
        with store.batched():
            futures = [store.submit(operation, *args) for args in calls]
        return [_result_or_error(future.result) for future in futures]
    calls_made = [store._run(operation, args, {}) for args in calls]
    requests = [build_request(txn, 1, store.clock.entropy(8)) for txn, _ in calls_made]
    answers = store.engine.commit(requests)

    def resolve(n: int) -> Any:
        txn, result = calls_made[n]
        resolve_deferred(txn, answers[n])
        return unwrap(result)

    return [_result_or_error(resolve, n) for n in range(len(calls_made))]


def _result_or_error(call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except HoldfastError as error:
        return error
