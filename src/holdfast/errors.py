"""Errors, named for what the caller does next.

    HoldfastError
    ├── Invalid               fix the input; nothing was changed
    │   ├── KeyTooLarge
    │   ├── ValueTooLarge
    │   ├── KeyConflict       the same idempotency key came with another body
    │   ├── KeyExpired        the key is older than what is remembered: nobody knows if it was used
    │   └── BadUrl
    ├── NotFound              it is not there
    │   ├── TaskForgotten     the task has ended, and its result is kept no longer (`retain_s`)
    │   └── StoreGone         the store's directory was removed or moved while it was open
    ├── HeadMoved             re-read: the journal went on, what you computed is void
    ├── IllegalTransition     fix the code: the move is not in the table
    ├── ReplayDiverged        fix the code: a journaled step comes out otherwise now
    ├── NoReply               the handler answered nothing
    ├── UnknownEvent          deploy code that knows the event; a dead letter is redriven after that
    ├── Conflict              retry: somebody else committed first
    ├── Busy                  retry later: nothing is wrong
    │   ├── Held              wait: another holder's lease is live
    │   │   └── AlreadyHeldByOther  another leads this universe; the error says until when
    │   ├── NotYet            nothing to do so far: the request stands (`store.standers`)
    │   ├── Withdrawn         whoever sent the request has called it back
    │   ├── Overloaded        wait for the time it names: too much is waiting already
    │   ├── StoreBusy         another process has the store to itself
    │   └── WriterLost        the writer process went away and none came back yet
    ├── Timeout               it took longer than you allowed
    ├── Fenced                stop: somebody else may act on this now
    │   ├── ClaimLost         drop the item: the claim expired or was taken over
    │   ├── NotHeld           acquire again: nobody leads by this lease any more
    │   └── OwnerMismatch     step down: another leads now
    ├── CommitUnknown         look before you repeat: it may or may not have happened
    └── StoreError            call an operator; the hint says what to do
        ├── StoreClosed
        ├── StoreForked
        ├── StoreReplaced
        ├── StoreCorrupt
        ├── StoreFull
        ├── StoreReadOnly
        ├── StoreTimeLeap     the calendar is too far ahead of the last commit to be true
        ├── StoreDenied       another account owns it, or the server says no
        ├── SchemaMismatch
        ├── StoreMoved        go on in the place that it names
        ├── CopyUnfinished    run the copy again, or remove what there is of it
        ├── LocksUnsupported  the kernel has no open file description locks
        └── NetworkFilesystem

An error carries fields, not prose: `Fenced(resource=..., held=3, current=4)`. `code` is stable
text for machines, `retryable` says whether the same call may succeed later, `hint` what a person
does next. `to_wire` and `from_wire` carry an error between processes as plain data.
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
        told = " ".join(f"{name}={value!r}" for name, value in self.fields.items())
        text = f"{self.code}: {told}" if told else self.code
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
    hint = "too old to be told from a repeat; look whether it happened, then use a new key"


class BadUrl(Invalid):
    code = "bad_url"
    hint = "use a directory, lmdb:DIR, memory: or postgresql://..."


class NotFound(HoldfastError):
    code = "not_found"


class TaskForgotten(NotFound):
    code = "task_forgotten"
    hint = "the task has ended, and retain_s has passed since; submit with a longer retain_s to read its result"


class StoreGone(NotFound):
    code = "store_gone"
    hint = "the store's directory was removed or moved while it was open; nothing is committed any more"


class HeadMoved(HoldfastError):
    code = "head_moved"
    hint = "discard the state in memory and read the journal again"


class IllegalTransition(HoldfastError):
    code = "illegal_transition"


class ReplayDiverged(HoldfastError):
    code = "replay_diverged"
    hint = "the world is parked; bring back code that repeats its journal, then resume it"


class NoReply(HoldfastError):
    code = "no_reply"
    hint = "the handler of this event does not call cx.reply, or it failed"


class UnknownEvent(HoldfastError):
    code = "unknown_event"
    hint = "no live worker knows its type; deploy code that does, then redrive it if it is a dead letter"


class Conflict(HoldfastError):
    code = "conflict"
    retryable = True


class Busy(HoldfastError):
    code = "busy"
    retryable = True


class NotYet(Busy):
    code = "not_yet"
    hint = "there is nothing to do for this request so far"


class Withdrawn(Busy):
    code = "withdrawn"
    hint = "whoever sent this request has called it back"


class Held(Busy):
    code = "held"


class AlreadyHeldByOther(Held):
    code = "already_held_by_other"
    hint = "it is free at until_ns at the latest, unless its owner renews"


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
    hint = (
        "another store is at this path now; nothing is committed to the former one; open it again"
    )


class StoreCorrupt(StoreError):
    code = "store_corrupt"
    hint = "nothing was changed; restore a backup with `holdfast restore`"


class StoreFull(StoreError):
    code = "store_full"
    retryable = True
    hint = "nothing of this commit was kept; free some disk space"


class StoreReadOnly(StoreError):
    code = "store_read_only"
    hint = "the store's directory must be writable"


class StoreDenied(StoreError):
    code = "store_denied"
    hint = "use the account that owns it, or share the store with its group by HOLDFAST_STORE_MODE=0770"


class StoreTimeLeap(StoreError):
    code = "store_time_leap"
    hint = (
        "nothing was changed; set the clock of the machine; if its calendar is right, open the store once with "
        "HOLDFAST_STORE_TIME_UNTIL=YYYY-MM-DD, a day that is still to come"
    )


class SchemaMismatch(StoreError):
    code = "schema_mismatch"
    hint = "nothing was changed; use the version of holdfast that wrote this store"


class StoreMoved(StoreError):
    code = "store_moved"
    hint = "this store was moved; use the one that it was moved to"


class CopyUnfinished(StoreError):
    code = "copy_unfinished"
    hint = "run the same `holdfast store copy` again: it goes on where it ended"


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
    """Every error class that is loaded, by its code. The first (topmost) class of a code wins."""
    found: dict[str, type[HoldfastError]] = {}
    level: list[type[HoldfastError]] = [HoldfastError]
    while level:
        for kind in level:
            found.setdefault(kind.code, kind)
        level = [child for kind in level for child in kind.__subclasses__()]
    return found
