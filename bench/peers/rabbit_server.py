"""A separate RabbitMQ node, with its own data, ports, node name, cookie and port mapper."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from bench.peers import install
from bench.peers.process import Process, ProcessFailed, free_port

START_S = 60.0
POLL_S = 0.05


@contextlib.contextmanager
def running(directory: Path) -> Iterator[tuple[int, Process]]:
    """Yields the AMQP port and the process."""
    server, mapper = install.rabbit_server()
    base = directory / "rabbit"
    base.mkdir()
    port, mapped, distribution = free_port(), free_port(), free_port()
    config, plugins = base / "rabbitmq.conf", base / "enabled_plugins"
    config.write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\nlog.console = false\n")
    plugins.write_text("[].\n")
    cookie = base / ".erlang.cookie"
    cookie.write_text(secrets.token_hex(20))
    cookie.chmod(0o400)
    env = {
        "HOME": str(base),
        "ERL_EPMD_PORT": str(mapped),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": f"bench{os.getpid()}@localhost",
        "RABBITMQ_CONF_ENV_FILE": str(base / "none"),
        "RABBITMQ_CONFIG_FILE": str(config),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_MNESIA_BASE": str(base / "data"),
        "RABBITMQ_LOG_BASE": str(base / "log"),
        "RABBITMQ_PID_FILE": str(base / "pid"),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
    }
    with (
        Process([mapper, "-port", str(mapped), "-address", "127.0.0.1"], env=env, cwd=base),
        Process([server], env=env, cwd=base) as process,
    ):
        _until_up(port, process)
        yield port, process


def _until_up(port: int, process: Process) -> None:
    until = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return
        if not process.running or time.monotonic() > until:
            raise ProcessFailed(f"RabbitMQ did not start: {process.errors()}")
        time.sleep(POLL_S)
