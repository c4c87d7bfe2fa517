"""Raw values: results that did not fit their schema, kept as JSON text in the column `_raw` of
failed rows.

`encode` converts any returned value to text and never fails; `decode` restores it. Values without a JSON
form become an object with one `$` name:

| value | in `_raw` | decoded |
|---|---|---|
| NaN, Infinity | `{"$float": "nan"}` | float |
| bytes, bytearray, memoryview | `{"$bytes": "<base64>"}` | bytes |
| Decimal | `{"$decimal": "1.50"}` | Decimal |
| datetime, date, time | `{"$datetime": "<ISO>"}`, `$date`, `$time` | the same |
| timedelta | `{"$timedelta_us": 1500000}` | timedelta |
| set, frozenset | `{"$set": [...]}` | list |
| dict with a key that is not text, or begins with `$` | `{"$map": [[key, value], ...]}` | dict |
| NumPy, pandas, torch arrays | a list | list |
| Arrow and pandas tables | a list of rows | list |
| dataclass, pydantic model, Row, named tuple | an object of its fields | dict |
| tuple, range, `array.array` | a list | list |
| Enum | its value | |
| any other value, and nesting deeper than 100 | `{"$object": "module.Class", "repr": "..."}` | dict |
| text above `RAW_BYTES_MAX` | `{"$cut": "<its beginning>", "bytes": n}` | dict |
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

from holdfast.spark.coercion import array_items, named_fields, unwrap_scalar

# A result that does not fit has the same size limit as one that does
# (`row_reports.RESULT_BYTES_MAX`).
RAW_BYTES_MAX = 64 * 1024 * 1024
CUT_CHARS = 64 * 1024
DEPTH_MAX = 100
ITEMS_MAX = 20_000_000
REPR_CHARS_MAX = 4000


def encode(value: Any) -> str:
    """Encode a value as text. It is pure ASCII, so its characters are its bytes."""
    try:
        text = json.dumps(_JsonConverter().convert(value), allow_nan=False, separators=(",", ":"))
    except Exception as error:
        text = json.dumps(_opaque_object(value, error))
    if len(text) <= RAW_BYTES_MAX:
        return text
    return json.dumps({"$cut": text[:CUT_CHARS], "bytes": len(text)})


def decode(text: str) -> Any:
    """Decode the text of `encode`."""
    return json.loads(text, object_hook=_restore_object)


class _JsonConverter:
    """The conversion of one value to JSON form. It tracks the enclosing containers and the number
    of items.
    """

    def __init__(self) -> None:
        self._enclosing: set[int] = set()
        self._items_left = ITEMS_MAX

    def convert(self, value: Any) -> Any:
        self._items_left -= 1
        if self._items_left < 0:
            raise ValueError("too many items")
        value = unwrap_scalar(value)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return str(value)
        if isinstance(value, int):
            return int(value)
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        if len(self._enclosing) >= DEPTH_MAX or id(value) in self._enclosing:
            return _opaque_object(value)
        self._enclosing.add(id(value))
        try:
            return self._convert_container(value)
        finally:
            self._enclosing.discard(id(value))

    def _convert_container(self, value: Any) -> Any:
        fields = named_fields(value)
        if fields is not None:
            return self._convert_object(fields)
        if isinstance(value, list | tuple | range | array):
            return [self.convert(one) for one in value]
        if isinstance(value, set | frozenset):
            return {"$set": [self.convert(one) for one in value]}
        if isinstance(value, pa.Table | pa.RecordBatch | pa.Array | pa.ChunkedArray):
            return self.convert(value.to_pylist())
        if hasattr(value, "columns") and hasattr(value, "to_dict"):  # a pandas DataFrame
            return self.convert(value.to_dict("records"))
        items = array_items(value)
        return self.convert(items) if items is not None else _convert_scalar(value)

    def _convert_object(self, fields: dict[Any, Any]) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in fields):
            return {str(key): self.convert(item) for key, item in fields.items()}
        return {"$map": [[self.convert(key), self.convert(item)] for key, item in fields.items()]}


def _convert_scalar(value: Any) -> Any:
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
    return _opaque_object(value)


def _opaque_object(value: Any, error: Exception | None = None) -> dict[str, str]:
    kind = type(value)
    result = {"$object": f"{kind.__module__}.{kind.__qualname__}"}
    try:
        result["repr"] = repr(value)[:REPR_CHARS_MAX]
    except Exception:
        result["repr"] = ""
    if error is not None:
        result["error"] = type(error).__name__
    return result


def _restore_object(value_object: dict[str, Any]) -> Any:
    if len(value_object) != 1:
        return value_object
    [(name, value)] = value_object.items()
    restore = _RESTORERS.get(name)
    return restore(value) if restore is not None else value_object


_RESTORERS: dict[str, Any] = {
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
