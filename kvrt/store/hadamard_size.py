"""How many channels a Walsh-Hadamard matrix rotates together; see `hadamard.py`."""

_MOST_V = 64  # channels of a run of values


def size_k(head_dim: int, wanted: bool) -> int:
    """Channels that turn together in a key: the greatest power of two that divides a head.

    0 where it is not wanted, as for rows of float types.
    """
    return head_dim & -head_dim if wanted else 0


def size_v(head_dim: int, wanted: bool) -> int:
    """Channels that turn together in a value, 64 at most."""
    return min(size_k(head_dim, wanted), _MOST_V)
