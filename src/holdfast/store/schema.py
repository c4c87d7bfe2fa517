"""The key schema: every key space of the store.

A key is a tuple whose first element is the number of its space. Numbers are contiguous from 0 and
never change their meaning. The schema version changes when the meaning of stored rows does:

    0.2    queue items name their operations by Python paths
    0.3    queue items name their operations by stable names (`operation_names`)
    0.4    flows and schedules, and tasks with an owner
    0.5    audit, settings, counters by tag, error, minute and day, jobs
    0.6    pauses of queues, which older code would not obey; 0.2 to 0.5 are read and upgraded

    0  app_state    runner.schema.version (raw bytes)            the marker (8 bytes, document 001)
                    "meta"                                       generation, store id, clock anchor
                    "census" "progress"                          the walk of the census that is under way
                    "census" "result"                            rows and bytes by universe, kind and type
                    "sim" …                                      free for tests and the simulator
                    "budget" <u> …                               money and tokens, reserved and spent, by day and model
                    "dispatch" <u> …                             dispatch requests, by id, state and mark
                    "replay" <u> …                               progress of the leader's notifications
                    "code" <u> <digest>                          declarations of the workers' code
    1  outcome      <slot>                                       answers of the last commits
    2  sequence     <space bytes>                                last sequence number of append
    3  blob         "data" <hash>                                large values, content-addressed
                    "refs" <hash>                                reference count
                    "idle" <since_ns> <hash>                     candidates for collection, by time
    4  lease        "fence" <resource>                           holder and epoch (fencing token)
                    "expiry" <resource>                          expiry time (8 bytes)
                    "by" <worker> <resource>                     index: leases of a worker
                    "base" <resource>                            the last removed line of the lease log
    5  lease_log    <n>                                          grants, expiries, releases
    6  journal      <subject> "head"                             height, hash, checkpoint, floor
                    <subject> "e" <height>                       entries
                    <subject> "s" <height>                       segments, by their top entry
    7  inbox        <world> "e" <seq>                            ingress, in order
                    <world> "cursor"                             last consumed seq (8 bytes)
    8  queue        <q> "i" <seq>                                items: payload, counts
                    <q> "h" <seq>                                current claims, by item
                    <q> "r" <-priority> <fair_rank> <seq>        ready, in order
                    <q> "g" <priority> <group>                   the fair rank of a group's last item
                    <q> "turn" <priority>                        the current fair rank of the queue
                    <q> "d" <not_before_ns> <seq>                delayed, by due time
                    <q> "x" <expires_ns> <seq>                   claims by expiry
                    <q> "o" <owner> <seq>                        claims by owner
                    <q> "z" <seq>                                dead letters
                    <q> "t" <died_ns> <seq>                      the same, by time, for purging
                    <q> "n"                                      number of items in each state
                    <q> "rate"                                   the time until which tokens are granted
    9  dedupe       <scope> "k" <key>                            the use of an idempotency key
                    <scope> "t" <time_ns> <key>                  the same, by time, for collection
                    <scope> "floor"                              keys issued before it are expired
    10 snapshot     <subject> "s" <height>                       states at a height
                    <subject> "baseline"                         the snapshot to restore from
    11 world        <u> "n" <type> <name>                        the world with this name
                    <u> "w" <world>                              its record: type, name, status, lineage
                    <u> "a" <world>                              its assignment to a worker
                    <u> "b" <worker> <world>                     index: worlds of a worker
                    <u> "t" <world> <slot>                       pending timers by their key
                    <u> "i" <intent>                             effects without a receipt
                    <u> "it" <tag> <intent>                      index: the same, by tag
                    <u> "h" <world> <n>                          state that a fork inherited
                    <u> "r" <world> <intent>                     a fork's intent for one of its parent
                    <u> "c" <status>                             counters
                    <u> "k" <world>                              history retention and next truncation
                    <u> "d" <due_ns> <world>                     index: histories due for truncation
                    <u> "x" <deleted_ns> <world>                 index: deleted worlds, to be erased
                    <u> "z" <world>                              tombstone of a purged world
                    <u> "route" <u'>                             when a pool last had a route there
                    <u> "u" <need> <since_ns> <world>            stopped before an item of this type
                    <u> "g" <world> <seq>                        items abandoned as unknown
    12 ready        <u> <worker> <-priority> <world>             hints: this world has work
    13 worker       <u> <worker>                                 registration and last heartbeat
    14 run          "n" <name>                                   the latest run of this name
                    "r" <run>                                    its record: status, input, policy
                    "c" <run>                                    its progress
                    "i" <run> <n>                                input blocks
                    "o" <run> <page> <height>                    outcome chunks, by their log entry
    15 task         <u> "b" <seq>                                the body of a task; immutable
                    <u> "t" <seq>                                its status, if it has its own row
                    <u> "s" <hash>                               the common spec of similar tasks
                    <u> "w" <queue> <kind> <-priority> <seq>     ready, in order: a task or a row range
                    <u> "f" <queue> <kind> <-priority> <rank> …  ready with a limit key, in fair turns
                    <u> "fp" <seq>                               its key in that index
                    <u> "fg" <queue> <kind> <-priority> <limit>  the rank of the last task of a limit key
                    <u> "ft" <queue> <kind> <-priority>          the rank that grants have reached
                    <u> "fn" <queue>                             number of tasks in that index
                    <u> "y" <queue> <kind> <-priority> <seq>     quarantined on its last lease
                    <u> "p" <queue> <limit> …                    throttled by its limit
                    <u> "u" <queue> <name> …                     unroutable: unknown to the worker
                    <u> "d" <not_before_ns> <seq>                delayed, by due time
                    <u> "a" <seq> <seq'>                         the second depends on the first
                    <u> "a" <seq> <digest>                       a flow or schedule waits for the end of the task
                    <u> "e" <seq>                                ended, dependents not yet released
                    <u> "x" <expires_ns> <lease>                 leases granted together, by expiry
                    <u> "l" <lease>                              the row ranges of a lease
                    <u> "i" <seq>                                the lease of the range starting here
                    <u> "k" <name> <key>                         the task of an idempotency key
                    <u> "tag" <tag> <seq>                        index: tasks by tag
                    <u> "li" <queue> <name> <state> <chunk>      bitmap index: tasks by queue, name and final state
                    <u> "ls"                                     the first task in that index
                    <u> "r" <until_ns> <seq>                     ended, retained until this time
                    <u> "n" <queue>                              number of tasks in each state
                    <u> "q" <queue>                              concurrency limit of the queue
                    <u> "c" <queue> <limit>                      leased tasks of a limit
                    <u> "g" <seq>                                last progress report
                    <u> "h" …                                    checkpoints of the log
                    <u> "seq" "lease" "v" "bytes"                counters
    16 flow         <u> "b" <flow>                               the body of a flow; immutable
                    <u> "h" <flow>                               its head: state, activation task, result
                    <u> "k" <name> <key>                         the flow of an idempotency key
                    <u> "tag" <tag> <flow>                       index: flows by tag
                    <u> "fn" <name> <flow>                       index: flows by name
                    <u> "fnc"                                    that index has every flow
                    <u> "r" <flow> <run> <n>                     the records of a run, in order
                    <u> "o" <flow> <name> <occurrence>           open steps that no worker holds
                    <u> "d" <due_ns> <flow> <name> <occurrence>  sleeps and timeouts, by due time
                    <u> "m" <flow> <n>                           the inbox, in order
                    <u> "mk" <flow> <key>                        idempotency keys of its events
                    <u> "p" <flow> <name>                        published values
                    <u> "c" <flow> <flow'>                       the second is a child of the first
                    <u> "t" <flow> <step key> <attempt>          threads of timed-out steps that still run
                    <u> "u" <flow> <name> <occurrence>           the dead letter of a failed compensation
                    <u> "s" <state> <flow>                       flows in each state
                    <u> "n" <name>                               number of flows in each state
                    <u> "x" <until_ns> <flow>                    ended, retained until this time
                    <u> "xr" <until_ns> <flow> <run>             a former run, retained until this time
                    <u> "seq"                                    counter
    17 schedule     <u> "s" <name>                               a schedule: its definition, next and last occurrence
                    <u> "d" <wall_ns> <name>                     index: schedules by their next occurrence
                    <u> "o" <name> <wall_ns>                     the use of an occurrence: started, queued or skipped
                    <u> "q" <name> <wall_ns>                     index: queued occurrences
                    <u> "c" <name> <n>                           the last changes of a schedule
                    <u> "k" <key>                                the schedule of an idempotency key
    18 audit        <u> <n>                                      actions of operators
    19 statistic    <u> "eg" <kind> <group>                      tasks, flows or dead letters with the same error
                    <u> "em" <kind> <group> <at_ns> <subject>    index: the subjects of a group, by time
                    <u> "en" <kind>                              the number of groups
                    <u> "since"                                  older ends are not in groups
                    <u> "m" <minute> <kind> <queue>              tasks and flows that ended in a minute
                    <u> "msince"                                 older ends are not counted
    20 setting      <u> "limits"                                 load limits of operators
                    <u> "verify"                                 the saved report of the last verification
    21 job          <u> "j" <number>                             an action on a selection, and its progress
                    <u> "o" <number>                             index: jobs that run
                    <u> "seq"                                    the number of the last job

If a key contains a name and is also scanned by a shorter prefix, the row kind precedes the name
(`lease`), so that no name can be mistaken for a kind.
"""

