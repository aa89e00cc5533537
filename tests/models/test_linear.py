"""Products with weights: the same in every form that they take, by rows and by type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt_models.layers import linear


@pytest.mark.parametrize("n", [1, 2, 16, 64, 65])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_product_is_that_of_wide_numbers(dtype, n):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, 48)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((80, 48)), dtype)
    found = jax.jit(linear.linear)(x, weight)
    assert found.dtype == np.float32
    wide = np.asarray(weight, np.float64)
    rounded = np.asarray(jnp.asarray(x, dtype), np.float64)
    # One row is multiplied without being rounded.
    wanted = (x.astype(np.float64) if n == 1 else rounded) @ wide.T
    np.testing.assert_allclose(np.asarray(found), wanted, atol=2e-5)


def test_few_rows_have_the_matrix_first():
    """Where the compiler does not exchange both sides again."""

    def dots(n):
        weight = jnp.zeros((80, 48))
        text = jax.jit(linear.linear).lower(jnp.zeros((n, 48)), weight).compile().as_text()
        return [line for line in text.splitlines() if " dot(" in line or "dot_" in line]

    assert any("f32[80,16]" in line for line in dots(16))
    assert not any("f32[80,128]" in line for line in dots(128))
