"""What tests of tiers share."""

import pytest
from tierdevice import Device


@pytest.fixture
def device(tmp_path):
    """Makes devices with tiers under them, and closes those at the end."""
    made = []

    def make(*args, **kwargs):
        made.append(Device(tmp_path, *args, **kwargs))
        return made[-1]

    yield make
    for d in made:
        d.gate.set()
        d.tiers.close()