from __future__ import annotations

import struct
from enum import Enum, IntEnum

import msgspec

from holdfast.errors import Invalid
from holdfast.store import tuples


class Space(IntEnum):
    APP_STATE = 0
    OUTCOME = 1
    SEQUENCE = 2
    BLOB = 3
    LEASE = 4
    LEASE_LOG = 5
    JOURNAL = 6
    INBOX = 7
    QUEUE = 8
    DEDUPE = 9
    SNAPSHOT = 10
    WORLD = 11
    READY = 12
    WORKER = 13
    RUN = 14
    TASK = 15
    FLOW = 16
    SCHEDULE = 17
    AUDIT = 18
    STATISTIC = 19
    SETTING = 20
    JOB = 21


SCHEMA_MAJOR = 0
SCHEMA_MINOR = 6
# The oldest version whose rows this code reads. An open for writing raises the marker to the current version.
SCHEMA_MINOR_OLDEST = 2
SCHEMA_VERSION = (SCHEMA_MAJOR, SCHEMA_MINOR)
MARKER_NAME = "runner.schema.version"


class StoreMeta(msgspec.Struct, frozen=True, array_like=True):
    """The meta row of the store."""

    store_id: str
    generation: int
    boot_id: str
    offset_ns: int
    floor_ns: int
    # Wall clock minus time of the last commit, at the first open of this boot.
    leap_ns: int = 0


