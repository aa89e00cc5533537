"""Every field that Python can set is an option with a flag, or stands with a reason why not."""

import dataclasses
import inspect
import typing
from typing import get_args

import pytest
from flag_samples import NEEDS, sample

import kvrt
from kvrt import CacheConfig, Engine, Runtime
from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags.parse import parse_flags
from kvrt.options.option import flags_of, option
from kvrt.options.serving import Eviction
from kvrt.paged.tiers.index import PolicyName

# What makes the object of a command.
CLASSES = {
    *("CacheConfig", "SelfExtend", "MaskSpec", "MeshSpec", "Sampling"),
    *("ContextShift", "AttentionSinks", "Quest", "DoubleSparsity"),
    *("GenerationSpec", "Speculation", "PromptLookup"),
    *("EngineConfig", "Rules", "TierConfig", "SessionDir", "Request"),
}
# Dataclasses that no user configures.
OTHERS = {
    **dict.fromkeys(
        ("GroupSpec", "RopeSpec", "RecurrentSpec", "StateArray", "QueryTemperature"),
        "the model's file says it",
    ),
    **dict.fromkeys(
        ("BlockView", "SeqView", "LayerAttention", "LayerKV", "TokenQKV", "Cells"),
        "arrays that a step is given",
    ),
    "DraftContext": "what a drafter is given",
    "Indexed": "the model's: what its indexer chooses by",
    "Select": "what Quest and DoubleSparsity have in common",
    **dict.fromkeys(("Observed", "QuerySums", "Seen", "Tap"), "what a policy by score is given"),
    "ScoredPolicy": "--policy names one, --policy_budget and --policy_interval its sizes",
    **dict.fromkeys(
        (
            "AttentionChoice",
            "DropEvent",
            "EngineStats",
            "LostCheckpoint",
            "Output",
            "Pin",
            "PoolUse",
        ),
        "a report",
    ),
    **dict.fromkeys(("CheckpointUse", "Stats", "TierUse", "Token"), "a report"),
    "BeamSpec": "a request has its fields",
    "BlendSpec": "kvrt ask and kvrt batch have --ratio and --check_layer, ask has --auto_ratio",
    "DraftModel": "--draft MODEL names its model",
    "LayerSkip": "--draft layerskip:E says its layers",
    "PrivatePrefix": "the chunks of a line of kvrt batch",
    **dict.fromkeys(
        ("Blended", "CachedChunk", "StoredChunk"), "what kvrt ask --chunk makes and reads"
    ),
    **dict.fromkeys(
        ("PlacedModule", "PlacedSchema", "Served"), "--schema names a file that says it"
    ),
    **dict.fromkeys(("KeptChunk", "Recomputed", "Restored", "ReusePlan"), "a report"),
    "ResumePositions": "what a sequence can be cut back to",
    "After": "the session says where sampling was left",
}
# Parameters of what runs, and what of a command gives them.
PARAMETERS = {
    Runtime.__init__: {
        **{"model": "-m", "config": "CacheConfig", "policy": "--policy"},
        **{"identity": "the model's own", "mesh": "MeshSpec"},
    },
    Engine.__init__: {
        **{"model": "-m", "config": "CacheConfig", "options": "EngineConfig"},
        **{"mesh": "MeshSpec", "policy": "--policy"},
    },
    Runtime.generate: {f.name: "GenerationSpec" for f in dataclasses.fields(kvrt.GenerationSpec)},
}

_MODEL = "the model's file says it"
_LINE = "a key of a line of kvrt batch"
# Fields without a flag of their own, and why.
REASONS = {
    "CacheConfig": {
        "programs": "a platform has one way that is best, and the numbers are the same",
        "self_extend": "SelfExtend",
        "select": "--select names it",
    },
    "Quest": {},
    "DoubleSparsity": {x: "--select_channels names a file" for x in ("channels", "weights")},
    "MaskSpec": {"kind": _MODEL, "size": _MODEL, "n_sink": "--window_sinks, of windowed layers"},
    "MeshSpec": {x: "--mesh names sizes" for x in ("tensor", "context")},
    "GenerationSpec": {
        "seq_id": "a run is sequence 0 of its runtime",
        "recent": "the prompt's tokens",
        "after": "where the session was left",
        "sampling": "Sampling",
        "speculation": "Speculation",
        "stop_ids": "--ignore_eos leaves them out",
        "n_best": "--logprobs",
        **{x: "of the command, which knows -1 and -2" for x in ("n_predict", "stride")},
    },
    "Speculation": {"drafter": "--draft names it", "n_draft": "--n_draft"},
    "PromptLookup": dict.fromkeys(("n_max", "n_min"), "measured, see docs/methods.md"),
    "EngineConfig": {
        "identity": "the model's own",
        "run_ahead": "on where the device is not the CPU, on which it gains nothing",
        **{"rules": "Rules", "tiers": "TierConfig", "sessions": "SessionDir"},
        "speculation": "Speculation",
    },
    "SessionDir": {"tell": "--quiet"},
    "Request": {
        **dict.fromkeys(("id", "tokens", "n", "priority", "cache", "quota", "reserve"), _LINE),
        **dict.fromkeys(("num_beams", "length_penalty", "early_stopping"), _LINE),
        **dict.fromkeys(("n_predict", "sampling", "stop_ids", "salt", "policy"), "by flags"),
        "borders": "a line has one text, and no messages that could end within it",
        "private_prefix": "what the files of a line's chunks give",
        "drafts": "drafts change no text, so --draft is for all lines",
    },
}


