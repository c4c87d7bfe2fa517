"""Output locations: parsing of output paths and URLs.

    labels/, ./labels, /mnt/labels, file:/mnt/labels, file:///mnt/labels     a directory
    s3://bucket/labels, s3a://bucket/labels                                  Amazon S3 and compatible
    gs://bucket/labels                                                       Google Cloud Storage
    az://container/labels, abfss://container@account.dfs.core.windows.net/labels, abfs://… Azure

Any other form is refused before anything is created: `dbfs:/labels` or `hdfs://…` would become a
local directory of that name. So would `default.labels`, which looks like a table. Write a directory
of such a name as `./default.labels`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Invalid

# The scheme in the URL, and the scheme of Spark's (Hadoop's) file system.
OBJECT_SCHEMES = {
    "s3": "s3a",
    "s3a": "s3a",
    "gs": "gs",
    "az": "az",
    "abfss": "abfss",
    "abfs": "abfs",
}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_TABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){1,3}")
# A dotted name with one of these endings is a directory, not a table.
_ENDINGS = (".parquet", ".delta", ".iceberg", ".d", ".tmp", ".out")


class OutputUnknown(Invalid):
    code = "output_unknown"
    hint = (
        "use a directory, file:, s3://, s3a://, gs://, az://, abfs:// or abfss://; for a Delta table DeltaSink; "
        "for other file systems omit output= and write run.output() with Spark"
    )


@dataclass(frozen=True)
class Location:
    """`local` is the directory, None for an object store. `url` is the full location."""

    url: str
    scheme: str
    local: Path | None
    bucket: str = ""
    prefix: str = ""

    @property
    def spark_url(self) -> str:
        """The URL of the location in Spark."""
        if self.local is not None:
            return f"file://{self.local}"
        return f"{OBJECT_SCHEMES[self.scheme]}://{self.url.partition('://')[2]}"


def locate(output: str | os.PathLike[str]) -> Location:
    """Parse the location of `output` or raise `OutputUnknown`. Reads only the text."""
    text = os.fspath(output)
    if not isinstance(text, str) or not text or "\0" in text:
        raise OutputUnknown(output=text, why="name a directory or an object store's URL")
    if isinstance(output, os.PathLike):  # an explicit path, never parsed as a URL
        return _directory(text)
    found = _SCHEME.match(text)
    if found is None:
        if _TABLE.fullmatch(text) and not text.lower().endswith(_ENDINGS):
            why = f"it looks like a table name; write ./{text} for a directory"
            raise OutputUnknown(output=text, why=why)
        return _directory(text)
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme == "file":
        host, slash, path = rest.removeprefix("//").partition("/")
        if rest.startswith("//") and host not in ("", "localhost"):
            raise OutputUnknown(
                output=text, why="a file: URL must not name a host; write file:///path"
            )
        if not (slash or not rest.startswith("//")):
            raise OutputUnknown(output=text, why="the URL names no directory; write file:///path")
        return _directory("/" + path if rest.startswith("/") else rest)
    if scheme not in OBJECT_SCHEMES:
        why = f"no output can be written to {scheme}:"
        if not rest.startswith("//"):
            why += f"; write ./{text} for a directory"
        raise OutputUnknown(output=text, why=why)
    if not rest.startswith("//"):
        raise OutputUnknown(output=text, why=f"write {scheme}://bucket/path")
    if any(sign in rest for sign in "?#"):
        raise OutputUnknown(
            output=scheme, why="a query is not allowed in the URL; use storage_options="
        )
    bucket, _, prefix = rest[2:].partition("/")
    if scheme not in ("abfss", "abfs") and "@" in bucket:
        raise OutputUnknown(
            output=scheme, why="credentials are not allowed in the URL; use storage_options="
        )
    prefix = prefix.rstrip("/")
    if not bucket or not prefix or any(part in ("", ".", "..") for part in prefix.split("/")):
        raise OutputUnknown(output=text, why=f"write {scheme}://bucket/path")
    return Location(f"{scheme}://{bucket}/{prefix}", scheme, None, bucket, prefix)


def _directory(text: str) -> Location:
    path = Path(text).absolute()  # the service may have another working directory
    return Location(str(path), "file", path)
