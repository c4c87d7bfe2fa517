"""The run record and the child job that a stage starts a run with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast import codec, traces
from holdfast.clock import SYSTEM
from holdfast.ledger import runs
from holdfast.spark.arrow_rows import to_arrow
from holdfast.spark.child_job import ChildJob, SlotRelease, StageTrace
from holdfast.spark.run_data import encode_schema
from holdfast.spark.spool import make_spool_access
from holdfast.store.api import Store

if TYPE_CHECKING:
    from holdfast.spark.run import PreparedStage
    from holdfast.spark.service_supervisor import ServiceSupervisor
    from holdfast.spark.sinks import Sink
    from holdfast.spark.stage import Stage

# How long a task of a dynamic run keeps its Spark slot.
TIME_SLICE_S = 30.0
# How long a task keeps its slot without a row to call.
IDLE_RELEASE_S = 2.0


def outcome_settings(stage: Stage, prepared: PreparedStage, sink: Sink | None) -> dict[str, str]:
    """The settings that the outcomes of a run depend on."""
    spec = dict(sink.spec()) if sink is not None else {}
    return {
        "key": ",".join(stage.key),
        "schema": prepared.schema.simpleString(),
        "batch_rows": str(stage.batch_rows),
        "file_rows": str(stage.file_rows),
        "file_bytes": str(stage.file_bytes),
        "carry": stage.carry,
        "output": codec.pack(spec).hex() if spec else "",
        "version": stage.version,
        "spool": stage.spool,
    }


def new_run_record(
    stage: Stage, run_store: Store, prepared: PreparedStage, sink: Sink | None
) -> runs.RunRecord:
    return runs.RunRecord(
        run_id=SYSTEM.entropy(10).hex(),
        name=stage.name,
        created_ns=run_store.now_ns(),
        generation=run_store.generation,
        key=stage.key,
        result_schema=encode_schema(to_arrow(prepared.schema)),
        config=outcome_settings(stage, prepared, sink),
        sink=dict(sink.spec()) if sink is not None else {},
        policy=stage.policy,
        spool=stage.spool,
    )


def child_job_of(
    stage: Stage, supervisor: ServiceSupervisor, record: runs.RunRecord, prepared: PreparedStage
) -> ChildJob:
    return ChildJob(
        address=supervisor.address,
        run_id=record.run_id,
        lo=0,
        hi=-1,
        schema=prepared.schema.json(),
        concurrency=stage.concurrency,
        flush_rows=stage.flush_rows,
        batch_rows=stage.batch_rows,
        rate=bool(stage.rate_per_s or stage.tokens_per_min),
        token_limited=bool(stage.tokens_per_min),
        timeout_s=stage.timeout_s,
        slot_release=SlotRelease(TIME_SLICE_S if stage.dynamic else 0.0, IDLE_RELEASE_S),
        lease_s=record.policy.lease_ns / 1e9,
        spool=make_spool_access(record),
        traced=StageTrace(stage.name, traces.current()),
    )
