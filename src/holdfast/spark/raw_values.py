"""Results that did not fit their schema, kept as JSON text: the column `_raw` of failed rows.

`encode` makes text of whatever a function returned and never fails; `decode` gives it back. What JSON
has no form for is an object with one `$` name:

| value | in `_raw` | decoded |
|---|---|---|
| NaN, Infinity | `{"$float": "nan"}` | float |
| bytes, bytearray, memoryview | `{"$bytes": "<base64>"}` | bytes |
| Decimal | `{"$decimal": "1.50"}` | Decimal |
| datetime, date, time | `{"$datetime": "<ISO>"}`, `$date`, `$time` | the same |
| timedelta | `{"$timedelta_us": 1500000}` | timedelta |
| set, frozenset | `{"$set": [...]}` | list |
| dict with a key that is no text, or begins with `$` | `{"$map": [[key, value], ...]}` | dict |
| NumPy, pandas, torch arrays | a list | list |
| Arrow and pandas tables | a list of rows | list |
| dataclass, pydantic model, Row, named tuple | an object of its fields | dict |
| tuple, range, `array.array` | a list | list |
| Enum | its value | |
| anything else, and what is nested deeper than 100 | `{"$object": "module.Class", "repr": "..."}` | dict |
| text beyond `RAW_BYTES_MAX` | `{"$cut": "<its beginning>", "bytes": n}` | dict |
"""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
from array import array
from typing import Any

import pyarrow as pa

from holdfast.spark.coercion import fields_of, listed, plain

# A result that does not fit is kept up to this size, as one that does (`row_reports.RESULT_BYTES_MAX`).
RAW_BYTES_MAX = 64 * 1024 * 1024
CUT_CHARS = 64 * 1024
DEPTH_MAX = 100
ITEMS_MAX = 20_000_000
REPR_CHARS_MAX = 4000


def encode(found: Any) -> str:
    """The text of a value. ASCII alone, so its characters are its bytes."""
    try:
        text = json.dumps(_Walk().of(found), allow_nan=False, separators=(",", ":"))
    except Exception as error:
        text = json.dumps(_opaque(found, error))
    if len(text) <= RAW_BYTES_MAX:
        return text
    return json.dumps({"$cut": text[:CUT_CHARS], "bytes": len(text)})


def decode(text: str) -> Any:
    """The value of a text, as `encode` describes it."""
    return json.loads(text, object_hook=_restored)


class _Walk:
    """One value on its way to JSON: what lies above the place it is at, and how much it was so far."""

    def __init__(self) -> None:
        self._above: set[int] = set()
        self._left = ITEMS_MAX

    def of(self, value: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many items")
        value = plain(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if len(self._above) >= DEPTH_MAX or id(value) in self._above:
            return _opaque(value)
        self._above.add(id(value))
        try:
            return self._inside(value)
        finally:
            self._above.discard(id(value))

    def _inside(self, value: Any) -> Any:
        fields = fields_of(value)
        if fields is not None:
            return self._object(fields)
        if isinstance(value, list | tuple | range | array):
            return [self.of(one) for one in value]
        if isinstance(value, set | frozenset):
            return {"$set": [self.of(one) for one in value]}
        if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
            return self.of(value.to_pylist())
        if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a pandas DataFrame
            return self.of(value.to_dict("records"))
        items = listed(value)
        return self.of(items) if items is not None else _rare(value)

    def _object(self, fields: dict[Any, Any]) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in fields):
            return {str(key): self.of(item) for key, item in fields.items()}
        return {"$map": [[self.of(key), self.of(item)] for key, item in fields.items()]}


def _rare(value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(bytes(value)).decode()}
    if isinstance(value, decimal.Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, datetime.datetime):
        return {"$datetime": value.isoformat()}
    if isinstance(value, datetime.date):
        return {"$date": value.isoformat()}
    if isinstance(value, datetime.time):
        return {"$time": value.isoformat()}
    if isinstance(value, datetime.timedelta):
        return {"$timedelta_us": value // datetime.timedelta(microseconds=1)}
    return _opaque(value)


def _opaque(value: Any, error: Exception | None = None) -> dict[str, str]:
    kind = type(value)
    found = {"$object": f"{kind.__module__}.{kind.__qualname__}"}
    try:
        found["repr"] = repr(value)[:REPR_CHARS_MAX]
    except Exception:
        found["repr"] = ""
    if error is not None:
        found["error"] = type(error).__name__
    return found


def _restored(found: dict[str, Any]) -> Any:
    if len(found) != 1:
        return found
    [(name, value)] = found.items()
    restore = _RESTORE.get(name)
    return restore(value) if restore is not None else found


_RESTORE: dict[str, Any] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$decimal": decimal.Decimal,
    "$datetime": datetime.datetime.fromisoformat,
    "$date": datetime.date.fromisoformat,
    "$time": datetime.time.fromisoformat,
    "$timedelta_us": lambda us: datetime.timedelta(microseconds=us),
    "$set": list,
    "$map": lambda pairs: {_hashable(key): item for key, item in pairs},
}


def _hashable(key: Any) -> Any:
    return tuple(_hashable(one) for one in key) if isinstance(key, list) else key
