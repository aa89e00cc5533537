"""Every field that Python can set is reached by a flag, or stands with a reason why none does."""

import dataclasses
import functools
import inspect
import json
import typing
from typing import Any, get_args

import pytest

import kvrt
from kvrt import CacheConfig, Engine, MaskSpec, Runtime
from kvrt.cli.batch.request_line import Parser
from kvrt.cli.batch.server import request_of
from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags import scheduling
from kvrt.cli.flags.parse import parse_flags
from kvrt.cli.process import devices
from kvrt.cli.setup.config import cache_config
from kvrt.cli.setup.engine import engine_config
from kvrt.cli.setup.flag_map import FIELD_FLAGS, REASONS
from kvrt.cli.setup.model import with_window_sinks
from kvrt.cli.setup.policy import policy_of_run
from kvrt.cli.setup.sampling import request
from kvrt.paged.tiers.index import PolicyName
from kvrt.runtime.heavy_channels import write_channels
from kvrt.serving.scheduling.step_plan import Rules
from kvrt_models import load

BOTH = {
    *("CacheConfig", "SelfExtend", "MaskSpec", "MeshSpec", "Sampling"),
    *("ContextShift", "AttentionSinks", "Quest", "DoubleSparsity"),
}
# What makes the object of a command.
CLASSES = {
    "run": BOTH | {"GenerationSpec", "Speculation", "PromptLookup"},
    "batch": BOTH | {"EngineConfig", "Rules", "TierConfig", "SessionDir", "Request"},
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
        **{"mesh": "MeshSpec", "policy": "--policy", "old": "names of 0.1"},
    },
    Runtime.generate: {f.name: "GenerationSpec" for f in dataclasses.fields(kvrt.GenerationSpec)},
}

# A value for each flag that is not its default, and words that it needs beside it.
SAMPLES = {
    **{"draft": "ngram", "n_draft": 3},
    **{"n_ctx": "96", "n_seq_max": "3", "block_size": "64", "n_ubatch": "32", "n_batch": "64"},
    **{"cache_type_k": "bf16", "cache_type_v": "bf16", "rope": "read", "attention": "pallas_gpu"},
    **{"defrag_thold": "0.5", "grp_attn_n": "4", "grp_attn_w": "256", "self_extend": "paper"},
    **{"n_rs_seq": "2", "on_states": "keep", "n_checkpoints": "3", "checkpoint_interval": "512"},
    **{"checkpoint_bytes": "1MB", "window_sinks": "2", "mesh": "tensor=2,context=2"},
    **{"keep": "1", "n_discard": "3", "n_window": "20", "n_sink": "2", "n_drop": "5"},
    **{"temp": "0.1", "top_k": "3", "top_p": "0.5", "min_p": "0.5", "repeat_penalty": "1.5"},
    **{"repeat_last_n": "9", "seed": "7", "n_predict": "5", "logprobs": "2", "stride": "4"},
    **{"mode": "cell", "hash_block_size": "8", "n_recent": "99", "session_dir": "here"},
    **{"n_ctx_seq": "64", "n_chunk": "8", "order": "fcfs", "n_wait": "0", "preempt": "swap"},
    **{
        "budget": "9MB",
        "admit": "whole",
        "n_alike": "32",
        "host_cache": "2MB",
        "disk_cache": "there",
    },
    **{"select": "quest", "select_cells": "512", "select_sink": "2", "select_recent": "32"},
    **{"select_dense": "1", "select_channels": "two.json", "select_labels": "f16"},
    **{"disk_cache_size": "3MB", "eviction_policy": "arc", "salt": "mine", "policy": "none"},
}
KEYS = {
    **{"id": "b", "prompt": "sand", "tokens": [1], "n": 2, "priority": 1, "cache": False},
    **{"num_beams": 2, "length_penalty": 2.0, "early_stopping": True},
    **{"quota": 32, "reserve": 8},
}
BESIDE = {
    "checkpoint_interval": "--n_checkpoints 2",
    "checkpoint_bytes": "--n_checkpoints 2",
    "logprobs": "--json",
    "n_draft": "--draft ngram",
    "budget": "--n_ctx_seq 64",
    "preempt": "--host_cache 1MB",
    "disk_cache_size": "--disk_cache there",
    "defrag_thold": "--mode cell",
}
OF_CLASS = {
    "SelfExtend": "-gan 2 --rope read",
    "ContextShift": "--policy context_shift",
    "AttentionSinks": "--policy attention_sinks -c 64",
    "TierConfig": "--host_cache 1MB",
    "SessionDir": "--session_dir there",
    "MeshSpec": "--mesh tensor=1",
    "Quest": "--select quest",
    "DoubleSparsity": "--select double_sparsity --select_channels one.json",
    "Request": "--policy context_shift",
}


def command(name):
    return next(c for c in COMMANDS if c.name == name)


def known(name):
    return FIELD_FLAGS.get(name, {})


def reasons(name, of):
    return REASONS[name].get(of, {})


def flags_of_field(name, of, field):
    """Flags, or keys of a line, by which a command sets a field."""
    source = known(of).get(field)
    own = set(command(name).given_by_name()) | (set(KEYS) if name == "batch" else set())
    return [] if source is None else [flag for flag in source.flags if flag in own]


