"""Tasks with keys, submitted in one commit. The arguments of a key in use are compared by value (`call_arguments`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace

from holdfast.app.call_arguments import DeclaredFunction, stored_if_equal
from holdfast.errors import KeyConflict
from holdfast.store.api import Txn
from holdfast.tasks import operations
from holdfast.tasks.model import TaskSpec
from holdfast.tasks.submit import TaskToSubmit


class KeyedTasks(NamedTuple):
    """After a `KeyConflict` the tasks are submitted again with the stored arguments, if those are equal."""

    specs: list[TaskSpec]
    spec_indexes: list[int]
    new: list[TaskToSubmit]

    def submit(
        self,
        transact: Callable[..., Any],
        read: Callable[..., Any],
        universe: str,
        declared: Mapping[str, DeclaredFunction],
    ) -> list[int]:
        """Submit all tasks in one commit and return their seqs."""
        tasks, tries_left = self, self._tries_max()
        while True:
            try:
                seqs: list[int] = transact(operations.submit_all, universe, *tasks)
                return seqs
            except KeyConflict as conflict:
                found = read(tasks.with_stored, universe, declared, conflict)
                tries_left -= 1
                if found is None or not tries_left:
                    raise
                tasks = found

    async def submit_async(
        self,
        submit: Callable[..., Awaitable[Any]],
        read: Callable[..., Awaitable[Any]],
        universe: str,
        declared: Mapping[str, DeclaredFunction],
    ) -> list[int]:
        """`submit` for a coroutine. `read` reads outside its event loop."""
        tasks, tries_left = self, self._tries_max()
        while True:
            try:
                seqs: list[int] = await submit(operations.submit_all, universe, *tasks)
                return seqs
            except KeyConflict as error:
                conflict = error
            found = await read(tasks.with_stored, universe, declared, conflict)
            tries_left -= 1
            if found is None or not tries_left:
                raise conflict
            tasks = found

    def with_stored(
        self,
        txn: Txn,
        universe: str,
        declared: Mapping[str, DeclaredFunction],
        conflict: KeyConflict,
    ) -> KeyedTasks | None:
        """Replace the arguments of the refused task by the stored ones. None if they are others."""
        refused = conflict.fields.get("name"), conflict.fields.get("key")
        new = list(self.new)
        for index, (spec_no, task) in enumerate(zip(self.spec_indexes, new, strict=True)):
            name = self.specs[spec_no].name
            if (name, task.key) != refused:
                continue
            function = declared.get(name)
            if function is None:
                return None
            stored = stored_if_equal(txn, universe, function, task.args, conflict)
            if stored is None:
                return None
            new[index] = replace(task, args=stored)
        return self._replace(new=new)

    def _tries_max(self) -> int:
        """One commit, and one for each key that may be in use."""
        return 1 + sum(bool(task.key) for task in self.new)
