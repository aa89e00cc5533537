"""How many channels one Hadamard transform mixes; see `hadamard.py`. Needs no JAX."""

_MOST_V = 64  # channels of a transform of values


def size_k(head_dim: int, wanted: bool) -> int:
    """Channels of a key that are transformed together: the greatest power of two in a head.

    0 where no transform is wanted, as for float types.
    """
    return head_dim & -head_dim if wanted else 0


def size_v(head_dim: int, wanted: bool) -> int:
    """Channels of a value that are transformed together, 64 at most."""
    return min(size_k(head_dim, wanted), _MOST_V)
