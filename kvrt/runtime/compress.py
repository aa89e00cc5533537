"""A prompt read whole, and compressed once: then each kv head keeps its budget of it."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from kvrt.arrays import Array, Float
from kvrt.attention.scored.evict import evict
from kvrt.attention.scored.head_slots import resized
from kvrt.attention.scored.spec import SlotSpec, slots_of, tables_of
from kvrt.errors import UsageError
from kvrt.options.cache import CacheConfig
from kvrt.policies import ScoredPolicy
from kvrt.policies.scored.kvzip import Repetition
from kvrt.program.layout import Layout
from kvrt.program.programs import Programs
from kvrt.runtime.runtime import Runtime
from kvrt.runtime.stepper import Progress
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot, StatePart

# What asks for a repetition, behind a prompt; its tokens are `ask` of `compress_prompt`.
REPEAT = "\n\nRepeat the previous context exactly.\n"


@runtime_checkable
class Compressing(Protocol):
    """A `Runtime` or an `Engine`, which goes on behind a compressed prompt."""

    @property
    def programs(self) -> Programs:
        """Its programs, which have its weights."""
        ...

    @property
    def config(self) -> CacheConfig:
        """Of its cache."""
        ...

    @property
    def fingerprint(self) -> Fingerprint:
        """Of its sessions."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressed:
    """What a compression gave, and took.

    Attributes:
      logits: of the prompt's last token.
      n_evaluated: tokens that were evaluated, those of a repetition among them.
      transient_bytes: of the cache that held the whole prompt beside the runtime's own, and is
        released; 0 where the prompt fits into the slots of the runtime.
      compile_s: seconds in which programs for that cache were compiled; the runtime's `stats` have
        those of its own.
    """

    logits: Float[Array, " V"]
    n_evaluated: int
    transient_bytes: int
    compile_s: float = 0.0


def compress_prompt(
    runtime: Runtime,
    tokens: Sequence[int],
    seq_id: int = 0,
    *,
    ask: Sequence[int] = (),
    progress: Progress | None = None,
) -> Compressed:
    """Reads a prompt without an eviction, then keeps what the runtime's policy scores highest.

    `Runtime.append` evicts every `interval` tokens instead, so that a prompt is never held whole;
    here scores are those of its end, as SnapKV has them. What follows is as after `append`. The
    programs are compiled for the prompt's length.

    With `KVzip` the prompt is evaluated a second time, behind itself and what asks for that, with
    slots for the prompt twice meanwhile: every query of both times attends to them all, so that it
    takes several times a prefill of the prompt.

    Args:
      runtime: with a policy by score; the sequence is empty.
      tokens: of the prompt.
      seq_id: the sequence.
      ask: tokens that ask for a repetition, for `KVzip`; see `REPEAT`.
      progress: as in `Runtime.append`, of all tokens that are evaluated, each step waited for. One
        that raises leaves nothing of the prompt, unless its tokens fit the slots as they come.

    Raises:
      UsageError: there is no such policy, its layers have budgets of their own, the sequence has
        tokens, or nothing is repeated by this policy.

    Source: arXiv:2404.14469, sec. 4; arXiv:2505.23416 for the repetition.
    """
    policy = _policy_of(runtime, ask)
    _check(runtime.seq_pos_max(seq_id) < 0, f"sequence {seq_id} has tokens; clear it first")
    n = len(tokens)
    if n < policy.budget + policy.interval:
        logits = runtime.prefill(tokens, seq_id, progress=progress)
        return Compressed(logits=logits, n_evaluated=n, transient_bytes=0)
    snapshot, found = compressed_prefix(runtime, tokens, ask=ask, progress=progress)
    runtime.restore(snapshot, {0: seq_id})
    return found


def compressed_prefix(
    to: Compressing,
    tokens: Sequence[int],
    *,
    ask: Sequence[int] = (),
    progress: Progress | None = None,
) -> tuple[Snapshot, Compressed]:
    """Reads tokens without an eviction, and keeps of them what the policy scores highest.

    For an Engine, whose request goes on behind them:

        prefix = PrivatePrefix(tokens=text, read=lambda: compressed_prefix(engine, text)[0])
        engine.add_request(Request(id="a", tokens=(*text, *question), private_prefix=prefix, ...))

    Args:
      to: a `Runtime` or an `Engine` with a policy by score.
      tokens: at least budget + interval of the policy.
      ask: see `compress_prompt`.
      progress: see `compress_prompt`.

    Returns:
      A session of `to` whose sequence 0 has the tokens, and what it took.

    Raises:
      UsageError: see `compress_prompt`; or there are fewer tokens.
    """
    policy, n = _policy_of(to, ask), len(tokens)
    n_least = policy.budget + policy.interval
    _check(n >= n_least, f"{n} tokens fit the slots of {n_least}; append them")
    n_evaluated = n + policy.reads_whole * (len(ask) + n)
    whole = _transient(to, _meanwhile(policy, n, n_evaluated))

    def read(tokens: Sequence[int], n_before: int) -> Float[Array, " V"]:
        told = progress and _waiting(whole, progress, n_before, n_evaluated)
        return whole.prefill(tokens, progress=told)

    logits, found = read(tokens, 0), whole.snapshot()
    if policy.reads_whole:
        read([*ask, *tokens], n)
        found = _judged(found, whole)
    to.programs.nan_scores.add(whole.programs.nan_scores.n)
    took = Compressed(
        logits=logits,
        n_evaluated=n_evaluated,
        transient_bytes=whole.stats().cache_bytes,
        compile_s=whole.stats().compile_s,
    )
    return _with_few_slots(found, whole.programs.spec.layout, to), took


