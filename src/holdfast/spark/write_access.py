"""Write access: the storage options with which a Spark task writes the output. Every task imports
it, so it has few imports.
"""

from __future__ import annotations

import msgspec


class WriteAccess(msgspec.Struct, frozen=True):
    """Credentials of outputs and spools by URL. They travel to executors with the function and are
    never displayed.
    """

    options: dict[str, dict[str, str]] = {}

    def __repr__(self) -> str:
        return "WriteAccess()"
