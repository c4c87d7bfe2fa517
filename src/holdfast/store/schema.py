"""Every key space, on one page.

A key is a tuple whose first element is the number of its space. Numbers are contiguous from 0 and
never change their meaning; `SCHEMA` moves when the meaning of stored rows does.

    0  app_state    runner.schema.version (raw bytes)            the marker (8 bytes, document 001)
                    "meta"                                       generation, store id, clock anchor
                    "sim" …                                      free for tests and the simulator
                    "budget" <u> …                               money and tokens, reserved and spent
                    "dispatch" <u> …                             requests to panes, by id, state and mark
                    "replay" <u> …                               how far the leader was told of them
                    "code" <u> <digest>                          what the code of workers declares
    1  outcome      <slot>                                       what the last commits answered
    2  sequence     <space bytes>                                last number given by append
    3  blob         "data" <hash>                                large values, content-addressed
                    "refs" <hash>                                how many rows refer to it
                    "idle" <since_ns> <hash>                     candidates for collection, by time
    4  lease        "fence" <resource>                           who may act, under which epoch
                    "expiry" <resource>                          until when (8 bytes)
                    "by" <worker> <resource>                     index: leases of a worker
    5  lease_log    <n>                                          grants, expiries, releases
    6  journal      <subject> "head"                             height, hash, checkpoint, floor
                    <subject> "e" <height>                       entries
                    <subject> "s" <height>                       segments, by their top entry
    7  inbox        <world> "e" <seq>                            ingress, in order
                    <world> "cursor"                             last consumed seq (8 bytes)
    8  queue        <q> "i" <seq>                                items: payload, counts
                    <q> "h" <seq>                                claims that stand, by item
                    <q> "r" <-priority> <turn> <seq>             ready, in order
                    <q> "g" <priority> <group>                   the turn of a group's last item
                    <q> "turn" <priority>                        the turn that the queue is at
                    <q> "d" <not_before_ns> <seq>                waiting for a time
                    <q> "x" <expires_ns> <seq>                   claims by expiry
                    <q> "o" <owner> <seq>                        claims by owner
                    <q> "z" <seq>                                dead letters
                    <q> "t" <died_ns> <seq>                      the same, by time, for purging
                    <q> "n"                                      how many items are in each state
                    <q> "rate"                                   until when its tokens are given away
    9  dedupe       <scope> "k" <key>                            what a key was used for
                    <scope> "t" <time_ns> <key>                  the same, by time, for collection
                    <scope> "floor"                              keys issued before it are forgotten
    10 snapshot     <subject> "s" <height>                       states at a height
                    <subject> "baseline"                         the one to restore from
    11 world        <u> "n" <type> <name>                        which world has this name
                    <u> "w" <world>                              its record: type, name, status, lineage
                    <u> "a" <world>                              its assignment to a worker
                    <u> "b" <worker> <world>                     index: worlds of a worker
                    <u> "t" <world> <slot>                       pending timers by their key
                    <u> "i" <intent>                             effects without a receipt
                    <u> "h" <world> <n>                          what a fork was given when it was made
                    <u> "r" <world> <intent>                     its own intent for one of its parent's
                    <u> "c" <status>                             counters
                    <u> "k" <world>                              how much history it keeps, when it is cut
                    <u> "d" <due_ns> <world>                     index: histories that are to be cut
                    <u> "x" <deleted_ns> <world>                 index: deleted worlds, to be erased
                    <u> "z" <world>                              what is left of a purged world
                    <u> "route" <u'>                             when a pool last had a route there
                    <u> "u" <need> <since_ns> <world>            stopped before an item of this type
                    <u> "g" <world> <seq>                        items given up as unknown
    12 ready        <u> <worker> <-priority> <world>             hints: this world has work
    13 worker       <u> <worker>                                 who said lately that it is alive
    14 run          "n" <name>                                   the latest run of this name
                    "r" <run>                                    its record: status, input, policy
                    "c" <run>                                    its progress
                    "i" <run> <n>                                input blocks
                    "o" <run> <page> <height>                    outcome chunks, by their log entry
    15 task         <u> "b" <seq>                                what a task is to do; never changes
                    <u> "t" <seq>                                how far it is, once it is by itself
                    <u> "s" <hash>                               what tasks submitted alike have in common
                    <u> "w" <queue> <kind> <-priority> <seq>     ready to be granted, in order: it, or a run
                    <u> "y" <queue> <kind> <-priority> <seq>     on its last lease: granted by itself
                    <u> "p" <queue> <limit> …                    waiting for room under its limit
                    <u> "u" <queue> <name> …                     whoever asked knows no such task
                    <u> "d" <not_before_ns> <seq>                waiting for a time
                    <u> "a" <seq> <seq'>                         the second waits for the first
                    <u> "e" <seq>                                ended, its dependents not told yet
                    <u> "x" <expires_ns> <lease>                 leases given together, by expiry
                    <u> "l" <lease>                              what is leased of runs by it
                    <u> "i" <seq>                                the lease of the run that begins here
                    <u> "k" <name> <key>                         the task that has a key
                    <u> "r" <until_ns> <seq>                     ended, kept until then
                    <u> "n" <queue>                              how many are in each place and state
                    <u> "q" <queue>                              how many may be leased at a time
                    <u> "c" <queue> <limit>                      how many of a limit are leased
                    <u> "g" <seq>                                what it last said while it ran
                    <u> "h" …                                    checkpoints of the log
                    <u> "seq" "lease" "v" "bytes"                counters

Where a name stands in a key that is also scanned by a shorter prefix, the kind of row comes first
(`lease`), so that no name can be taken for a kind.
"""

from __future__ import annotations

import struct
from enum import IntEnum

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


SCHEMA_MAJOR = 0
SCHEMA_MINOR = 2
MARKER_NAME = "runner.schema.version"


class Meta(msgspec.Struct, frozen=True, array_like=True):
    """One row about the store itself."""

    store_id: str
    generation: int
    boot_id: str
    offset_ns: int
    floor_ns: int
    # By how much the calendar was after the last commit when this boot was first seen.
    leap_ns: int = 0


def marker(major: int = SCHEMA_MAJOR, minor: int = SCHEMA_MINOR) -> bytes:
    return struct.pack("<4sHH", b"RSV0", major, minor)


def read_marker(value: bytes) -> tuple[int, int]:
    if len(value) != 8 or value[:4] != b"RSV0":
        raise Invalid(what="schema marker", found=value[:16])
    _, major, minor = struct.unpack("<4sHH", value)
    return major, minor


def prefix(space: Space, *path: tuples.Element) -> bytes:
    return tuples.pack((int(space), *path))


def sequence_key(space: bytes) -> bytes:
    return _SEQUENCE + space


def int_bytes(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=True)


def int_of(value: bytes) -> int:
    if len(value) != 8:
        raise Invalid(what="counter", why="not 8 bytes", found=value[:16])
    return int.from_bytes(value, "big", signed=True)


# Written as it stands in document 001, outside the tuple layout, so that any tool can find it.
MARKER_KEY = MARKER_NAME.encode()
META_KEY = prefix(Space.APP_STATE, "meta")
OUTCOME = prefix(Space.OUTCOME)
_SEQUENCE = prefix(Space.SEQUENCE)
