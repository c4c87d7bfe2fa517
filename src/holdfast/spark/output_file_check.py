"""Missing part files of an output: one typed error in place of Spark's error.

On a local disk the driver checks each file. It sends no request to an object store: Spark checks every
file there when it plans the read, and the driver translates Spark's error. Over Connect the plan is made
when the DataFrame is first used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from holdfast.spark.sinks import OutputCorrupt

_NOT_FOUND = re.compile(r"\[PATH_NOT_FOUND\] Path does not exist: (.+?)\.?(?: SQLSTATE|\s|$)")
_MISSING_FILE_WHY = (
    "the part file is missing; run.write(output) writes all rows again without a call: into another place, or into "
    "this one after the remaining files are moved away"
)


def check_files_exist(files: Iterable[str]) -> None:
    """Raise `OutputCorrupt` for the first of these files that is missing on a local disk."""
    for file in files:
        path = file.removeprefix("file://")
        if "://" not in path and not os.path.exists(path):
            raise OutputCorrupt(path=path, why=_MISSING_FILE_WHY)


def missing_file_error(error: Exception) -> OutputCorrupt | None:
    """Translate Spark's error for a path that does not exist; None for any other error."""
    found = _NOT_FOUND.search(str(error))
    return OutputCorrupt(path=found[1], why=_MISSING_FILE_WHY) if found else None
