"""Benchmarks of Holdfast. Figures are ratios to the speed of the disk, measured in the same minute.

    python -m bench [--budget-s 120] [--only one_caller,…] [--json FILE] [--save]
    python -m bench churn [--store postgresql://…] [--minutes 30]     a backlog under churn, by minutes
    python -m bench flows [--sleepers 1000000] [--save]     sleeping flows, wake-ups and resume
    python -m bench loop_lag [--save]         the lag of an event loop while PostgreSQL stands still
    python -m bench footprint [--store postgresql://…]       bytes per message, effect and task
    python -m bench isolation [--store postgresql://…]       latency beside rejected calls, as a ratio
    python -m bench.report                     docs/benchmarks.md from the last saved run

A rate depends on the disk. Each rate is therefore divided by the rate of a raw loop of 4 KiB overwrite
and `fdatasync`, measured on the same file system right before and right after it. Every metric is
repeated. The median counts, and the spread is kept. Targets are printed as met or not, and never
fail a run: a busy machine is not a bug.

    raw         the reference loop of all ratios
    record      the outcome of a metric: measures with their spread, targets
    workers     processes that wait for a go line and report in JSON (they run `load`)
    commits, queues, wakeup_latency, ledger, effects, timers, memory    the metrics
    churn, churn_load, footprint        a PostgreSQL store under churn, and the space that data takes
    isolation                           the cost of rejected submissions for concurrent callers
    table, history, report              the output
"""
