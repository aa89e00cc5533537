"""Edits by llama.cpp's names and order of arguments, as tests are shorter to read with."""

from kvrt.cells import Copy, Divide, Keep, Remove, Shift


class NamedEdits:
    """Applies edits to parts of a cache by the part's `apply`."""

    def __init__(self, apply):
        self._apply = apply

    def rm(self, part, seq_id, p0=0, p1=None):
        return self._apply(part, Remove(seq_id=seq_id, p0=p0, p1=p1))

    def cp(self, part, src, dst, p0=0, p1=None):
        return self._apply(part, Copy(src=src, dst=dst, p0=p0, p1=p1))

    def keep(self, part, seq_id):
        return self._apply(part, Keep(seq_id=seq_id))

    def add(self, part, seq_id, p0, p1, d):
        return self._apply(part, Shift(seq_id=seq_id, p0=p0, p1=p1, d=d))

    def div(self, part, seq_id, p0, p1, d):
        return self._apply(part, Divide(seq_id=seq_id, p0=p0, p1=p1, d=d))


def alone(apply):
    """An `apply` that returns the part without the cells to copy."""
    return lambda part, edit: apply(part, edit)[0]
