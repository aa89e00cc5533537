"""The gated delta rule, one token: a matrix a head that maps keys to values and corrects itself.

    S' = Diag(exp(g)) S            what decays
    u  = beta (v - k S')           what the state does not say of this key yet
    S  = S' + k u                  is written at it
    o  = q S

Source: arXiv:2412.06464, eq. 10; with a decay for each channel of the keys arXiv:2510.26692,
sec. 3.
"""

import jax.numpy as jnp

from kvrt.arrays import Array, Float


def delta_step(
    s: Float[Array, "H K V"],
    qkv: tuple[Float[Array, "H K"], Float[Array, "H K"], Float[Array, "H V"]],
    g: Float[Array, "H"] | Float[Array, "H K"],
    beta: Float[Array, " H"],
) -> tuple[Float[Array, "H K V"], Float[Array, "H V"]]:
    """The state after one token, and what the token reads; all in float32.

    Args:
      s: the state before it.
      qkv: query, key and value by head; the rule neither scales nor norms them.
      g: logarithm of the decay, at most 0: of a head, or of each channel of its keys.
      beta: how much of the difference is written, in [0, 2].

    Returns:
      The state, and the output of each head.

    Source: arXiv:2412.06464, eq. 10.
    """
    q, k, v = qkv
    decay = jnp.exp(g.reshape(g.shape[0], -1))
    s = s * decay[:, :, None]
    u = beta[:, None] * (v - jnp.sum(k[:, :, None] * s, axis=1))
    s = s + k[:, :, None] * u[:, None, :]
    return s, jnp.sum(q[:, :, None] * s, axis=1)
