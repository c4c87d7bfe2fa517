"""The user's function on its way from the driver to the children: the one place that pickles code.

It takes the way that every PySpark function takes: the driver pickles it, Spark ships it inside the
task, the worker hands it to the child it started, over that child's own standard input. It is
never stored, and nothing that was stored or came over the network from elsewhere is unpickled.

A broadcast variable inside the function travels as its value: the child is no Spark worker and has
no registry to look it up in.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any

from pyspark import cloudpickle
from pyspark.core.broadcast import Broadcast

from holdfast.errors import Invalid


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


def dump(fn: Callable[..., Any], retry_on: tuple[type[BaseException], ...]) -> bytes:
    buffer = io.BytesIO()
    try:
        pickler: Any = _Pickler(buffer)  # type: ignore[no-untyped-call]
        pickler.dump((fn, retry_on, [path for path in sys.path if path]))
    except Exception as error:
        raise NotPicklable(function=_name(fn), why=f"{type(error).__name__}: {error}") from error
    return buffer.getvalue()


def load(data: bytes) -> tuple[Callable[..., Any], tuple[type[BaseException], ...]]:
    """In the child: the function. Modules are looked for where the driver found them, too."""
    try:
        fn, retry_on, paths = cloudpickle.loads(data)
    except Exception as error:
        raise NotLoadable(why=f"{type(error).__name__}: {error}") from error
    for path in paths:
        if path not in sys.path:
            sys.path.append(path)
    return fn, retry_on


class _Pickler(cloudpickle.CloudPickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Broadcast):
            return Value, (obj.value,)
        return super().reducer_override(obj)  # type: ignore[no-untyped-call]


def _name(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", fn))