def encode_marker(major: int = SCHEMA_MAJOR, minor: int = SCHEMA_MINOR) -> bytes:
    return struct.pack("<4sHH", b"RSV0", major, minor)


def decode_marker(value: bytes) -> tuple[int, int]:
    if len(value) != 8 or value[:4] != b"RSV0":
        raise Invalid(what="schema marker", found=value[:16])
    _, major, minor = struct.unpack("<4sHH", value)
    return major, minor


class SchemaMatch(Enum):
    SAME = "same"
    UPGRADE = "upgrade"
    REFUSE = "refuse"


def compare_versions(
    found: tuple[int, int], expected: tuple[int, int] = SCHEMA_VERSION
) -> SchemaMatch:
    """Decide whether code of version `expected` can use a store of version `found`: as it is, after an upgrade, or not.
    Upgrades exist only to the version of this code."""
    if found == expected:
        return SchemaMatch.SAME
    major, minor = found
    readable = major == SCHEMA_MAJOR and SCHEMA_MINOR_OLDEST <= minor < SCHEMA_MINOR
    return SchemaMatch.UPGRADE if expected == SCHEMA_VERSION and readable else SchemaMatch.REFUSE


def key_prefix(space: Space, *path: tuples.Element) -> bytes:
    return tuples.pack((int(space), *path))


def sequence_key(space: bytes) -> bytes:
    return _SEQUENCE + space


def encode_int(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def decode_int(value: bytes) -> int:
    if len(value) != 8:
        raise Invalid(what="counter", why="not 8 bytes", found=value[:16])
    return int.from_bytes(value, "big", signed=True)


# The literal key of document 001, outside the tuple layout, so that any tool can find it.
MARKER_KEY = MARKER_NAME.encode()
META_KEY = key_prefix(Space.APP_STATE, "meta")
OUTCOME = key_prefix(Space.OUTCOME)
_SEQUENCE = key_prefix(Space.SEQUENCE)
