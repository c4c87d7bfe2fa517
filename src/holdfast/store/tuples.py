"""Order-preserving keys: `pack(a) < pack(b)` exactly when `a < b`.

Elements are bytes, str and int (up to 8 bytes), in the layout of the FoundationDB tuple layer: a type
code, then bytes that compare like the value.

    01 … 00        bytes, with 00 escaped as 00 FF
    02 … 00        text as UTF-8, with the same escape
    0C … 13        negative integers of 8 … 1 bytes, one's complement
    14             zero
    15 … 1C        positive integers of 1 … 8 bytes

A range of all keys below a prefix is `(pack(prefix), after(pack(prefix)))`.
"""

from __future__ import annotations

from typing import TypeAlias

from holdfast.errors import Invalid

Element: TypeAlias = bytes | str | int
Key: TypeAlias = tuple[Element, ...]

_ZERO = 0x14
_CODES = [bytes([code]) for code in range(256)]


def pack(key: Key) -> bytes:
    return b"".join([_encode(element) for element in key])


def pack_int(value: int) -> bytes:
    """Pack one integer, for hot paths: `prefix + pack_int(seq)`."""
    if value > 0:
        size = (value.bit_length() + 7) >> 3
        if size > 8:
            raise Invalid(what="key", why="an integer in a key has 8 bytes at most", found=value)
        return _CODES[_ZERO + size] + value.to_bytes(size, "big")
    if value == 0:
        return b"\x14"
    size = ((-value).bit_length() + 7) >> 3
    if size > 8:
        raise Invalid(what="key", why="an integer in a key has 8 bytes at most", found=value)
    return _CODES[_ZERO - size] + ((1 << (8 * size)) - 1 + value).to_bytes(size, "big")


def unpack(data: bytes) -> Key:
    elements: list[Element] = []
    at = 0
    while at < len(data):
        element, at = unpack_element(data, at)
        elements.append(element)
    return tuple(elements)


def unpack_last_int(data: bytes, prefix_len: int) -> int:
    """Unpack the single integer after a known prefix: the inverse of `prefix + pack_int(seq)`."""
    code = data[prefix_len]
    if code >= _ZERO:
        return int.from_bytes(data[prefix_len + 1 :], "big")
    element, _ = unpack_element(data, prefix_len)
    assert isinstance(element, int)
    return element


def prefix_end(prefix: bytes) -> bytes:
    """The first key greater than every key with this prefix."""
    return prefix + b"\xff"


def _encode(element: Element) -> bytes:
    if type(element) is int:
        return pack_int(element)
    if type(element) is str:
        try:
            raw = element.encode()
        except UnicodeEncodeError:
            raise Invalid(
                what="key", why="the key contains text that is not valid UTF-8", found=element
            ) from None
        return b"\x02" + raw.replace(b"\x00", b"\x00\xff") + b"\x00"
    if type(element) is bytes:
        return b"\x01" + element.replace(b"\x00", b"\x00\xff") + b"\x00"
    raise Invalid(what="key", why="elements are bytes, str or int", found=type(element).__name__)


def unpack_element(data: bytes, at: int) -> tuple[Element, int]:
    """Unpack the element at an offset, and return the offset of its end."""
    code = data[at]
    if code in (1, 2):
        end = at + 1
        while True:
            end = data.find(b"\x00", end)
            if end < 0:
                raise Invalid(what="key", why="unterminated element", offset=at)
            if data[end + 1 : end + 2] != b"\xff":
                break
            end += 2
        raw = data[at + 1 : end].replace(b"\x00\xff", b"\x00")
        try:
            return (raw if code == 1 else raw.decode()), end + 1
        except UnicodeDecodeError:
            raise Invalid(what="key", why="text that is not UTF-8", offset=at) from None
    size = code - _ZERO
    if -8 <= size <= 8:
        end = at + 1 + abs(size)
        if end > len(data):
            raise Invalid(what="key", why="truncated integer", offset=at)
        value = int.from_bytes(data[at + 1 : end], "big")
        return (value if size >= 0 else value - (1 << (8 * -size)) + 1), end
    raise Invalid(what="key", why="unknown type code", found=code, offset=at)
