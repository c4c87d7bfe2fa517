"""Errors, named for what the caller does next.

    HoldfastError
    ├── Invalid               fix the input; nothing was changed
    │   ├── KeyTooLarge
    │   ├── ValueTooLarge
    │   ├── KeyConflict       the idempotency key was used with a different body
    │   ├── KeyExpired        the key is older than the dedupe retention: a repeat cannot be detected
    │   └── BadUrl
    ├── NotFound              the object does not exist
    │   ├── TaskForgotten     the task has ended and its result has passed its retention (`retain_s`)
    │   └── StoreGone         the store's directory was removed or moved while it was open
    ├── HeadMoved             re-read: the journal has new entries, the computed step is void
    ├── IllegalTransition     fix the code: the transition is not in the table
    ├── ReplayDiverged        fix the code: replay of a journaled step gives a different result
    ├── ReducerTimeout        fix the code: a replay for the HTTP API did not end
    ├── ReducerDied           fix the code: a replay for the HTTP API ended its process
    ├── ReducerMemory         fix the code: a replay for the HTTP API needs too much memory
    ├── NoReply               the handler sent no reply
    ├── UnknownEvent          deploy code that knows the event, then redrive its dead letter
    ├── Conflict              retry: a concurrent transaction committed first
    ├── Busy                  retry later: nothing is wrong
    │   ├── Held              wait: another holder's lease is live
    │   │   └── AlreadyHeldByOther  another process leads this universe; the error has the expiry
    │   ├── NothingToDo       a parked operation found no work: it stays parked (`store.parked`)
    │   ├── RequestCancelled  the client cancelled its parked request
    │   ├── Overloaded        wait for `retry_after_s`: the queue is full
    │   ├── StatesBusy        the process that computes states is in use
    │   ├── StoreBusy         another process has exclusive access to the store
    │   └── WriterLost        the writer process exited and no new one is reachable yet
    ├── Timeout               the call exceeded its timeout
    ├── Fenced                stop: another holder may act on this resource now
    │   ├── ClaimLost         drop the item: the claim expired or was cancelled
    │   ├── NotHeld           acquire again: this lease is no longer held
    │   └── OwnerMismatch     step down: another process leads now
    ├── CommitUnknown         in-doubt commit: read before you repeat it
    └── StoreError            call an operator; the hint has the remedy
        ├── StoreClosed
        ├── StoreForked
        ├── StoreReplaced
        ├── StoreCorrupt
        ├── StoreFull
        ├── StoreReadOnly
        ├── StoreTimeLeap     the wall clock is implausibly far ahead of the last commit
        ├── StoreDenied       another account owns the store, or the server denies access
        ├── SchemaMismatch
        ├── StoreMoved        use the store that the error names
        ├── CopyUnfinished    run the copy again, or remove the partial copy
        ├── LocksUnsupported  the kernel has no open file description locks
        └── NetworkFilesystem

An error carries fields, not prose: `Fenced(resource=..., held=3, current=4)`. `code` is a stable
identifier for programs. `retryable` means that the same call may succeed later. `hint` is the next
step for a person. `to_wire` and `from_wire` convert an error to and from plain data.
"""

from __future__ import annotations

from typing import Any, ClassVar


class HoldfastError(Exception):
    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = ""

    def __init__(self, **fields: Any) -> None:
        super().__init__(fields)
        self.fields = fields

    def __str__(self) -> str:
        described = " ".join(f"{name}={value!r}" for name, value in self.fields.items())
        text = f"{self.code}: {described}" if described else self.code
        return f"{text} ({self.hint})" if self.hint else text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.fields.items())})"

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(name)


class Invalid(HoldfastError):
    code = "invalid"


class KeyTooLarge(Invalid):
    code = "key_too_large"
    hint = "shorten the name: a stored key holds the whole path"


class ValueTooLarge(Invalid):
    code = "value_too_large"
    hint = "keep large data outside and store a reference to it"


class KeyConflict(Invalid):
    code = "key_conflict"
    hint = "this idempotency key was used with another body; use a new key"


class KeyExpired(Invalid):
    code = "key_expired"
    hint = "the key is too old to detect a repeat; check whether the call took effect, then use a new key"


class BadUrl(Invalid):
    code = "bad_url"
    hint = "use a directory, lmdb:DIR, memory: or postgresql://..."


class NotFound(HoldfastError):
    code = "not_found"


class TaskForgotten(NotFound):
    code = "task_forgotten"
    hint = (
        "the task ended longer than retain_s ago; submit with a longer retain_s to read its result"
    )


class StoreGone(NotFound):
    code = "store_gone"
    hint = "the store's directory was removed or moved while it was open; no further commit is possible"


class HeadMoved(HoldfastError):
    code = "head_moved"
    hint = "discard the state in memory and read the journal again"


class IllegalTransition(HoldfastError):
    code = "illegal_transition"


