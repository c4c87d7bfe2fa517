"""The type as which the value of a step is read back: the return annotation of its function.

A class as a step returns its instances. A callable object is annotated at its method `__call__`. Only the return
annotation is evaluated, so the annotations of parameters may name types that exist for type checkers only. Without an
annotation the value is plain data.
"""

from __future__ import annotations

import contextlib
import inspect
import typing
from collections.abc import Awaitable
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import inspect as types

from holdfast import codec
from holdfast.errors import Invalid

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
# Weak: a local function of a flow must not outlive its activation.
_types: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class UnreadableAnnotation(Invalid):
    """The return annotation of a step names something that does not exist at run time."""

    code = "annotation_unreadable"
    hint = (
        "import the name at run time, not under TYPE_CHECKING, and define a class of a result at module level; "
        "for a function of a library, write a function around it and annotate that"
    )


def return_type(fn: Any) -> Any:
    """Return the type of a step's value. Raise UnreadableAnnotation if it names something unknown."""
    kind = typing.get_origin(fn) or fn
    if isinstance(kind, type):
        return fn if _is_readable(fn) else Any
    fn = inspect.unwrap(fn)
    if not isinstance(fn, _FUNCTIONS):
        fn = getattr(type(fn), "__call__", None)  # noqa: B004
    owner = getattr(fn, "__self__", None)
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    try:
        if fn not in _types:
            _types[fn] = _annotated_type(fn, owner if isinstance(owner, type) else type(owner))
        return _types[fn]
    except TypeError:  # not weakly referenced: a function of an extension module
        return Any


def _annotated_type(fn: Any, owner: type[Any]) -> Any:
    try:
        annotation = getattr(fn, "__annotations__", {}).get("return", Any)
        names = _closure_of(fn)
        try:
            hint = _evaluate(fn, annotation, names)
        except NameError:
            hint = _evaluate(fn, annotation, _class_names(owner) | names)
    except (NameError, AttributeError, SyntaxError) as error:
        raise UnreadableAnnotation(
            what="step", name=getattr(fn, "__qualname__", repr(fn)[:64]), why=str(error)
        ) from None
    return _awaited(hint)


def _evaluate(fn: Any, annotation: Any, names: dict[str, Any]) -> Any:
    holder = SimpleNamespace(
        __annotations__={"return": annotation}, __type_params__=getattr(fn, "__type_params__", ())
    )
    return typing.get_type_hints(holder, getattr(fn, "__globals__", {}), names)["return"]


def _closure_of(fn: Any) -> dict[str, Any]:
    names: dict[str, Any] = {}
    code, closure = getattr(fn, "__code__", None), getattr(fn, "__closure__", None)
    if code is not None and closure:
        for name, cell in zip(code.co_freevars, closure, strict=True):
            with contextlib.suppress(ValueError):  # not assigned yet
                names[name] = cell.cell_contents
    return names


def _class_names(owner: type[Any]) -> dict[str, Any]:
    """The class of a method, and the names inside it. A global hides them, as `list` does a method of that name."""
    names: dict[str, Any] = {}
    for kind in reversed(owner.__mro__):
        names |= {**vars(kind), kind.__name__: kind}
    return names


def _awaited(hint: Any) -> Any:
    """The type of the value behind an awaitable: a plain function may return a coroutine."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not isinstance(origin, type) or not args or not issubclass(origin, Awaitable):
        return hint
    # The last argument of a coroutine type is the type of its result.
    return args[-1]


def _is_readable(kind: Any) -> bool:
    """Whether the instances of a class are read back as such."""
    try:
        info = types.type_info(kind)
    except Exception:
        return False
    return not isinstance(info, types.CustomType) or codec.is_model(kind)
