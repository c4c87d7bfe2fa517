"""The tests, as a package: `tests.processes` is imported by suites and by `python -m`."""
