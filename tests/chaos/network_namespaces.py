"""Test machines: network namespaces on a switch, with links that can be cut.

    with Switch() as switch:
        switch.machine("a").command(["holdfast", "up", …])
        switch.machine("a").cut()

The switch is a namespace with a bridge, where the server runs. Each machine is a namespace with a veth pair to the
bridge. A cut takes down the switch's end of the pair: packets are lost in both directions without a reset, and
connections stay open until a time-out. All machines share files and Unix sockets. This needs root and changes
nothing outside of the namespaces.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from typing import Self

from tests.processes import require_programs

RUN_S = 20.0
NETWORK = "10.213.77"
SERVER_ADDRESS = f"{NETWORK}.1"


class Machine:
    def __init__(self, switch: Switch, name: str, number: int) -> None:
        self.name = name
        self.namespace = f"{switch.name}-{name}"
        self.address = f"{NETWORK}.{number + 10}"
        self._switch = switch.namespace
        self._port = f"p{number}"

    def command(self, args: Sequence[str]) -> list[str]:
        """The command line that runs `args` on the machine."""
        return ["ip", "netns", "exec", self.namespace, *args]

    def cut(self) -> None:
        """Take down the link."""
        _ip(f"-n {self._switch} link set {self._port} down")

    def heal(self) -> None:
        _ip(f"-n {self._switch} link set {self._port} up")

    def plug(self) -> None:
        """Create the namespace, its link to the switch, and its address."""
        _ip(f"netns add {self.namespace}")
        _ip(
            f"-n {self._switch} link add {self._port} type veth peer name eth0 netns {self.namespace}"
        )
        _ip(f"-n {self._switch} link set {self._port} master hub up")
        _ip(f"-n {self.namespace} address add {self.address}/24 dev eth0")
        for device in ("lo", "eth0"):
            _ip(f"-n {self.namespace} link set {device} up")


class Switch:
    def __init__(self) -> None:
        require_programs("ip")
        assert os.geteuid() == 0, "network namespaces need root: run the tests as root"
        self.name = f"hf{os.getpid()}"
        self.namespace = f"{self.name}-hub"
        self._machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        _ip(f"netns add {self.namespace}")
        try:
            _ip(f"-n {self.namespace} link add hub type bridge forward_delay 0")
            _ip(f"-n {self.namespace} address add {SERVER_ADDRESS}/24 dev hub")
            for device in ("lo", "hub"):
                _ip(f"-n {self.namespace} link set {device} up")
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._remove()

    def machine(self, name: str) -> Machine:
        if name not in self._machines:
            made = self._machines[name] = Machine(self, name, len(self._machines))
            made.plug()
        return self._machines[name]

    @property
    def prefix(self) -> list[str]:
        """The prefix of a command that runs in the server's namespace."""
        return ["ip", "netns", "exec", self.namespace]

    def _remove(self) -> None:
        for namespace in (*(one.namespace for one in self._machines.values()), self.namespace):
            with contextlib.suppress(AssertionError):
                _ip(f"netns del {namespace}")


def _ip(arguments: str) -> None:
    done = subprocess.run(["ip", *arguments.split()], capture_output=True, timeout=RUN_S)
    assert done.returncode == 0, f"ip {arguments}: {done.stderr.decode(errors='replace')}"
