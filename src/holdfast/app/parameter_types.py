"""The types of the parameters of a declared function, also of those in `*args` and `**kwargs`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from holdfast import codec
from holdfast.errors import Invalid
from holdfast.value_versions import UnreadableValue

Convert = Callable[[Any, Any], Any]


class BadArgument(Invalid):
    """An argument that does not match its annotation."""

    hint = "pass a value of the annotated type"


class ParameterTypes(NamedTuple):
    """The types of the parameters of a function. `Any`: not checked."""

    # By position: the name of each parameter and its type.
    positional: tuple[tuple[str, Any], ...]
    rest: Any
    named: dict[str, Any]
    named_rest: Any

    def convert(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], convert: Convert
    ) -> tuple[list[Any], dict[str, Any]]:
        """Convert arguments as they were passed: by position or by name. The error names the argument."""
        count = len(self.positional)
        positional = [
            _convert(convert, value, hint, name)
            for value, (name, hint) in zip(args, self.positional, strict=False)
        ]
        if self.rest is Any:
            positional += args[count:]
        else:
            positional += [
                _convert(convert, value, self.rest, number)
                for number, value in enumerate(args[count:], start=count + 1)
            ]
        named = {
            name: _convert(convert, value, self.named.get(name, self.named_rest), name)
            for name, value in kwargs.items()
        }
        return positional, named


def _convert(convert: Convert, value: Any, hint: Any, name: str | int) -> Any:
    if hint is Any:
        return value
    try:
        return convert(value, hint)
    except UnreadableValue as error:
        raise UnreadableValue(argument=name, **error.fields) from None
    except codec.ENCODE_ERRORS as error:
        raise BadArgument(argument=name, why=str(error)) from None


def types_of(signature: inspect.Signature, hints: Mapping[str, Any]) -> ParameterTypes:
    positional: list[tuple[str, Any]] = []
    named: dict[str, Any] = {}
    rest: Any = Any
    named_rest: Any = Any
    for name, parameter in signature.parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_POSITIONAL:
            rest = _type_of_each(hint)
        elif parameter.kind is parameter.VAR_KEYWORD:
            if typing.get_origin(hint) is typing.Unpack:
                # `**kwargs: Unpack[Fields]` has a type for each name.
                named |= typing.get_type_hints(typing.get_args(hint)[0])
            named_rest = _type_of_each(hint)
        else:
            if parameter.kind is not parameter.KEYWORD_ONLY:
                positional.append((name, hint))
            if parameter.kind is not parameter.POSITIONAL_ONLY:
                named[name] = hint
    return ParameterTypes(tuple(positional), rest, named, named_rest)


def _type_of_each(hint: Any) -> Any:
    """The type of each value in `*args` or `**kwargs`. A variadic type has none that msgspec knows."""
    variadic = typing.get_origin(hint) is typing.Unpack or isinstance(
        hint, typing.ParamSpecArgs | typing.ParamSpecKwargs
    )
    return Any if variadic else hint
