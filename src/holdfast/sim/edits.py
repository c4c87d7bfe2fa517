"""How a bug is planted: an edit of the product's source, in force while a run lasts.

In one function, this text becomes that. The edited module is compiled and the function's code swapped,
so whoever holds the function, by whatever name, runs the bug. The text must stand in the function
exactly once: when the product is rewritten, `tests/sim/test_mutants.py` says which edit has lost its
place.
"""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.store.api import Operation


class Edit(NamedTuple):
    """In the function `module:qualname` of the package, `old` becomes `new`."""

    where: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    edits: tuple[Edit, ...]

    def codes(self) -> dict[str, types.CodeType]:
        """By function: its code with the edits in it."""
        places = dict.fromkeys(edit.where for edit in self.edits)
        return {
            where: _edited(where, tuple(edit for edit in self.edits if edit.where == where))
            for where in places
        }

    @contextmanager
    def planted(self) -> Iterator[None]:
        swapped = [(function_at(where), code) for where, code in self.codes().items()]
        genuine = [(fn, fn.__code__) for fn, _ in swapped]
        try:
            for fn, code in swapped:
                fn.__code__ = code
            yield
        finally:
            for fn, code in genuine:
                fn.__code__ = code


def function_at(where: str) -> Any:
    module, _, path = where.partition(":")
    found: Any = importlib.import_module(f"holdfast.{module}")
    for name in path.split("."):
        found = found.__dict__[name] if isinstance(found, type) else getattr(found, name)
    if isinstance(found, Operation):
        found = found.fn
    if isinstance(found, property):
        found = found.fget
    assert isinstance(found, types.FunctionType), where
    return found


@cache
def _edited(where: str, edits: tuple[Edit, ...]) -> types.CodeType:
    fn = function_at(where)
    path = inspect.getsourcefile(fn)
    assert path is not None
    lines, first = inspect.getsourcelines(fn)
    body = "".join(lines)
    for edit in edits:
        if body.count(edit.old) != 1:
            found = body.count(edit.old)
            raise LookupError(f"{where}: {edit.old!r} stands there {found} times, not once")
        body = body.replace(edit.old, edit.new)
    whole = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    whole[first - 1 : first - 1 + len(lines)] = [body]
    code = compile("".join(whole), path, "exec")
    for name in fn.__qualname__.split("."):
        if name != "<locals>":
            code = _inner(code, name)
    return code


def _inner(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        const
        for const in code.co_consts
        if isinstance(const, types.CodeType) and const.co_name == name
    )
