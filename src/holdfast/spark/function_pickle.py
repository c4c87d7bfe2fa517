"""Pickling of the user's function: the only module that pickles code.

The function travels like every PySpark function: the driver pickles it, Spark ships it inside the task,
and the worker sends it to its child over the child's standard input. It is never stored. Data from
storage or from the network is never unpickled.

A broadcast variable inside the function travels as its value: the child is not a Spark worker and has no
broadcast registry.
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
from holdfast.spark.exception_rules import RetryRule

# Estimated tokens of a call: a number, or a function of its row (or batch).
TokenEstimate = int | Callable[[Any], Any]

# Bytecode instructions that occur before and between the imports at the head of a function.
_IMPORT_OPCODES = frozenset(
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


class BroadcastValue:
    """The child's replacement for a broadcast variable."""

    def __init__(self, value: Any) -> None:
        self.value = value


def dump_function(
    fn: Callable[..., Any], retry_on: tuple[RetryRule, ...], tokens: TokenEstimate = 0
) -> bytes:
    buffer = io.BytesIO()
    try:
        pickler: Any = _FunctionPickler(buffer)  # type: ignore[no-untyped-call]
        pickler.dump((fn, retry_on, tokens))
    except Exception as error:
        raise NotPicklable(
            function=_function_name(fn), why=f"{type(error).__name__}: {error}"
        ) from error
    paths = [path or os.getcwd() for path in sys.path]
    return msgspec.msgpack.encode((paths, buffer.getvalue()))


def load_function(data: bytes) -> tuple[Callable[..., Any], tuple[RetryRule, ...], TokenEstimate]:
    """Unpickle the function, its retry rules and its token estimate, in the child. The module path
    is extended by the driver's.
    """
    paths, function = msgspec.msgpack.decode(data, type=tuple[list[str], bytes])
    extend_module_path(paths)
    try:
        fn, retry_on, tokens = cloudpickle.loads(function)
    except Exception as error:
        module = {"module": error.name} if isinstance(error, ModuleNotFoundError) else {}
        raise NotLoadable(why=f"{type(error).__name__}: {error}", **module) from error
    return fn, retry_on, tokens


def find_missing_import(fn: Any) -> str:
    """Return a module that the function imports first and that is not installed; or "".

    Only imports at the head of the function are checked. Later ones may be conditional: a row that
    reaches a failing import fails with its error.
    """
    body = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    if body is None:
        return ""
    level: Any = None
    for step in dis.get_instructions(body):
        if step.opname == "IMPORT_NAME":
            if level == 0 and not _is_installed(step.argval.partition(".")[0]):
                return str(step.argval)
        elif step.opname not in _IMPORT_OPCODES:
            return ""
        elif isinstance(step.argval, int):
            level = step.argval
    return ""


def _is_installed(module: str) -> bool:
    try:
        return module in sys.modules or importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def extend_module_path(paths: list[str]) -> None:
    """Append directories to the module search path."""
    sys.path.extend(path for path in paths if path not in sys.path)


class _FunctionPickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Broadcast):
            return BroadcastValue, (obj.value,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _function_name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", fn))
