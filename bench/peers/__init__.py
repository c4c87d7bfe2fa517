"""Holdfast beside the peers, in the same breath: Holdfast, Restate, DBOS, Holdfast, …

    python -m bench.peers [--suite worlds|effects] [--runs 5] [--only NAME,…] [--budget-s N] [--save]
    python -m bench.peers.report               the pages of both from their last saved runs
    make bench-peers, make bench-effects

Every system gets the same work. For `worlds`: counters under a key, each message adds one, durably
and in order per key. For `effects`: flows of durable steps, and timers. They take turns within a run,
on the same disk, so that a machine that slows down slows all of them; the median of the runs counts,
and the spread is kept. The peers are installed by this benchmark under `build/peers`, pinned by hash,
and listen on loopback alone. One that cannot be installed is a line that says why.

    suite, suites what a comparison consists of, and the two that there are
    workload, effect_workload   what is measured, how much of it each system gets, what it must reach
    process       processes in groups of their own, that answer by JSON lines
    install       the peers' own directory
    holdfast_turn, restate_turn, dbos_turn   the systems for worlds; effect_turns for effects
    world_load, flow_load       what our clients and workers run; `flows` is the application
    *_service, *_flows, *_load  run under the peers' interpreter
    turns         the runs, interleaved
    table, history, report      what comes out

`bench/worlds.py`, `bench/effects.py` and `bench/timers.py` hold the measures that no peer has.
"""
