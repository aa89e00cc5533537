"""Every field of every configuration: it changes the fingerprint, or no result depends on it.

A field without a line here fails. Sessions, libraries, chunks and tiers are told apart by the
fingerprint, results of `kvrt batch` by the digests of `kvrt.cli.batch.digest`.
"""

import dataclasses
import json

import pytest
from flag_samples import NEEDS, expected

import kvrt
from kvrt import (
    AttentionSinks,
    BlendSpec,
    CacheConfig,
    ContextShift,
    DoubleSparsity,
    EngineConfig,
    GroupSpec,
    Indexed,
    MaskSpec,
    MeshSpec,
    QueryTemperature,
    Quest,
    RecurrentSpec,
    RopeSpec,
    Rules,
    Sampling,
    SelfExtend,
    SessionDir,
    Speculation,
    StateArray,
    TierConfig,
)
from kvrt.attention.scored.layers import ScoredGroup, by_kind
from kvrt.attention.scored.spec import SlotSpec
from kvrt.cli.batch import requests
from kvrt.cli.batch.digest import Basis, Digests
from kvrt.cli.batch.requests import Parser
from kvrt.cli.flags.serving import BatchOptions
from kvrt.errors import BadConfig
from kvrt.options.option import flags_of
from kvrt.policies.scored import (
    H2O,
    SCORED,
    TOVA,
    DuoAttention,
    ExpectedAttention,
    Keyformer,
    SnapKV,
    SparseWindow,
)
from kvrt.policies.scored.kvzip import Repetition
from kvrt.runtime.heavy_channels import write_channels
from kvrt.session import fingerprint

ROPE = RopeSpec(
    n_rot=8, scaling="longrope", n_ctx_orig=64, short_factors=(1.0,) * 4, long_factors=(2.0,) * 4
)
GROUP = GroupSpec(layers=(0, 1), n_kv_heads=2, head_dim=16, rope=ROPE)
CONFIG = CacheConfig(n_ctx=256, type_k="int8", type_v="int8")


def digest(group=GROUP, config=CONFIG, recurrent=None, policy=None, identity=None):
    found = fingerprint.describe((group,), recurrent, config, 50, "w", identity or {})
    if policy is None:
        return fingerprint.digest(found)
    types = {"type_k": config.type_k, "type_v": config.type_v, "n_ctx": 0}
    budgets = policy.budgets(len(group.layers))
    slots = tuple(SlotSpec(group=group, policy=policy, budget=n, **types) for n in budgets)
    scored = [ScoredGroup(group=group, slots=slots)]
    return fingerprint.digest(fingerprint.with_scored(found, scored, config))


LATENT = GroupSpec(
    layers=(0, 1), n_kv_heads=1, head_dim=16, latent_rank=8, scale=0.25, rope=RopeSpec(n_rot=8)
)
INDEXED = Indexed(n_cells=4, keys_of=((0, 2), (1, 3)))
SIZES = {"budget": 64, "n_sink": 4, "n_recent": 8, "interval": 16}
OF_ALL = {"budget": 72, "n_sink": 5, "n_recent": 9, "interval": 17, "pyramid": 1.5}
OF_ALL |= {"head_share": 0.5, "close_up": True}
# By policy, other values of what it has beside these.
OWN = {
    H2O: {"normalised": True},
    SnapKV: {"window": 9, "kernel": 7},
    ExpectedAttention: {"n_future": 9, "epsilon": 0.5},
    Keyformer: {"tau": 1.5, "tau_end": 3.0, "n_anneal": 99, "seed": 1},
    SparseWindow: {"score_horizon": 9, "n_read": 32, "refresh_every": 8},
    SCORED["random_tokens"]: {"seed": 1},
    DuoAttention: {"streaming": ((0,),), "n_stream": 20},
}
BASE_OF_POLICY = {
    SnapKV: {"window": 8},
    SparseWindow: {"n_read": 48, "refresh_every": 16, "n_recent": 24},
    DuoAttention: {"streaming": ((1,),), "n_stream": 24},
    Repetition: {"n_prompt": 4},
}
# Values that a policy refuses, so that no cache has them.
REFUSED = {TOVA: {"head_share"}, DuoAttention: {"pyramid", "head_share"}}
REFUSED |= {SparseWindow: {"close_up"}}  # with n_read
POLICIES = [*SCORED.values(), DuoAttention]

