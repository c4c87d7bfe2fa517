"""The values that a step's function carries: its closure, its defaults and the object of a bound method.

Two functions of one factory share their name and their code, and differ in these values only. A value counts if it
cannot change in place: a scalar, a path, a fraction, an enum member, a tuple, a frozen dataclass, a function. Other
objects, such as clients, lists and dicts, count by their type, because they change while flows run. So do variables
and attributes that the function or a method of the class assigns. An object that holds live objects has only those
attributes counted that have the name of a parameter of its constructor. A function that its module or class holds under its
qualified name has one version only, and its closure and defaults do not count.

The same encoding serves for arguments that msgpack cannot encode. Lists and dicts count by their content there.
"""

from __future__ import annotations

import dataclasses
import dis
import enum
import fractions
import functools
import inspect
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from holdfast import codec
from holdfast.value_versions import UpcastObjects

# Values deeper than this, or behind this number of values, count by their type.
DEPTH_MAX = 20
VALUES_MAX = 100_000
_INT_BITS_MAX = 63
_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__attrs_post_init__"})
_FUNCTIONS = (
    types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, functools.partial, type,
)  # fmt: skip


def encode_state(fn: Any, upcast: UpcastObjects) -> bytes:
    """Encode the values that a function carries. Empty if it carries none that count."""
    if type(fn) is types.FunctionType and not carries_values(fn):
        return b""
    encoder = ValueEncoder(upcast, is_captured=True)
    if isinstance(fn, _FUNCTIONS):
        form = encoder.carried(fn, 0)
    else:
        form = encoder.attributes(fn, 0)
    return codec.pack(form) if encoder.has_values else b""


def encode_argument(value: Any, upcast: UpcastObjects) -> bytes:
    """Encode an argument that msgpack cannot encode. Empty if nothing but its type counts."""
    encoder = ValueEncoder(upcast, is_captured=False)
    form = encoder.encode(value, 0)
    return codec.pack(form) if encoder.has_values else b""


def carries_values(fn: types.FunctionType) -> bool:
    """Whether another function with the same code may carry other values."""
    if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
        return False
    found: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is not fn


class ValueEncoder:
    """Encodes a value as plain data. `has_values` is true if it contains more than types."""

    def __init__(self, upcast: UpcastObjects, *, is_captured: bool) -> None:
        self._upcast = upcast
        self._is_captured = is_captured
        self._count = 0
        self.has_values = False

    def encode(self, value: Any, depth: int) -> Any:
        self._count += 1
        if depth > DEPTH_MAX or self._count > VALUES_MAX:
            return _type_name(value)
        if (stored := self._upcast.get(id(value))) is not None:
            return self._leaf("stored", codec.pack_value(stored.fields))
        if isinstance(value, _FUNCTIONS):
            return self._function(value, depth)
        if (leaf := _leaf_of(value)) is not None:
            return self._leaf(*leaf)
        form = self._container(value, depth)
        return _type_name(value) if form is None else form

    def _leaf(self, kind: str, *parts: Any) -> Any:
        self.has_values = True
        return [kind, *parts]

    def _container(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple) or (isinstance(value, list) and not self._is_captured):
            self.has_values |= not self._is_captured
            return ["list", *(self.encode(item, depth + 1) for item in value)]
        if isinstance(value, frozenset) or (isinstance(value, set) and not self._is_captured):
            self.has_values |= not self._is_captured
            return ["set", *sorted(codec.pack(self.encode(item, depth + 1)) for item in value)]
        if isinstance(value, dict) and not self._is_captured:
            self.has_values = True
            pairs = [
                (codec.pack(self.encode(key, depth + 1)), self.encode(item, depth + 1))
                for key, item in value.items()
            ]
            return ["dict", *sorted(pairs, key=lambda pair: pair[0])]
        names = list(codec.field_names(type(value)))
        if names and (not self._is_captured or _is_frozen(type(value))):
            fields = [(name, self.encode(getattr(value, name, None), depth + 1)) for name in names]
            return ["fields", type(value).__qualname__, fields]
        return None

    def _function(self, fn: Any, depth: int) -> Any:
        inner = fn.func if isinstance(fn, functools.partial) else fn
        name = getattr(inner, "__qualname__", None) or type(inner).__qualname__
        carries = type(fn) is not types.FunctionType or carries_values(fn)
        return self._leaf("function", name, self.carried(fn, depth + 1) if carries else [])

    def carried(self, fn: Any, depth: int) -> Any:
        """The closure, the defaults and the object of a function."""
        if depth > DEPTH_MAX:
            return []
        if isinstance(fn, functools.partial):
            args = [self.encode(value, depth + 1) for value in fn.args]
            named = [
                (name, self.encode(fn.keywords[name], depth + 1)) for name in sorted(fn.keywords)
            ]
            return [self._function(fn.func, depth), args, named]
        if isinstance(fn, types.FunctionType):
            if not carries_values(fn):
                return []
            return [self._kept(name, value, depth) for name, value in _carried_values(fn)]
        owner = getattr(fn, "__self__", None)
        if owner is None or isinstance(fn, type) or isinstance(owner, types.ModuleType):
            return []
        inner = getattr(fn, "__func__", None)
        carried = self.carried(inner, depth + 1) if isinstance(inner, types.FunctionType) else []
        if isinstance(owner, type):
            return [self._leaf("class", owner.__qualname__), carried]
        return [self.attributes(owner, depth), carried]

    def attributes(self, owner: Any, depth: int) -> Any:
        """The attributes of an object that count. They are all attributes of an object that holds only values, and
        those with the name of a constructor's parameter of an object that also holds live objects."""
        if _leaf_of(owner) is not None or isinstance(owner, tuple | frozenset):
            return self._captured(owner, depth)
        kind = type(owner)
        names = {
            *getattr(owner, "__dict__", ()), *codec.field_names(kind), *_slots_of(kind),
        } - _assigned_attributes(kind)  # fmt: skip
        values = [(name, getattr(owner, name)) for name in sorted(names) if hasattr(owner, name)]
        if not all(self._is_value(value, depth) for _, value in values):
            parameters = _constructor_parameters(kind)
            values = [(name, value) for name, value in values if name.strip("_") in parameters]
        return [_type_name(owner), *(self._kept(name, value, depth) for name, value in values)]

    def _is_value(self, value: Any, depth: int) -> bool:
        encoder = ValueEncoder(self._upcast, is_captured=True)
        encoder.encode(value, depth + 1)
        return encoder.has_values or type(value) in (tuple, frozenset)

    def _kept(self, name: str, value: Any, depth: int) -> Any:
        return [name, self._captured(value, depth)]

    def _captured(self, value: Any, depth: int) -> Any:
        """Encode a value of a closure or an attribute: what changes in place counts by its type."""
        before, self._is_captured = self._is_captured, True
        try:
            return self.encode(value, depth + 1)
        finally:
            self._is_captured = before


