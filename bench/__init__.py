"""How fast it is, as ratios to what the disk can do in the same minute.

    python -m bench [--budget-s 120] [--only one_caller,…] [--json FILE] [--save]
    python -m bench churn [--store postgresql://…] [--minutes 30]     a backlog under churn, by minutes
    python -m bench footprint [--store postgresql://…]       bytes a message, an effect, a task
    python -m bench isolation [--store postgresql://…]       calls beside refused ones, as a ratio
    python -m bench.report                     docs/benchmarks.md from the last saved run

A figure without its disk says little, so each is put in relation to a raw loop of 4 KiB overwrite
and `fdatasync`, measured on the same file system right before and right after it. Every metric is
repeated; the median counts, and the spread is kept. Targets are printed as met or not, and never
fail a run: a busy machine is not a bug.

    raw         the loop that everything is compared with
    record      a metric's outcome: measures with their spread, targets
    workers     processes that wait for a go line and report by JSON (`load` is what they run)
    commits, queues, waiting, ledger, effects, timers, memory    the metrics
    churn, churn_load, footprint        how a PostgreSQL bears what passes through it, and what stays
    isolation                           what refused submissions cost the callers beside them
    table, history, report              what comes out
"""
