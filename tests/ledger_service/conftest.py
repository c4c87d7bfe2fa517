"""The ledger services of these tests come from a fork server, except in tests of their start."""

from collections.abc import Iterator

import pytest

from tests.forked_services import forked_services, spawned_services

# Tests of the start and the reuse of services.
SPAWNING_FILES = ("test_service_reuse.py",)


@pytest.fixture(scope="module", autouse=True)
def _services(request: pytest.FixtureRequest) -> Iterator[None]:
    how = spawned_services if request.path.name in SPAWNING_FILES else forked_services
    with how():
        yield
