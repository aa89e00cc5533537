"""The matrix as data: its axes, what is refused, what is owed, and the cells of the default suite.

A cell is one value of every axis. It is *equal* to its oracle unless a rule below matches it. Rules
of kind "refused" are errors of kvrt when the object is made, "absent" what an object has no option
for; all other kinds are debts: "mid-run" (an error of kvrt after the object was made), "missing"
(issue 18 asks for it, nothing offers it), "different" (another result, without a word).
"""

import dataclasses
import itertools
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


@dataclasses.dataclass(frozen=True, eq=False)
class Rule:
    """What happens in the cells that have one of the values of every axis in `when`.

    Attributes:
      id: of the rule in tables.
      when: values by axis, separated by spaces.
      kind: refused, absent, mid-run, missing or different.
      says: a regular expression of what is said.
      why: for a reader, a line; of a refusal its reason, of a debt what happens today.
    """

    id: str
    when: dict[str, str]
    kind: str
    says: str
    why: str

    def matches(self, cell):
        return all(getattr(cell, axis) in of.split() for axis, of in self.when.items())

    def combinations(self):
        """Every choice of one value of each of its axes."""
        for values in itertools.product(*(of.split() for of in self.when.values())):
            yield dict(zip(self.when, values, strict=True))


ENGINES, RUNTIMES = "engine_cells engine_paged", "runtime blocks"
DROPS = "context_shift attention_sinks"
SCORES = "h2o snapkv sparse_window"
STATES = "recurrent full+recurrent window+recurrent full+delta"
REUSED = "chunks modules"

