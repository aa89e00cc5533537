"""Engines and runtimes that the tests of several modules share, compiled as their module wants."""

import pytest

from tests.serving import engines


@pytest.fixture(scope="module", autouse=True)
def _engines_compiled_alike(_quick_compiles):
    """Optimised programs round otherwise: a module with OPTIMISED has engines of its own."""

    def forget():
        engines.engine.cache_clear()
        engines.runtime.cache_clear()

    if _quick_compiles:
        forget()
    yield
    if _quick_compiles:
        forget()
