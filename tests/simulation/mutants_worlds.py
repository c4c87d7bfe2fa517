"""Planted bugs in worlds, in the services that host and place them, and in the leader lease."""

from __future__ import annotations

from tests.simulation.source_edits import Edit

_commit = "world.cycle:_apply_cycle"
_check = "world.cycle:_check"
_prepare = "world.host:WorldHost._prepare"
_repeat = "world.reducer:_replay"
_advance = "world.reducer:run_step"
_change = "world.catalog:change_status"
_plant = "world.fork:create_fork"
_tick = "workers.world.worker:WorldWorker.on_committed"
_block = "workers.world.worker:WorldWorker._block_world"
_OUTCOME = (
    "elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):\n"
    "            hosted.host.invalidate()"
)
_HELD_ON = Edit(_prepare, "self.loaded = False\n        self.stop_request", "self.stop_request")
_NOT_FORGOTTEN = Edit(_tick, _OUTCOME, _OUTCOME.replace("hosted.host.invalidate()", "pass"))
_HEAD = (
    Edit(_check, "height != cycle.expected_head", "False"),
    Edit(
        _commit,
        "expected_head=cycle.expected_head",
        "expected_head=journal.head(txn, subject).height",
    ),
)
_INBOX = '__import__("holdfast.durable.inbox", fromlist=["inbox"])'

_STRANGE = "stop is None or not stop.given_up or stop.seq != item.seq"

# Need runs with two code versions.
VERSIONS: dict[str, tuple[Edit, ...]] = {
    "unknown: journaled as ignored": (
        Edit(
            "world.host:CycleBuilder.run",
            "not host.world.definition.can_consume(ingress)",
            "False",
        ),
    ),
    "unknown: given up too early": (
        Edit(
            "workers.orchestrator:Orchestrator._is_overdue",
            "self._knows_live_workers() and self.store.now_ns() >= since_ns + self._unknown_event_ns",
            "True",
        ),
    ),
    "other code: parked at once": (Edit(_block, "not isinstance(made_by, str)", "True"),),
    "other code: parked too early": (
        Edit(
            "workers.orchestrator:Orchestrator._has_waited_enough",
            "self._is_overdue(since_ns)",
            "True",
        ),
    ),
    "other code: goes on without the new field": (
        Edit("world.reducer:replay_step", 'error.fields["made_by"] = made_by', "return state"),
    ),
    "other code: a dropped field kept in a replay": (
        Edit(
            "world.definition:WorldDefinition.reload_as_shape",
            "if dropped\n            else",
            "if False\n            else",
        ),
    ),
    "unknown: given up by any host": (
        Edit("world.host:WorldHost.must_stop_before", _STRANGE, "False"),
        Edit(_check, "now is None or not now.given_up or now.seq != failed.seq", "False"),
    ),
    "unknown: a key that waits answered as handled": (
        Edit(
            "world.unknown_events:item_status",
            'InboxItemStatus("waiting", seq, blocked)',
            'InboxItemStatus("handled", seq)',
        ),
    ),
    "unknown: a key of a dead letter answered as handled": (
        Edit(
            "world.unknown_events:item_status",
            'InboxItemStatus("dead", seq, found.type, found.letter)',
            'InboxItemStatus("handled", seq)',
        ),
    ),
    "unknown: stopped, and listed nowhere": (
        Edit(
            "world.unknown_events:mark_stopped",
            "txn.put(stopped.row_key(universe, record.type, world_id), codec.pack(need))",
            "pass",
        ),
    ),
}

_trim = "world.history:_trim_world"

