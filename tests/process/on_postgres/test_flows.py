"""Flows in real processes on PostgreSQL: workers are killed and stopped, and the server is restarted without a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pgcluster import USER, ClusterServer, PostgresCluster
from tests.process.test_flows_killed import (
    DEEP_FLOWS,
    FaultPlan,
    call_port,
    port,
    run_plan,
)

__all__ = ["call_port", "port"]

PLANS = [
    pytest.param(FaultPlan(20, kills=2, stops=1, outages=1), id="short", marks=pytest.mark.slow),
    pytest.param(FaultPlan.of(DEEP_FLOWS), id="whole", marks=pytest.mark.deep),
]


@pytest.fixture
def server() -> Iterator[ClusterServer]:
    with PostgresCluster(standby=False) as cluster:
        yield cluster.primary


@pytest.mark.timeout(300 + 3 * DEEP_FLOWS)
@pytest.mark.parametrize("plan", PLANS)
def test_flows_end_once_when_workers_are_killed_and_the_server_restarts(
    server: ClusterServer, port: int, plan: FaultPlan
) -> None:
    """X1, X2: no step is repeated without a fault, no stale worker records anything, every flow ends once."""
    with server.admin() as connection:
        connection.execute("CREATE DATABASE flows")
    url = f"postgresql://{USER}@{server.host}:{server.port}/flows"
    try:
        run_plan(plan, url, port, lambda: restart(server))
    except BaseException:
        print_sessions(server)
        raise


def print_sessions(server: ClusterServer) -> None:
    """Print the sessions of the server with their locks, to find the holder of the commit lock."""
    query = """
        SELECT a.pid, a.client_port, a.state, a.wait_event, now() - a.state_change, left(a.query, 80),
               array_agg(l.locktype || ' ' || l.mode || ' ' || l.granted) FILTER (WHERE l.locktype = 'advisory')
        FROM pg_stat_activity a LEFT JOIN pg_locks l USING (pid)
        WHERE a.datname = 'flows' GROUP BY 1, 2, 3, 4, 5, 6
    """
    with server.admin() as connection:
        for row in connection.execute(query):
            print(*row)


def restart(server: ClusterServer) -> None:
    server.stop(immediate=True)
    server.start()
