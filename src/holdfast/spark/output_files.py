"""Part files of an output that are missing when the output is read: one typed error in place of Spark's.

The driver looks for each file on a local disk. It asks an object store nothing: Spark looks for every file there
when it plans the read, and its error is translated. Over Connect that is when the DataFrame is first used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast.spark.sinks import OutputCorrupt

_NOT_FOUND = re.compile(r"\[PATH_NOT_FOUND\] Path does not exist: (.+?)\.?(?: SQLSTATE|\s|$)")
_WHY = (
    "the part file is missing; run.write(output) writes all rows again without a call: into another place, or into "
    "this one once what is left there is moved away"
)


def check_present(files: Iterable[str]) -> None:
    """Raise `OutputCorrupt` for the first of these files that is missing on a local disk."""
    for file in files:
        path = file.removeprefix("file://")
        if "://" not in path and not os.path.exists(path):
            raise OutputCorrupt(path=path, why=_WHY)


def missing_file(error: Exception) -> OutputCorrupt | None:
    """What an error of Spark means that says that a path does not exist; None for any other."""
    found = _NOT_FOUND.search(str(error))
    return OutputCorrupt(path=found[1], why=_WHY) if found else None
