"""Planted bugs in worlds, in the roles that host and place them, and in the authority over them."""

from __future__ import annotations

from holdfast.sim.edits import Edit

_commit = "world.cycle:_advance"
_check = "world.cycle:_check"
_prepare = "world.host:Host._prepare"
_repeat = "world.kernel:_repeat"
_advance = "world.kernel:advance"
_change = "world.catalog:change"
_plant = "world.fork:plant"
_tick = "roles.world_worker:WorldWorker.committed"
_block = "roles.world_worker:WorldWorker._block"
_OUTCOME = (
    "elif isinstance(error, (HeadMoved, Conflict, CommitUnknown, Busy)):\n"
    "            hosted.host.forget()"
)
_HELD_ON = Edit(_prepare, "self.loaded = False\n        self.stops", "self.stops")
_NOT_FORGOTTEN = Edit(_tick, _OUTCOME, _OUTCOME.replace("hosted.host.forget()", "pass"))
_HEAD = (
    Edit(_check, "found != cycle.expected_head", "False"),
    Edit(
        _commit,
        "expected_head=cycle.expected_head",
        "expected_head=journal.head(txn, subject).height",
    ),
)
_INBOX = '__import__("holdfast.durable.inbox", fromlist=["inbox"])'

_STRANGE = "given is None or not given.given_up or given.seq != item.seq"

# In runs with two versions of the code.
VERSIONS: dict[str, tuple[Edit, ...]] = {
    "unknown: journaled as ignored": (
        Edit(_prepare, "not self.world.program.knows(ingress)", "False"),
    ),
    "unknown: given up too early": (
        Edit(
            "roles.orchestrator:Orchestrator._overdue",
            "self._has_heard() and self.store.now_ns() >= since_ns + self._unknown_event_ns",
            "True",
        ),
    ),
    "other code: parked at once": (Edit(_block, "not isinstance(made_by, str)", "True"),),
    "other code: parked too early": (
        Edit("roles.orchestrator:Orchestrator._over", "self._overdue(since_ns)", "True"),
    ),
    "other code: goes on without the new field": (
        Edit("world.kernel:repeat", 'error.fields["made_by"] = made_by', "return state"),
    ),
    "other code: a dropped field kept in a replay": (
        Edit("world.program:Program.adopted", "if dropped else", "if False else"),
    ),
    "unknown: given up by any host": (
        Edit(_prepare, _STRANGE, "False"),
        Edit(_check, "now is None or not now.given_up or now.seq != failed.seq", "False"),
    ),
    "unknown: a key that waits answered as handled": (
        Edit("world.unknown:item", 'Item("waiting", seq, blocked)', 'Item("handled", seq)'),
    ),
    "unknown: a key of a dead letter answered as handled": (
        Edit(
            "world.unknown:item",
            'Item("dead", seq, found.type, found.letter)',
            'Item("handled", seq)',
        ),
    ),
    "unknown: stopped, and listed nowhere": (
        Edit(
            "world.unknown:mark",
            "txn.put(stopped.row_key(universe, record.type, world_id), codec.pack(need))",
            "pass",
        ),
    ),
}

_trim = "world.history:_trim"

# In runs with a bound on histories.
HISTORIES: dict[str, tuple[Edit, ...]] = {
    "history: cut above the baseline": (
        Edit(_trim, "journal.cut(txn, subject, to)", "journal.cut(txn, subject, head.height)"),
        Edit("durable.journal:cut", "height > was.checkpoint", "False"),
    ),
    "history: cut above its bound": (
        Edit(_trim, "head.height - found.bound.entries", "head.height"),
    ),
    "history: cut before its time": (
        Edit(_trim, "txn.now_ns - found.bound.ns + 1", "1 << 62"),
        Edit("world.history:_due_ns", "lowest[1] + bound.ns", "lowest[1]"),
    ),
    "history: cut where there is no state": (
        Edit(_trim, "journal.cut(txn, subject, to)", "journal.cut(txn, subject, to - 1)"),
    ),
    "history: the floor's state dropped": (Edit(_trim, "floor - 1, min(", "floor, min("),),
    "history: rows swept above the floor": (
        Edit(
            "durable.journal:sweep",
            "floor = head(txn, subject).floor",
            "floor = head(txn, subject).floor + 1",
        ),
    ),
    "history: a cut in parts forgotten": (
        Edit("world.history:plan", "due_ns or _due_ns(", "_due_ns("),
    ),
    "purge: not fenced": (
        Edit(
            "world.purge:begin",
            "record = catalog.change.fn(txn, universe, world_id, Event.DELETE)",
            "pass",
        ),
        Edit("world.purge:erase", "record.status is not Status.DELETED", "False"),
    ),
    "purge: a held world, without force": (
        Edit("world.purge:begin", "if not force:", "if False:"),
    ),
    "purge: the record first": (
        Edit(
            "world.purge:erase",
            "head = journal.head(txn, subject)",
            "head = journal.head(txn, subject)\n    catalog.remove(txn, record)",
        ),
    ),
    "purge: rows left behind": (
        Edit("world.purge:erase", "and _erase_timers(txn, universe, world_id, limit)", ""),
    ),
    "erase: without the leader's lease": (
        Edit("world.purge:_guarded", "txn.require_live(guard)", "pass"),
    ),
    "history: cut without the leader's lease": (
        Edit("roles.upkeep:Upkeep._cut", "txn.require_live(lease)", "pass"),
    ),
}

