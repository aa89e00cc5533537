"""Strict settings for every test: checked annotations, strict promotion, no network by default."""

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

_hook = install_import_hook("kvrt", "typechecker.check")


@pytest.fixture(scope="session", autouse=True)
def _typechecked():
    yield
    _hook.uninstall()
