"""Calls of one operation that reach a store at the same moment: all in one batch, or nearly so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.store.api import Store, settled
from holdfast.store.local import LocalStore
from holdfast.store.wire import fill, request_of


def at_once(store: Store, operation: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The answers, or the errors, of calls with these arguments, in their order.

    A store in this process gets them as one batch of its engine, from clients that know nothing of each
    other. Any other store is sent them together.
    """
    if not isinstance(store, LocalStore):
        with store.together():
            futures = [store.submit(operation, *args) for args in calls]
        return [_answer_of(future.result) for future in futures]
    made = [store._run(operation, args, {}) for args in calls]
    asked = [request_of(txn, 1, store.clock.entropy(8)) for txn, _ in made]
    answers = store.engine.commit(asked)

    def told(n: int) -> Any:
        txn, result = made[n]
        fill(txn, answers[n])
        return settled(result)

    return [_answer_of(told, n) for n in range(len(made))]


def _answer_of(ask: Any, *args: Any) -> Any:
    try:
        return ask(*args)
    except HoldfastError as error:
        return error
