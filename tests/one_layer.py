"""Runs of layers cut to one layer each, whose programs compile in a fraction of the time."""

from unittest import mock

from kvrt.program.layers import by_layer
from kvrt.program.layers.runs import layer_runs


def one_layer_a_program():
    """A context in which runtimes and engines by layer are made so.

    Kvrt takes five or six layers of a real model together, for fewer dispatches.
    """

    def each(layout, kinds, select, n_each=None):
        return layer_runs(layout, kinds, select, 1)

    return mock.patch.object(by_layer, "layer_runs", each)
