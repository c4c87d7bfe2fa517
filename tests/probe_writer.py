"""A writer process that knows the probe operations: the shipped writer after an import of `probe_operations`."""

from __future__ import annotations

from pathlib import Path

from holdfast.store.lmdb import writer_process

# It ends with the shipped code, by which every client recognises a writer process.
PROBE_WRITER_CODE = (
    f"import sys; sys.path.append({str(Path(__file__).resolve().parents[1])!r}); "
    f"import tests.probe_operations; {writer_process.WRITER_CODE}"
)


def start_probe_writers() -> None:
    """Let this process start such writers from now on."""
    writer_process.WRITER_CODE = PROBE_WRITER_CODE
