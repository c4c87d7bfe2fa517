import pytest

from tests.roles.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
