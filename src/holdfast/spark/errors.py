"""Errors of a stage, grouped by the user's next action.

Invalid
├── RunChanged       the name has a run with other settings: use another name, or fresh=True
├── InputChanged     ... with other input: changed="extend" calls only new and changed rows
├── RunCancelled     the run of this name was cancelled: changed="extend" resumes and reuses its outcomes
├── OutputNotShared  executors do not see the output's directory; no call was made
├── ExecutorUnfit    an executor cannot run the stage; no call was made
│   ├── PythonDiffers      its Python has another minor version than the driver's
│   └── HoldfastDiffers    it has no holdfast, or another version
├── NotADataFrame    the input is from pandas, pandas-on-Spark or another library
├── InPipeline       a query function of a declarative pipeline cannot run a stage
├── SpoolDenied      the spool refuses this process: credentials, permissions
└── NotAStage        an argument of Stage is invalid
Busy
└── SpoolUnreachable the spool cannot be read or written at the moment
StoreError
├── JobCancelled     the Spark job was cancelled, for example in the UI; the run is open
├── RunHalted        the ledger detected an illegal transition: a bug; the run is kept for inspection
├── OutputUnreadable this Spark has no file system for the output; the rows are written
├── RunFailed        the Spark job cannot continue; finished rows are kept, run again to resume
├── SpoolLost        objects of the run's spool are gone or changed; no call was made
├── RunStopped       a bound of stop_after was reached; the run is open, run again to resume
└── RowsFailed       rows failed: on_fail="raise", or the lazy form would omit them
"""

from __future__ import annotations

from holdfast.errors import Busy, Invalid, StoreError


class NotAStage(Invalid):
    code = "not_a_stage"


class NotADataFrame(Invalid):
    code = "not_a_dataframe"
    hint = "a stage takes a Spark DataFrame; `use` creates one"


class InPipeline(Invalid):
    code = "in_pipeline"
    hint = "a query function of a declarative pipeline may only describe a query, and a stage runs jobs; run the stage before the pipeline, and read its output there: spark.read.parquet(output)"


class RunChanged(Invalid):
    code = "run_changed"
    hint = "nothing was changed; use another name for other settings, or fresh=True for a new run"


class InputChanged(Invalid):
    code = "input_changed"
    hint = 'nothing was changed; run(df, changed="extend") calls only new and changed rows; fresh=True calls all rows again'


class RunCancelled(Invalid):
    code = "run_cancelled"
    hint = 'its outcomes are kept; run(df, changed="extend") resumes and reuses them; fresh=True calls all rows again, into a new output'


class OutputNotShared(Invalid):
    code = "output_not_shared"
    hint = "no call was made; use a mount that every executor has, or the URL of an object store"


class ExecutorUnfit(Invalid):
    code = "executor_unfit"
    hint = "no call was made; fix the executor's set-up and run the stage again"


class PythonDiffers(ExecutorUnfit):
    code = "python_differs"
    hint = "no call was made; point PYSPARK_PYTHON to the same minor version everywhere"


class HoldfastDiffers(ExecutorUnfit):
    code = "holdfast_differs"
    hint = "no call was made; install the driver's version of holdfast[spark] on every executor"


class SpoolDenied(Invalid):
    code = "spool_denied"
    hint = "set credentials in the environment or with storage_options=, or grant access to the directory"


class SpoolUnreachable(Busy):
    code = "spool_unreachable"
    hint = "every executor and the driver must reach the spool; run the stage again, it resumes"


class SpoolLost(StoreError):
    code = "spool_lost"
    hint = (
        "the spool objects of the rows in these ranges of _seq are lost; restore the objects, or call "
        "the rows again with fresh=True"
    )


class JobCancelled(StoreError):
    code = "job_cancelled"
    hint = "the run is open and nothing was started again: run the stage again, it resumes"


class RunHalted(StoreError):
    code = "run_halted"
    hint = "this is a bug, please report it with `holdfast runs show`; fresh=True starts a new run"


class OutputUnreadable(StoreError):
    code = "output_unreadable"
    hint = (
        "the rows are written: add the file system's jar to Spark (hadoop-aws for s3a:), or read the "
        "files that holdfast.spark.sinks.read_parts(url).files lists by pyarrow"
    )


class RunFailed(StoreError):
    code = "run_failed"
    hint = "finished rows are kept: run the stage again, it resumes"


class RunStopped(StoreError):
    code = "run_stopped"
    hint = (
        "fix the cause and run the stage again: it resumes, and the bounds count from zero; "
        "`holdfast runs retry` includes the rows that had failed"
    )


class RowsFailed(StoreError):
    code = "rows_failed"
    hint = 'see Run.of(name, spark, store).failed(); `holdfast runs retry` marks them for retry; the lazy form returns them as rows with meta=True, and omits them with on_fail="keep"'
