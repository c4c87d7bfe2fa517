"""The tests as a package: suites and `python -m` programs import `tests.processes`."""