WORLDS: dict[str, tuple[Edit, ...]] = {
    **VERSIONS,
    **HISTORIES,
    # Without a bound on histories, where a deleted account stays for days: a run with one keeps it for a second,
    # which is often over when the leader looks.
    "erase: before its time": (
        Edit("roles.upkeep:Upkeep._erase", "now_ns - self._deleted_kept_ns", "now_ns"),
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
            "hosted.host.settle(cycle)",
            f"self.store.transact({_INBOX}.advance, hosted.host._subject, cycle.to_seq)\n"
            "            hosted.host.settle(cycle)",
        ),
    ),
    "host: unknown outcome taken for done": (
        Edit(_tick, _OUTCOME, _OUTCOME.replace("forget()", "settle(cycle)")),
    ),
    "host: memory kept after an unknown outcome": (_HELD_ON, _NOT_FORGOTTEN),
    "host: neither memory dropped nor head expected": (_HELD_ON, _NOT_FORGOTTEN, *_HEAD),
    "carry: others came first": (
        Edit(_check, "last != cycle.to_seq - len(cycle.carried)", "False"),
    ),
    "carry: receipt journaled, and still awaited": (
        Edit(_commit, "publish.end(txn, universe, one.intent_hash)", "pass"),
    ),
    "carry: receipt journaled, and still to be done": (
        Edit("world.cycle:apply_all", "queue.ack.fn(txn, carried)", "pass"),
    ),
    "carry: no numbers taken": (
        Edit(_commit, "cycle.to_seq, len(cycle.carried))", "cycle.to_seq)"),
    ),
    "host: state kept after a reducer raised": (
        Edit(_prepare, "safe = self._unspoil(store, safe, bodies)", "pass"),
    ),
    "host: failed event not kept": (
        Edit(_commit, "for failed in cycle.failed:", "for failed in ():"),
    ),
    "host: intents not published": (
        Edit(
            "world.cycle:apply_all",
            "publish.publish.fn(txn, cycle.intents, cycle.wanted_ns)",
            "pass",
        ),
        Edit("world.cycle:apply_all", "publish.publish.fn(txn, intents)", "pass"),
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
        Edit("world.host:Host.compact", "txn.require_live(self.lease)", "pass"),
    ),
    # steps and replays
    "kernel: entropy not journaled": (
        Edit(
            _advance,
            "wall_ns,\n        entropy,\n        world.program",
            "wall_ns,\n        b'',\n        world.program",
        ),
    ),
    "kernel: time not journaled": (
        Edit(
            _advance,
            "wall_ns,\n        entropy,\n        world.program",
            "0,\n        entropy,\n        world.program",
        ),
    ),
    "kernel: intents of a failed step": (
        Edit(_advance, "[] if failed else cx.intents", "cx.intents"),
    ),
    "replay: other entropy": (Edit(_repeat, "entropy=step.entropy", "entropy=bytes(16)"),),
    "replay: other time": (Edit(_repeat, "wall_ns=step.wall_ns", "wall_ns=0"),),
    "replay: other generation": (Edit(_repeat, "generation=step.generation", "generation=1"),),
    "replay: not compared": (Edit(_repeat, "if was != now:", "if False:"),),
    "replay: memory not as stored": (
        Edit(_repeat, "if step.base == height - 1:", "if False:"),
        Edit(_repeat, "return world.program.fresh(state)", "return state"),
    ),
    "digest: not compared": (Edit("world.kernel:repeat", "if step.state:", "if False:"),),
    "digest: not written": (
        Edit(_prepare, "bodies[-1] = entry.with_state(bodies[-1], self._next_digest)", "pass"),
    ),
    "digest: of the state before": (
        Edit(
            _prepare,
            "saved or (safe if careful else None) or self._storable()",
            "self.world.program.dump(None)",
        ),
    ),
    "restore: a step too few": (
        Edit("world.restore:restore", "done + 1, height)", "done + 1, height - 1)"),
    ),
    # in and out
    "ingress: key not passed on": (
        Edit("world.ingress:deliver_to", "subject, key, body", "subject, None, body"),
    ),
    "ingress: no hint": (
        Edit(
            "world.ingress:deliver_to", "    catalog.hint(txn, universe, world_id)\n", "    pass\n"
        ),
    ),
    "redrive: delivered and kept": (
        Edit("world.redrive:redeliver", "queue.ack.fn(txn, [claim.token])", "pass"),
        Edit("world.redrive:redeliver", "_key(claim)", "None"),
    ),
    # which worlds there are, and who hosts them
    "hint: settled without looking": (
        Edit("world.catalog:settle", "inbox.depth(txn, subject_of(universe, world_id))", "False"),
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
        Edit("world.catalog:_unassign", "txn.delete(keys.by_worker", "(keys.by_worker"),
    ),
    "change: host not evicted": (
        Edit(
            _change,
            '_evict(txn, subject_of(universe, world_id), f"the world is {status.value}")',
            "pass",
        ),
    ),
    "change: no hint on resuming": (Edit(_change, "hint(txn, universe, world_id)", "pass"),),
    "change: name of the deleted kept": (
        Edit(_change, "txn.delete(_name_key(universe, was.type, was.name))", "pass"),
    ),
    "change: not counted": (
        Edit(_change, "txn.add(counts + tuples.pack((status.value,)), 1)", "pass"),
    ),
    "tenure: assignment not checked": (
        Edit(
            "world.tenure:_acquire",
            "assigned is not None and assigned.desired_worker_id not in (None, worker)",
            "False",
        ),
        Edit(
            "roles.world_worker:WorldWorker._is_ours",
            "found is not None and found.desired_worker_id == self.worker",
            "found is not None",
        ),
    ),
    "tenure: paused world acquired": (
        Edit("world.tenure:_acquire", "record.status is not Status.ACTIVE", "False"),
    ),
    "tenure: losses not told apart": (
        Edit("world.tenure:_hold_against", "record.stuck_seq == seq", "True"),
    ),
    "tenure: stuck for ever": (Edit("world.tenure:_hold_against", "count >= stuck_max", "False"),),
    "tenure: tried alone without the lease": (
        Edit("world.tenure:try_alone", "txn.require_live(held)", "pass"),
    ),
    "worker: fenced and not let go": (
        Edit(_tick, "del self._hosted[world_id]", "pass"),
        Edit(
            "roles.world_worker:WorldWorker._renew",
            "del self._hosted[hosted.host.world.world_id]",
            "pass",
        ),
        Edit("roles.world_worker:WorldWorker._release_idle", "hosted.active_ns < idle_ns", "False"),
    ),
    # forks
    "fork: inbox inherited": (
        Edit(
            _plant,
            "journal.begin_at(txn, child, height, cutting.hash)",
            "journal.begin_at(txn, child, height, cutting.hash)\n"
            f"    for item in {_INBOX}.read(txn, subject_of(universe, cutting.parent_id), 10):\n"
            f"        {_INBOX}.put(txn, child, item.key, item.body)",
        ),
    ),
    "fork: the latest state": (
        Edit(
            "world.fork:cut",
            "_state_bytes(txn, parent, subject, height)",
            "_state_bytes(txn, parent, subject, head.height)",
        ),
    ),
    "fork: lineage not recorded": (Edit(_plant, "catalog.save(txn, made)", "pass"),),
    "fork: heights start anew": (
        Edit(_plant, "journal.begin_at(txn, child, height, cutting.hash)", "pass"),
    ),
    # who leads
    "orchestrator: placing is not fenced": (
        Edit("roles.orchestrator:Orchestrator._place", "txn.require_live(self._held())", "pass"),
    ),
    "orchestrator: moving is not fenced": (
        Edit(
            "roles.orchestrator:Orchestrator._move_page", "txn.require_live(self._held())", "pass"
        ),
    ),
    "authority: expiry not logged": (
        Edit("authority.authority:acquire", "_mark_overdue(txn, universe)\n", "pass\n"),
    ),
    "authority: renewal not logged": (
        Edit(
            "authority.authority:renew",
            "_log(txn, universe, Kind.RENEWED, read(txn, universe))",
            "pass",
        ),
    ),
    "authority: release by anybody": (
        Edit("authority.authority:release", "_require_own(txn, universe, lease)", "pass"),
        Edit("durable.lease:release", " or not _is_of(found, lease)", ""),
    ),
}
