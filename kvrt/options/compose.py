"""What cannot go together: one table of rules over traits, for caches, engines, kernels and calls.

A trait is a name that a thing states of itself (`traits` of a config, a group of layers, a policy,
a kernel), with the words that stand for it in a sentence. A rule forbids two sets of them together.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from kvrt.errors import BadConfig, BadRequest, CannotRewind, KvrtError, NoKernel

Traits = Mapping[str, str]
Reason = Literal["mathematics", "representation", "not built"]

# Below: two sets of traits, "a + b | c" where a and b and c do not go together, "a | b / c" for
# two that a does not go with; why, and what to do about it. A trait in braces is its words.

# Forbidden by mathematics, or because the one leaves nothing for the other to do.
_MATHEMATICS = {
    "divided positions | only states": "SelfExtend of kind 'cache' has no positions to divide, "
    "for all layers are recurrent; do without it",
    "divided positions | only windows": "SelfExtend of kind 'cache' cannot reach layers that see "
    "a window of their own or have no positions, the first is {only windows}; use a model without "
    "such layers",
    "grouped positions | only windows": "SelfExtend of kind 'paper' cannot reach layers that see "
    "a window of their own or have no positions, the first is {only windows}; use a model without "
    "such layers",
    "policy by position | only states": "{policy by position} takes positions out of a sequence, "
    "which the state of recurrent layers cannot forget; do without it and raise n_ctx",
    "policy by position + exact states | some states": "{policy by position} takes positions out "
    "of a sequence, which the state of recurrent layers cannot forget; do without it and raise "
    "n_ctx (or set on_states to 'keep')",
    "kept states | no states": "on_states is 'keep', and the model has no recurrent layers; leave "
    "it out",
    "policy by score | select": "sparse reads choose among all tokens, and {policy by score} "
    "keeps but some; use one of the two",
    "policy by score | unrotated keys": "rope='read' is for keys whose positions move, and those "
    "of tokens that {policy by score} keeps never do but with close_up; use rope='write', which "
    "gives the same",
    "policy by score | no full layer": "{policy by score} keeps tokens of layers that see every "
    "position, and this model has none: windows and states forget by themselves; leave the policy "
    "out",
    "select | grouped positions": "select chooses by labels of keys at exact positions, and "
    "SelfExtend as in the paper compares distant keys at grouped ones; leave select out, or use "
    "kind='cache'",
    "heavy channels | hadamard": "hadamard mixes the channels of quantized keys, so none is "
    "heavy; use select=Quest(...) or hadamard=False",
    "select | no full layer": "select reads some cells of layers that see all of them, and this "
    "model has none beyond its first {select} layers; leave select out",
    "extremes | unrotated keys": "Quest compares extremes of keys in a unit, RoPE rotates each key "
    "by its own angle, and the extremes of unrotated keys bound none of that; use rope='write', or "
    "DoubleSparsity",
    "indexer | grouped positions": "SelfExtend of kind 'paper' compares distant keys by grouped "
    "positions, and an indexer was trained to rank them by exact ones; use the kind cache, or do "
    "without it",
    "indexer | shared reads": "with an indexer each token reads cells of its own choice, so that "
    "several sequences have no prefix to read once; leave shared_reads out",
    "hadamard keys | unrotated keys / grouped positions": "hadamard transforms keys after RoPE, "
    "and with rope='read' or SelfExtend as in the paper RoPE comes last; use rope='write' without "
    "it, or keys of a float type",
    "drafts | run_ahead": "run_ahead dispatches a step before the last one is read, and drafts "
    "follow what that sampled; leave out run_ahead, or speculation",
    "cell mode | hash_block_size": "hash_block_size is for hits within blocks, in cell mode a hit "
    "ends at any token; leave it out",
    "no prefix cache | sessions": "sessions go into the prefix cache, and there is none; set "
    "prefix_cache",
    "no prefix cache | n_checkpoints": "n_checkpoints is {n_checkpoints}; requests find "
    "checkpoints in the prefix cache, and there is none; set prefix_cache",
    "n_rs_seq | paged mode": "n_rs_seq is {n_rs_seq}, in paged mode states are kept by block, a "
    "hit ends with one, and no call of an engine takes tokens back; set it to 0, or use "
    "mode='cell'",
    "n_rs_seq | no prefix cache": "n_rs_seq is {n_rs_seq}, for hits that end within the last "
    "tokens of a text, and there is no prefix cache; set prefix_cache, or n_rs_seq to 0",
    "chunks | one order": "windowed layers that reuse cells, recurrent ones and policies by score "
    "hold what came before in one order, so chunks cannot be blended; set swa_full, leave the "
    "policy out, or prefill the text",
    "chunks | divided positions": "SelfExtend in the cache gives several tokens one position, so "
    'that none of them can be replaced alone; use the kind "paper"',
    "filled positions | one order / divided positions": "{filled positions} cannot be filled: "
    "windowed layers that reuse cells, recurrent ones, policies by score and SelfExtend in the "
    "cache take tokens in at the end; append them, set swa_full, or leave the policy out",
    "blocks | policy by position": "{blocks} cannot lie in blocks, where the position is the "
    "place: {policy by position} moves positions; do without it, or use an Engine in paged mode",
    "blocks | divided positions": "{blocks} cannot lie in blocks, where the position is the "
    "place: SelfExtend moves positions; do without it, or use an Engine in paged mode",
    "blocks | no complete layer": "{blocks} cannot lie in blocks: no layer of this model keeps the "
    "cells of all positions; set swa_full",
    "blocks | only slots of heads": "{blocks} cannot lie in blocks: no layer of this model keeps "
    "the cells of all positions; leave the policy by score out",
    "whole cells | one order": "windowed layers that reuse cells, recurrent ones and policies by "
    "score hold what came before in one order, so no cell can be taken out of the middle; set "
    "swa_full, or take a policy by score alone",
    "private prefix | no prefix cache": "{private prefix}: a private prefix goes into the prefix "
    "cache, and there is none; set prefix_cache",
    "private prefix | moving request": "{private prefix}: a private prefix is found as long as "
    "nothing of it moves, and its policy or SelfExtend would move it; shorten the request, or "
    "turn that off",
}
# Forbidden by the way in which something is kept.
_REPRESENTATION = {
    "policy by score | self_extend": "SelfExtend moves positions, and those of tokens that "
    "{policy by score} keeps are part of a state; use one of the two",
    "policy by score | full latent": "layers that keep a latent have one cell a token for all "
    "heads, which {policy by score} chooses by head; use a policy by position",
    "policy by score | full keys by channel": "keys of {full keys by channel} share scales with "
    "their neighbours, and {policy by score} keeps some without the others; use int4 or int8",
    "select | keys by channel": "select reads cells of a block, and {keys by channel} keys share "
    "scales by cells and have a tail elsewhere; use keys of another type",
    "select | full latent": "select chooses cells for each kv head, and a latent is one key for "
    "all heads, which is read once anyway; leave select out",
    "select | shared arrays": "select labels the keys of a layer, and in blocks this model's "
    "layers share arrays; use cells",
    "select by unit | engine + cell mode": "{select by unit}, and which lie together in cells "
    "depends on other requests, so that a request would not get what it gets alone; use "
    "mode='paged', or DoubleSparsity(by_cell=True)",
    "indexer | keys by channel": "keys by channel change when the last of a group comes, and with "
    "them the tokens that an indexer chooses; use a KV dtype by token",
    "TPU kernel | float16": "a cache or scales of f16: TPUs have no such vectors; take bf16 or "
    "int8, or attention='chunked'",
    "drafts | keys by channel": "keys of {keys by channel} share scales by tokens: a group is "
    "quantized between two tokens, of which a round's later ones would see it as it was before; "
    "use another type of keys, or no drafts",
    "chunks | keys by channel": "type_k {keys by channel} has one scale for several tokens, so "
    "that none of them can be replaced alone; use a KV dtype by token",
    "modules | keys by channel": "type_k {keys by channel} has one scale for several tokens, so "
    "that a module's keys would depend on what lies beside them; use a KV dtype by token",
}
# Nobody built it.
_NOT_BUILT = {
    "divided positions | policy by position": "{policy by position} and SelfExtend in the cache "
    "both move positions; choose one of them",
    "divided positions | some windows": "SelfExtend of kind 'cache' cannot reach layers that see "
    "a window of their own or have no positions, the first is {some windows}: the other layers "
    "would need positions and a token history apart from theirs; use a model without such layers, "
    "or the kind paper",
    "close_up | hadamard": "with close_up {close_up} keeps keys unrotated and rotates them when "
    "it reads them, which a Hadamard transform before has to wait for; leave hadamard or close_up "
    "out",
    "policy by score | full layer that reads": "{full layer that reads}, which {policy by score} "
    "evicts before it runs, by what that one alone attends to; use a policy by position",
    "select | mesh": "select needs labels of all cells on one device; leave mesh out",
    "indexer | mesh": "an indexer ranks all cells of a sequence together, and a mesh has some on "
    "each device; leave mesh out",
    "kernel | latent": "layers that keep a latent read their keys from two arrays, kernels from "
    "one: each would have to load both for a block and add two products; use attention='chunked'",
    "kernel | fp8": "a cache of fp8: kernels read plain floats and integers; take int8, or "
    "attention='chunked'",
    "TPU kernel | neighbours rotated at read": "cached keys of which RoPE rotates pairs of "
    "neighbours: the TPU kernel rotates halves; use rope='write' without SelfExtend as in the "
    "paper, or attention='chunked'",
    "Mosaic kernel | rotated at read": "'mosaic_gpu' does not rotate keys; use rope='write' "
    "without SelfExtend as in the paper, or 'pallas_gpu'",
    "Mosaic kernel | few bits": "'mosaic_gpu' reads f32, f16, bf16 and eight bits without a zero "
    "point, not {few bits} bits; use 'pallas_gpu'",
    "drafts | select": "a round reads all cells for several tokens, and select lets single steps "
    "read some: with drafts the text would be another; leave one of them out",
    "drafts | indexer + rounded": "the tokens of a round choose by each other's index keys as they "
    "were computed, single steps as a cache of {rounded} has them; use f32, or no drafts",
    "n_rs_seq + engine | drafts": "n_rs_seq is {n_rs_seq}, and a round of drafts keeps one state "
    "a request, that of its last accepted token; set n_rs_seq to 0, or leave out speculation",
    "whole cells | unrotated keys / self_extend": "cells are chosen by keys as they are stored, "
    "and with rope='read' or SelfExtend they are compared otherwise; use rope='write' without "
    "SelfExtend",
    "whole cells | keys by channel / latent": "type_k {whole cells}: keys by channel share "
    "scales, and latents are compared in two parts; whole cells are chosen by plain keys or keys "
    "quantized by cell",
    "whole cells | mesh": "whole cells are chosen on one device; leave mesh out",
    "private prefix | several processes": "{private prefix}: a private prefix is read by one "
    "process, and there are several; serve it with one",
}

# What is raised, by a trait of the rule; BadConfig by others.
_ERRORS: dict[str, type[KvrtError]] = {
    **dict.fromkeys(("kernel", "TPU kernel", "Mosaic kernel"), NoKernel),
    **dict.fromkeys(("one order", "filled positions"), CannotRewind),
    "private prefix": BadRequest,
}


class Rule(NamedTuple):
    """Traits that do not go together.

    Attributes:
      traits: of both sets; all of them are there.
      says: why, and what to do about it; a trait's name in braces stands for its words.
      reason: mathematics forbids it, the way in which something is kept does, or nobody built it.
      error: what is raised.
    """

    traits: tuple[str, ...]
    says: str
    reason: Reason
    error: type[KvrtError]


def _rules(reason: Reason, table: Mapping[str, str]) -> Iterator[Rule]:
    for pair, says in table.items():
        one, others = pair.split(" | ")
        for other in others.split(" / "):
            traits = (*one.split(" + "), *other.split(" + "))
            error = next((_ERRORS[x] for x in traits if x in _ERRORS), BadConfig)
            yield Rule(traits, says, reason, error)


# The first that fits is said.
RULES = (
    *_rules("mathematics", _MATHEMATICS),
    *_rules("representation", _REPRESENTATION),
    *_rules("not built", _NOT_BUILT),
)


def refusal(*traits: Traits) -> tuple[Rule, str] | None:
    """The first rule that forbids some things together, and its sentence; None if none does."""
    every = {name: words for of in traits for name, words in of.items()}
    for rule in RULES:
        if every.keys() >= set(rule.traits):
            return rule, rule.says.format_map(every)
    return None


def check_together(*traits: Traits) -> None:
    """Refuses things that do not go together.

    Raises:
      KvrtError: the rule's error, most often BadConfig.
    """
    if found := refusal(*traits):
        rule, text = found
        raise rule.error(text)