# Need runs with bounded histories.
HISTORIES: dict[str, tuple[Edit, ...]] = {
    "history: cut above the baseline": (
        Edit(
            _trim,
            "journal.raise_floor(txn, subject, to)",
            "journal.raise_floor(txn, subject, head.height)",
        ),
        Edit("durable.journal:raise_floor", "height > old_head.checkpoint", "False"),
    ),
    "history: cut above its bound": (
        Edit(_trim, "head.height - trim_plan.bound.entries", "head.height"),
    ),
    "history: cut before its time": (
        Edit(_trim, "txn.now_ns - trim_plan.bound.ns + 1", "1 << 62"),
        Edit("world.history:_due_ns", "lowest[1] + bound.ns", "lowest[1]"),
    ),
    "history: cut where there is no state": (
        Edit(
            _trim,
            "journal.raise_floor(txn, subject, to)",
            "journal.raise_floor(txn, subject, to - 1)",
        ),
    ),
    "history: the floor's state dropped": (Edit(_trim, "floor - 1, min(", "floor, min("),),
    "history: rows swept above the floor": (
        Edit(
            "durable.journal:delete_below_floor",
            "floor = head(txn, subject).floor",
            "floor = head(txn, subject).floor + 1",
        ),
    ),
    "history: a cut in parts forgotten": (
        Edit("world.history:schedule_trim", "due_ns or _due_ns(", "_due_ns("),
    ),
    "purge: not fenced": (
        Edit(
            "world.purge:begin_purge",
            "record = catalog.change_status.fn(txn, universe, world_id, WorldEvent.DELETE)",
            "pass",
        ),
        Edit("world.purge:erase", "record.status is not WorldStatus.DELETED", "False"),
    ),
    "purge: a held world, without force": (
        Edit("world.purge:begin_purge", "if not force:", "if False:"),
    ),
    "purge: the record first": (
        Edit(
            "world.purge:erase",
            "head = journal.head(txn, subject)",
            "head = journal.head(txn, subject)\n    catalog.remove_record(txn, record)",
        ),
    ),
    "purge: rows left behind": (
        Edit("world.purge:erase", "and _erase_timers(txn, universe, world_id, limit)", ""),
    ),
    "erase: without the leader's lease": (
        Edit("world.purge:_run_guarded", "txn.require_live(guard)", "pass"),
    ),
    "history: cut without the leader's lease": (
        Edit("workers.history_upkeep:HistoryUpkeep._cut", "txn.require_live(lease)", "pass"),
    ),
}

