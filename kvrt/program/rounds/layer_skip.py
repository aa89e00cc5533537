"""One round of drafts by the first layers of a model, which the others then verify.

    layers [0, E)   token 0, draft 1, draft 2, ...   one after the other, each cached as it comes
    layers [E, L)   all of them at once, from the residual stream that was kept of each

So every layer runs once a token. The cells of drafts that are refused are empty afterwards: the
slots of a round were empty before it, or those of tokens that no later one sees.

Source: arXiv:2404.16710 (LayerSkip), sec. 4.3.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvrt.arrays import AnyArray, Array, Bool, Float, Int32, state
from kvrt.attention.contract import LayeredDecoder
from kvrt.attention.step_attention import StepAttention
from kvrt.config import GroupSpec
from kvrt.errors import BadConfig
from kvrt.program import sample
from kvrt.program import step as steps
from kvrt.program.batch import Batch
from kvrt.program.decode_loop import Sampled
from kvrt.program.device import Device
from kvrt.program.layer_range import in_parts, in_place
from kvrt.program.programs import ModelKind, Program, Programs
from kvrt.program.rounds.verify import Round, accept
from kvrt.program.step import Cache, StepSpec


@dataclasses.dataclass(frozen=True)
class ExitSpec:
    """What a round is compiled for, beside the cache: layers that draft, log-probabilities."""

    exit_layer: int
    n_best: int


@state
class _Drafting:
    """`n_fed` tokens have gone through the first layers, whose stream is kept of each."""

    n_fed: Int32[Array, ""]
    ended: Bool[Array, ""]
    tokens: Int32[Array, " T"]
    stream: Float[Array, "T E"]
    cache: Cache
    sampler: sample.Sampler


def check_exit(programs: Programs, exit_layer: int) -> None:
    """Refuses a model whose first layers cannot draft for the others.

    Raises:
      BadConfig: there are too few layers, it cannot be run in parts, it keeps recurrent states, or
        a layer behind the exit reads keys and values of one before it.
    """
    layout = programs.spec.layout
    n_layers = layout.n_layers
    if not 0 < exit_layer < n_layers:
        raise BadConfig(
            f"exit_layer is {exit_layer}, and the model has {n_layers} layers; some of them must "
            "draft and some verify: choose more than 0 and fewer than all"
        )
    if layout.recurrent:
        raise BadConfig(
            "LayerSkip drafts by attention layers; this model has recurrent ones, whose states of "
            "refused drafts cannot be taken back: use PromptLookup or DraftModel"
        )
    reads = [x for group in layout.groups for x in _across(group, exit_layer)]
    if reads:
        layer, read = reads[0]
        raise BadConfig(
            f"layer {layer} reads the keys and values of layer {read}, which lies before "
            f"exit_layer {exit_layer}: the verifying step does not run it again; choose an exit "
            "that separates no layer from the one that it reads"
        )
    token = jax.ShapeDtypeStruct((1,), np.int32)
    jax.eval_shape(lambda p, t: in_parts(programs.kind.model(p)).embed(t), programs.params, token)


def _across(group: GroupSpec, exit_layer: int) -> list[tuple[int, int]]:
    return [(x, read) for x, read in group.kv_of if read < exit_layer <= x]


def draft_and_verify(
    model: LayeredDecoder,
    cache: Cache,
    plan: Round,
    sampler: sample.Sampler,
    spec: StepSpec,
    how: ExitSpec,
) -> tuple[tuple[Sampled, Int32[Array, ""]], Cache, sample.Sampler]:
    """Runs a round on the device.

    Args:
      model: it can be run in parts.
      cache: donated by jitted callers.
      plan: the first token, and slots for it and for plan.n_steps - 1 drafts; the blocks that it
        reads have those slots.
      sampler: its state before the first token is sampled.
      spec: as for `forward`.
      how: which layers draft.

    Returns:
      What was sampled, [T, 1], and how many tokens were fed, drafts among them; the cache with the
      first Sampled.n_steps tokens; and the sampler.
    """
    drafted = _draft(model, cache, plan, sampler, (spec, how.exit_layer))
    real = jnp.arange(len(drafted.tokens), dtype=jnp.int32) < drafted.n_fed
    batch = dataclasses.replace(
        plan.batch,
        tokens=drafted.tokens,
        pos=jnp.where(real, plan.batch.pos, -1),
        seq_ids=jnp.where(real, plan.batch.seq_ids, -1),
    )
    fed = dataclasses.replace(plan, batch=batch, n_steps=drafted.n_fed)
    sampled, cache, last = _verify(model, drafted, fed, sampler, spec, how)
    return (sampled, drafted.n_fed), cache, last


def _draft(
    model: LayeredDecoder,
    cache: Cache,
    plan: Round,
    sampler: sample.Sampler,
    where: tuple[StepSpec, int],
) -> _Drafting:
    """Drafts token after token by the first layers, and runs those over the last draft too."""
    (spec, n_layers), batch = where, plan.batch
    tokens = jnp.asarray(batch.tokens)
    x = jax.eval_shape(model.embed, tokens)
    first = _Drafting(
        n_fed=jnp.int32(0),
        ended=jnp.asarray(False),
        tokens=tokens,
        stream=jnp.zeros(x.shape, x.dtype),
        cache=cache,
        sampler=jax.tree.map(jnp.asarray, sampler),
    )

    def more(c: _Drafting) -> Array:
        return (c.n_fed < plan.n_steps) & ~c.ended

    def one(c: _Drafting) -> _Drafting:
        i = c.n_fed

        def run(token: Array, attend: StepAttention) -> tuple[Array, Array]:
            x = model.layers(model.embed(token), attend, 0, n_layers)
            return x.astype(jnp.float32), x

        (_, x), cache = steps.step(run, c.cache, _single(batch, c.tokens, i), spec)
        stream = lax.dynamic_update_slice_in_dim(c.stream, x, i, 0)
        token, sampler = sampled_behind(model, x, c.sampler, i + 1 < plan.n_steps)
        stops = jnp.any(token == jnp.asarray(plan.stop_ids)) | (token[0] == sample.NO_TOKEN)
        return _Drafting(
            n_fed=i + 1,
            ended=stops,
            tokens=c.tokens.at[i + 1].set(token[0], mode="drop"),
            stream=stream,
            cache=cache,
            sampler=sampler,
        )

    return lax.while_loop(more, one, first)


def sampled_behind(
    model: LayeredDecoder, x: Float[Array, "S E"], sampler: sample.Sampler, wanted: Array
) -> tuple[Int32[Array, " S"], sample.Sampler]:
    """The tokens that are sampled behind the exit; none where none is wanted."""
    nothing = jnp.full(x.shape[0], sample.NO_TOKEN, jnp.int32), sampler
    return lax.cond(
        wanted,
        lambda: sample.sample_tokens(model.head(x).astype(jnp.float32), sampler),
        lambda: nothing,
    )


def _verify(
    model: LayeredDecoder,
    drafted: _Drafting,
    fed: Round,
    sampler: sample.Sampler,
    spec: StepSpec,
    how: ExitSpec,
) -> tuple[Sampled, Cache, sample.Sampler]:
    """The other layers over all tokens that were fed; those that stay are cached."""
    n_layers = spec.layout.n_layers

    def run(_: Array, attend: StepAttention) -> tuple[Array, Sampled, sample.Sampler]:
        attend.one_by_one()
        x = model.layers(drafted.stream, attend, how.exit_layer, n_layers)
        logits = model.head(x).astype(jnp.float32)
        sampled, after = accept(logits, fed, sampler, how.n_best)
        attend.keep(jnp.arange(logits.shape[0], dtype=jnp.int32) < sampled.n_steps)
        return logits, sampled, after

    # Layers behind the exit have cached nothing of these tokens.
    (_, sampled, last), cache = in_place(run, drafted.cache, fed.batch, spec)
    return sampled, cache, last


def _single(batch: Batch, tokens: Array, i: Array) -> Batch:
    """Token i of a batch alone."""

    def at(x: AnyArray) -> Array:
        return lax.dynamic_slice_in_dim(jnp.asarray(x), i, 1)

    return Batch(
        tokens=at(tokens),
        pos=at(batch.pos),
        seq_ids=at(batch.seq_ids),
        places=tuple(dataclasses.replace(p, slots=at(p.slots)) for p in batch.places),
        out_ids=jnp.zeros(1, jnp.int32),
    )


# --- programs ----------------------------------------------------------------------------------


def run_on(
    device: Device, plan: Round, sampler: sample.Sampler, how: ExitSpec
) -> tuple[Sampled, Int32[Array, ""], sample.Sampler]:
    """Runs a round on a device's cache; what was sampled, how many were fed, and the sampler."""
    found = device.programs.run(exit_program(device.programs, device.cache, plan, sampler, how))
    (sampled, n_fed), device.cache, sampler = found
    return sampled, n_fed, sampler


def exit_program(
    programs: Programs, cache: Cache, plan: Round, sampler: sample.Sampler, how: ExitSpec
) -> Program:
    """The program of a round."""
    args = programs.params, cache, plan, sampler
    return Program(layer_skip, (programs.kind, how), args, donate=(1,), n_known=2)


def layer_skip(
    kind: ModelKind,
    how: ExitSpec,
    params: tuple,
    cache: Cache,
    plan: Round,
    sampler: sample.Sampler,
) -> tuple[tuple[Sampled, Int32[Array, ""]], Cache, sample.Sampler]:
    """`draft_and_verify` as a program."""
    return draft_and_verify(in_parts(kind.model(params)), cache, plan, sampler, kind.spec, how)
