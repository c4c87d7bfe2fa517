"""Settings of a stage as checked values, grouped by the part that uses them.

`StageSettings` shows each setting under the name of its keyword of `Stage`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.ledger.run_policy import ATTEMPTS_MAX, PAGE_ROWS, RunPolicy
from holdfast.ledger.run_scheduler import CLAIM_ROWS_MAX
from holdfast.ledger.stop_rules import StopRules
from holdfast.spark.carried_columns import encode_carry
from holdfast.spark.exception_rules import RetryRule
from holdfast.spark.function_pickle import TokenEstimate
from holdfast.spark.service_host import checked_host
from holdfast.spark.stage_arguments import checked_int, checked_number
from holdfast.spark.stage_options import checked_retry_rules, checked_tokens
from holdfast.spark.stop import Stop
from holdfast.spark.tls import Tls

CONCURRENCY_MAX = 10_000
FLUSH_ROWS_MAX = 100_000
TTL_S_MAX = 30 * 24 * 3600
PORT_MAX = 65_535


@dataclass(frozen=True)
class CallSettings:
    """How rows are called: retries, concurrency, limits, batches."""

    retry_on: tuple[RetryRule, ...]
    concurrency: int
    rate_per_s: float
    tokens_per_min: float
    tokens: TokenEstimate
    timeout_s: float
    # 0: the function takes one row.
    batch_rows: int
    flush_rows: int

    @classmethod
    def checked(
        cls,
        *,
        retry_on: RetryRule | Sequence[RetryRule],
        concurrency: int,
        rate_per_s: float,
        tokens_per_min: float,
        tokens: TokenEstimate | None,
        timeout_s: float,
        batch_rows: int | None,
        flush_rows: int,
    ) -> CallSettings:
        rows = 0 if batch_rows is None else checked_int("batch_rows", batch_rows, 1, CLAIM_ROWS_MAX)
        return cls(
            retry_on=checked_retry_rules(retry_on),
            concurrency=checked_int("concurrency", concurrency, 1, CONCURRENCY_MAX),
            rate_per_s=checked_number("rate_per_s", rate_per_s, 0),
            tokens_per_min=checked_number("tokens_per_min", tokens_per_min, 0),
            tokens=checked_tokens(tokens_per_min, tokens),
            timeout_s=checked_number("timeout_s", timeout_s, 0.001),
            batch_rows=rows,
            flush_rows=checked_int("flush_rows", flush_rows, 1, FLUSH_ROWS_MAX),
        )


@dataclass(frozen=True)
class OutputSettings:
    """The columns, files and failed rows of the output."""

    # As `encode_carry` returns it.
    carry: str
    file_rows: int
    file_bytes: int
    on_fail: Literal["keep", "raise"]
    meta: bool
    # A failed row fails the lazy form. Otherwise the lazy form omits the row.
    lazily_strict: bool

    @classmethod
    def checked(
        cls,
        *,
        carry: Literal["*"] | Sequence[str],
        file_rows: int,
        file_bytes: int,
        on_fail: Literal["keep", "raise"] | None,
        meta: bool,
    ) -> OutputSettings:
        return cls(
            carry=encode_carry(carry),
            file_rows=checked_int("file_rows", file_rows, 1),
            file_bytes=checked_int("file_bytes", file_bytes, 1),
            on_fail=on_fail or "keep",
            meta=meta,
            lazily_strict=on_fail == "raise" or (on_fail is None and not meta),
        )


@dataclass(frozen=True)
class ListenSettings:
    """Where the ledger service of a run listens."""

    ledger_host: str | None
    ledger_port: int
    bind: str | None
    tls: Tls | None

    @classmethod
    def checked(
        cls, ledger_host: str | None, ledger_port: int, bind: str | None, tls: Tls | None
    ) -> ListenSettings:
        port = checked_int("ledger_port", ledger_port, 0, PORT_MAX)
        return cls(checked_host(ledger_host), port, bind, tls)


def checked_policy(
    *,
    attempts: int,
    retry_budget: int,
    lease_s: float,
    grace_s: float,
    ahead_rows: int,
    file_rows: int,
    batch_rows: int,
    stop_after: Stop | None,
) -> RunPolicy:
    # A page consists of whole batches.
    page_rows = batch_rows * max(PAGE_ROWS // batch_rows, 1) if batch_rows else PAGE_ROWS
    return RunPolicy(
        attempts_max=checked_int("attempts", attempts, 1, ATTEMPTS_MAX),
        retries_max=checked_int("retry_budget", retry_budget, 0),
        lease_ns=int(checked_number("lease_s", lease_s, 0.1, TTL_S_MAX) * 1e9),
        grace_ns=int(checked_number("grace_s", grace_s, 0, TTL_S_MAX) * 1e9),
        page_rows=page_rows,
        batch_rows=batch_rows,
        # The commit advances by whole files, so it may lag by one file.
        ahead_rows_max=ahead_rows and checked_int("ahead_rows", ahead_rows, 0) + file_rows,
        stop_rules=stop_after.rules() if stop_after is not None else StopRules(),
    )


class StageSettings:
    calls: CallSettings
    outputs: OutputSettings
    listen: ListenSettings

    @property
    def retry_on(self) -> tuple[RetryRule, ...]:
        return self.calls.retry_on

    @property
    def concurrency(self) -> int:
        return self.calls.concurrency

    @property
    def rate_per_s(self) -> float:
        return self.calls.rate_per_s

    @property
    def tokens_per_min(self) -> float:
        return self.calls.tokens_per_min

    @property
    def tokens(self) -> TokenEstimate:
        return self.calls.tokens

    @property
    def timeout_s(self) -> float:
        return self.calls.timeout_s

    @property
    def batch_rows(self) -> int:
        return self.calls.batch_rows

    @property
    def flush_rows(self) -> int:
        return self.calls.flush_rows

    @property
    def carry(self) -> str:
        return self.outputs.carry

    @property
    def file_rows(self) -> int:
        return self.outputs.file_rows

    @property
    def file_bytes(self) -> int:
        return self.outputs.file_bytes

    @property
    def on_fail(self) -> Literal["keep", "raise"]:
        return self.outputs.on_fail

    @property
    def meta(self) -> bool:
        return self.outputs.meta

    @property
    def ledger_host(self) -> str | None:
        return self.listen.ledger_host

    @property
    def ledger_port(self) -> int:
        return self.listen.ledger_port

    @property
    def bind(self) -> str | None:
        return self.listen.bind

    @property
    def tls(self) -> Tls | None:
        return self.listen.tls
