"""The core of the ledger service: what it decides for one run, without IO.

    messages        reports and claims of children, and the reply to a report
    handlers        `RunService`: one method a request; a decision is a reply, log entries and stored rows
    group_log       `GroupLog`: decisions in order, several in one commit, replies after it
    waiting_claims  claims that wait for rows, first come, first served
    succession      children that take over the grants of a predecessor
    outcome_chunks  what is stored of a report
    metrics         the figures of a run

No thread, no socket, no store, no clock: the caller brings the time, an `append` and tickets. `spark.office`
runs it behind sockets with a thread for each connection; `sim.ledger_process` runs the same classes in the
simulator.
"""
