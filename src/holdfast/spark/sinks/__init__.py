"""Sinks: outputs of the ordered commit of a run. Parquet by default, Delta, Iceberg, or a
user-defined `Sink`.

`api` has the interface and its errors. `parquet_files` writes part files. `parquet`, `delta` and
`iceberg` record which parts are committed. The table libraries are imported on first use.
"""

from holdfast.spark.sinks.api import (
    NOTHING,
    Base,
    Begun,
    ExecutorSink,
    KeptPart,
    OutputCorrupt,
    OutputError,
    OutputFull,
    OutputHeld,
    OutputNotOurs,
    OutputReadOnly,
    OutputTaken,
    Part,
    PartOutOfOrder,
    Same,
    Sink,
    Spec,
    SuccessorSink,
    open_sink,
)
from holdfast.spark.sinks.delta import DeltaSink
from holdfast.spark.sinks.iceberg import IcebergSink
from holdfast.spark.sinks.location import Location, OutputUnknown, locate
from holdfast.spark.sinks.parquet import Manifest, ParquetSink, read_parts
from holdfast.spark.sinks.part_files import PartFile, WrittenFile, WrittenPart
from holdfast.spark.sinks.table import TableSink

__all__ = [
    "NOTHING",
    "Base",
    "Begun",
    "DeltaSink",
    "ExecutorSink",
    "IcebergSink",
    "KeptPart",
    "Location",
    "Manifest",
    "OutputCorrupt",
    "OutputError",
    "OutputFull",
    "OutputHeld",
    "OutputNotOurs",
    "OutputReadOnly",
    "OutputTaken",
    "OutputUnknown",
    "ParquetSink",
    "Part",
    "PartFile",
    "PartOutOfOrder",
    "Same",
    "Sink",
    "Spec",
    "SuccessorSink",
    "TableSink",
    "WrittenFile",
    "WrittenPart",
    "locate",
    "open_sink",
    "read_parts",
]
