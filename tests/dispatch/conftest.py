"""The store fixtures of the durable suites. The `clock` fixture sets their time."""

from tests.durable.conftest import clock, sim_store

__all__ = ["clock", "sim_store"]
