"""The client runtime of the API: the app's public calls over the store of a request, without any role."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from holdfast.app.runtime import Runtime
from holdfast.ops.api.call import ApiCall
from holdfast.store.api import Store

_runtimes: WeakKeyDictionary[Store, dict[tuple[int, str], Runtime]] = WeakKeyDictionary()


def client_runtime(call: ApiCall) -> Runtime:
    """Return a runtime without roles. It is kept as long as the store."""
    app = call.require_app()
    of_store = _runtimes.setdefault(call.store, {})
    key = (id(app), call.universe)
    runtime = of_store.get(key)
    if runtime is None:
        runtime = of_store[key] = Runtime(app, call.store, roles=(), universe=call.universe)
    return runtime
