"""The job of a child process: the run, the rows, the limits. A Spark task sends it to its child as msgpack."""

from __future__ import annotations

import msgspec

from holdfast.spark.ledger_client import ServiceAddress
from holdfast.spark.spool_access import SpoolAccess


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
    # Only load the function and connect to the ledger. No row is claimed.
    probe: bool = False
    # Time slice: then no row is begun and the task frees its slot. 0: until the end of the run.
    time_slice_s: float = 0.0
    # Idle time after which the task frees its slot, if other tasks suffice for the rest. 0: until
    # the end of the run.
    idle_s: float = 0.0
    lease_s: float = 15.0
    # Owner name at the ledger. A successor uses the same name and inherits the grants.
    owner: str = ""
    # Rows of the predecessor with a call that timed out. None: no predecessor.
    timed_out: list[int] | None = None
    # Calls are admitted by their estimated tokens. `rate` is set, too.
    token_limited: bool = False
    # The spool of blocks and results, if the run has one.
    spool: SpoolAccess | None = None
    # For a probe: an object that the driver has put into the spool.
    spool_marker: bytes = b""


class HungCall(Exception):
    """Calls have timed out and can only be stopped with their process. `seqs` are their rows."""

    def __init__(self, seqs: list[int], timeout_s: float) -> None:
        super().__init__(f"calls took longer than timeout_s={timeout_s:g}: rows {seqs}")
        self.seqs = seqs