WORLDS: dict[str, tuple[Edit, ...]] = {
    **VERSIONS,
    **HISTORIES,
    # Needs unbounded histories, where a deleted account is kept for days. With a bound it is kept
    # for a second, which is often over before the leader looks.
    "erase: before its time": (
        Edit(
            "workers.history_upkeep:HistoryUpkeep._erase",
            "now_ns - self._deleted_kept_ns",
            "now_ns",
        ),
    ),
    # the cycle
    "host: lease not checked": (Edit(_check, "txn.require_live(cycle.lease)", "pass"),),
    "host: cursor not moved": (
        Edit(_commit, "inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))", "pass"),
    ),
    "host: cursor moved by another transaction": (
        Edit(_commit, "inbox.advance(txn, subject, cycle.to_seq, len(cycle.carried))", "pass"),
        Edit(
            _tick,
            "hosted.host.on_committed(cycle)",
            'self.store.transact(__import__("holdfast.durable.inbox", fromlist=["inbox"]).advance, hosted.host._subject, cycle.to_seq)\n            hosted.host.on_committed(cycle)',
        ),
    ),
    "host: unknown outcome taken for done": (
        Edit(_tick, _OUTCOME, _OUTCOME.replace("invalidate()", "on_committed(cycle)")),
    ),
    "host: memory kept after an unknown outcome": (_HELD_ON, _NOT_FORGOTTEN),
    "host: neither memory dropped nor head expected": (_HELD_ON, _NOT_FORGOTTEN, *_HEAD),
    "carry: others came first": (
        Edit(_check, "last != cycle.to_seq - len(cycle.carried)", "False"),
    ),
    "carry: receipt journaled, and still awaited": (
        Edit(_commit, "world_intents.resolve(txn, universe, one.intent_hash)", "pass"),
    ),
    "carry: receipt journaled, and still to be done": (
        Edit("world.cycle:apply_all", "queue.ack.fn(txn, tokens)", "pass"),
    ),
    "carry: no numbers taken": (
        Edit(_commit, "cycle.to_seq, len(cycle.carried))", "cycle.to_seq)"),
    ),
    "host: state kept after a reducer raised": (
        Edit("world.host:CycleBuilder._add_step", "self._roll_back()", "pass"),
    ),
    "host: failed event not kept": (
        Edit(_commit, "for failed in cycle.failed:", "for failed in ():"),
    ),
    "host: intents not published": (
        Edit(
            "world.cycle:apply_all",
            "world_intents.publish.fn(txn, cycle.intents, cycle.wanted_ns)",
            "pass",
        ),
        Edit("world.cycle:apply_all", "world_intents.publish.fn(txn, intents)", "pass"),
    ),
    "host: snapshot of the state before": (
        Edit(
            _commit,
            "snapshot.save(txn, subject, head.height, cycle.snapshot)",
            "snapshot.save(txn, subject, head.height, b'\\x80')",
        ),
    ),
    "host: snapshot without a baseline kept": (
        Edit(
            _commit,
            "snapshot.prune(txn, subject, cycle.snapshots_kept, window)",
            "[txn.delete(key) for key, _ in txn.scan(snapshot._keys(subject).states,"
            " snapshot._keys(subject).states + b'\\xff')]",
        ),
    ),
    "host: upkeep without the lease": (
        Edit("world.host:WorldHost.compact", "txn.require_live(self.lease)", "pass"),
    ),
    # steps and replays
    "kernel: entropy not journaled": (
        Edit(
            _advance,
            "wall_ns,\n        entropy,\n        world.definition",
            "wall_ns,\n        b'',\n        world.definition",
        ),
    ),
    "kernel: time not journaled": (
        Edit(
            _advance,
            "wall_ns,\n        entropy,\n        world.definition",
            "0,\n        entropy,\n        world.definition",
        ),
    ),
    "kernel: intents of a failed step": (
        Edit(_advance, "[] if failed else cx.intents", "cx.intents"),
    ),
    "replay: other entropy": (Edit(_repeat, "entropy=step.entropy", "entropy=bytes(16)"),),
    "replay: other time": (Edit(_repeat, "wall_ns=step.wall_ns", "wall_ns=0"),),
    "replay: other generation": (Edit(_repeat, "generation=step.generation", "generation=1"),),
    "replay: not compared": (Edit(_repeat, "if recorded != computed:", "if False:"),),
    "replay: memory not as stored": (
        Edit(_repeat, "if step.base == height - 1:", "if False:"),
        Edit(_repeat, "return world.definition.reload_state(state)", "return state"),
    ),
    "digest: not compared": (Edit("world.reducer:replay_step", "if step.state:", "if False:"),),
    "digest: not written": (
        Edit(
            _prepare,
            "bodies[-1] = journal_entry.with_state_digest(bodies[-1], self._next_digest)",
            "pass",
        ),
    ),
    "digest: of the state before": (
        Edit(
            _prepare,
            "snapshot_bytes\n                or (builder.rollback_bytes if check_each_step else None)\n"
            "                or self._state.storable_bytes()",
            "self.world.definition.dump_state(None)",
        ),
    ),
    "restore: a step too few": (
        Edit("world.restore:restore", "done + 1, height)", "done + 1, height - 1)"),
    ),
    # ingress and mail
    "ingress: key not passed on": (
        Edit("world.ingress:put_ingress", "subject, key, body", "subject, None, body"),
    ),
    "ingress: no hint": (
        Edit(
            "world.ingress:put_ingress",
            "    catalog.mark_runnable(txn, universe, world_id)\n",
            "    pass\n",
        ),
    ),
    "redrive: delivered and kept": (
        Edit("world.redrive:redeliver", "queue.ack.fn(txn, [claim.token])", "pass"),
        Edit("world.redrive:redeliver", "_redrive_key(claim)", "None"),
    ),
    # catalog and hosting
    "hint: settled without looking": (
        Edit(
            "world.catalog:clear_runnable",
            "inbox.depth(txn, subject_of(universe, world_id))",
            "False",
        ),
    ),
    "assign: hint left behind": (
        Edit(
            "world.catalog:assign",
            "if waiting or inbox.depth(txn, subject_of(universe, world_id)):",
            "if False:",
        ),
    ),
    "unassign: no hint": (
        Edit(
            "world.catalog:unassign",
            "if inbox.depth(txn, subject_of(universe, world_id)):",
            "if False:",
        ),
    ),
    "unassign: index kept": (
        Edit("world.catalog:_remove_assignment", "txn.delete(keys.by_worker", "(keys.by_worker"),
    ),
    "change: host not evicted": (
        Edit(
            _change,
            '_force_release_lease(txn, subject_of(universe, world_id), f"the world is {status.value}")',
            "pass",
        ),
    ),
    "change: no hint on resuming": (
        Edit(_change, "mark_runnable(txn, universe, world_id)", "pass"),
    ),
    "change: name of the deleted kept": (
        Edit(_change, "txn.delete(_name_key(universe, was.type, was.name))", "pass"),
    ),
    "change: not counted": (
        Edit(_change, "txn.add(counts + tuples.pack((status.value,)), 1)", "pass"),
    ),
    "tenure: assignment not checked": (
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
    "tenure: paused world acquired": (
        Edit("world.hosting_lease:_acquire", "record.status is not WorldStatus.ACTIVE", "False"),
    ),
    "tenure: losses not told apart": (
        Edit("world.hosting_lease:_record_loss", "record.stuck_seq == seq", "True"),
    ),
    "tenure: stuck for ever": (
        Edit("world.hosting_lease:_record_loss", "count >= stuck_max", "False"),
    ),
    "tenure: tried alone without the lease": (
        Edit("world.hosting_lease:mark_isolated", "txn.require_live(held)", "pass"),
    ),
    "worker: fenced and not let go": (
        Edit(_tick, "del self._hosted[world_id]", "pass"),
        Edit(
            "workers.world.worker:WorldWorker._renew_leases",
            "del self._hosted[hosted.host.world.world_id]",
            "pass",
        ),
        Edit(
            "workers.world.worker:WorldWorker._release_idle", "hosted.active_ns < idle_ns", "False"
        ),
    ),
    # forks
    "fork: inbox inherited": (
        Edit(
            _plant,
            "journal.start_at(txn, child, height, cutting.hash)",
            'journal.start_at(txn, child, height, cutting.hash)\n    for item in __import__("holdfast.durable.inbox", fromlist=["inbox"]).read(txn, subject_of(universe, cutting.parent_id), 10):\n        __import__("holdfast.durable.inbox", fromlist=["inbox"]).put(txn, child, item.key, item.body)',
        ),
    ),
    "fork: the latest state": (
        Edit(
            "world.fork:plan_fork",
            "_state_bytes(txn, parent, subject, height)",
            "_state_bytes(txn, parent, subject, head.height)",
        ),
    ),
    "fork: lineage not recorded": (Edit(_plant, "catalog.save_record(txn, made)", "pass"),),
    "fork: heights start anew": (
        Edit(_plant, "journal.start_at(txn, child, height, cutting.hash)", "pass"),
    ),
    # the leader lease
    "orchestrator: placing is not fenced": (
        Edit(
            "workers.orchestrator:Orchestrator._place_worlds",
            "txn.require_live(self._current_lease())",
            "pass",
        ),
    ),
    "orchestrator: moving is not fenced": (
        Edit(
            "workers.orchestrator:Orchestrator._move_page",
            "txn.require_live(self._current_lease())",
            "pass",
        ),
    ),
    "authority: expiry not logged": (
        Edit("leadership.leader_lease:acquire", "_mark_overdue(txn, universe)\n", "pass\n"),
    ),
    "authority: renewal not logged": (
        Edit(
            "leadership.leader_lease:renew",
            "_log(txn, universe, LeaderEventKind.RENEWED, read(txn, universe))",
            "pass",
        ),
    ),
    "authority: release by anybody": (
        Edit("leadership.leader_lease:release", "_require_own(txn, universe, lease)", "pass"),
        Edit("durable.lease:release", " or not _matches(status, lease)", ""),
    ),
}
