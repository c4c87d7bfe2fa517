"""The codec creates decoders under a lock: two threads that prepare one type concurrently would crash the process."""

from __future__ import annotations

import pytest

from tests.processes import python_proc

ROUNDS = 300
RACE = f"""
    import sys, threading
    import msgspec
    from holdfast import codec

    sys.setswitchinterval(1e-6)
    THREADS = 4

    def kinds(n):
        inner = msgspec.defstruct(f"Inner{{n}}", [("a", int), ("b", list[int])], array_like=True)
        return msgspec.defstruct(
            f"Outer{{n}}", [("inner", inner), ("k", dict[str, inner])], array_like=True
        )

    for n in range({ROUNDS}):
        kind, at_once = kinds(n), threading.Barrier(THREADS)
        data = msgspec.msgpack.encode([[1, [2]], {{}}])

        def use():
            at_once.wait()
            USE

        threads = [threading.Thread(target=use) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    print("lived")
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "use", ["codec.unpack_as(kind, data)", "codec.convert([[1, [2]], {}], kind)"]
)
def test_concurrent_first_use_of_a_codec_type_does_not_crash(use: str) -> None:
    with python_proc(RACE.replace("USE", use), ready=None) as race:
        assert race.wait() == 0, race.errors
        assert race.lines == ["lived"]