def unreached(kind, of):
    """Fields of a class that neither a flag sets nor a reason stands for."""
    options = {x.field for x in flags_of(kind)}
    both = options & set(REASONS.get(of, {}))
    assert not both, f"{both} of {of} have a flag by now: their reasons go"
    return {f.name for f in dataclasses.fields(kind)} - options - set(REASONS.get(of, {}))


@pytest.mark.parametrize("of", sorted(CLASSES))
def test_every_field_has_a_flag_or_a_reason(of):
    """A field that is added to a configuration fails here until it has one of both."""
    kind = getattr(kvrt, of)
    assert unreached(kind, of) == set(), "make it an option, or give a reason"
    assert set(REASONS.get(of, {})) <= {f.name for f in dataclasses.fields(kind)}


def test_a_field_that_was_forgotten_is_found():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(CacheConfig):
        n_more: int = 0
        n_flagged: int = option(0, "tokens", "N", group="Cache")

    assert unreached(More, "CacheConfig") == {"n_more"}


def test_every_class_that_python_configures_is_known():
    """Public dataclasses, and those that constructors and their fields name."""
    public = {n for n in kvrt.__all__ if dataclasses.is_dataclass(getattr(kvrt, n))}
    public -= {"Decoder", "LayeredDecoder", "ShardedDecoder"}  # what a model is to be
    # --policy names those by score.
    public -= {n for n in public if issubclass(getattr(kvrt, n), kvrt.ScoredPolicy)}
    told = CLASSES
    assert public - told - set(OTHERS) == set()
    named = set()
    for thing in [*PARAMETERS, Engine.add_request, *(getattr(kvrt, n) for n in told)]:
        hints = typing.get_type_hints(inspect.unwrap(thing), include_extras=False)
        named |= {x for k, hint in hints.items() if k != "return" for x in inner(hint)}
    found = {x.__name__ for x in named if isinstance(x, type) and dataclasses.is_dataclass(x)}
    assert found - told - set(OTHERS) == set()


def inner(hint):
    """Classes of kvrt in an annotation."""
    if isinstance(hint, type) and not get_args(hint):
        return {hint} if hint.__module__.split(".")[0] == "kvrt" else set()
    return {x for part in get_args(hint) for x in inner(part)}


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda f: f.__qualname__)
def test_every_parameter_is_given_by_something(function):
    names = set(inspect.signature(inspect.unwrap(function)).parameters) - {"self"}
    assert names == set(PARAMETERS[function])


def test_words_of_tiers_are_those_of_their_room():
    assert Eviction == PolicyName


PARTS = [
    (name, kind, x)
    for name in ("run", "batch")
    for kind in (getattr(kvrt, of) for of in sorted(CLASSES))
    for x in flags_of(kind)
    if not x.made
]


@pytest.mark.parametrize(("name", "kind", "flag"), PARTS, ids=str)
def test_a_flag_changes_its_field(name, kind, flag):
    command = next(c for c in COMMANDS if c.name == name)
    own = command.given_by_name()
    found = [own[x] for x in (flag.name, *flag.also) if x in own]
    if not found:
        return  # of the other command
    fixed = "-p the" if name == "run" else "-i a -o b"
    beside = {**NEEDS.get(found[0].name, {})}
    if name == "batch":
        beside |= MORE.get(found[0].name, {})
    words = [*fixed.split(), *(f"--{x}={value}" for x, value in beside.items())]
    word = f"--{found[0].name}={sample(found[0])}"
    before, after = (parse_flags(x, command).part(kind) for x in (words, [*words, word]))
    assert before[flag.field] != after[flag.field]


# What flags need in `kvrt batch`.
MORE = {
    "budget": {"n_ctx_seq": "64"},
    "defrag_thold": {"mode": "cell"},
    **{x: {"host_cache": "1MB"} for x in ("disk_cache", "preempt", "eviction_policy")},
    **{x: {"host_cache": "1MB"} for x in ("disk_cache_size", "always_load")},
}
