"""Recovery after a commit with an unknown outcome (in-doubt transaction). The task worker and the runner
share these rules.

- A call that the store refused for now, or whose outcome is unknown, is repeated. It is repeated safely
  because reports are idempotent, and because the runner looks up an in-doubt settlement first.
- A lost reply may have granted leases. Until the worker has read its own leases it is uncertain. A lease
  of this owner for which it has no work is an orphan. The runner adopts orphans. The task worker releases
  them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from holdfast.errors import CommitUnknown, HoldfastError
from holdfast.runner.error_policy import is_transient

Lease = TypeVar("Lease")


def can_repeat(error: BaseException) -> bool:
    """Whether a store call may succeed when it is repeated: refused for now, or with an unknown outcome."""
    return isinstance(error, CommitUnknown) or (
        isinstance(error, HoldfastError) and error.retryable
    )


def can_repeat_claim(error: HoldfastError) -> bool:
    """`can_repeat` for calls about queue items, which another worker may remove between two reads."""
    return is_transient(error) or isinstance(error, CommitUnknown)


def orphaned_leases(
    stored: Iterable[Lease], is_known: Callable[[Lease], bool], limit: int | None = None
) -> list[Lease]:
    """Return the leases of this owner in the store for which it has no work, at most `limit`."""
    return [lease for lease in stored if not is_known(lease)][:limit]
