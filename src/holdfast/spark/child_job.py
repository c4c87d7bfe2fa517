"""The job of a child process: the run, the rows, the limits. A Spark task sends it to its child as msgpack."""

from __future__ import annotations

import msgspec

from holdfast.spark.ledger_client import ServiceAddress
from holdfast.spark.spool_access import SpoolAccess


class SlotRelease(msgspec.Struct, frozen=True):
    """When a task frees its Spark slot before the run is over. 0: never."""

    # Time slice. After it no row is begun.
    time_slice_s: float = 0.0
    # Idle time, if other tasks suffice for the rest.
    idle_s: float = 0.0


class ProbeRequest(msgspec.Struct, frozen=True):
    """Only load the function and connect to the ledger. No row is claimed."""

    # An object that the driver has put into the spool.
    spool_marker: bytes = b""


class StageTrace(msgspec.Struct, frozen=True):
    """The name of the stage, and the trace context of its run."""

    stage: str = ""
    context: bytes = b""


class ChildJob(msgspec.Struct, frozen=True):
    """The job of a child: run, rows, concurrency."""

    address: ServiceAddress
    run_id: str
    lo: int
    hi: int
    schema: str
    concurrency: int
    flush_rows: int
    batch_rows: int
    rate: bool
    timeout_s: float
    # Deaths among the earlier children of this task: more deaths, smaller window.
    deaths: int = 0
    # Module search path of the Spark worker: it includes files of addPyFile.
    paths: list[str] = []
    probe: ProbeRequest | None = None
    slot_release: SlotRelease = SlotRelease()
    lease_s: float = 15.0
    # Owner name at the ledger. A successor uses the same name and inherits the grants.
    owner: str = ""
    # Rows of the predecessor with a call that timed out. None: no predecessor.
    timed_out: list[int] | None = None
    # Calls are admitted by their estimated tokens. `rate` is set, too.
    token_limited: bool = False
    # The spool of blocks and results, if the run has one.
    spool: SpoolAccess | None = None
    traced: StageTrace = StageTrace()


class HungCall(Exception):
    """Calls have timed out and can only be stopped with their process. `seqs` are their rows."""

    def __init__(self, seqs: list[int], timeout_s: float) -> None:
        super().__init__(f"calls took longer than timeout_s={timeout_s:g}: rows {seqs}")
        self.seqs = seqs
