"""Stage on real Spark, beside naive Spark: the cost of faults, and the speed.

    python -m bench.spark                        both, and writes docs/benchmarks-spark.md
    python -m bench.spark --only executor,poison

- `calls`   the paid function, and the external log that counts its calls
- `driver`  the process that runs Spark jobs; it can be killed
- `faults`  4,000 paid calls on a two-worker cluster with a fault, naive Spark and Stage
- `speed`   time ratios to `mapInArrow` + `write.parquet` in one warm session
- `report`  both as tables
"""
