"""The seq ledger: the state of every row of a Spark run (document 002).

    states run_policy            state and transition tables, error classes, the retry decision
    seq_ledger ranges            state arrays that move in batches, sets of seqs as sorted ranges
    events replies               log entries, replies to workers
    run_state                    the state of a run as a fold of its log
    assignment outcome_rules     the rows of a claim, the effect of a report or of a lost grant
    run_scheduler                the decisions: claim, report, reclaim, cancel, commit
    service                      the core of the ledger service without I/O
    log runs                     the log on a store, run records, input blocks, outcome chunks

Every module except `log` and `runs` is pure. This package is the only importer of NumPy below
`spark`.
"""
