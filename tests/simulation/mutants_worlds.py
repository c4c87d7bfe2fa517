"""Planted bugs in worlds, in the services that host and place them, and in the leader lease."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_apply_cycle = "world.cycle:_apply_cycle"
_check = "world.cycle:_check"
_prepare = "world.host:WorldHost._prepare"
_replay = "world.reducer:_replay"
_run_step = "world.reducer:run_step"
_change_status = "world.catalog:change_status"
_create_fork = "world.fork:create_fork"
_on_committed = "workers.world.worker:WorldWorker.on_committed"
_block_world = "workers.world.hosted_worlds:HostedWorlds.block"
_INVALIDATE = (
    "elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):\n"
    "            hosted.host.invalidate()"
)
_KEEP_LOADED = Edit(_prepare, "self.loaded = False\n        self.stop_request", "self.stop_request")
_KEEP_STATE = Edit(
    _on_committed, _INVALIDATE, _INVALIDATE.replace("hosted.host.invalidate()", "pass")
)
_HEAD = (
    Edit(_check, "height != cycle.expected_head", "False"),
    Edit(
        _apply_cycle,
        "expected_head=cycle.expected_head",
        "expected_head=journal.head(txn, subject).height",
    ),
)

_NOT_GIVEN_UP = "stop is None or not stop.given_up or stop.seq != item.seq"

# Need runs with two code versions.
VERSIONS: dict[str, tuple[Edit, ...]] = {
    "unknown event: is journaled as ignored": (
        Edit(
            "world.host:CycleBuilder.run",
            "not host.world.definition.can_consume(ingress)",
            "False",
        ),
    ),
    "unknown event: is given up before the waiting time": (
        Edit(
            "workers.orchestrator:Orchestrator._is_overdue",
            "self._knows_live_workers() and self.store.now_ns() >= since_ns + self._unknown_event_ns",
            "True",
        ),
    ),
    "code mismatch: parks the world at once": (
        Edit(_block_world, "not isinstance(made_by, str)", "True"),
    ),
    "code mismatch: parks the world before the waiting time": (
        Edit(
            "workers.orchestrator:Orchestrator._has_waited_enough",
            "self._is_overdue(since_ns)",
            "True",
        ),
    ),
    "code mismatch: ignores a divergent replay of other code": (
        Edit("world.reducer:replay_step", 'error.fields["made_by"] = made_by', "return state"),
    ),
    "code mismatch: keeps a dropped field in the replay": (
        Edit(
            "world.definition:WorldDefinition.reload_as_shape",
            "if dropped\n            else",
            "if False\n            else",
        ),
    ),
    "unknown event: is given up by a host without the leader's decision": (
        Edit("world.host:WorldHost.must_stop_before", _NOT_GIVEN_UP, "False"),
        Edit(_check, "now is None or not now.given_up or now.seq != failed.seq", "False"),
    ),
    "unknown event: reports a waiting item as handled": (
        Edit(
            "world.unknown_events:item_status",
            'InboxItemStatus("waiting", seq, blocked)',
            'InboxItemStatus("handled", seq)',
        ),
    ),
    "unknown event: reports a dead item as handled": (
        Edit(
            "world.unknown_events:item_status",
            'InboxItemStatus("dead", seq, found.type, found.letter)',
            'InboxItemStatus("handled", seq)',
        ),
    ),
    "unknown event: stops a world without its index row": (
        Edit(
            "world.unknown_events:mark_stopped",
            "txn.put(stopped.row_key(universe, record.type, world_id), codec.pack(need))",
            "pass",
        ),
    ),
}

_trim_world = "world.history:_trim_world"

# Need runs with bounded histories.
HISTORIES: dict[str, tuple[Edit, ...]] = {
    "history trim: raises the floor to the head": (
        Edit(
            _trim_world,
            "journal.raise_floor(txn, subject, to)",
            "journal.raise_floor(txn, subject, head.height)",
        ),
        Edit("durable.journal:raise_floor", "height > old_head.checkpoint", "False"),
    ),
    "history trim: ignores the number of entries to keep": (
        Edit(_trim_world, "head.height - trim_plan.bound.entries", "head.height"),
    ),
    "history trim: ignores the time to keep": (
        Edit(_trim_world, "txn.now_ns - trim_plan.bound.ns + 1", "1 << 62"),
        Edit("world.history:_due_ns", "lowest[1] + bound.ns", "lowest[1]"),
    ),
    "history trim: raises the floor to a height without a snapshot": (
        Edit(
            _trim_world,
            "journal.raise_floor(txn, subject, to)",
            "journal.raise_floor(txn, subject, to - 1)",
        ),
    ),
    "history trim: removes the snapshot that the floor needs": (
        Edit(_trim_world, "floor - 1, min(", "floor, min("),
    ),
    "history trim: deletes the entry at the floor": (
        Edit(
            "durable.journal:delete_below_floor",
            "floor = head(txn, subject).floor",
            "floor = head(txn, subject).floor + 1",
        ),
    ),
    "history trim: reschedules a trim that is not complete": (
        Edit("world.history:schedule_trim", "due_ns or _due_ns(", "_due_ns("),
    ),
    "purge: does not delete and fence the world first": (
        Edit(
            "world.purge:begin_purge",
            "record = catalog.change_status.fn(txn, universe, world_id, WorldEvent.DELETE)",
            "pass",
        ),
        Edit("world.purge:erase", "record.status is not WorldStatus.DELETED", "False"),
    ),
    "purge: erases a world with a live lease without force": (
        Edit("world.purge:begin_purge", "if not force:", "if False:"),
    ),
    "purge: removes the catalog record before the rows": (
        Edit(
            "world.purge:erase",
            "head = journal.head(txn, subject)",
            "head = journal.head(txn, subject)\n    catalog.remove_record(txn, record)",
        ),
    ),
    "purge: leaves the timers": (
        Edit("world.purge:erase", "and _erase_timers(txn, universe, world_id, limit)", ""),
    ),
    "erasure: skips the check of the leader lease": (
        Edit("world.purge:_run_guarded", "txn.require_live(guard)", "pass"),
    ),
    "history trim: skips the check of the leader lease": (
        Edit("workers.history_upkeep:HistoryUpkeep._cut", "txn.require_live(lease)", "pass"),
    ),
}

WORLDS: dict[str, tuple[Edit, ...]] = {
    **VERSIONS,
    **HISTORIES,
    # Needs unbounded histories, where a deleted account is kept for days. With a bound it is kept
    # for a second, which is often over before the leader looks.
    "erasure: erases a deleted world before its retention ends": (
        Edit(
            "workers.history_upkeep:HistoryUpkeep._erase",
            "now_ns - self._deleted_kept_ns",
            "now_ns",
        ),
    ),
    # the cycle
    "world commit: skips the lease check": (Edit(_check, "txn.require_live(cycle.lease)", "pass"),),
    "world commit: does not advance the inbox cursor": (
        Edit(_apply_cycle, "inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))", "pass"),
    ),
    "world commit: advances the inbox cursor in a second transaction": (
        Edit(_apply_cycle, "inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))", "pass"),
        Edit(
            _on_committed,
            "hosted.host.on_committed(cycle)",
            'self.store.transact(__import__("holdfast.durable.inbox", fromlist=["inbox"]).advance, hosted.host._subject, cycle.to_seq)\n            hosted.host.on_committed(cycle)',
        ),
    ),
    "world worker: treats a failed or unknown commit as committed": (
        Edit(
            _on_committed, _INVALIDATE, _INVALIDATE.replace("invalidate()", "on_committed(cycle)")
        ),
    ),
    "world worker: keeps the state in memory after a failed or unknown commit": (
        _KEEP_LOADED,
        _KEEP_STATE,
    ),
    "world worker: keeps the state in memory and skips the head check": (
        _KEEP_LOADED,
        _KEEP_STATE,
        *_HEAD,
    ),
    "fused commit: ignores inbox items that arrived first": (
        Edit(_check, "last != cycle.to_seq - len(cycle.carried)", "False"),
    ),
    "fused receipt: leaves the pending row": (
        Edit(_apply_cycle, "world_intents.resolve(txn, universe, one.intent_hash)", "pass"),
    ),
    "fused receipt: does not ack the effect": (
        Edit("world.cycle:apply_all", "queue.ack.fn(txn, tokens)", "pass"),
    ),
    "fused commit: assigns no inbox seqs": (
        Edit(_apply_cycle, "cycle.to_seq, len(cycle.carried))", "cycle.to_seq)"),
    ),
    "world host: keeps the state after a reducer raised": (
        Edit("world.host:CycleBuilder._add_step", "self._roll_back()", "pass"),
    ),
    "world commit: writes no dead letter for a failed event": (
        Edit(_apply_cycle, "for failed in cycle.failed:", "for failed in ():"),
    ),
    "world commit: does not publish the intents": (
        Edit(
            "world.cycle:apply_all",
            "world_intents.publish.fn(txn, cycle.intents, cycle.wanted_ns)",
            "pass",
        ),
        Edit("world.cycle:apply_all", "world_intents.publish.fn(txn, intents)", "pass"),
    ),
    "world commit: saves a snapshot without the state": (
        Edit(
            _apply_cycle,
            "snapshot.save(txn, subject, head.height, cycle.snapshot)",
            "snapshot.save(txn, subject, head.height, b'\\x80')",
        ),
    ),
    "world commit: deletes every snapshot after saving one": (
        Edit(
            _apply_cycle,
            "snapshot.prune(txn, subject, cycle.snapshots_kept, window)",
            "[txn.delete(key) for key, _ in txn.scan(snapshot._keys(subject).states,"
            " snapshot._keys(subject).states + b'\\xff')]",
        ),
    ),
    "world host: compacts the journal without a lease check": (
        Edit("world.host:WorldHost.compact", "txn.require_live(self.lease)", "pass"),
    ),
    # steps and replays
    "reducer: does not journal the entropy": (
        Edit(
            _run_step,
            "entropy=entropy,\n        code=world.definition",
            "entropy=b'',\n        code=world.definition",
        ),
    ),
    "reducer: does not journal the time": (
        Edit(
            _run_step,
            "wall_ns=wall_ns,\n        entropy=entropy,\n        code=",
            "wall_ns=0,\n        entropy=entropy,\n        code=",
        ),
    ),
    "reducer: emits the intents of a failed step": (
        Edit(_run_step, "[] if failed else cx.intents", "cx.intents"),
    ),
    "replay: uses other entropy than the journal": (
        Edit(_replay, "entropy=step.entropy", "entropy=bytes(16)"),
    ),
    "replay: uses another time than the journal": (
        Edit(_replay, "wall_ns=step.wall_ns", "wall_ns=0"),
    ),
    "replay: uses another generation than the journal": (
        Edit(_replay, "generation=step.generation", "generation=1"),
    ),
    "replay: does not compare the results with the journal": (
        Edit(_replay, "if recorded != computed:", "if False:"),
    ),
    "replay: does not reload the state after a snapshot or a failed step": (
        Edit(_replay, "if step.base == height - 1:", "if False:"),
        Edit(_replay, "return world.definition.reload_state(state)", "return state"),
    ),
    "state digest: is not compared in a replay": (
        Edit("world.reducer:replay_step", "if step.state:", "if False:"),
    ),
    "state digest: is not journaled": (
        Edit(
            _prepare,
            "bodies[-1] = journal_entry.with_state_digest(bodies[-1], self._next_digest)",
            "pass",
        ),
    ),
    "state digest: is computed without the state": (
        Edit(
            _prepare,
            "snapshot_bytes\n                or (builder.rollback_bytes if check_each_step else None)\n"
            "                or self._state.storable_bytes()",
            "self.world.definition.dump_state(None)",
        ),
    ),
    "restore: omits the last journal entry": (
        Edit("world.restore:restore", "done + 1, height)", "done + 1, height - 1)"),
    ),
    # ingress and mail
    "ingress: drops the key": (
        Edit("world.ingress:put_with_limits", "subject, key, body", "subject, None, body"),
    ),
    "ingress: sets no runnable mark": (
        Edit(
            "world.ingress:put_with_limits",
            "    catalog.mark_runnable_with(txn, universe, world_id, assignment)\n",
            "    pass\n",
        ),
    ),
    "event redrive: leaves the queue item and delivers without a key": (
        Edit("world.redrive:redeliver", "queue.ack.fn(txn, [claim.token])", "pass"),
        Edit("world.redrive:redeliver", "_redrive_key(claim)", "None"),
    ),
    # catalog and hosting
    "runnable mark: is cleared although the inbox has items": (
        Edit(
            "world.catalog:clear_runnable",
            "inbox.depth(txn, subject_of(universe, world_id))",
            "False",
        ),
    ),
    "assign: does not move the runnable mark": (
        Edit(
            "world.catalog:assign",
            "if waiting or inbox.depth(txn, subject_of(universe, world_id)):",
            "if False:",
        ),
    ),
    "unassign: sets no runnable mark": (
        Edit(
            "world.catalog:unassign",
            "if inbox.depth(txn, subject_of(universe, world_id)):",
            "if False:",
        ),
    ),
    "unassign: leaves the index row of the worker": (
        Edit("world.catalog:_remove_assignment", "txn.delete(keys.by_worker", "(keys.by_worker"),
    ),
    "world status change: does not revoke the hosting lease": (
        Edit(
            _change_status,
            '_force_release_lease(txn, subject_of(universe, world_id), f"the world is {status.value}")',
            "pass",
        ),
    ),
    "world status change: sets no runnable mark on resume": (
        Edit(_change_status, "mark_runnable(txn, universe, world_id)", "pass"),
    ),
    "world status change: leaves the name of a deleted world": (
        Edit(_change_status, "txn.delete(_name_key(universe, was.type, was.name))", "pass"),
    ),
    "world status change: does not count the new status": (
        Edit(_change_status, "txn.add(counts + tuples.pack((status.value,)), 1)", "pass"),
    ),
    "hosting lease: ignores the assignment to another worker": (
        Edit(
            "world.hosting_lease:_acquire",
            "assigned is not None and assigned.desired_worker_id not in (None, worker)",
            "False",
        ),
        Edit(
            "workers.world.worker:WorldWorker._is_assigned_here",
            "found is not None and found.desired_worker_id == self.worker",
            "found is not None",
        ),
    ),
    "hosting lease: is granted for a world that is not active": (
        Edit("world.hosting_lease:_acquire", "record.status is not WorldStatus.ACTIVE", "False"),
    ),
    "hosting lease: counts losses at different seqs together": (
        Edit("world.hosting_lease:_record_loss", "record.stuck_seq == seq", "True"),
    ),
    "hosting lease: never parks a stuck world": (
        Edit("world.hosting_lease:_record_loss", "count >= stuck_max", "False"),
    ),
    "hosting lease: marks a world isolated without a lease check": (
        Edit("world.hosting_lease:mark_isolated", "txn.require_live(held)", "pass"),
    ),
    "world worker: keeps a world after it lost the lease": (
        Edit(_on_committed, "del self._hosted[world_id]", "pass"),
        Edit(
            "workers.world.worker:WorldWorker._renew_leases",
            "del self._hosted[world_id]",
            "pass",
        ),
        Edit(
            "workers.world.worker:WorldWorker._release_idle",
            "hosted.active_ns < idle_ns",
            "False",
        ),
    ),
    # forks
    "fork: copies the parent's inbox": (
        Edit(
            _create_fork,
            "journal.start_at(txn, child, height, plan.hash)",
            'journal.start_at(txn, child, height, plan.hash)\n    for item in __import__("holdfast.durable.inbox", fromlist=["inbox"]).read(txn, subject_of(universe, plan.parent_id), 10):\n        __import__("holdfast.durable.inbox", fromlist=["inbox"]).put(txn, child, item.key, item.body)',
        ),
    ),
    "fork: copies the state of the parent's head": (
        Edit(
            "world.fork:plan_fork",
            "_state_bytes(txn, parent, subject, height)",
            "_state_bytes(txn, parent, subject, head.height)",
        ),
    ),
    "fork: does not save the lineage": (
        Edit(_create_fork, "catalog.save_record(txn, made)", "pass"),
    ),
    "fork: restarts the journal heights": (
        Edit(_create_fork, "journal.start_at(txn, child, height, plan.hash)", "pass"),
    ),
    # the leader lease
    "orchestrator: places worlds without a lease check": (
        Edit(
            "workers.orchestrator:Orchestrator._place_worlds",
            "txn.require_live(self._current_lease())",
            "pass",
        ),
    ),
    "orchestrator: moves worlds without a lease check": (
        Edit(
            "workers.orchestrator:Orchestrator._move_page",
            "txn.require_live(self._current_lease())",
            "pass",
        ),
    ),
    "leader lease: does not log the expiry": (
        Edit("leadership.leader_lease:acquire", "_mark_overdue(txn, universe)\n", "pass\n"),
    ),
    "leader lease: does not log the renewal": (
        Edit(
            "leadership.leader_lease:renew",
            "_log(txn, universe, LeaderEventKind.RENEWED, read(txn, universe))",
            "pass",
        ),
    ),
    "leader lease: can be released by another holder": (
        Edit("leadership.leader_lease:release", "_require_own(txn, universe, lease)", "pass"),
        Edit("durable.lease:release", " or not _matches(status, lease)", ""),
    ),
}
