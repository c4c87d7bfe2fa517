"""Holdfast beside the peers, in the same breath: Holdfast, Restate, DBOS, Holdfast, …

    python -m bench.peers [--suite worlds|effects|tasks|postgres] [--runs 5] [--only NAME,…] [--budget-s N] [--save]
    python -m bench.peers.report               the pages of all from their last saved runs
    make bench-peers, make bench-effects, make bench-tasks, make bench-postgres

Every system gets the same work. For `worlds`: counters under a key, each message adds one, durably
and in order per key. For `effects`: flows of durable steps, and timers. For `tasks`: no-op tasks, put
by one process and done by another. For `postgres`: all of these, on one PostgreSQL.
They take turns within a run, on the same disk, so that a machine that slows down slows all of them; the median of the runs counts,
and the spread is kept. The peers are installed by this benchmark under `build/peers`, pinned by hash,
and listen on loopback alone. One that cannot be installed is a line that says why.

    suite, suites what a comparison consists of, and the four that there are
    workload, effect_workload, task_workload   what is measured, how much of it, what it must reach
    process       processes in groups of their own, that answer by JSON lines
    install       the peers' own directory
    holdfast_turn, restate_turn, dbos_turn   the systems for worlds; effect_turns for effects
    task_turn     the parts for tasks; task_holdfast, task_peers are their systems, rabbit_server one's server
    world_load, flow_load, task_load   what our clients run; `flows`, `task_app` are the applications
    producing, tally            how tasks are put, and when they were done, alike for every system
    *_service, *_flows, *_tasks, *_load   run under the peers' interpreter
    turns         the runs, interleaved
    pg_workload, pg_systems     the same on one PostgreSQL (pg_place, pg_server), a database each
    table, history, report      what comes out

`bench/worlds.py`, `bench/effects.py`, `bench/timers.py` and `bench/tasks.py` hold the measures that no peer has.
"""
