"""Which flag sets which field of what a user configures: the one map from flags to configurations.

Commands make their configurations by it. `tests/cli/test_flag_map.py` wants every field of them
either here or in `REASONS`, and that a flag that is named here changes its field. Classes stand by
their names, so that no command imports what it does not use.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvrt.cli.flags.declare import Options, flags_of


@dataclasses.dataclass(frozen=True)
class FieldFlags:
    """The flags that set a field.

    Attributes:
      flags: names of flags, of which a command has one at most; in `kvrt batch` also keys of a
        request's line.
      none_at: a value that stands for None.
      is_made: the value is made of several flags, or of a flag and of what else is known.
    """

    flags: tuple[str, ...]
    none_at: Any = None
    is_made: bool = False


def _by(*flags: str) -> FieldFlags:
    return FieldFlags(flags)


def _made(*flags: str) -> FieldFlags:
    return FieldFlags(flags, is_made=True)


def _none_at_0(flag: str) -> FieldFlags:
    return FieldFlags((flag,), none_at=0)


_SELECT = {
    "n_cells": _by("select_cells"),
    "n_sink": _by("select_sink"),
    "n_recent": _by("select_recent"),
    "n_dense": _by("select_dense"),
}
FIELD_FLAGS: Mapping[str, Mapping[str, FieldFlags]] = MappingProxyType(
    {
        "CacheConfig": {
            "n_ctx": _made("n_ctx"),
            "n_seq_max": _by("n_seq_max"),
            "block_size": _made("block_size"),
            "n_ubatch": _by("n_ubatch", "n_batch"),
            "type_k": _made("cache_type_k"),
            "type_v": _made("cache_type_v"),
            "hadamard": _by("hadamard"),
            "rope": _by("rope"),
            "attention": _by("attention"),
            "defrag_threshold": _by("defrag_thold"),
            "self_extend": _made("grp_attn_n"),
            "swa_full": _by("swa_full"),
            "n_rs_seq": _by("n_rs_seq"),
            "on_states": _by("on_states"),
            "n_checkpoints": _by("n_checkpoints"),
            "checkpoint_interval": _by("checkpoint_interval"),
            "checkpoint_bytes": _made("checkpoint_bytes"),
            "select": _made("select"),
        },
        "Quest": _SELECT,
        "DoubleSparsity": {
            **_SELECT,
            "channels": _made("select_channels"),
            "weights": _made("select_channels"),
            "label_type": _by("select_labels"),
            "by_cell": _by("select_by_cell"),
        },
        "SelfExtend": {
            "ga_n": _by("grp_attn_n"),
            "ga_w": _by("grp_attn_w"),
            "kind": _by("self_extend"),
        },
        "MaskSpec": {"n_sink": _made("window_sinks")},
        "MeshSpec": {"tensor": _made("mesh"), "context": _made("mesh")},
        "ContextShift": {"n_keep": _made("keep"), "n_discard": _none_at_0("n_discard")},
        "AttentionSinks": {
            "n_window": _made("n_window"),
            "n_sink": _by("n_sink"),
            "n_drop": _by("n_drop"),
        },
        "Sampling": {
            "temp": _by("temp"),
            "top_k": _by("top_k"),
            "top_p": _by("top_p"),
            "min_p": _by("min_p"),
            "repeat_penalty": _by("repeat_penalty"),
            "repeat_last_n": _by("repeat_last_n"),
            "seed": _by("seed"),
        },
        "GenerationSpec": {
            "n_predict": _made("n_predict"),
            "sampling": _made("temp"),
            "stop_ids": _made("ignore_eos"),
            "n_best": _made("logprobs"),
            "stride": _by("stride"),
            "speculation": _made("draft"),
        },
        "Speculation": {"drafter": _made("draft"), "n_draft": _by("n_draft")},
        "EngineConfig": {
            "mode": _by("mode"),
            "rules": _made("n_batch"),
            "prefix_cache": _by("prefix_cache"),
            "hash_block_size": _none_at_0("hash_block_size"),
            "n_recent": _made("n_recent"),
            "tiers": _made("host_cache"),
            "sessions": _made("session_dir"),
            "budget_bytes": _made("budget"),
            "shared_reads": _by("shared_reads"),
            "speculation": _made("draft"),
        },
        "Rules": {
            "n_batch": _by("n_batch"),
            "n_ctx_seq": _none_at_0("n_ctx_seq"),
            "n_chunk": _none_at_0("n_chunk"),
            "order": _by("order"),
            "n_wait": _none_at_0("n_wait"),
            "preempt": _by("preempt"),
            "admit": _by("admit"),
            "by_prefix": _by("group_by_prefix"),
            "n_alike": _by("n_alike"),
        },
        "TierConfig": {
            "host_bytes": _made("host_cache"),
            "disk": _made("disk_cache"),
            "disk_bytes": _made("disk_cache_size"),
            "policy": _by("eviction_policy"),
            "always": _by("always_load"),
        },
        "SessionDir": {"path": _made("session_dir"), "tell": _made("quiet")},
        "Request": {
            "id": _made("id"),
            "tokens": _made("prompt", "tokens"),
            "n_predict": _by("n_predict"),
            "sampling": _made("temp"),
            "stop_ids": _made("ignore_eos"),
            "n": _by("n"),
            "priority": _by("priority"),
            "salt": _made("salt"),
            "cache": _by("cache"),
            "policy": _made("policy"),
            "quota": _by("quota"),
            "reserve": _by("reserve"),
            "num_beams": _by("num_beams"),
            "length_penalty": _by("length_penalty"),
            "early_stopping": _by("early_stopping"),
        },
    }
)

_MODEL = "the model's file says it"
# Of a command, fields that none of its flags sets, and why.

_PROGRAMS = "a platform has one way that is best, and the numbers are the same"
REASONS: Mapping[str, Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "run": {
            "CacheConfig": {"n_seq_max": "a run is one conversation", "programs": _PROGRAMS},
            "MaskSpec": {"kind": _MODEL, "size": _MODEL},
            "GenerationSpec": {
                "seq_id": "a run is sequence 0 of its runtime",
                "recent": "the prompt's tokens",
                "after": "where the session was left",
            },
            "PromptLookup": dict.fromkeys(("n_max", "n_min"), "measured, see docs/methods.md"),
        },
        "batch": {
            "CacheConfig": {
                "n_rs_seq": "of cell mode alone, for hits near the end of a text",
                "on_states": "of cell mode alone, for requests that outgrow their context",
                "programs": _PROGRAMS,
            },
            "MaskSpec": {"kind": _MODEL, "size": _MODEL},
            "EngineConfig": {
                "identity": "the model's own",
                "run_ahead": "on where the device is not the CPU, on which it gains nothing",
            },
            "Request": {
                "borders": "a line has one text, and no messages that could end within it",
                "private_prefix": "what the files of a line's chunks give",
                "drafts": "drafts change no text, so --draft is for all lines",
            },
            "PromptLookup": dict.fromkeys(("n_max", "n_min"), "measured, see docs/methods.md"),
        },
    }
)


def taken(name: str, options: Options) -> dict[str, Any]:
    """Fields of a class that a command's flags give as they are.

    Args:
      name: of the class.
      options: of the command; a field whose flag it has not is left out.
    """
    has = {flag.name for flag in flags_of(type(options))}
    out: dict[str, Any] = {}
    for field, source in FIELD_FLAGS[name].items():
        found = [getattr(options, flag) for flag in source.flags if flag in has]
        if found and not source.is_made:
            is_none = source.none_at is not None and found[0] == source.none_at
            out[field] = None if is_none else found[0]
    return out
