"""Source edits: plant a bug in the product for the duration of a run.

An edit replaces a text in one function. The edited module is compiled and the function's code
object is swapped, so that every reference to the function runs the bug. The text must occur in the
function exactly once. After a product change, `tests/sim/test_mutants.py` lists the edits whose
text no longer occurs.
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
    """Replaces `old` by `new` in the function `module:qualname` of the package."""

    where: str
    old: str
    new: str


class Mutant(NamedTuple):
    name: str
    edits: tuple[Edit, ...]

    def edited_code(self) -> dict[str, types.CodeType]:
        """Return the edited code object of each function."""
        places = dict.fromkeys(edit.where for edit in self.edits)
        return {
            where: _edited_code_of(where, tuple(edit for edit in self.edits if edit.where == where))
            for where in places
        }

    @contextmanager
    def planted(self) -> Iterator[None]:
        swapped = [(resolve_function(where), code) for where, code in self.edited_code().items()]
        # A bug may remember something in the attributes of its function, for this run only.
        genuine = [(fn, fn.__code__, dict(fn.__dict__)) for fn, _ in swapped]
        try:
            for fn, code in swapped:
                fn.__code__ = code
            yield
        finally:
            for fn, code, attributes in genuine:
                fn.__code__ = code
                fn.__dict__.clear()
                fn.__dict__.update(attributes)


def resolve_function(where: str) -> Any:
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
def _edited_code_of(where: str, edits: tuple[Edit, ...]) -> types.CodeType:
    fn = resolve_function(where)
    path = inspect.getsourcefile(fn)
    assert path is not None
    lines, first = inspect.getsourcelines(fn)
    body = "".join(lines)
    for edit in edits:
        if body.count(edit.old) != 1:
            found = body.count(edit.old)
            raise LookupError(f"{where}: {edit.old!r} occurs {found} times, not once")
        body = body.replace(edit.old, edit.new)
    whole = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    whole[first - 1 : first - 1 + len(lines)] = [body]
    code = compile("".join(whole), path, "exec")
    for name in fn.__qualname__.split("."):
        if name != "<locals>":
            code = _nested_code(code, name)
    return code


def _nested_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(
        const
        for const in code.co_consts
        if isinstance(const, types.CodeType) and const.co_name == name
    )
