"""Holdfast beside the peers. The systems alternate within a run: Holdfast, Restate, DBOS, Holdfast, …

    python -m bench.peers [--suite worlds|effects|tasks|flows|postgres] [--runs 5] [--only NAME,…] [--budget-s N] [--save]
    python -m bench.peers.report               the pages of all suites from their last saved runs
    make bench-peers, make bench-effects, make bench-tasks, make bench-flows, make bench-postgres

Every system gets the same work. For `worlds`: counters under a key, each message adds one, durably
and in order per key. For `effects`: flows of durable steps, and timers. For `tasks`: no-op tasks, put
by one process and run by another. For `postgres`: all of these, on one PostgreSQL.
The systems take turns on the same disk, so that a machine that slows down slows all of them. The median
of the runs counts, and the spread is kept. This benchmark installs the peers under `build/peers`, pinned
by hash. They listen on loopback alone. If a peer cannot be installed, the output has a line with the reason.

    suite, suites the definition of a comparison, and the five comparisons
    workload, effect_workload, task_workload, flow_workload   parts, measures, amounts and goals
    process       processes in separate process groups that answer in JSON lines
    install       the directory of the peers
    holdfast_turn, restate_turn, dbos_turn   the systems for worlds; effect_turns for effects, flow_turns for flows
    task_turn     the parts for tasks; task_holdfast and task_peers are the systems, rabbit_server a server
    world_load, effect_load, task_load, flow_load   the code of our clients (effect_client, effect_timers)
    effect_app, task_app, flow_app   the applications
    producers, tally            producers and completion times, identical for every system
    *_service, *_effects, *_tasks, *_load   run under the peers' interpreter
    turns         the interleaved runs
    pg_workload, pg_systems     the same on one PostgreSQL (pg_place, pg_server), a database per system
    table, history, report      the output

`bench/worlds.py`, `bench/effects.py`, `bench/timers.py` and `bench/tasks.py` hold the metrics without a peer.
"""
