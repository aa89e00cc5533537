"""The object that a model calls in a step: rotates, attends, and keeps what is to be written."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp

from kvrt.arrays import AnyArray, Array, Bool
from kvrt.attention import grouped, rope
from kvrt.attention.api import attend
from kvrt.attention.contract import ChunkedStep, Inputs, Outputs, Step
from kvrt.attention.prefill import one_by_one
from kvrt.attention.select import indexer, read
from kvrt.attention.select.choose import UnitView, unit_view
from kvrt.attention.select.labels import LabelArray
from kvrt.attention.step import some_tokens
from kvrt.attention.types import (
    AttendArgs,
    GroupView,
    LayerAttention,
    LayerKV,
    LayerStep,
    MaybeArray,
    TokenQKV,
    mark_damage,
    tempered,
)
from kvrt.attention.view import AnyView, BlockView, SeqView
from kvrt.config import MAX_POS, GroupSpec, Indexed
from kvrt.errors import BadConfig
from kvrt.options.cache import CacheConfig
from kvrt.options.select import DoubleSparsity, Select
from kvrt.store import hadamard, recurrent
from kvrt.store.codec import Quantized
from kvrt.store.kv import KVStore
from kvrt.store.per_channel import PerChannel

# A slot beyond the last one of every cache.
NOWHERE = MAX_POS // 2


@dataclasses.dataclass
class StepAttention:
    """The `Attend` of one step.

    Lives while a step is traced. `k_new` and `v_new` hold, by layer, keys and values in the frame
    in which they are stored, `own` what layers see of the step's own tokens before they are
    rotated, `states` the tables of recurrent layers, advanced as soon as a layer has run. `apart`
    has the states after each token instead, in a step of tokens that may yet be refused; `kept`
    makes of their slots those that are written. `indexes` has index queries and weights by layer,
    `seen` what they can choose of, by view.
    """

    layers: dict[int, LayerStep]
    states: dict[int, recurrent.StateTables]
    state_index: recurrent.StateIndex | None
    unrotated: bool
    implementation: str
    k_new: dict[int, Array] = dataclasses.field(default_factory=dict)
    v_new: dict[int, Array] = dataclasses.field(default_factory=dict)
    own: dict[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    apart: dict[int, recurrent.StatesByToken] | None = None
    kept: Callable[[AnyArray], Array] | None = None
    select: Select | None = None
    indexes: dict[int, tuple[Array, Array]] = dataclasses.field(default_factory=dict)
    seen: dict[int, indexer.Candidates] = dataclasses.field(default_factory=dict)

    def read_sparsely(self, labels: Mapping[int, LabelArray], select: Select) -> None:
        """Lets tokens that are the only one of their sequence choose what they read.

        Args:
          labels: by layer that keeps keys.
          select: how they choose.
        """
        self.select = select
        views: dict[int, UnitView] = {}
        for layer, here in self.layers.items():
            own = layer if here.read is None else here.read
            if own not in labels:
                continue
            parts = []
            for part in here.parts:
                # A single token beside others that decode is of a prompt.
                alone = len(here.parts) == 1 and part.view.n_tokens == 1
                if alone or isinstance(part.view, SeqView):
                    made = views.get(id(part.view)) or unit_view(part.view, here.group, select)
                    views[id(part.view)] = made
                    part = dataclasses.replace(part, units=made)
                parts.append(part)
            new = dataclasses.replace(here, labels=labels[own], parts=tuple(parts))
            self.layers[layer] = new

    def one_by_one(self) -> None:
        """Lets tokens be refused later on; called before the model.

        Each then sees those before it in the step as the cache is going to have them, so that it
        finds what it would find one step later.
        """
        self.apart = {}

    def keep(self, stays: Bool[Array, " T"]) -> None:
        """Refuses tokens, before anything is written: they leave no trace; called after the model.

        Args:
          stays: which tokens stay.
        """
        self.kept = only(stays)
        for layer, states in (self.apart or {}).items():
            assert self.state_index is not None, "states that no token has written"
            self.states[layer] = recurrent.put_kept(
                self.states[layer], self.state_index, states, stays
            )

    def __call__(
        self, layer: int, q: Array, k: MaybeArray, v: MaybeArray, *, sinks: MaybeArray = None
    ) -> Array:
        """Attention output of one layer; see `kvrt.attention.contract.Attend`."""
        here = self.layers[layer]
        n_hadamard, rank = here.n_hadamard_v, here.group.latent_rank
        if here.read is not None or k is None or (v is None and not rank):
            k, v = self.shared(layer, gives_none=k is None and v is None)
        else:
            k, v = self._own(layer, k, v)
        found = []
        reads = self.output if here.group.indexed is None else self._indexed(layer)
        for part, tokens in here.by_part(q, k, v):
            own_q, own_k, own_v = tokens
            args = self.arguments(here, part, own_q, own_k, own_v, sinks)
            found.append((reads(layer, part, tokens, args), own_k if self.unrotated else args[0].k))
        out, keys = (x[0] if len(x) == 1 else jnp.concatenate(x) for x in zip(*found, strict=True))
        if here.read is None:
            self.k_new[layer], self.v_new[layer] = keys[:, :, rank:] if rank else keys, v
        return hadamard.transform(out, n_hadamard) if n_hadamard else out

    def produce(self, layer: int, k: Array, v: MaybeArray) -> None:
        """Keeps keys and values; see `kvrt.attention.contract.Attend`."""
        here = self.layers[layer]
        k, v = self._own(layer, k, v)
        keys = k
        if not self.unrotated:
            found = [here.compared(part, x) for part, (x,) in here.by_part(k)]
            keys = found[0] if len(found) == 1 else jnp.concatenate(found)
        self.k_new[layer], self.v_new[layer] = keys[:, :, here.group.latent_rank :], v

    def index(self, layer: int, q: Array, k: Array, weights: Array) -> None:
        """Keeps index keys; see `kvrt.attention.contract.Attend`."""
        indexed = self.layers[layer].group.indexed
        if indexed is None:
            raise BadConfig(f"layer {layer} has no `indexed` in its group and gives index keys")
        self.produce(indexed.keys_layer(layer), k, None)
        self.indexes[layer] = q, weights

    def _indexed(self, layer: int) -> Callable[..., Array]:
        """As `output`, of parts in their order, whose tokens read what an indexer chooses."""
        indexed = self.layers[layer].group.indexed
        if indexed is None or layer not in self.indexes:
            raise BadConfig(f"layer {layer} chooses by an indexer; call Attend.index before it")
        found, n = self._by_index(layer, indexed), indexed.n_cells
        return lambda layer, part, tokens, args: indexer.jitted(args, next(found), n, attend)

    def _by_index(self, layer: int, indexed: Indexed) -> Iterator[indexer.Index]:
        """What the tokens of each part choose by."""
        keys_layer = indexed.keys_layer(layer)
        keys, n_cells = self.layers[keys_layer], indexed.n_cells
        tokens = (*self.indexes[layer], *self.own[keys_layer])
        for part, (q, weights, k, v) in keys.by_part(*tokens):
            args = self.arguments(keys, part, q, k, v, None)
            # Both groups have the same cells, so what one's tokens see the other's do.
            made = self.seen.get(id(part.view)) or indexer.candidates(part.view, n_cells)
            self.seen[id(part.view)] = made
            yield indexer.Index(args=args, weights=weights, candidates=made)

    def for_tokens(self, ids: Array) -> some_tokens.SomeTokens:
        """The same for some tokens; see `kvrt.attention.contract.Attend`."""
        return some_tokens.SomeTokens(step=self, ids=ids)

    def _own(self, layer: int, k: Array, v: MaybeArray) -> tuple[Array, Array]:
        """Keys and values of a layer's own, as they are stored but for the rotation."""
        here = self.layers[layer]
        if here.read is not None:
            self.shared(layer, gives_none=False)
        if here.group.latent_rank:
            self.own[layer] = here.own_latent(layer, k, v)
        else:
            self.own[layer] = mark_damage(k, v, here.n_hadamard_v)
        return self.own[layer]

    def is_usual(self, part: GroupView) -> bool:
        """Whether tokens choose nothing of what they read, and none may be refused."""
        return self.apart is None and part.units is None

    def output(
        self, layer: int, part: GroupView, tokens: tuple[Array, ...], args: AttendArgs
    ) -> Array:
        """The output for a part's queries, keys and values, from what `attend` takes of them."""
        here = self.layers[layer]
        if self.is_usual(part):
            return attend(*args)[0]
        if part.units is not None:
            return self._sparse(layer, here, part, args)
        return self._apart(here, part, tokens, args)

    def _sparse(self, layer: int, here: LayerStep, part: GroupView, args: AttendArgs) -> Array:
        """The output for tokens that choose what they read."""
        assert here.labels is not None and part.units is not None and self.select is not None
        # Channels are those of the layer whose keys these are; layers without are traced once.
        of_keys = layer if here.read is None else here.read
        which = of_keys if isinstance(self.select, DoubleSparsity) else 0
        chosen_by = read.Selection(labels=here.labels, units=part.units)
        return read.jitted(args, chosen_by, self.select, which, attend)

    def _apart(
        self, here: LayerStep, part: GroupView, tokens: tuple[Array, ...], args: AttendArgs
    ) -> Array:
        """The output for tokens of which some may be refused; one by one where that may differ."""
        qkv, kv, view, how = args
        if isinstance(view, SeqView) or one_by_one.is_exact(kv):
            return attend(*args)[0]
        if isinstance(kv.k, PerChannel):
            raise BadConfig(
                "keys quantized by channel: the tokens of one step would see groups of cells as "
                "they were before the first of them"
            )
        q, k, v = tokens
        rank, cached_v = here.group.latent_rank, one_by_one.as_cached(qkv.v, kv.v)
        cached = one_by_one.as_cached((k if self.unrotated else qkv.k)[:, :, rank:], kv.k)
        cached = jnp.concatenate([cached_v, cached], axis=2) if rank else cached
        if self.unrotated:
            cached = self.arguments(here, part, q, cached, v, None)[0].k
        return one_by_one.attend_one_by_one((qkv, kv, view, how), cached, cached_v)

    def shared(self, layer: int, *, gives_none: bool) -> tuple[Array, Array]:
        """The step's own keys and values of the layer that a layer reads.

        Raises:
          BadConfig: the model gives other keys and values than its groups say.
        """
        read = self.layers[layer].read
        if read is None or not gives_none:
            does = "keeps keys and values" if read is None else f"reads those of layer {read}"
            raise BadConfig(
                f"layer {layer} {does} and gives attend {'its own' if read is not None else 'none'}"
                "; give both, or None for both, as kv_of of its group says"
            )
        if read not in self.own:
            raise BadConfig(
                f"layer {layer} reads the keys and values of layer {read}, which did not run "
                "before it in this step; run both"
            )
        return self.own[read]

    def arguments(
        self, here: LayerStep, part: GroupView, q: Array, k: Array, v: Array, sinks: Array | None
    ) -> AttendArgs:
        """What `attend` is given for some tokens."""
        q = tempered(q, part.view.pos, here.group.temperature) if here.group.temperature else q
        q = here.mixed_latent(q) if here.group.latent_rank and here.n_hadamard_v else q
        at_grouped = part.grouped and part.grouped.tokens(q, k)
        compared = here.compared(part, q), here.compared(part, k)
        qkv = TokenQKV(q=compared[0], k=compared[1], v=v, grouped=at_grouped)
        how = LayerAttention(
            group=here.group,
            rope=part.rope if part.rope and part.rope.cells else None,
            grouped=part.grouped and part.grouped.cells,
            sinks=sinks,
            implementation=self.implementation,
        )
        return qkv, here.kv, part.view, how

    def recur(
        self,
        layer: int,
        step: Step[Outputs],
        inputs: Inputs,
        *,
        chunk: ChunkedStep[Outputs] | None = None,
    ) -> Outputs:
        """Outputs of a recurrence of one layer; see `kvrt.attention.contract.Attend`."""
        at, tables = self.state_index, self.states[layer]
        assert at is not None, "a recurrent layer that the model's `recurrent` lacks"
        if self.apart is not None:
            self.apart[layer], out = recurrent.advance_apart(tables, at, step, inputs)
        elif chunk is None:
            self.states[layer], out = recurrent.advance(tables, at, step, inputs)
        else:
            form = chunk.run, chunk.size
            self.states[layer], out = recurrent.advance_chunks(tables, at, step, form, inputs)
        return out


