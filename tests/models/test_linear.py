"""Products with weights: the same in every form that they take, by rows and by type."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt_models.layers import linear


@pytest.mark.parametrize("n", [1, 2, 16, 64, 65])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_a_product_is_that_of_wide_numbers(dtype, n):
    compare(dtype, n, 48)


@pytest.mark.parametrize("n_inputs", [1, 16, 33, 40, 576])
def test_one_token_with_float16_weights_of_any_width(n_inputs):
    """Sums in lanes where the inputs fill registers (16, 576), a plain sum elsewhere."""
    compare(np.float16, 1, n_inputs)


def compare(dtype, n, n_inputs):
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, n_inputs)).astype(np.float32)
    weight = jnp.asarray(rng.standard_normal((80, n_inputs)), dtype)
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
