"""Every limit of the system, named with its unit, in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

S = 1_000_000_000  # nanoseconds

KEY_BYTES_MAX = 480
VALUE_BYTES_MAX = 16 * 1024 * 1024
BLOB_THRESHOLD_BYTES = 4096
# Grace period before an unreferenced blob is deleted: a reader with its hash may still fetch it.
BLOB_GRACE_NS = 60 * S

# The file with the stores of universes and the load limits, and the variable that names another file.
CONFIG_FILE = "holdfast.toml"
CONFIG_VARIABLE = "HOLDFAST_CONFIG"

# Maximum rows that one call reads, claims or deletes. A larger request is Invalid.
BATCH_MAX = 10_000
# Names of queues, resources, owners, subjects. A key contains up to two names and some numbers.
NAME_BYTES_MAX = 200
# Maximum TTL of leases and claims. A longer one is a mistake in the unit.
TTL_NS_MAX = 366 * 24 * 3600 * S
# Extra rows that a claim sweeps (overdue claims, due items) beyond its limit.
QUEUE_SWEEP_EXTRA = 64
QUEUE_PRIORITY_MAX = 1 << 31
# A dead letter stores at most this part of its error.
ERROR_CODE_CHARS_MAX = 100
ERROR_TEXT_CHARS_MAX = 4000

# Maximum intents of one event. More indicates a bug in the reducer.
EMISSIONS_MAX = 10_000
# Maximum size of one event, the parameters of one effect, or one reply. A journal entry contains several.
MESSAGE_BYTES_MAX = 4 * 1024 * 1024
# Maximum size of a world's state. An event that exceeds it fails.
STATE_BYTES_MAX = 64 * 1024 * 1024
# A larger snapshot is stored in parts of this size.
SNAPSHOT_PART_BYTES = 8 * 1024 * 1024
# Maximum size of the headers of a message between worlds.
HEADERS_BYTES_MAX = 16 * 1024
MESSAGE_ID_BYTES_MAX = 64
# A cycle ends when its journal entries and intents reach this size, so that it fits into one commit.
CYCLE_BYTES_MAX = 16 * 1024 * 1024
# Maximum number and size of cycles (of several worlds) in one call to the writer.
CYCLES_MAX = 32
CYCLES_BYTES_MAX = 4 * 1024 * 1024
# Maximum workers of one executor.
CONCURRENCY_MAX = 1_000
# Names that are part of longer names (queues, subjects).
UNIVERSE_BYTES_MAX = 100
EFFECT_KIND_BYTES_MAX = 80
# An inbox of this depth rejects events. Receipts are always accepted.
INBOX_DEPTH_MAX = 1_000_000
# Retention of idempotency keys. It exceeds every retry period.
DEDUPE_RETENTION_NS = 7 * 24 * 3600 * S
SWEEP_INTERVAL_NS = 10 * S
# Lines of the lease log that a sweep leaves, also if they are younger than DEDUPE_RETENTION_NS.
LEASE_LOG_LINES_MAX = 10_000
# Retention of the rows of a deleted world.
DELETED_RETENTION_NS = 7 * 24 * 3600 * S
# Approximate maximum of rows that one commit removes when it truncates or erases a journal.
ERASE_ROWS_PER_COMMIT = 1000
# A bounded journal is truncated at a snapshot. The window keeps this number of evenly spaced snapshots.
SNAPSHOTS_PER_WINDOW = 8
# An item of a type that no live worker knows waits this long in store time. Then it becomes a dead
# letter `unknown_event`.
UNKNOWN_EVENT_TIMEOUT_S = 3600.0
# Retry delay of mail to a full inbox.
FULL_INBOX_RETRY_NS = S
# Route lookups for an unroutable universe: maximum number and maximum backoff, about an hour in total.
# Then its mail ends as `no_route`. Each waiting message adds to the backoff, which limits lookups to
# about 1,000 per second.
ROUTE_LOOKUPS_MAX = 168
ROUTE_LOOKUP_PAUSE_NS_MAX = 30 * S
ROUTE_LOOKUP_PAUSE_PER_MESSAGE_NS = S // 1000
# Interval at which worker pools announce their routes to universes, and lifetime of an announcement.
ROUTE_ANNOUNCE_INTERVAL_NS = 3600 * S
ROUTE_TTL_NS = 24 * 3600 * S
# A larger `retry_after_s` of a remote service is ignored.
RETRY_AFTER_S_MAX = 24 * 3600

# Mode of an embedded store's directory: owner only. HOLDFAST_STORE_MODE overrides it.
STORE_MODE = 0o700
# Wall clock checks at the first open after a boot. A clock further ahead of the last commit than LEAP_MAX is
# rejected, a smaller leap is logged as a warning. So is a clock behind the last commit: store time is then ahead
# of the wall clock.
STORE_TIME_LEAP_MAX_NS = 366 * 24 * 3600 * S
STORE_TIME_LEAP_WARN_NS = 30 * 24 * 3600 * S
STORE_TIME_BEHIND_WARN_NS = 24 * 3600 * S
# LMDB reserves address space, not disk; the map is never resized.
MAP_BYTES = 1 << 40
# A redo log checkpoint starts after REDO_BYTES, REDO_COMMITS or REDO_NS, whichever is first. Above the _MAX
# values commits wait for the checkpoint: it pins pages, so the file grows until it completes.
REDO_BYTES = 1024 * 1024
REDO_COMMITS = 256
REDO_NS = 1 * S
REDO_BYTES_MAX = 8 * 1024 * 1024
REDO_COMMITS_MAX = 4096
READERS_MAX = 4096

# Attempts of a transaction that loses optimistic validation, before it raises Conflict. After the first
# few attempts the threads of a process retry one at a time.
TRANSACT_CONCURRENT_ATTEMPTS = 3
TRANSACT_ATTEMPTS_MAX = 64
# A transaction is not resent after this number of consecutive writers crashed on it.
RESENDS_MAX = 10
# Batch size in which a client resends transactions to a new writer.
RESEND_BATCH = 64
# The writer keeps the outcomes of this number of recent commits, or transactions, to resend lost replies.
OUTCOMES_KEPT = 8192
OUTCOME_REPLIES_MAX = 50_000
# A larger reply is not kept. If it is lost, the outcome is unknown to the client.
OUTCOME_BYTES_MAX = 1024
# Optimistic validation keeps the write sets of this number of recent commits, or keys, whichever is less.
RECENT_COMMITS_MAX = 4096
RECENT_KEYS_MAX = 200_000
# Maximum transactions of one group commit. It bounds the latency of each reply.
COMMIT_TXNS_MAX = 2048
# Approximate maximum of rows of one group commit. It bounds a batch of large transactions.
COMMIT_ROWS_MAX = 50_000
FRAME_BYTES_MAX = 256 * 1024 * 1024
TOPICS_MAX = 100_000
# Maximum topics that a client stays subscribed to without a waiting thread.
IDLE_TOPICS_MAX = 1_000
SCAN_PAGE = 1000
# Maximum entries and bytes of a segment. Compaction packs journal entries below the checkpoint into segments.
SEGMENT_ENTRIES = 512
SEGMENT_BYTES_MAX = 4 * 1024 * 1024


WRITER_IDLE_EXIT_S = 3.0
READER_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Limits of the embedded store's writer process."""

    # A writer without clients exits after this time.
    idle_exit_s: float = field(default_factory=lambda: WRITER_IDLE_EXIT_S)
    # A stopped writer (SIGSTOP, debugger) with a pending reply is replaced after this time.
    stopped_s: float = 1.0
    # A running writer that does not reply (dead disk) is replaced after this time.
    hung_s: float = 15.0
    # Timeout of a client for connecting to or starting a writer.
    connect_s: float = 30.0
    # The writer disconnects a client with more unread replies than this.
    backlog_bytes: int = 256 * 1024 * 1024
    # Interval of the check for dead readers, which pin old pages.
    reader_check_s: float = field(default_factory=lambda: READER_CHECK_S)


# An item stores its last failed attempts, each with the beginning of its error.
ATTEMPTS_KEPT = 10
ATTEMPT_ERROR_CHARS_MAX = 200
# Maximum size of an effect's tag. The receipt returns the tag.
TAG_BYTES_MAX = 1024
# Maximum size of the joined operations (mostly receipts) of one settlement commit. The rest goes into the next one.
SETTLEMENT_BYTES_MAX = 8 * 1024 * 1024
# Maximum size of one inbox read.
INBOX_READ_BYTES_MAX = 16 * 1024 * 1024
