"""Where the ordered commit of a run puts its rows: Parquet by default, Delta, Iceberg, or your own `Sink`.

`api` is the interface and its errors, `files` writes a part, `parquet`, `delta` and `iceberg` say which
parts are committed. The libraries of tables are imported only once such a sink is used.
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
from holdfast.spark.sinks.table import TableSink
from holdfast.spark.sinks.written import PartFile, WrittenFile, WrittenPart

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
