"""`holdfast limits show | set`."""

from pathlib import Path

import pytest

import holdfast as hf
from holdfast import codec
from holdfast.errors import Overloaded
from holdfast.ops.audit import AuditEntry
from holdfast.store import tuples
from holdfast.store.schema import Space, key_prefix
from tests.cli.conftest import RunCommand


@hf.task
def pack(n: int) -> int:
    return n


def test_limits_are_set_shown_audited_and_apply_at_once(tmp_path: Path, run: RunCommand) -> None:
    url = str(tmp_path / "data")
    with hf.App("shop", tasks=[pack]).open(url, roles=()) as rt:
        rt.submit(pack, 1)
        assert run("limits", "show", "--store", url).out == "no limits\n"
        result = run("limits", "set", "tasks=1", "queue:default=5", "--store", url)
        assert result.err == ""
        assert result.out.splitlines() == [
            "limit          at most  now",
            "tasks                1    1",
            "queue:default        5    1",
        ]
        with pytest.raises(Overloaded, match="wait for retry_after_s"):
            rt.submit(pack, 2)
        assert run("limits", "set", "tasks=0", "--json", "--store", url).document == {
            "universe": "shop",
            "limits": [{"limit": "queue:default", "limit_max": 5, "now": 1}],
        }
        rt.submit(pack, 2)
        prefix = key_prefix(Space.AUDIT, "shop")
        rows = rt.store.read(lambda txn: txn.scan(prefix, tuples.prefix_end(prefix)))
        entries = [codec.unpack_as(AuditEntry, row) for _, row in rows]
        assert [(one.action, one.subject, one.detail) for one in entries] == [
            ("limits.set", "universe/shop", "tasks=1 queue:default=5"),
            ("limits.set", "universe/shop", "tasks=0"),
        ]


@pytest.mark.parametrize("text", ["tasks", "tasks=x", "=3", "task=3", "tasks=-1"])
def test_wrong_limits_are_one_line(tmp_path: Path, run: RunCommand, text: str) -> None:
    url = str(tmp_path / "data")
    with hf.App("shop", tasks=[pack]).open(url, roles=()) as rt:
        rt.submit(pack, 1)
        result = run("limits", "set", text, "--store", url)
        assert (result.code, result.out) == (1, "")
        assert result.error.startswith(("invalid: ", "bad_limits: "))
