"""What jaxlib 0.10.2 computes wrongly is found wherever a program is compiled as users have it.

In such modules, of which this is one, conftest.py searches every program: those of small runtimes
and engines of all KV dtypes, and of real models. `scripts.soak` does so as well.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import xla_defects

OPTIMISED = True
affected = pytest.mark.skipif(not xla_defects.FUSED_SUMS, reason="jaxlib 0.10.2 alone")


def lengths(points):
    return jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(points)


def seven(a, b):
    return jnp.sum(a * b, axis=3)


def lowered(function, *shapes):
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes))


@affected
def test_a_product_that_is_summed_in_one_piece_is_found():
    with pytest.raises(xla_defects.DefectiveProgram, match=r"sums a product .*39103"):
        lowered(lengths, (2000, 3)).compile()  # sums of fewer numbers are no business of YNNPACK


@affected
def test_a_piece_of_seven_dimensions_is_found():
    """Compiled and never run: it would hang or end the process."""
    shape = (3, 1, 2, 2, 8, 8, 8)
    with pytest.raises(xla_defects.DefectiveProgram, match=r"has 7 dimensions .*39257"):
        lowered(seven, shape, shape).compile()
    lowered(seven, shape[3:], shape[3:]).compile()


@affected
def test_what_is_found_is_wrong():
    """When this fails, jaxlib computes it right, and the search can go."""
    n = 32_769
    points = jnp.zeros((n, 3)).at[:, 0].set(jnp.arange(n, dtype=jnp.float32))
    wanted = np.arange(n, dtype=np.float32) ** 2
    wrong = np.flatnonzero(np.asarray(jax.jit(lengths)(points)) != wanted)
    assert wrong.tolist() == [n - 1]
