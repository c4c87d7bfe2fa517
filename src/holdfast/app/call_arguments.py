"""Whether two calls of a declared function have the same arguments.

    canonical(declared, packed)    encoded arguments in one form: by parameter, with defaults, as the annotated types
    stored_if_equal(…)             the stored arguments of a key in use, if they are the arguments of this call

A commit compares the arguments of a key in use by their bytes. Only after its `KeyConflict` the caller, which has the
code, compares them by value. It then repeats the call with the stored bytes.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from holdfast import codec, value_versions
from holdfast.app.parameter_types import ParameterTypes
from holdfast.errors import Invalid, KeyConflict
from holdfast.flows import queries as flow_queries
from holdfast.store.api import Txn
from holdfast.tasks import queries as task_queries


class DeclaredFunction(Protocol):
    """A task or a flow."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature: ...
    @property
    def types(self) -> ParameterTypes: ...


def canonical(declared: DeclaredFunction, packed: bytes) -> bytes:
    """Return encoded arguments in the one form that all ways to write the call have."""
    versions, body = codec.split_versions(packed)

    def convert(value: Any, hint: Any) -> Any:
        return value_versions.convert(value, hint, versions)

    args, kwargs = codec.unpack(body)
    positional, named = declared.types.convert(args, kwargs, convert)
    bound = declared.signature.bind(*positional, **named)
    given = set(bound.arguments)
    bound.apply_defaults()
    return codec.pack_value(
        [
            [value] if name in given else _default_form(declared, name, value)
            for name, value in bound.arguments.items()
        ]
    )


def _default_form(declared: DeclaredFunction, name: str, value: Any) -> list[Any]:
    """A default as it would be if it were given. Empty if it cannot be stored, so that it cannot be given."""
    if declared.signature.parameters[name].kind in (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
    ):
        return [value]
    try:
        plain = codec.unpack(codec.pack_value(value))
    except codec.ENCODE_ERRORS:
        return []
    hints = dict(declared.types.positional) | declared.types.named
    try:
        return [value_versions.convert(plain, hints[name], {})]
    except Invalid:  # such as `n: int = None`
        return [plain]


def stored_if_equal(
    txn: Txn, universe: str, declared: DeclaredFunction, packed: bytes, conflict: KeyConflict
) -> bytes | None:
    """Return the stored arguments of the key in use if they are the arguments of this call, else None."""
    find = {"flow": flow_queries.arguments_of_key, "task": task_queries.arguments_of_key}
    what, name, key = (conflict.fields.get(field) for field in ("what", "name", "key"))
    if what not in find or name != declared.name:
        return None
    stored = find[what](txn, universe, str(name), str(key))
    if stored is None:
        return packed  # the key became free meanwhile
    try:
        same = canonical(declared, stored) == canonical(declared, packed)
    except (Invalid, *codec.ENCODE_ERRORS):  # the present code cannot read them
        return None
    return stored if same else None
