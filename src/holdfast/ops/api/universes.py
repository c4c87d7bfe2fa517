"""The universe of a request: `?universe=`, else the universe of the server, else the only one of the store."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from holdfast.errors import Invalid, NotFound
from holdfast.ops import catalog_queries
from holdfast.ops.redacted_documents import RedactionRules
from holdfast.redaction import Redactor
from holdfast.schedules import queries as schedules
from holdfast.store.api import Store, Txn

if TYPE_CHECKING:
    from holdfast.app.app import App
    from holdfast.ops.state_process import StateProcess

NAMES_SHOWN = 20


class UniverseRequired(Invalid):
    code = "universe_required"
    hint = "the store has several universes: name one with ?universe=U"


class UniverseChoice:
    """The universes that a server serves."""

    def __init__(
        self,
        store: Store,
        apps: Mapping[str, App],
        default: str = "",
        *,
        states: Mapping[str, StateProcess] | None = None,
        redactor: Redactor | None = None,
    ) -> None:
        """`apps` has the app of each universe whose code the server has. `states` has the process that
        computes states of its worlds; without one they are computed in this process. `redactor` has
        further paths than the apps."""
        self._store = store
        self._apps = apps
        self.default = default
        self._states = states or {}
        redactors = [app.redactor for app in apps.values()]
        self.redaction = RedactionRules(
            reduce(or_, redactors, redactor or Redactor()), apps.values()
        )
        self._named = {*apps, default} - {""}
        # The universes that were found in the store. They never leave it.
        self._known: set[str] = set(self._named)

    def app_of(self, universe: str) -> App | None:
        return self._apps.get(universe)

    def states_of(self, universe: str) -> StateProcess | None:
        return self._states.get(universe)

    def close(self) -> None:
        """End the processes that compute states."""
        for process in self._states.values():
            process.close()

    def names(self) -> list[str]:
        """Return the universes of the server and of the store."""
        self._known.update(self._store.read(_stored))
        return sorted(self._known)

    def is_cached(self, name: str) -> bool:
        """Whether `resolve` needs no read."""
        return name in self._known if name else bool(self.default)

    def resolve(self, name: str = "") -> str:
        """Return the universe of a request that names this one, or none."""
        if name:
            if name not in self._known and name not in self.names():
                raise NotFound(what="universe", found=name[:64])
            return name
        if self.default:
            return self.default
        names = self.names()
        if len(names) == 1:
            return names[0]
        if not names:
            raise NotFound(
                what="universe", why="the store has none; start the server with --universe U"
            )
        raise UniverseRequired(what="universe", known=names[:NAMES_SHOWN])


def _stored(txn: Txn) -> list[str]:
    return [*catalog_queries.universes(txn), *schedules.universes(txn)]