def _transient(to: Compressing, policy: ScoredPolicy) -> Runtime:
    """A runtime of one sequence with the same weights, and slots for a whole prompt."""
    model = to.programs.kind.model(to.programs.params)
    one = {"n_seq_max": 1, "n_rs_seq": 0, "n_checkpoints": 0}
    return Runtime(model, dataclasses.replace(to.config, **one), policy=policy)


def _meanwhile(policy: ScoredPolicy, n: int, n_evaluated: int) -> ScoredPolicy:
    """The policy of the runtime that holds a whole prompt of n tokens: nothing has to go there."""
    if not policy.reads_whole:
        return dataclasses.replace(policy, interval=n - policy.budget)
    # A slot for each of both times, and one more.
    budget, n_sink = policy.budget, policy.n_sink
    interval = n_evaluated + 1 - budget
    return Repetition(
        budget=budget,
        n_sink=n_sink,
        n_recent=1,
        interval=interval,
        head_share=policy.head_share,
        n_prompt=n,
    )


def _waiting(whole: Runtime, progress: Progress, n_before: int, n_all: int) -> Progress:
    """Tells of the steps of one time among all tokens, each when the device has done it."""

    def step(done: int, total: int) -> None:
        jax.block_until_ready(whole.cache.states)
        progress(n_before + done, n_all)

    return step


def _judged(before: Snapshot, whole: Runtime) -> Snapshot:
    """The prompt in slots, of which stay those that its repetition attended to."""
    after, layout = whole.snapshot(), whole.programs.spec.layout
    assert before.states is not None and after.states is not None, "slots are states"
    assert layout.recurrent is not None, "slots are states"
    specs = dict(_specs(layout))
    tables = tuple(
        _kept(specs[layer], prompt, repeated, whole) if layer in specs else prompt
        for layer, prompt, repeated in zip(
            layout.recurrent.layers, before.states.tables, after.states.tables, strict=True
        )
    )
    states = StatePart(held=before.states.held, tables=tables)
    return dataclasses.replace(before, states=states)


def _kept(spec: SlotSpec, prompt: tuple, repeated: tuple, whole: Runtime) -> tuple:
    """Arrays of one state of a prompt: tokens that stay by what its repetition gave them."""
    slots, scores = slots_of(spec, prompt), slots_of(spec, repeated).marks.sums
    n, marks = int(slots.marks.filled), dataclasses.replace(slots.marks, sums=scores)
    full = resized(dataclasses.replace(slots, marks=marks), max(n, spec.n_kept))
    after, n_nan = _evict(spec, full)
    whole.programs.nan_scores.add(int(n_nan))
    return tuple(map(np.asarray, tables_of(after)))


_evict = jax.jit(evict, static_argnums=0)


def _with_few_slots(snapshot: Snapshot, whole: Layout, to: Compressing) -> Snapshot:
    """The snapshot as one of a cache whose slots are as many as it needs."""
    few = to.programs.spec.layout
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
    """Arrays of one state with so many slots a head, in which all that is taken lies."""
    return tuple(map(np.asarray, tables_of(resized(slots_of(spec, arrays), n_slots))))


def _policy_of(to: Compressing, ask: Sequence[int]) -> ScoredPolicy:
    """The policy by score that a prompt is compressed by.

    Raises:
      UsageError: as `compress_prompt` says.
    """
    policy, spec = to.programs.spec.layout.policy, to.programs.spec
    _check(policy is not None, "no layer keeps tokens by score; give it such a policy")
    assert policy is not None, "checked"
    _check(policy.pyramid == 1, "layers of a pyramid are full at different tokens; use append")
    _check(
        not any(slots.parts for _, slots in _specs(spec.layout)),
        "heads that keep different numbers of tokens are full at different ones; use append",
    )
    _check(
        spec.shards is None,
        "the cache that holds the prompt meanwhile is on one device; use append, or leave mesh out",
    )
    _check(
        policy.reads_whole or not ask,
        f"{type(policy).__name__} repeats nothing; leave ask out, or use KVzip",
    )
    return policy


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise UsageError(f"compress_prompt: {message}")