class ReplayDiverged(HoldfastError):
    code = "replay_diverged"
    hint = "the world is parked; deploy code that replays its journal identically, then resume it"


class ReducerTimeout(HoldfastError):
    code = "reducer_timeout"
    hint = (
        "the code did not compute this state in time; the output of the server shows where it was"
    )


class ReducerDied(HoldfastError):
    code = "reducer_died"
    hint = "the code ended the process that computes states; the output of the server may say why"


class ReducerMemory(HoldfastError):
    code = "reducer_memory"
    hint = "the code needs more memory to compute this state than the server permits"


class NoReply(HoldfastError):
    code = "no_reply"
    hint = "the handler of this event does not call cx.reply, or it failed"


class UnknownEvent(HoldfastError):
    code = "unknown_event"
    hint = "no live worker knows this event type; deploy code that does, then redrive the event if it is a dead letter"


class Conflict(HoldfastError):
    code = "conflict"
    retryable = True


class Busy(HoldfastError):
    code = "busy"
    retryable = True


class NothingToDo(Busy):
    code = "not_yet"
    hint = "the operation found no work yet"


class RequestCancelled(Busy):
    code = "withdrawn"
    hint = "the client cancelled this request"


class Held(Busy):
    code = "held"


class AlreadyHeldByOther(Held):
    code = "already_held_by_other"
    hint = "the lease expires at until_ns unless its owner renews it"


class StatesBusy(Busy):
    code = "states_busy"
    hint = "the process that computes states is in use; retry"


class StoreBusy(Busy):
    code = "store_busy"
    hint = "another process has this store open; stop it first"


class WriterLost(Busy):
    code = "writer_lost"
    hint = "the store's writer process cannot be reached or started; see its stderr"


class Overloaded(Busy):
    code = "overloaded"
    hint = "wait for retry_after_s and send again"


class Timeout(HoldfastError):
    code = "timeout"
    retryable = True


class Fenced(HoldfastError):
    code = "fenced"


class ClaimLost(Fenced):
    code = "claim_lost"


class NotHeld(Fenced):
    code = "not_held"


class OwnerMismatch(Fenced):
    code = "owner_mismatch"


class CommitUnknown(HoldfastError):
    code = "commit_unknown"
    hint = "the commit may or may not have happened; read before you repeat it"


class StoreError(HoldfastError):
    code = "store"


class StoreClosed(StoreError):
    code = "store_closed"
    hint = "open the store again"


class StoreForked(StoreError):
    code = "store_forked"
    hint = "a store does not survive fork(); open it in the child, or spawn instead"


class StoreReplaced(StoreError):
    code = "store_replaced"
    hint = "another store is at this path now; the former store accepts no commit; open the store again"


class StoreCorrupt(StoreError):
    code = "store_corrupt"
    hint = "nothing was changed; restore a backup with `holdfast restore`"


class StoreFull(StoreError):
    code = "store_full"
    retryable = True
    hint = "the commit was rolled back; free some disk space"


class StoreReadOnly(StoreError):
    code = "store_read_only"
    hint = "the store's directory must be writable"


class StoreDenied(StoreError):
    code = "store_denied"
    hint = "use the account that owns it, or share the store with its group by HOLDFAST_STORE_MODE=0770"


class StoreTimeLeap(StoreError):
    code = "store_time_leap"
    hint = (
        "nothing was changed; set the machine's clock; if the clock is right, open the store once with "
        "HOLDFAST_STORE_TIME_UNTIL=YYYY-MM-DD, a date in the future"
    )


class SchemaMismatch(StoreError):
    code = "schema_mismatch"
    hint = "nothing was changed; use the version of holdfast that wrote this store"


class StoreMoved(StoreError):
    code = "store_moved"
    hint = "this store was moved; use it at its new URL"


class CopyUnfinished(StoreError):
    code = "copy_unfinished"
    hint = "run the same `holdfast store copy` again: it resumes at the last copied row"


class LocksUnsupported(StoreError):
    code = "locks_unsupported"
    hint = "an embedded store needs a Linux kernel with open file description locks (3.15 or later); use postgresql:// here"


class NetworkFilesystem(StoreError):
    code = "network_filesystem"
    hint = "put the store on a local disk, or use postgresql:// to share it"


def to_wire(error: HoldfastError) -> list[Any]:
    return [error.code, error.fields]


def from_wire(data: list[Any]) -> HoldfastError:
    code, fields = data
    kind = by_code().get(code)
    if kind is None:
        return HoldfastError(remote_code=code, **fields)
    return kind(**fields)


def by_code() -> dict[str, type[HoldfastError]]:
    """All loaded error classes by code. For a shared code the topmost class wins."""
    classes: dict[str, type[HoldfastError]] = {}
    level: list[type[HoldfastError]] = [HoldfastError]
    while level:
        for kind in level:
            classes.setdefault(kind.code, kind)
        level = [child for kind in level for child in kind.__subclasses__()]
    return classes
