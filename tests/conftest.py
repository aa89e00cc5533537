"""Strict settings for every test: checked annotations, strict promotion, no network by default."""

import hypothesis
import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile programs of their own: a first one takes seconds, whatever the machine.
hypothesis.settings.register_profile("kvrt", deadline=None)
hypothesis.settings.load_profile("kvrt")

_hook = install_import_hook("kvrt", "typechecker.check")


@pytest.fixture(scope="session", autouse=True)
def _typechecked():
    yield
    _hook.uninstall()


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles(request):
    """Most tests compare numbers, and programs without optimisation give them in half the time.

    Tests of the model marker want speed, and a module with OPTIMISED looks at the programs.
    """
    marks = getattr(request.module, "pytestmark", [])
    marks = marks if isinstance(marks, list) else [marks]
    wanted = getattr(request.module, "OPTIMISED", False) or any(m.name == "model" for m in marks)
    jax.config.update("jax_disable_most_optimizations", not wanted)
