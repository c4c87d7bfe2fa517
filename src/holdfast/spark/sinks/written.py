"""Files of parts: those that an output counts, and those that an executor has written for it.

An executor writes the files of a part and reports them; the ledger service commits them. Until then no reader of
the output counts them.
"""

from __future__ import annotations

import msgspec


class PartFile(msgspec.Struct, frozen=True):
    """A committed part. Without rows it has no file, and `path` is empty."""

    path: str  # relative to the output
    lo: int
    hi: int
    rows: int
    bytes: int
    sha256: str


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that an executor wrote and synced. `scratch` is the name under which it lies until the commit renames it;
    empty: it has its own name already. `facts` is JSON by which a table describes the file."""

    file: PartFile
    scratch: str = ""
    facts: str = ""


class WrittenPart(msgspec.Struct, frozen=True):
    """The successes of seqs [lo, hi), as files. A part without rows has one `PartFile` without a path."""

    lo: int
    hi: int
    files: list[WrittenFile]

    @property
    def version(self) -> int:
        return self.hi - 1


def part_name(lo: int, hi: int, suffix: str = "") -> str:
    return f"part-{lo:012d}-{hi:012d}{suffix}.parquet"


def no_file(lo: int, hi: int) -> PartFile:
    """The file of a part without rows."""
    return PartFile("", lo, hi, 0, 0, "")