def only(stays: Bool[Array, " T"]) -> Callable[[AnyArray], Array]:
    """Makes of the slots of a step's tokens those that are written."""
    return lambda slots: jnp.where(stays, slots, NOWHERE)


def step_attention(
    stores: Sequence[KVStore],
    views: Sequence[Sequence[AnyView]],
    groups: Sequence[GroupSpec],
    config: CacheConfig,
    states: dict[int, recurrent.StateTables],
    state_index: recurrent.StateIndex | None,
) -> StepAttention:
    """One step over the stores and states of all layers.

    Args:
      stores: cached keys and values by group; the i-th layer of a group has the i-th arrays of its
        store.
      views: by group, what each part of the step's tokens sees, in the tokens' order.
      groups: attention layers.
      config: where keys are rotated, implementation, SelfExtend.
      states: tables by recurrent layer.
      state_index: which states the tokens read and write.
    """
    layers: dict[int, LayerStep] = {}
    for store, parts, group in zip(stores, views, groups, strict=True):
        shared = tuple(_group_view(view, group, config) for view in parts)
        for layer, k, v in zip(group.layers, store.k, store.v, strict=True):
            mixed = [config.hadamard and isinstance(x, Quantized) for x in (k, v)]
            layers[layer] = LayerStep(
                group=group,
                parts=shared,
                kv=LayerKV(k=k, v=v),
                n_hadamard_k=hadamard.size_k(group.dim_k, True) if mixed[0] else 0,
                n_hadamard_v=hadamard.size_v(group.dim_v, True) if mixed[1] else 0,
            )
        layers |= {x: dataclasses.replace(layers[read], read=read) for x, read in group.kv_of}
    return StepAttention(
        states=states,
        state_index=state_index,
        layers=layers,
        unrotated=config.rope == "read",
        implementation=config.attention,
    )


def _group_view(view: AnyView, group: GroupSpec, config: CacheConfig) -> GroupView:
    at_exact, at_grouped, extend = view, None, config.self_extend
    tables, raw = None, config.rope == "read"
    if group.rope and extend and grouped.uses_grouped_positions(group, config):
        if view.n_tokens == 1 and isinstance(view, BlockView):
            at_exact = grouped.for_one_query(view, extend, unrotated=raw)
        else:
            n_ctx = config.n_ctx
            at_grouped = grouped.grouped_tables(group.rope, view, n_ctx, extend, unrotated=raw)
    if group.rope:
        moved = at_exact is not view and not raw
        tables = rope.make(group.rope, at_exact, config.n_ctx, unrotated=raw, moved=moved)
    found = GroupView(view=view, rope=tables, grouped=at_grouped)
    return found.behind(group.latent_rank) if group.latent_rank else found
