"""Which tokens the layers of a sequence keep that keep them by score."""

import numpy as np

from kvrt.arrays import Int32
from kvrt.attention.scored.split import positions_kept
from kvrt.cache.cell_cache import CellCache

KeptPositions = dict[int, tuple[Int32[np.ndarray, " _"], ...]]


def kept_positions(cache: CellCache, seq_id: int) -> KeptPositions:
    """By layer and kv head the positions kept, ascending; nothing where no layer chooses."""
    layout, states = cache.device.layout, cache.host.states
    kept = states.kept.get(cache.check_seq_id(seq_id), ()) if states else ()
    if not layout.scored or layout.recurrent is None or not kept:
        return {}
    held = cache.device.take_state(kept[-1][1])
    arrays = dict(zip(layout.recurrent.layers, held, strict=True))
    out: KeptPositions = {}
    for scored in layout.scored:
        for layer, spec in zip(scored.group.layers, scored.slots, strict=True):
            # sync: positions are chosen on the device.
            out[layer] = positions_kept(spec, arrays[layer])
    return out
