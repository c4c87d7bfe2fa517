"""The stores of the durable suites, whose time the `clock` fixture moves."""

from tests.durable.conftest import clock, sim_store

__all__ = ["clock", "sim_store"]
