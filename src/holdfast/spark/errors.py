"""What can be wrong with a stage, named for what its user does next.

Invalid
├── RunChanged       the name has a run of other settings: use another name, or fresh=True
├── InputChanged     ... of other input: changed="extend" calls new and changed rows alone
├── RunCancelled     the run of this name was cancelled: changed="extend" goes on with what it has
├── OutputNotShared  executors do not see the output's directory; no call was made
├── ExecutorUnfit    an executor cannot run the stage; no call was made
│   ├── PythonDiffers      its Python is of another minor version than the driver's
│   └── HoldfastDiffers    it has no holdfast, or another version
├── NotADataFrame    the input is of pandas, pandas-on-Spark or something else
├── InPipeline       a query function of a declarative pipeline cannot run a stage
├── SpoolDenied      the spool refuses this process: credentials, rights
└── NotAStage        an argument of Stage is no good
Busy
└── SpoolUnreachable the spool cannot be read or written just now
StoreError
├── JobCancelled     somebody ended the Spark job, in the UI for one; the run is open
├── RunHalted        the ledger saw an illegal move: a bug; the run is kept for a look
├── OutputUnreadable this Spark has no file system for the output; its rows are there
├── RunFailed        the Spark job cannot go on; what is done is kept, run again to resume
├── SpoolLost        objects of the run's spool are gone or changed; nothing was called
├── RunStopped       a bound of stop_after was reached; the run is open, run again to go on
└── RowsFailed       rows failed: on_fail="raise", or the lazy form would leave them out
"""

from __future__ import annotations

from holdfast.errors import Busy, Invalid, StoreError


class NotAStage(Invalid):
    code = "not_a_stage"


class NotADataFrame(Invalid):
    code = "not_a_dataframe"
    hint = "a stage takes a DataFrame of Spark; `use` makes one"


class InPipeline(Invalid):
    code = "in_pipeline"
    hint = "a query function of a declarative pipeline may only describe a query, and a stage runs jobs; run the stage before the pipeline, and read its output there: spark.read.parquet(output)"


class RunChanged(Invalid):
    code = "run_changed"
    hint = "nothing was changed; use another name for other settings, or fresh=True for a new run"


class InputChanged(Invalid):
    code = "input_changed"
    hint = 'nothing was changed; run(df, changed="extend") calls new and changed rows alone; fresh=True calls all rows again'


class RunCancelled(Invalid):
    code = "run_cancelled"
    hint = 'its outcomes are kept; run(df, changed="extend") goes on and reuses them; fresh=True calls all rows again, into a new output'


class OutputNotShared(Invalid):
    code = "output_not_shared"
    hint = "no call was made; use a mount that every executor has, or the URL of an object store"


class ExecutorUnfit(Invalid):
    code = "executor_unfit"
    hint = "no call was made; mend the executor's set-up and run the stage again"


class PythonDiffers(ExecutorUnfit):
    code = "python_differs"
    hint = "no call was made; point PYSPARK_PYTHON to the same minor version everywhere"


class HoldfastDiffers(ExecutorUnfit):
    code = "holdfast_differs"
    hint = "no call was made; install the driver's version of holdfast[spark] on every executor"


class SpoolDenied(Invalid):
    code = "spool_denied"
    hint = (
        "give credentials in the environment or with storage_options=, or rights to the directory"
    )


class SpoolUnreachable(Busy):
    code = "spool_unreachable"
    hint = "every executor and the driver must reach the spool; run the stage again, it resumes"


class SpoolLost(StoreError):
    code = "spool_lost"
    hint = (
        "rows in these ranges of _seq have lost what the spool kept of them; bring the objects back, or "
        "pay for them again with fresh=True"
    )


class JobCancelled(StoreError):
    code = "job_cancelled"
    hint = "the run is open and nothing was started again: run the stage again, it resumes"


class RunHalted(StoreError):
    code = "run_halted"
    hint = "this is a bug, please report it with `holdfast runs show`; fresh=True begins anew"


class OutputUnreadable(StoreError):
    code = "output_unreadable"
    hint = (
        "the rows are there: add the file system's jar to Spark (hadoop-aws for s3a:), or read the "
        "files that holdfast.spark.sinks.read_parts(url).files lists by pyarrow"
    )


class RunFailed(StoreError):
    code = "run_failed"
    hint = "what is done is kept: run the stage again, it resumes"


class RunStopped(StoreError):
    code = "run_stopped"
    hint = (
        "mend the cause and run the stage again: it goes on, and the bounds count anew; "
        "`holdfast runs retry` includes the rows that had failed"
    )


class RowsFailed(StoreError):
    code = "rows_failed"
    hint = 'see Run.of(name, spark, store).failed(); `holdfast runs retry` marks them for another try; the lazy form has them as rows with meta=True, and leaves them out with on_fail="keep"'
