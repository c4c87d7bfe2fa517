"""The seq ledger: what became of every record of a run (document 002).

    states classes     the tables: eight states, twelve moves; error classes and the retry decision
    ledger ranges      arrays of states, moved in batches; sets of seqs as sorted ranges
    records answers    what is logged; what callers are told
    position           the fold of the log: where a run stands
    choose judge board which rows a claim gets; what a report comes to; the decisions, each folded
    service            the ledger service without IO: requests, waiting claims, the group log
    log runs           the log on a store; runs, their input blocks and outcome chunks

Pure but for the last line. The only importer of NumPy below `spark`.
"""
