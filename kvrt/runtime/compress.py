"""A prompt read whole, and compressed once: then each kv head keeps its budget of it."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvrt.arrays import Array, Float
from kvrt.attention.scored.attend import SlotSpec, slots_of
from kvrt.attention.scored.head_slots import first_slots
from kvrt.errors import UsageError
from kvrt.policies import ScoredPolicy
from kvrt.program.layout import Layout
from kvrt.runtime.runtime import Runtime
from kvrt.session.snapshot import Snapshot, StatePart


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressed:
    """What a compression gave, and took.

    Attributes:
      logits: of the prompt's last token.
      transient_bytes: of the cache that held the whole prompt beside the runtime's own, and is
        released; 0 where the prompt fits into the slots of the runtime.
      cache_bytes: of the runtime's, in which the text goes on.
    """

    logits: Float[Array, " V"]
    transient_bytes: int
    cache_bytes: int


def compress_prompt(runtime: Runtime, tokens: Sequence[int], seq_id: int = 0) -> Compressed:
    """Reads a prompt without an eviction, then keeps what the runtime's policy scores highest.

    `Runtime.append` evicts every `interval` tokens instead, so that a prompt is never held whole;
    here scores are those of its end, as SnapKV has them. What follows is as after `append`. The
    programs are compiled for the prompt's length.

    Args:
      runtime: with a policy by score; the sequence is empty.
      tokens: of the prompt.
      seq_id: the sequence.

    Raises:
      UsageError: there is no such policy, its layers have budgets of their own, or the sequence
        has tokens.

    Source: arXiv:2404.14469, sec. 4.
    """
    policy = runtime.stats().scored
    _check(policy is not None, "no layer keeps tokens by score; give the Runtime such a policy")
    assert policy is not None, "checked"
    _check(policy.pyramid == 1, "layers of a pyramid are full at different tokens; use append")
    layout = runtime.programs.spec.layout
    _check(
        not any(spec.parts for _, spec in _specs(layout)),
        "heads that keep different numbers of tokens are full at different ones; use append",
    )
    _check(runtime.seq_pos_max(seq_id) < 0, f"sequence {seq_id} has tokens; clear it first")
    n = len(tokens)
    if n < policy.budget + policy.interval:
        logits = runtime.append(tokens, seq_id)[0]
        n_bytes = runtime.stats().cache_bytes
        return Compressed(logits=logits, transient_bytes=0, cache_bytes=n_bytes)
    whole = _transient(runtime, dataclasses.replace(policy, interval=n - policy.budget))
    logits = whole.append(tokens)[0]
    both = whole.programs.spec.layout, layout
    runtime.restore(_with_few_slots(whole.snapshot(), *both, runtime), {0: seq_id})
    return Compressed(
        logits=logits,
        transient_bytes=whole.stats().cache_bytes,
        cache_bytes=runtime.stats().cache_bytes,
    )


def _transient(runtime: Runtime, policy: ScoredPolicy) -> Runtime:
    """A runtime of one sequence with the same weights, and slots for a whole prompt."""
    model = runtime.programs.model(runtime.programs.params)
    one = {"n_seq_max": 1, "n_rs_seq": 0, "n_checkpoints": 0}
    config = dataclasses.replace(runtime.config, **one)
    return Runtime(model, config, policy=policy, identity=runtime.identity)


def _with_few_slots(snapshot: Snapshot, whole: Layout, few: Layout, to: Runtime) -> Snapshot:
    """The snapshot as one of a runtime whose slots are as many as are needed."""
    assert snapshot.states is not None and whole.recurrent is not None, "slots are states"
    specs = {layer: spec for layer, spec in _specs(whole)}
    wanted = {layer: spec.n_slots for layer, spec in _specs(few)}
    tables = tuple(
        _fewer(specs[layer], arrays, wanted[layer]) if layer in specs else arrays
        for layer, arrays in zip(whole.recurrent.layers, snapshot.states.tables, strict=True)
    )
    states = StatePart(held=snapshot.states.held, tables=tables)
    return dataclasses.replace(snapshot, fingerprint=to.fingerprint, states=states)


def _specs(layout: Layout) -> list[tuple[int, SlotSpec]]:
    return [x for g in layout.scored for x in zip(g.group.layers, g.slots, strict=True)]


def _fewer(spec: SlotSpec, arrays: tuple, n_slots: int) -> tuple:
    """Arrays of one state with the first slots of each head."""
    one = tuple(np.asarray(x).reshape(x.shape[1:]) for x in arrays)
    slots = first_slots(slots_of(spec, one), n_slots)
    return tuple(np.asarray(x)[None] for x in jax.tree.leaves(slots))


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(f"compress_prompt: {message}")
