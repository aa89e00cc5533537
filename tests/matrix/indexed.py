"""Cells whose queries read few tokens by an indexer (DeepSeek-V3.2), beside the pairs of all axes.

The value `indexed` of the axis `layers` is that of `latent` with index keys. The cells have between
them every place, policy, frame of keys, KV dtype, state and way to decode that is not refused, and
drafts.
"""

import functools

from tests.matrix.axes import Cell

whole = functools.partial(Cell, programs="whole", layers="indexed")
INDEXED = (
    whole("context_shift", "engine_cells"),
    Cell("context_shift", dtype="f16", layers="indexed", state="session"),
    Cell("context_shift", layers="indexed", state="checkpoints"),
    Cell("extend_cache", "engine_cells", "read", "int4", "indexed", state="prefix", decode="beams"),
    Cell("attention_sinks", "engine_cells", dtype="bf16", layers="indexed", decode="fork"),
    Cell("attention_sinks", dtype="int8", layers="indexed"),
    whole(where="blocks", dtype="q8_0", state="modules"),
    Cell(rope="read", dtype="int2", layers="indexed"),
    Cell("attention_sinks", "engine_paged", layers="indexed", state="tiers"),
    Cell("context_shift", "engine_paged", dtype="int4", layers="indexed", state="checkpoints"),
    Cell("extend_cache", "engine_paged", "read", layers="indexed", decode="fork"),
    whole(where="engine_paged", dtype="int8", state="prefix", decode="beams"),
    Cell(where="engine_paged", layers="indexed", state="prefix", speculation="ngram"),
    Cell(where="engine_paged", dtype="bf16", layers="indexed", state="session"),
    Cell(layers="indexed", speculation="ngram"),
    Cell("context_shift", dtype="int8", layers="indexed", state="chunks"),
    Cell(where="engine_paged", rope="read", layers="indexed", state="chunks"),
)
# Refused when the object is made.
NOT_INDEXED = (
    Cell(where="engine_cells", layers="indexed", decode="shared"),
    Cell(dtype="int8", layers="indexed", speculation="ngram"),
    Cell("extend_paper", rope="read", layers="indexed"),
    Cell(dtype="kivi4", layers="indexed"),
    Cell(layers="indexed", attention="gpu"),
)