def _leaf_of(value: Any) -> tuple[Any, ...] | None:
    kind = type(value)
    if isinstance(value, enum.Enum):
        return "enum", kind.__qualname__, value.name
    if kind is int and value.bit_length() > _INT_BITS_MAX:
        return "int", hex(value)
    if isinstance(value, pathlib.PurePath):
        return "path", str(value)
    if kind in (fractions.Fraction, complex, range, slice):
        return kind.__name__, repr(value)
    if kind in codec.SCALAR_TYPES and kind is not bytearray:
        try:
            return kind.__name__, codec.pack(value)
        except codec.ENCODE_ERRORS:
            return kind.__name__, ascii(value)
    if isinstance(value, int | str | bytes):
        return kind.__name__, ascii(value)
    return None


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _is_frozen(kind: type[Any]) -> bool:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_config__.frozen
    parameters = getattr(kind, "__dataclass_params__", None)
    return dataclasses.is_dataclass(kind) and bool(getattr(parameters, "frozen", False))


def _carried_values(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The closure and the defaults of a function, without the variables that it assigns."""
    assigned = _assigned_names(fn.__code__, "STORE_DEREF")
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        # A recursive function carries itself.
        if name not in assigned and value is not fn:
            yield name, value
    for number, value in enumerate(fn.__defaults__ or ()):
        yield f"default {number}", value
    for name in sorted(fn.__kwdefaults__ or ()):
        yield f"default {name}", (fn.__kwdefaults__ or {})[name]


@functools.lru_cache(maxsize=1024)
def _assigned_names(code: types.CodeType, operation: str) -> frozenset[str]:
    """The names that a function and the functions inside it assign."""
    names = {found.argval for found in dis.get_instructions(code) if found.opname == operation}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _assigned_names(constant, operation)
    return frozenset(names)


_attributes_of_class: WeakKeyDictionary[type[Any], frozenset[str]] = WeakKeyDictionary()


def _assigned_attributes(kind: type[Any]) -> frozenset[str]:
    """The attributes that the methods of a class assign, except its constructors."""
    if (known := _attributes_of_class.get(kind)) is not None:
        return known
    names: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            member = getattr(member, "fget", None) or getattr(member, "__wrapped__", member)
            if isinstance(member, types.FunctionType) and name not in _CONSTRUCTORS:
                names |= _assigned_names(member.__code__, "STORE_ATTR")
    found = _attributes_of_class[kind] = frozenset(names)
    return found


def _constructor_parameters(kind: type[Any]) -> set[str]:
    try:
        return {name.strip("_") for name in inspect.signature(kind).parameters}
    except (TypeError, ValueError):  # a class of an extension module
        return set()


def _slots_of(kind: type[Any]) -> set[str]:
    found: set[str] = set()
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        found |= {slots} if isinstance(slots, str) else set(slots)
    return found - {"__dict__", "__weakref__"}