# By class: a value, its digest, and another value of each field that changes that.
CHANGES = {
    RopeSpec: (
        ROPE,
        lambda x: digest(dataclasses.replace(GROUP, rope=x)),
        {
            **{"base": 5e5, "layout": "norm", "scaling": "dynamic_ntk", "factor": 2.0},
            **{"n_ctx_orig": 32, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
            **{"freq_factors": (2.0,) * 4, "short_factors": (3.0,) * 4},
            **{"long_factors": (3.0,) * 4, "beta_fast": 9.0, "beta_slow": 2.0},
            **{"truncate": False, "magnitude": 0.5},
        },
    ),
    MaskSpec: (
        MaskSpec(kind="window", size=8),
        lambda x: digest(dataclasses.replace(GROUP, mask=x)),
        {"kind": "chunked", "size": 9, "n_sink": 2},
    ),
    QueryTemperature: (
        QueryTemperature(floor_scale=8.0, attn_scale=0.5),
        lambda x: digest(dataclasses.replace(GROUP, temperature=x)),
        {"floor_scale": 4.0, "attn_scale": 0.25},
    ),
    GroupSpec: (
        GROUP,
        digest,
        {
            **{"layers": (0, 2), "n_kv_heads": 4, "head_dim": 32, "rope": None, "scale": 0.5},
            **{"mask": MaskSpec(kind="window", size=8), "soft_cap": 30.0, "kv_of": ((2, 1),)},
            **{"temperature": QueryTemperature(floor_scale=8.0, attn_scale=0.5)},
        },
    ),
    Indexed: (
        INDEXED,
        lambda x: digest(dataclasses.replace(LATENT, indexed=x)),
        {"n_cells": 8, "keys_of": ((0, 3), (1, 4))},
    ),
    RecurrentSpec: (
        RecurrentSpec(layers=(2,), shapes=((4,),)),
        lambda x: digest(recurrent=x),
        {"layers": (3,), "shapes": ((5,),)},
    ),
    StateArray: (
        StateArray(shape=(4,)),
        lambda x: digest(recurrent=RecurrentSpec(layers=(2,), by_layer=((x,),))),
        {"shape": (5,), "dtype": "int32"},
    ),
    SelfExtend: (
        SelfExtend(ga_n=2, ga_w=8),
        lambda x: digest(config=CacheConfig(self_extend=x)),
        {"ga_n": 4, "ga_w": 16, "kind": "paper"},
    ),
    CacheConfig: (
        CONFIG,
        lambda x: digest(config=x),
        {
            **{"type_k": "int4", "type_v": "int4", "hadamard": True, "rope": "read"},
            **{"self_extend": SelfExtend(ga_n=2, ga_w=8), "n_ctx": 512},
        },
    ),
    EngineConfig: (
        EngineConfig(),
        lambda x: digest(identity=x.identity),
        {"identity": {"arch": "other"}},
    ),
}
CHANGES |= {
    kind: (
        kind(**SIZES | BASE_OF_POLICY.get(kind, {})),
        lambda x: digest(policy=x),
        {k: x for k, x in OF_ALL.items() if k not in REFUSED.get(kind, ())}
        | OWN.get(kind, {})
        | ({"pyramid": 1.1} if kind is SparseWindow else {}),
    )
    for kind in POLICIES
}
# Fields that only go together with another one, tried by themselves.
TOGETHER = {
    RopeSpec: {"n_rot": (RopeSpec(n_rot=8), 4)},
    GroupSpec: {"latent_rank": (LATENT, 4), "indexed": (LATENT, INDEXED)},
    RecurrentSpec: {
        "by_layer": (
            RecurrentSpec(layers=(2,), by_layer=((StateArray(shape=(4,)),),)),
            ((StateArray(shape=(4,), dtype="int32"),),),
        )
    },
}

WHERE = "where a token lies, and with whom, changes none of its values"
WHEN = "who is served when, and what is computed again, changes no result"
ROUNDING = "sums are taken in another order; last bits differ, as between two machines"
BACK = "how far back a sequence can be cut; what was cut is computed again"
ROOM = "how much is kept, how long and where"
SAMPLED = "of what is sampled, not of what is cached; results have it in their digest"
DROPS = "what a drop moved is found by no other request; any policy continues a session"
INEXACT = "tokens computed so are marked; sessions say how, and no other text takes them"
NO_EFFECT = {
    CacheConfig: {
        "tiers and what is quantized with whom add it, see below": ("block_size",),
        WHERE: ("n_seq_max", "defrag_threshold"),
        ROUNDING: ("n_ubatch", "attention", "programs"),
        BACK: (
            *("swa_full", "n_rs_seq", "n_checkpoints", "checkpoint_interval"),
            "checkpoint_bytes",
        ),
        INEXACT: ("select", "on_states"),
    },
    EngineConfig: {
        WHERE: ("mode",),
        "tiers add it where keys are quantized by channel": ("hash_block_size",),
        WHEN: ("rules", "prefix_cache", "run_ahead"),
        ROOM: ("tiers", "sessions", "budget_bytes"),
        "a request that looks further back is refused": ("n_recent",),
        ROUNDING: ("shared_reads",),
        "drafts are verified by the model": ("speculation",),
    },
    TierConfig: {ROOM: ("host_bytes", "disk", "disk_bytes", "policy", "always")},
    Rules: {
        WHEN: (
            *("n_batch", "n_ctx_seq", "n_chunk", "order", "n_wait", "preempt", "admit"),
            *("by_prefix", "n_alike"),
        )
    },
    SessionDir: {ROOM: ("path", "tell")},
    MeshSpec: {ROUNDING: ("tensor", "context")},
    Speculation: {"drafts are verified by the model": ("drafter", "n_draft")},
    Quest: {INEXACT: ("n_cells", "n_sink", "n_recent", "n_dense")},
    DoubleSparsity: {
        INEXACT: (
            *("n_cells", "n_sink", "n_recent", "n_dense", "channels", "weights", "label_type"),
            "by_cell",
        )
    },
    BlendSpec: {INEXACT: ("ratio", "check_layer", "rule", "auto_ratio")},
    ContextShift: {DROPS: ("n_keep", "n_discard")},
    AttentionSinks: {DROPS: ("n_sink", "n_window", "n_drop")},
    Sampling: {SAMPLED: tuple(f.name for f in dataclasses.fields(Sampling))},
}


# What is asked of one text, whose results `kvrt batch` knows by its keys, see below.
ASKED = {"After", "BeamSpec", "GenerationSpec", "PrivatePrefix", "Request"}
# Parts of drafters: drafts are verified by the model.
DRAFTS = {"DraftContext", "DraftModel", "LayerSkip", "PromptLookup"}
# What a call gives, or a model is given, beside the bases of `Quest` and of policies by score.
VALUES = {
    *("AttentionChoice", "Blended", "BlockView", "CachedChunk", "Cells", "CheckpointUse"),
    *("DropEvent", "EngineStats", "LayerAttention", "LayerKV", "LostCheckpoint", "Pin"),
    *("PlacedModule", "PlacedSchema", "PoolUse", "ResumePositions", "Select", "SeqView"),
    *("KeptChunk", "Recomputed", "Restored", "ReusePlan", "ScoredPolicy"),
    *("Served", "Stats", "TierUse", "Token", "TokenQKV"),
}


def test_every_public_dataclass_is_listed():
    public = {x for x in kvrt.__all__ if dataclasses.is_dataclass(getattr(kvrt, x))}
    listed = {kind.__name__ for kind in [*CHANGES, *NO_EFFECT]}
    assert public - listed == ASKED | DRAFTS | VALUES


def fields_of(kind):
    return {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", [*CHANGES, *NO_EFFECT], ids=lambda kind: kind.__name__)
def test_every_field_is_listed_once(kind):
    changing = [*(CHANGES[kind][2] if kind in CHANGES else ()), *TOGETHER.get(kind, ())]
    silent = [name for names in NO_EFFECT.get(kind, {}).values() for name in names]
    listed = [*changing, *silent, *REFUSED.get(kind, ())]
    assert sorted(listed) == sorted(fields_of(kind))


@pytest.mark.parametrize("kind", CHANGES, ids=lambda kind: kind.__name__)
def test_each_field_changes_the_fingerprint(kind):
    base, of, others = CHANGES[kind]
    for name, other in others.items():
        assert of(dataclasses.replace(base, **{name: other})) != of(base), name
    for name, (pair, other) in TOGETHER.get(kind, {}).items():
        assert of(dataclasses.replace(pair, **{name: other})) != of(pair), name


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_policy_refuses_needs_no_place(kind):
    base, config = CHANGES[kind][0], dataclasses.replace(CONFIG, type_k="f32", type_v="f32")
    for name in REFUSED[kind]:
        with pytest.raises(BadConfig):
            policy = dataclasses.replace(base, **{name: OF_ALL[name]})
            by_kind([GROUP], None, config, policy, {})


def test_fields_without_effect_leave_the_fingerprint_as_it_is():
    """Else sessions would be refused for what changes none of their values."""
    others = {
        **{"block_size": 64, "n_seq_max": 4, "defrag_threshold": 0.5, "n_ubatch": 64},
        **{
            "attention": "reference",
            "programs": "whole",
            "swa_full": True,
            "n_rs_seq": 2,
            "n_checkpoints": 2,
        },
        **{"checkpoint_interval": 64, "checkpoint_bytes": 1 << 20, "select": Quest(n_cells=80)},
        "on_states": "keep",
    }
    assert set(others) == {x for names in NO_EFFECT[CacheConfig].values() for x in names}
    base = dataclasses.replace(CONFIG, n_checkpoints=4, n_ubatch=32)
    for name, other in others.items():
        assert digest(config=dataclasses.replace(base, **{name: other})) == digest(), name


# --- results of kvrt batch -------------------------------------------------------------------

LINE = {"id": "a", "prompt": "x"}
MODEL = "smollm2-135m"  # its digest is pinned: nothing is fetched
DUO = {"policy": "duo_attention", "streaming_heads": "[[1]]"}
SHIFT = {"policy": "context_shift"}
CHANNELS = {"select": "double_sparsity", "select_channels": "channels.json"}
# By flag, another value, and the flags that it says something with.
FLAGS = {
    "model": ("gemma3-270m", {}),
    **{name: ("f16", {}) for name in ("dtype", "cache_type_k", "cache_type_v")},
    "hadamard": (True, {}),
    "rope": ("read", {}),
    "attention": ("pallas_gpu", {}),
    **{"n_predict": (9, {}), "ignore_eos": (True, {}), "stop": (("x",), {}), "chat": (True, {})},
    **{"temp": (0.5, {}), "top_k": (9, {}), "top_p": (0.5, {}), "min_p": (0.5, {})},
    **{"repeat_penalty": (1.5, {}), "repeat_last_n": (9, {}), "seed": (9, {})},
    **{"select": ("quest", {}), "select_channels": ("other.json", CHANNELS)},
    **{name: (9, {"select": "quest"}) for name in ("select_cells", "select_sink")},
    **{name: (9, {"select": "quest"}) for name in ("select_recent", "select_dense")},
    **{"select_labels": ("int4", CHANNELS), "select_by_cell": (True, CHANNELS)},
    **{"policy": ("h2o", {}), "keep": (9, SHIFT), "n_discard": (9, SHIFT), "n_ctx": (512, SHIFT)},
    **{name: (9, {"policy": "attention_sinks"}) for name in ("n_sink", "n_window", "n_drop")},
    **{name: (128, SHIFT) for name in ("n_ctx_seq", "n_batch")},
    **{"policy_budget": ("99", {"policy": "h2o"}), "policy_interval": (9, {"policy": "h2o"})},
    **{"streaming_heads": ("[[0]]", DUO), "n_stream": (99, DUO)},
    "n_read": (96, {"policy": "sparse_window"}),
    "close_up": (True, {"policy": "h2o"}),
    "refresh_every": (16, {"policy": "sparse_window", "n_read": 96}),
    "grp_attn_n": (2, {}),
    **{name: (256, {"grp_attn_n": 2}) for name in ("grp_attn_w",)},
    "self_extend": ("paper", {"grp_attn_n": 2}),
    "window_sinks": (4, {}),
    "block_size": (64, {"cache_type_k": "kivi4", "block_size": 32}),
    "hash_block_size": (32, {"cache_type_k": "kivi4", "block_size": 64}),
}
FILES = "files that a command reads and writes, by their content where it counts"
WORDS = "what a command says"
BLENDED = "of lines with chunks, tried below"
BATCH_NO_EFFECT = {
    FILES: ("input", "output", "restart", "metrics", "chunk_dir", "session_dir"),
    WORDS: ("stats", "quiet"),
    WHERE: ("mode", "defrag_thold"),
    BACK: ("swa_full", "n_checkpoints", "checkpoint_interval", "checkpoint_bytes"),
    WHEN: (
        *("n_seq_max", "prefix_cache", "salt", "group_by_prefix", "n_alike", "order", "n_wait"),
        *("n_chunk", "admit", "preempt"),
    ),
    ROOM: (
        *("budget", "host_cache", "disk_cache", "disk_cache_size", "eviction_policy"),
        "always_load",
    ),
    ROUNDING: (
        *("shared_reads", "mesh", "coordinator", "n_processes", "process_id", "draft"),
        "n_draft",
    ),
    "a request that looks further back is refused": ("n_recent",),
    BLENDED: ("ratio", "check_layer"),
    "a damaged chunk is computed again, with the same values": ("strict",),
}


def basis(flags, line=LINE):
    """Of a line's results: but for the limits, which matter to errors alone."""
    flags = {"model": MODEL, **flags}
    options = BatchOptions(**flags, given=frozenset(flags))
    asked = Parser(options).parse(json.dumps(line).encode())
    found = Basis.parse(Digests(options).of(asked))
    return found.model, found.flags, found.request


@pytest.fixture
def channels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, channel in (("channels.json", 1), ("other.json", 2)):
        write_channels(name, (((channel,),),), "")


def test_a_flag_decides_results_or_stands_with_a_reason_why_not():
    """A new flag decides: results of other values of it are other results."""
    silent = [name for names in BATCH_NO_EFFECT.values() for name in names]
    flags = {x.name: x for x in flags_of(BatchOptions)}
    undecided = {name for name, x in flags.items() if x.decides is None and name not in FLAGS}
    assert sorted(silent) == sorted(undecided)


@pytest.mark.usefixtures("channels")
def test_each_flag_changes_the_digest_of_results():
    more = {x.name: x for x in flags_of(BatchOptions) if x.decides and x.name not in FLAGS}
    flags = FLAGS | {name: (expected(x), NEEDS.get(name, {})) for name, x in more.items()}
    for name, (other, base) in flags.items():
        assert basis(base | {name: other}) != basis(base), name


# By field of a request, other values on its line; those of sampling by theirs.
KEYS = {
    "prompt": {"prompt": "y"},
    "n_predict": {"n_predict": 9},
    "n": {"n": 2},
    "stop": {"stop": "x"},
    "chat": {"chat": True},
    "ignore_eos": {"ignore_eos": True},
    "policy": {"policy": "context_shift"},
    "keep": {"policy": "context_shift", "keep": 9},
    "n_discard": {"policy": "context_shift", "n_discard": 9},
    "n_sink": {"policy": "attention_sinks", "n_sink": 9},
    "n_window": {"policy": "attention_sinks", "n_window": 9},
    "n_drop": {"policy": "attention_sinks", "n_drop": 9},
    "beams": {"num_beams": 2},
    "room": {"quota": 99},
    "sampling": {"seed": 9},
}
# By key of a line that no flag has, another value; the others are flags.
KEYS = {"prompt": "y", "n": 2, "num_beams": 2, "quota": 99}
OTHER_KEYS = {
    "a result is found by it": ("id",),
    "in the place of the prompt": ("tokens",),
    WHEN: ("priority", "salt", "cache"),
    "by their content, below": ("chunks",),
    "of a beam search": ("length_penalty", "early_stopping"),
    "room that is kept free": ("reserve",),
}


def test_every_key_of_a_request_decides_or_stands_with_a_reason_why_not():
    silent = {name for names in OTHER_KEYS.values() for name in names}
    flags = {x.name for x in flags_of(BatchOptions) if x.decides is not None}
    assert requests._KEYS.keys() - flags == {*KEYS} | silent


def test_each_key_of_a_request_changes_the_digest_of_its_results(tmp_path):
    for x in (x for x in flags_of(BatchOptions) if x.line is not False and x.decides):
        needed = {name: other for name, other in NEEDS.get(x.name, {}).items()}
        line = LINE | needed | {x.name: json.loads(json.dumps(expected(x)))}
        assert basis({}, line) != basis({}, LINE | needed), x.name
    found = [basis({}, LINE | {name: other}) for name, other in KEYS.items()]
    assert len({basis({}), *found}) == len(found) + 1
    assert basis({}, {"id": "a", "tokens": [1]}) != basis({}, {"id": "a", "tokens": [2]})
    chunk, line = tmp_path / "chunk.txt", LINE | {"chunks": [str(tmp_path / "chunk.txt")]}
    chunk.write_text("one")
    first = basis({}, line)
    assert basis({"ratio": 0.5}, line) != first != basis({"check_layer": 2}, line)
    chunk.write_text("two")
    assert basis({}, line) != first


def test_heads_that_stream_count_by_content(tmp_path):
    named = tmp_path / "heads.json"
    named.write_text('{"streaming": [[1]]}')
    in_file = basis(DUO | {"streaming_heads": str(named)})
    assert in_file == basis(DUO)
    named.write_text('{"streaming": [[0]]}')
    assert basis(DUO | {"streaming_heads": str(named)}) != in_file


def test_a_policy_by_score_counts_whatever_a_line_says():
    scored, line = {"policy": "h2o"}, LINE | {"policy": "none"}
    assert basis(scored, line) != basis({}, line)
    assert basis(scored | {"policy_budget": "99"}, line) != basis(scored, line)
    # H2O protects no sinks unless they are asked for, were it by the flag's own default.
    assert basis(scored | {"n_sink": 4}) != basis(scored)