REFUSED = (
    Rule(
        "R2",
        {"policy": "extend_cache", "layers": "window sink_window chunked window+recurrent"},
        "refused",
        "kind 'cache' cannot reach layers that see a window of their own",
        "SelfExtend is for what lies beyond the trained length, which a window never sees",
    ),
    Rule(
        "R3",
        {"policy": "extend_cache", "layers": "full+window full+wide_window full+chunked"},
        "refused",
        "kind 'cache' cannot reach layers .* or the kind paper",
        "a window of divided positions would see more tokens than the model was trained for",
    ),
    Rule(
        "R4",
        {
            "policy": "extend_paper",
            "layers": "window sink_window chunked window+recurrent",
        },
        "refused",
        "kind 'paper' cannot reach layers that see a window of their own",
        "there is no layer whose keys could have grouped positions",
    ),
    Rule(
        "R5",
        {"policy": DROPS, "layers": STATES},
        "refused",
        "policy takes positions out of a sequence, which the state .* cannot forget; do without it",
        "a state depends on all its tokens in their order, and none can be taken out of it: each "
        'drop would compute what is kept once more; `on_states="keep"` drops in attention alone '
        "(`tests/policies/test_kept_states.py`)",
    ),
    Rule(
        "R17",
        {"policy": "extend_cache", "layers": "recurrent"},
        "refused",
        "has no positions to divide, for all layers are recurrent; do without it",
        "a state has no positions that tokens could share",
    ),
    Rule(
        "R7",
        {"policy": f"{DROPS} extend_cache", "where": "blocks"},
        "refused",
        "cannot lie in blocks, where the position is the place: .* moves positions",
        "in a block the position is the place, so that each move of positions would copy all that "
        "is behind; an Engine in paged mode has tables in its place; `to_blocks` refuses, before "
        "anything is copied",
    ),
    Rule(
        "R8",
        {"where": "blocks", "layers": "window chunked recurrent window+recurrent"},
        "refused",
        "no layer of this model keeps the cells of all positions; set swa_full",
        "windows use their cells again, so that a position has no place; `to_blocks` refuses",
    ),
    Rule(
        "R23",
        {"layers": "latent", "attention": "gpu tpu"},
        "refused",
        "read their keys from two arrays, kernels from one; use attention='chunked'",
        "a latent is values and a part of the keys, the rotated part lies in another array, and "
        "kernels take keys as one array: to join them would copy the cache in each step",
    ),
    Rule(
        "R13",
        {"dtype": "f16 q8_0 kivi4", "attention": "tpu"},
        "refused",
        "a cache or scales of f16: TPUs have no such vectors; take bf16 or int8",
        "TPUs have no vectors of float16",
    ),
    Rule(
        "R14",
        {"dtype": "int4 int2", "attention": "tpu"},
        "refused",
        "a cache of [24] bits: the TPU kernel reads f32, bf16 and int8; use",
        "their scales are float16, of which TPUs have no vectors",
    ),
    Rule(
        "R15",
        {"dtype": "fp8", "attention": "gpu tpu"},
        "refused",
        "a cache of fp8: kernels read plain floats and integers; take int8",
        "the kernels would read its bits as integers; `int8` takes as many bytes",
    ),
    Rule(
        "R24",
        {
            "state": REUSED,
            "layers": f"window chunked full+window full+wide_window full+chunked {STATES}",
        },
        "refused",
        "windowed layers that reuse cells.*; (set swa_full|append them)",
        "windows that use cells again and states hold what came before in one order, and a text "
        "that was computed alone had nothing before it; `Runtime.chunk` and `PromptCache.encode` "
        "refuse, before anything is computed",
    ),
    Rule(
        "R25",
        {"state": REUSED, "policy": "extend_cache"},
        "refused",
        "SelfExtend in the cache (gives several tokens one position.*; use|take tokens in at the)",
        "several tokens have one position, so that none of them can be computed again alone or put "
        "at its place",
    ),
    Rule(
        "R26",
        {"state": REUSED, "dtype": "kivi4"},
        "refused",
        "has one scale for several tokens, so that .*; use a KV dtype by token",
        "keys would depend on what lies beside them",
    ),
    Rule(
        "R27",
        {"state": "chunks", "policy": DROPS, "where": ENGINES},
        "refused",
        "a private prefix is found as long as nothing of it moves, and its policy or SelfExtend",
        "a request finds its blended chunks again by what it has in front of them, so they stay",
    ),
    Rule(
        "R28",
        {"policy": SCORES, "rope": "read"},
        "refused",
        "positions move, and those of tokens that .* keeps never do but with close_up",
        "positions of tokens that are kept by score never move",
    ),
    Rule(
        "R29",
        {"policy": SCORES, "dtype": "kivi4"},
        "refused",
        "share scales with their neighbours, and .* keeps some without the others; use int4",
        "keys that share a scale do not go one by one",
    ),
    Rule(
        "R30",
        {"policy": SCORES, "layers": "shared produced"},
        "refused",
        "which .* evicts before it runs, by what layer 0 alone attends to; use a policy",
        "a layer that reads what another one keeps would lose tokens that it attends to itself",
    ),
    Rule(
        "R31",
        {"policy": SCORES, "layers": "latent"},
        "refused",
        "have one cell a token for all heads, which .* chooses by head; use a policy by position",
        "a latent is one cell for all heads, and each head keeps tokens of its own",
    ),
    Rule(
        "R32",
        {"policy": SCORES, "layers": "window sink_window chunked recurrent window+recurrent"},
        "refused",
        "keeps tokens of layers that see every position, and this model has none: .* leave the",
        "windows and states forget by a rule of their own",
    ),
    Rule(
        "R33",
        {"policy": SCORES, "where": "blocks"},
        "refused",
        "no layer of this model keeps the cells of all positions; leave the policy by score out",
        "slots of a head are no cells, and no layer is left that has a block table; `to_blocks` "
        "refuses",
    ),
    Rule(
        "R34",
        {"attention": "sparse", "rope": "read"},
        "refused",
        "RoPE pairs channels and moves extremes, so unrotated keys have none; use rope='write'",
        "labels are of keys as they are stored, and RoPE mixes their channels",
    ),
    Rule(
        "R35",
        {"attention": "sparse", "dtype": "kivi4"},
        "refused",
        "kivi4 keys share scales by cells and have a tail elsewhere; use keys of another type",
        "a tail of keys lies in another array, and cells are read one by one",
    ),
    Rule(
        "R36",
        {"attention": "sparse", "layers": "latent"},
        "refused",
        "a latent is one key for all heads, which is read once anyway; leave select out",
        "cells are chosen for each kv head, and a latent has one for all",
    ),
    Rule(
        "R37",
        {"attention": "sparse", "layers": "window sink_window chunked recurrent window+recurrent"},
        "refused",
        "layers that see all of them, and this model has none .* leave select out",
        "windows and states read little already",
    ),
    Rule(
        "R38",
        {"attention": "sparse", "policy": SCORES},
        "refused",
        "choose among all tokens, and .* keeps but some; use one of the two",
        "what a policy by score has evicted cannot be chosen",
    ),
    Rule(
        "R39",
        {"attention": "sparse", "devices": "mesh"},
        "refused",
        "needs labels of all cells on one device; leave mesh out",
        "devices would choose among their own cells",
    ),
    Rule(
        "R40",
        {
            "attention": "sparse",
            "where": "engine_paged",
            "layers": "full+window full+wide_window full+chunked",
        },
        "refused",
        "in blocks this model's layers share arrays; use cells",
        "layers with a window and without share an array, of which labels would be of one",
    ),
    Rule(
        "R42",
        {"attention": "sparse", "policy": "extend_paper"},
        "refused",
        "compares distant keys at grouped ones; leave select out, or use kind='cache'",
        "labels are of some channels of keys at exact positions, and the rotation to a grouped one "
        "mixes each channel with one that a label may lack, or moves its extremes",
    ),
    Rule(
        "R41",
        {"state": REUSED, "policy": SCORES},
        "refused",
        "policies by score .*; .* leave the policy out",
        "what slots of a head hold came in one order, as a state does: no token in the middle can "
        "be put or computed again",
    ),
    Rule(
        "N1",
        {"where": RUNTIMES, "state": "tiers"},
        "absent",
        "unexpected keyword argument 'tiers'",
        "a Runtime has no tiers: its sequences go to sessions",
    ),
    Rule(
        "N2",
        {"where": RUNTIMES, "state": "prefix"},
        "absent",
        "unexpected keyword argument 'prefix_cache'",
        "a Runtime has no requests that could hit; `kvrt.reuse` plans what a prompt reuses",
    ),
    Rule(
        "N3",
        {"where": RUNTIMES, "decode": "fork beams shared"},
        "absent",
        "unexpected keyword argument 'decode'",
        "a Runtime has no requests; its `seq_cp` shares a sequence, and searches are an Engine's",
    ),
    Rule(
        "N4",
        {"where": ENGINES, "state": "modules"},
        "absent",
        "unexpected keyword argument 'modules'",
        "a `PromptCache` is of a Runtime; requests share what they begin with by the prefix cache",
    ),
)

# Nothing is owed now; what is goes here.
DEBTS: tuple[Rule, ...] = ()
RULES = REFUSED + DEBTS
