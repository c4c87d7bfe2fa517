import pytest

from tests.runner.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()
