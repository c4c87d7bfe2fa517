"""Every limit of the system, named with its unit, in one place."""

from __future__ import annotations

from dataclasses import dataclass

S = 1_000_000_000  # nanoseconds

KEY_BYTES_MAX = 480
VALUE_BYTES_MAX = 16 * 1024 * 1024
BLOB_THRESHOLD_BYTES = 4096
# A reader that has a hash fetches its data within moments, mostly from the same snapshot.
BLOB_GRACE_NS = 60 * S

# One call reads, claims or deletes this many rows at most; above it the call is Invalid.
BATCH_MAX = 10_000
# Names of queues, resources, owners, subjects; a key holds two of them and some numbers.
NAME_BYTES_MAX = 200
# Leases and claims: longer than this is a mistake in the unit.
TTL_NS_MAX = 366 * 24 * 3600 * S
# What a claim sweeps (overdue claims, due items) beyond what it was asked to take.
QUEUE_SWEEP_EXTRA = 64
QUEUE_PRIORITY_MAX = 1 << 31
# A dead letter keeps this much of the error that killed it.
ERROR_CODE_CHARS_MAX = 100
ERROR_TEXT_CHARS_MAX = 4000

# What one event may emit; above it the reducer is wrong.
EMISSIONS_MAX = 10_000
# One event, the parameters of one effect, one reply: a journal entry holds two of them and more.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
# The state of a world: above it, the event that made it so large fails.
STATE_BYTES_MAX = 64 * 1024 * 1024
# A snapshot that is larger than this is stored in parts of this size.
SNAPSHOT_PART_BYTES = 8 * 1024 * 1024
# What a message between worlds may hold besides its body.
HEADERS_BYTES_MAX = 16 * 1024
MESSAGE_ID_BYTES_MAX = 64
# A cycle that has journaled and emitted this much ends, so that it fits into a commit.
CYCLE_BYTES_MAX = 16 * 1024 * 1024
# Cycles of several worlds in one call to the writer, by number and by bytes.
CYCLES_MAX = 32
CYCLES_BYTES_MAX = 4 * 1024 * 1024
# Hands of one crew.
CONCURRENCY_MAX = 1_000
# Names that other names are made of: of queues, of subjects.
UNIVERSE_BYTES_MAX = 100
EFFECT_KIND_BYTES_MAX = 80
# An inbox that is this deep takes no more events (receipts are always taken).
INBOX_DEPTH_MAX = 1_000_000
# Keys are remembered for longer than anybody retries.
DEDUPE_RETENTION_NS = 7 * 24 * 3600 * S
SWEEP_EVERY_NS = 10 * S
# The rows of a deleted world are kept for this long.
DELETED_KEPT_NS = 7 * 24 * 3600 * S
# A commit that cuts or erases histories removes about this many rows at most.
ERASED_PER_COMMIT = 1000
# A bounded history is cut at a snapshot: one is kept for each of so many parts of it.
KEEP_PARTS = 8
# An item that no live worker knows waits this long, in store time, for one that does. Then it is a dead
# letter `unknown_event`.
UNKNOWN_EVENT_S = 3600.0
# Mail to a full inbox is tried again after this long.
RETRY_FULL_NS = S
# A universe that nobody has a route to is looked for so often, after pauses that grow up to this: about
# an hour in all. Then its mail ends as `no_route`. Each message that waits makes pauses longer, so that
# no more than a thousand are looked at in a second.
ROUTE_LOOKS_MAX = 168
ROUTE_LOOK_NS_MAX = 30 * S
ROUTE_LOOK_EACH_NS = S // 1000
# Pools announce this often which universes they have a route to, and it counts for this long.
ROUTE_ANNOUNCE_EVERY_NS = 3600 * S
ROUTE_KEPT_NS = 24 * 3600 * S
# Whoever asks us to wait longer than this is not waited for.
RETRY_AFTER_S_MAX = 24 * 3600

# The directory of an embedded store is its owner's, unless HOLDFAST_STORE_MODE says otherwise.
STORE_MODE = 0o700
# After a boot, a calendar further ahead of the last commit is not believed, and a shorter leap is warned of. So is
# one that is behind it: store time is ahead of the calendar then.
STORE_TIME_LEAP_MAX_NS = 366 * 24 * 3600 * S
STORE_TIME_LEAP_WARN_NS = 30 * 24 * 3600 * S
STORE_TIME_BEHIND_WARN_NS = 24 * 3600 * S
# LMDB reserves address space, not disk; the map is never resized.
MAP_BYTES = 1 << 40
# A checkpoint of the redo log is begun after so much in it, so many commits, or so long; above the last
# two commits wait for it: pages that it needs cannot be used again, so the file grows meanwhile.
REDO_BYTES = 1024 * 1024
REDO_COMMITS = 256
REDO_NS = 1 * S
REDO_BYTES_MAX = 8 * 1024 * 1024
REDO_COMMITS_MAX = 4096
READERS_MAX = 4096

# A transaction is run again this often when others commit first; then it is a Conflict. After the
# first few, threads of a process take turns.
TRANSACT_TRIES_FREE = 3
TRANSACT_TRIES_MAX = 64
# A transaction that this many writers in a row died on is not sent to yet another one.
RESENDS_MAX = 10
# After a take-over, transactions are sent again by so many at a time.
RESENT_TOGETHER = 64
# The writer answers a lost reply from the outcomes of this many last commits, or transactions.
OUTCOMES_KEPT = 8192
OUTCOME_ANSWERS_MAX = 50_000
# An answer larger than this is not kept: if it gets lost, its outcome is unknown.
OUTCOME_BYTES_MAX = 1024
# Snapshots are validated against this many recent commits, or keys, whichever is less.
RING_COMMITS_MAX = 4096
RING_KEYS_MAX = 200_000
# One durable commit holds this many transactions at most, so that none waits long for its answer.
COMMIT_TXNS_MAX = 2048
# ... and about this many rows, so that a batch of large ones does not take for ever.
COMMIT_ROWS_MAX = 50_000
FRAME_BYTES_MAX = 256 * 1024 * 1024
TOPICS_MAX = 100_000
# Topics that a client watches though no thread of it waits for them.
WATCHED_IDLE_MAX = 1_000
SCAN_PAGE = 1000
# Entries of a journal below its checkpoint are packed by so many, or so many bytes, to a segment.
SEGMENT_ENTRIES = 512
SEGMENT_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Bounds on the embedded store's writer process."""

    # A writer without clients leaves after this long.
    linger_s: float = 3.0
    # A writer that is stopped (SIGSTOP, debugger) and owes an answer is replaced after this long ...
    stopped_s: float = 1.0
    # ... and one that runs but does not answer (dead disk) after this long.
    hung_s: float = 15.0
    # How long a client tries to reach or start a writer before it gives up.
    connect_s: float = 30.0
    # What a client may leave unread before the writer hangs up on it.
    backlog_bytes: int = 256 * 1024 * 1024
    # Dead readers pin old pages: they are looked for this often.
    reader_check_s: float = 1.0


# What an item keeps of its attempts: the last ones, and of each the beginning of its error.
TRIED_KEPT = 10
TRIED_ERROR_CHARS_MAX = 200
# The tag of an effect comes back with its receipt.
TAG_BYTES_MAX = 1024
# What joins the outcomes of one commit: receipts, mostly. More goes into the next one.
SETTLED_BYTES_MAX = 8 * 1024 * 1024
# What is read of an inbox at once.
INBOX_READ_BYTES_MAX = 16 * 1024 * 1024