def unreached(name, of, fields):
    """Fields of a class that neither a flag of a command sets nor a reason stands for."""
    return {f for f in fields if not flags_of_field(name, of, f) and f not in reasons(name, of)}


def fields(of):
    return {f.name for f in dataclasses.fields(getattr(kvrt, of))}


PAIRS = [(name, of) for name, classes in CLASSES.items() for of in sorted(classes)]


@pytest.mark.parametrize(("name", "of"), PAIRS)
def test_every_field_has_a_flag_or_a_reason(name, of):
    """A field that is added to a configuration fails here until it has one of both."""
    assert unreached(name, of, fields(of)) == set(), f"give {of} of kvrt {name} a flag, or a reason"
    both = {f for f in reasons(name, of) if flags_of_field(name, of, f)}
    assert not both, f"{both} of {of} have a flag by now: their reasons go"
    assert set(known(of)) | set(reasons(name, of)) <= fields(of), "a field that is gone"


def test_a_field_that_was_forgotten_is_found():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(CacheConfig):
        n_more: int = 0

    assert unreached("run", "CacheConfig", {f.name for f in dataclasses.fields(More)}) == {"n_more"}


def test_every_class_that_python_configures_is_known():
    """Public dataclasses, and those that constructors and their fields name."""
    public = {n for n in kvrt.__all__ if dataclasses.is_dataclass(getattr(kvrt, n))}
    public -= {"Decoder", "LayeredDecoder", "ShardedDecoder"}  # what a model is to be
    # --policy names those by score.
    public -= {n for n in public if issubclass(getattr(kvrt, n), kvrt.ScoredPolicy)}
    told = CLASSES["run"] | CLASSES["batch"]
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


def test_words_of_flags_are_those_of_the_configurations():
    hints = typing.get_type_hints(Rules)
    assert (scheduling.Order, scheduling.Preempt) == (hints["order"], hints["preempt"])
    assert (scheduling.Admit, scheduling.Eviction) == (hints["admit"], PolicyName)


@pytest.fixture(scope="module")
def model(tiny):
    found = load.describe_model(tiny)
    return found.spec, load.open_tokenizer(tiny)


def made(name, of, words, line, model):
    """The object of a class as a command makes it of some flags, and a line's keys."""
    spec, tokenizer = model
    fixed = "-p the" if name == "run" else "-i a -o b"
    options = parse_flags([*fixed.split(), *words.split()], command(name))
    if of in ("CacheConfig", "SelfExtend", "Quest", "DoubleSparsity"):
        config = cache_config(options, 512)
        inside = {"CacheConfig": config, "SelfExtend": config.self_extend}
        return inside.get(of, config.select)
    if of == "MeshSpec":
        return devices.mesh(options)
    if of == "MaskSpec":
        groups = [dataclasses.replace(g, mask=MaskSpec(kind="window", size=8)) for g in spec.groups]
        windowed = dataclasses.replace(spec, groups=tuple(groups))
        return with_window_sinks(windowed, options.window_sinks).groups[0].mask
    if name == "run":
        if of in ("ContextShift", "AttentionSinks"):
            return policy_of_run(options, 64, [5, 6, 7], tokenizer)
        spec = request(options, tokenizer)
        assert spec is not None
        inside = {"Sampling": spec.sampling, "Speculation": spec.speculation}
        return inside.get(of, spec)
    config = engine_config(options, {})
    inside = {"EngineConfig": config, "Rules": config.rules, "TierConfig": config.tiers}
    if of in (*inside, "SessionDir"):
        return config.sessions if of == "SessionDir" else inside[of]
    asked = Parser(options.defaults()).parse(json.dumps(line).encode())
    found = request_of(asked, tokenizer)
    inside = {"Request": found, "Sampling": found.sampling}
    return inside.get(of, found.policy)


REACHED = [
    (name, of, field, flag)
    for name, of in PAIRS
    for field in sorted(known(of))
    for flag in flags_of_field(name, of, field)
]


@pytest.fixture(autouse=True)
def channels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, at in (("one", 1), ("two", 2)):
        write_channels(f"{name}.json", (((0, at),),) * 2, name)


@pytest.mark.parametrize(("name", "of", "field", "flag"), REACHED)
def test_a_flag_changes_its_field(name, of, field, flag, model):
    make = functools.partial(made, name, of, model=model)
    line: dict[str, Any] = {"id": "a", "prompt": "the"}
    beside = BESIDE.get(flag, "") if flag != "defrag_thold" or name == "batch" else ""
    base = f"{OF_CLASS.get(of, '')} {beside}"
    if flag in KEYS and flag not in command(name).given_by_name():
        after = {k: x for k, x in line.items() if flag != "tokens" or k != "prompt"}
        more = {"num_beams": 2} if flag in ("length_penalty", "early_stopping") else {}
        words, line_after = base, after | more | {flag: KEYS[flag]}
    else:
        given = command(name).given_by_name()[flag]
        switch = "no" if given.default is True else ""
        word = f"--{switch}{flag}" if given.kind is bool else f"--{flag}={SAMPLES[flag]}"
        words, line_after = f"{base} {word}", line
    before, after = make(base, line), make(words, line_after)
    was = None if before is None else getattr(before, field)
    assert getattr(after, field) != was, (was, words)
