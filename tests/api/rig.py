"""A rig that calls endpoints by method and path, over a store and a universe, without a server."""

from __future__ import annotations

from types import TracebackType
from typing import Any
from urllib.parse import unquote

from holdfast import App, codec
from holdfast.app.runtime import Runtime
from holdfast.clock import SYSTEM
from holdfast.ops.api import registry
from holdfast.ops.api.call import invoke
from holdfast.ops.api.endpoint import Endpoint, match_path
from holdfast.ops.audit import AuditEntry
from holdfast.store import schema, tuples
from holdfast.store.api import Store, Txn
from holdfast.store.schema import Space
from holdfast.workers.world.worker import WorldWorker
from holdfast.world import catalog
from tests.api.shop import app as shop

WORKER = "worker-1"
ACTOR = "ada's token"
TICKS_MAX = 100


class ApiRig:
    def __init__(self, store: Store, universe: str) -> None:
        self.store = store
        self.universe = universe
        self.app: App | None = shop
        self._runtimes: list[Runtime] = []

    def __enter__(self) -> ApiRig:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for runtime in self._runtimes:
            runtime.close()

    def get(self, path: str, /, *, etag: str = "", **query: Any) -> Any:
        texts = {name.rstrip("_"): str(value) for name, value in query.items()}
        return self._call("GET", path, query=texts, etag=etag)

    def post(self, path: str, body: Any = None, /, *, key: str = "") -> Any:
        return self._call("POST", path, body=body or {}, key=key)

    def pages(self, path: str, **query: Any) -> list[Any]:
        """All items of a list, page by page."""
        items: list[Any] = []
        cursor = ""
        for _ in range(TICKS_MAX):
            page = self.get(path, cursor=cursor, **query)
            assert set(page) == {"items", "next"}
            items += page["items"]
            if not page["next"]:
                return items
            cursor = page["next"]
        raise AssertionError("the list does not end")

    def _call(self, method: str, path: str, **request: Any) -> Any:
        endpoint, parameters = find_endpoint(method, path)
        return invoke(
            endpoint,
            self.store,
            self.universe,
            path=parameters,
            app=self.app,
            actor=ACTOR,
            **request,
        )

    def start(self, *roles: str) -> Runtime:
        """Run roles of the app in this process, until the test ends."""
        runtime = Runtime(shop, self.store, roles=roles, universe=self.universe)
        self._runtimes.append(runtime)
        return runtime

    def run_worlds(self) -> None:
        """Run a world worker until no world has work. It takes snapshots."""
        worker = WorldWorker(
            self.store,
            universe=self.universe,
            programs=shop.programs,
            vocabulary=shop,
            worker=WORKER,
            incarnation=SYSTEM.entropy(8).hex(),
        )
        for record in self.store.read(catalog.list_worlds, self.universe, "", 1000):
            if record.status is not catalog.WorldStatus.DELETED:
                self.store.transact(catalog.assign, self.universe, record.world_id, WORKER)
        for _ in range(TICKS_MAX):
            if not worker.tick():
                break
        worker.shut_down()

    def audit_entries(self) -> list[AuditEntry]:
        """The audit log, oldest first."""

        def read(txn: Txn) -> list[AuditEntry]:
            prefix = schema.key_prefix(Space.AUDIT, self.universe)
            rows = txn.scan(prefix, tuples.prefix_end(prefix))
            return [codec.unpack_as(AuditEntry, row) for _, row in rows]

        return self.store.read(read)


def find_endpoint(method: str, path: str) -> tuple[Endpoint, dict[str, str]]:
    parts = [unquote(part) for part in path.strip("/").split("/")]
    for endpoint in registry.endpoints():
        parameters = match_path(endpoint, parts)
        if endpoint.method == method and parameters is not None:
            return endpoint, parameters
    raise LookupError(f"{method} {path}")
