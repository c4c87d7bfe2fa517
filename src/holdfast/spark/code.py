"""The user's function on its way from the driver to the children: the one place that pickles code.

It takes the way that every PySpark function takes: the driver pickles it, Spark ships it inside the
task, the worker hands it to the child it started, over that child's own standard input. It is
never stored, and nothing that was stored or came over the network from elsewhere is unpickled.

A broadcast variable inside the function travels as its value: the child is no Spark worker and has
no registry to look it up in.
"""

from __future__ import annotations

import dis
import importlib.util
import io
import os
import sys
from collections.abc import Callable
from typing import Any

import msgspec
from pyspark import cloudpickle
from pyspark.core.broadcast import Broadcast

from holdfast.errors import Invalid
from holdfast.spark.error_classes import Rule

# The tokens that a call is thought to use: a number, or a function of its row (or batch).
Estimate = int | Callable[[Any], Any]

# Steps of the interpreter before and between the imports at the head of a function.
_BEFORE_CALLS = frozenset(
    [
        "CACHE",
        "COPY_FREE_VARS",
        "IMPORT_FROM",
        "LOAD_CONST",
        "LOAD_SMALL_INT",
        "MAKE_CELL",
        "NOP",
        "POP_TOP",
        "RESUME",
        "RETURN_GENERATOR",
        "STORE_DEREF",
        "STORE_FAST",
        "SWAP",
    ]
)


class NotPicklable(Invalid):
    code = "not_picklable"
    hint = "make clients, sessions and locks inside the function (or lazily), not outside of it"


class NotLoadable(Invalid):
    code = "not_loadable"
    hint = (
        "install the modules that the function uses on every executor, or ship them with addPyFile"
    )


class Value:
    """Stands for a broadcast variable in the child."""

    def __init__(self, value: Any) -> None:
        self.value = value


def dump(fn: Callable[..., Any], retry_on: tuple[Rule, ...], tokens: Estimate = 0) -> bytes:
    buffer = io.BytesIO()
    try:
        pickler: Any = _Pickler(buffer)  # type: ignore[no-untyped-call]
        pickler.dump((fn, retry_on, tokens))
    except Exception as error:
        raise NotPicklable(function=_name(fn), why=f"{type(error).__name__}: {error}") from error
    paths = [path or os.getcwd() for path in sys.path]
    return msgspec.msgpack.encode((paths, buffer.getvalue()))


def load(data: bytes) -> tuple[Callable[..., Any], tuple[Rule, ...], Estimate]:
    """In the child: the function, and what estimates its tokens. Modules are looked for where the driver
    found them, too."""
    paths, function = msgspec.msgpack.decode(data, type=tuple[list[str], bytes])
    look_in(paths)
    try:
        fn, retry_on, tokens = cloudpickle.loads(function)
    except Exception as error:
        module = {"module": error.name} if isinstance(error, ModuleNotFoundError) else {}
        raise NotLoadable(why=f"{type(error).__name__}: {error}", **module) from error
    return fn, retry_on, tokens


def missing_import(fn: Any) -> str:
    """A module that the function imports before it does anything else, and that is not installed; or "".

    Later imports may depend on what happens before them: a row that meets one fails with its error.
    """
    body = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if body is None:
        return ""
    level: Any = None
    for step in dis.get_instructions(body):
        if step.opname == "IMPORT_NAME":
            if level == 0 and not _installed(step.argval.partition(".")[0]):
                return str(step.argval)
        elif step.opname not in _BEFORE_CALLS:
            return ""
        elif isinstance(step.argval, int):
            level = step.argval
    return ""


def _installed(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def look_in(paths: list[str]) -> None:
    """Look for modules there, too, after the places that are known already."""
    sys.path.extend(path for path in paths if path not in sys.path)


class _Pickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Broadcast):
            return Value, (obj.value,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", fn))
