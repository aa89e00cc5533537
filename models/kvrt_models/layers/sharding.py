"""How a mesh divides each weight: the products of a layer in pairs, by outputs and then by inputs.

So the devices exchange what a layer gives to the residual stream, and nothing within it.

Source: arXiv:1909.08053, sec. 3.
"""

from jax.sharding import PartitionSpec as P

from kvrt.attention.contract import ParamPath

# The module that has a weight [..., O, I] says whether devices divide its outputs or its inputs.
_BY_OUTPUT = ("qkv", "gate_up", "gate", "up", "projection", "embedding", "output")
_BY_INPUT = ("out", "down")


def partition(path: ParamPath, n_axes: int) -> P:
    """How a parameter at this path of a decoder is divided; norms, biases and routers are whole."""
    if n_axes < 2 or "bias" in path:
        return P()
    if "scale" in path:
        # Of a matrix of eight bits [..., G, O, g], whose groups are whole on every device.
        by_output = any(name in _BY_OUTPUT for name in path)
        return P(*[None] * (n_axes - 1), "tensor") if by_output else P()
    for names, axis in ((_BY_OUTPUT, -2), (_BY_INPUT, -1)):
        if any(name in names for name in path):
            return P(*[None] * (n_axes + axis), "tensor")
    return P()
