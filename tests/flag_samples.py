"""A value for any flag that is not its default, and the flags that it says something with."""

from kvrt.cli.flags.groups import _OF

# Values that only the flag knows, as words of a command line.
WORDS = {
    **{"mesh": "tensor=2", "coordinator": "here:8476", "n_processes": "2", "process_id": "1"},
    **{"policy": "attention_sinks", "policy_budget": "25%", "draft": "ngram", "n_sink": "5"},
    **{"streaming_heads": "[[1]]", "select": "quest", "n_ctx": "96", "n_window": "50"},
    **{"block_size": "64", "select_cells": "512", "n_read": "64", "refresh_every": "16"},
    **{"grp_attn_w": "64", "checkpoint_interval": "512", "mode": "cell", "n_batch": "64"},
}
_MEETING = {"mesh": "tensor=2", "coordinator": "here:8476", "n_processes": "2"}
_CHECKPOINTS = {"n_checkpoints": "2"}
NEEDS = {
    **{name: _MEETING for name in ("coordinator", "n_processes", "process_id")},
    **{name: {"policy": policies[0]} for name, policies in _OF.items()},
    **{name: _CHECKPOINTS for name in ("checkpoint_interval", "checkpoint_bytes")},
    **{f"select_{x}": {"select": "quest"} for x in ("cells", "sink", "recent", "dense")},
    "seq": {"session": "a.kv"},
    "n_draft": {"draft": "ngram"},
    "compress": {"policy": "snapkv"},
    "system": {"chat": "true"},
}
_HEADS = {"policy": "duo_attention", "streaming_heads": "[[1]]"}
NEEDS |= {"streaming_heads": _HEADS, "n_stream": _HEADS}
NEEDS["refresh_every"] = {"policy": "sparse_window", "n_read": "64"}
_CHANNELS = {"select": "double_sparsity", "select_channels": "channels.json"}
NEEDS |= {f"select_{x}": _CHANNELS for x in ("channels", "labels", "by_cell")}


def sample(flag) -> str:
    """Another value than the default, as a word."""
    if flag.name in WORDS:
        return WORDS[flag.name]
    if flag.choices:
        return next(x for x in flag.choices if x not in (flag.default, "auto"))
    if flag.kind is bool:
        return "false" if flag.default else "true"
    if flag.size:
        return "7MB"
    if flag.kind is int:
        near = int(flag.least if flag.default is None else flag.default) + 1
        return str(near if near <= flag.high else near - 2)
    if flag.kind is float:
        return "0.5" if flag.default != 0.5 else "0.25"
    return f"{flag.name}.json" if flag.file else "a b"


def expected(flag):
    """That value as the options have it."""
    text = sample(flag)
    if flag.type == tuple[str, ...]:
        return (text,)
    if flag.kind is bool:
        return text == "true"
    return flag.kind(text) if flag.kind in (int, float) else text
