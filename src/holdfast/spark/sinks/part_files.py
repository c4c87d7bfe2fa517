"""Part files: files that an output lists, and files that an executor has written for it.

An executor writes the files of a part and reports them. The ledger service commits them. Before the
commit no reader of the output sees them.
"""

from __future__ import annotations

import msgspec


class PartFile(msgspec.Struct, frozen=True):
    """A committed part. A part without rows has no file and an empty `path`."""

    path: str  # relative to the output
    lo: int
    hi: int
    rows: int
    bytes: int
    sha256: str


class WrittenFile(msgspec.Struct, frozen=True):
    """A file that an executor wrote and synced. `scratch` is its temporary name until the commit
    renames it; empty if it has its final name. `facts` is JSON metadata of the file for a table.
    """

    file: PartFile
    scratch: str = ""
    facts: str = ""


class WrittenPart(msgspec.Struct, frozen=True):
    """The successful rows of seqs [lo, hi) as files. A part without rows has one `PartFile` without
    a path.
    """

    lo: int
    hi: int
    files: list[WrittenFile]

    @property
    def version(self) -> int:
        return self.hi - 1


def part_name(lo: int, hi: int, suffix: str = "") -> str:
    return f"part-{lo:012d}-{hi:012d}{suffix}.parquet"


def empty_part_file(lo: int, hi: int) -> PartFile:
    """Return the `PartFile` of a part without rows."""
    return PartFile("", lo, hi, 0, 0, "")
