"""Stage on real Spark: what faults cost, beside naive Spark; and how fast it is, beside the same.

    python -m bench.spark                        both, and writes docs/benchmarks-spark.md
    python -m bench.spark --only executor,poison

- `calls`   the paid function, and the outside log that counts it
- `driver`  the process that runs Spark jobs; it can be killed
- `faults`  4,000 paid calls on a two-worker cluster, a fault amid them, naive Spark and Stage
- `speed`   ratios of time to `mapInArrow` + `write.parquet` in one warm session
- `report`  both as tables
"""
