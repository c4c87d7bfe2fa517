"""Worlds beside the peers, in the same breath: Holdfast, Restate, DBOS, Holdfast, …

    python -m bench.peers [--runs 5] [--only NAME,…] [--budget-s N] [--save]
    python -m bench.peers.report               docs/benchmarks-peers.md from the last saved run
    make bench-peers

Every system gets the same work: counters under a key, each message adds one, durably and in order
per key. They take turns within a run, on the same disk, so that a machine that slows down slows all
of them; the median of the runs counts, and the spread is kept. The peers are installed by this
benchmark under `build/peers`, pinned by hash, and listen on loopback alone. One that cannot be
installed is a line that says why.

    workload      what is measured, how much of it each system gets, what it must reach
    process       processes in groups of their own, that answer by JSON lines
    install       the peers' own directory
    holdfast_turn ours; `world_load` is what its client and its worker run
    restate_turn, dbos_turn   the peers; `*_service`, `*_load` run under the peers' interpreter
    turns         the runs, interleaved
    table, history, report    what comes out

`bench/worlds.py` holds the measures that no peer has: leases, failover, restore, fork, memory.
"""
