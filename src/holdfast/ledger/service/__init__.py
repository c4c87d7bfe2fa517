"""The core of the ledger service: its decisions about one run, without I/O.

    messages        reports and claims of children, replies to reports
    handlers        `RunService`: one method per request; a decision is a reply, log entries and rows
    group_log       `GroupLog`: group commit of decisions in order, replies after the commit
    waiting_claims  claims that wait for rows, in FIFO order
    child_handover  children that take over the grants of a predecessor
    outcome_chunks  the stored rows of a report
    rate_limits     the call rate and the tokens per minute of a run
    metrics         the figures of a run

It has no thread, socket, store or clock. The caller passes the time, an `append` function and
tickets. The `spark` package runs it behind sockets, with a thread per connection.
`sim.ledger_process` runs the same classes in the simulator.
"""
