"""Engines and runtimes that the tests of several modules share, on the device of their module."""

import pytest

from tests.serving import engines


@pytest.fixture(scope="module", autouse=True)
def _engines_of_one_module():
    """Optimised programs round otherwise, and some modules have devices in NumPy."""
    yield
    engines.engine.cache_clear()
    engines.runtime.cache_clear()
