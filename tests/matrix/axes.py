"""The axes of the matrix. A cell is one value of each; it is *equal* to its oracle unless a rule of
`rules.py` matches it."""

from typing import NamedTuple

AXES = {
    "policy": (
        *("none", "context_shift", "attention_sinks", "extend_cache", "extend_paper"),
        *("h2o", "snapkv", "sparse_window"),
    ),
    "where": ("runtime", "blocks", "engine_cells", "engine_paged"),
    "rope": ("write", "read"),
    "dtype": ("f32", "bf16", "f16", "int8", "q8_0", "int4", "int2", "kivi4", "fp8"),
    "layers": (
        *("full", "window", "sink_window", "chunked", "recurrent", "shared", "latent", "produced"),
        *("full+window", "full+wide_window", "full+chunked", "full+recurrent"),
        *("window+recurrent", "full+delta"),
    ),
    "devices": ("one", "mesh"),
    "attention": ("xla", "gpu", "tpu", "sparse"),
    "state": ("plain", "session", "tiers", "prefix", "checkpoints", "chunks", "modules"),
    "decode": ("plain", "fork", "beams", "shared"),
    "programs": ("by_layer", "whole"),
}
# What each value means; docs/support.md has it in front of the tables.
MEANING = {
    "policy": "`ContextShift`, `AttentionSinks`, `SelfExtend` of kind `cache` and of kind `paper`; "
    "policies by score, of which each kv head keeps 24 to 31 tokens, and reads 16 with "
    "`sparse_window`",
    "where": "a `Runtime`, a `Runtime` whose sequence lies in blocks (`to_blocks`), an `Engine` in "
    "cell mode and one in paged mode",
    "rope": "`CacheConfig.rope`: keys are rotated when they are written, or when they are read",
    "dtype": "KV dtype of keys and values; `kivi4` is for keys by channel, with values of `f16`",
    "layers": "the groups of layers of the model: all positions, a window of 9 (or of 24: "
    "`wide_window`), the same with 2 sinks, chunks of 12, a recurrent state, or one of the gated "
    "delta rule (`delta`), all positions with a second layer that reads the keys and values of the "
    "first (`kv_of`), or with two that read those of a layer without queries, as in YOCO "
    "(`produced`), all positions with a latent, of which values are a view (`latent_rank`), and "
    "mixtures",
    "devices": "one device, or a mesh of `tensor=2,context=2`",
    "attention": "XLA, the GPU's kernel and the TPU's kernel, both interpreted, and sparse reads "
    "(`CacheConfig.select`, by labels of single cells) of 32 cells, fewer than a text has",
    "state": "nothing more; saved in a file and read into another object; blocks offloaded to the "
    "host's memory and back; a prefix hit of a second request; context checkpoints, at one of "
    "which a text that continues otherwise resumes; three chunks, blended (in an engine as a "
    "request's private prefix), of which a quarter is computed in every layer; modules of a schema "
    "at their places (`PromptCache`)",
    "decode": "a request goes on by itself; it is forked while it runs (after a drop where there "
    "is one) and the fork is sampled otherwise; it is a search of two beams; it is forked, and "
    "what both read is read once (`shared_reads`)",
    "programs": "`CacheConfig.programs`: a step as several programs, here one a layer, or as one",
}


class Cell(NamedTuple):
    """One value of every axis; the first of each is what a user gets who asks for nothing."""

    policy: str = "none"
    where: str = "runtime"
    rope: str = "write"
    dtype: str = "f32"
    layers: str = "full"
    devices: str = "one"
    attention: str = "xla"
    state: str = "plain"
    decode: str = "plain"
    programs: str = "by_layer"
    speculation: str = "none"

    def __str__(self):
        """The last one has no place among the pairs of all axes, see `drafted.py`."""
        return "-".join(self[:-1] if self.speculation == "none" else self)

    @property
    def is_engine(self):
        return self.where.startswith("engine")
