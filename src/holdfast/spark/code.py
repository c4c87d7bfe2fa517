"""The user's function on its way from the driver to the children: the one place that pickles code.

It takes the way that every PySpark function takes: the driver pickles it, Spark ships it inside the
task, the worker hands it to the child it started, over that child's own standard input. It is
never stored, and nothing that was stored or came over the network from elsewhere is unpickled.

A broadcast variable inside the function travels as its value: the child is no Spark worker and has
no registry to look it up in.
"""

from __future__ import annotations

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


def dump(fn: Callable[..., Any], retry_on: tuple[Rule, ...]) -> bytes:
    buffer = io.BytesIO()
    try:
        pickler: Any = _Pickler(buffer)  # type: ignore[no-untyped-call]
        pickler.dump((fn, retry_on))
    except Exception as error:
        raise NotPicklable(function=_name(fn), why=f"{type(error).__name__}: {error}") from error
    paths = [path or os.getcwd() for path in sys.path]
    return msgspec.msgpack.encode((paths, buffer.getvalue()))


def load(data: bytes) -> tuple[Callable[..., Any], tuple[Rule, ...]]:
    """In the child: the function. Modules are looked for where the driver found them, too."""
    paths, function = msgspec.msgpack.decode(data, type=tuple[list[str], bytes])
    look_in(paths)
    try:
        fn, retry_on = cloudpickle.loads(function)
    except Exception as error:
        raise NotLoadable(why=f"{type(error).__name__}: {error}") from error
    return fn, retry_on


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
