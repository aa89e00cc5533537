"""Context checkpoints of a hybrid: what one costs to write, and what resuming at one saves.

    python -m scripts.bench.checkpoints --n_tokens 2000 --n_checkpoints 8
    python -m scripts.bench.checkpoints

Random weights in the sizes of Granite 4.0 H 350M: 28 layers of Mamba-2 and 4 of attention. A prompt
is read, and one whose last tokens differ is read again from the nearest checkpoint.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.cache.checkpoint import DeviceCheckpoint
from kvrt.reuse.plan import operations, plan_reuse
from kvrt_models import spec
from kvrt_models.decoder import Decoder
from kvrt_models.spec import Layers, SsmSpec
from kvrt_models.weights.shapes import weight_shapes
from scripts._lib import commands, measure

_N_TOKENS = flags.DEFINE_integer("n_tokens", 8000, "Tokens of the prompt.", lower_bound=512)
_N_KEPT = flags.DEFINE_integer("n_checkpoints", 32, "Checkpoints of it.", lower_bound=2)
_N_DIFFER = flags.DEFINE_integer("n_differ", 100, "Tokens that differ at its end.", lower_bound=1)
_N_WRITES = flags.DEFINE_integer("n_writes", 30, "Checkpoints written alone.", lower_bound=1)
_SEED = 0


def hybrid() -> Decoder:
    """A decoder of random weights whose states decay, as trained ones do."""
    attention = (10, 13, 17, 27)
    rest = tuple(i for i in range(32) if i not in attention)
    mamba = SsmSpec(
        kind="mamba2", layers=rest, d_inner=1536, d_state=128, d_conv=4, n_heads=48, n_groups=1
    )
    of = spec.build(
        arch="granitehybrid",
        layers=[Layers(layers=attention, rope=None)],
        n_vocab=100_352,
        n_embd=768,
        n_ff=2048,
        n_heads=12,
        n_kv_heads=4,
        head_dim=64,
        norm_eps=1e-5,
        n_ctx_train=32_768,
        tied=True,
        qkv_bias=False,
        out_bias=False,
        ffn_bias=False,
        qk_norm=False,
        ssm=mamba,
    )
    keys = jax.random.split(jax.random.key(_SEED), 1000)
    weights = {}
    for key, (name, x) in zip(keys, weight_shapes(of, "f32").items(), strict=False):
        assert isinstance(x, jax.ShapeDtypeStruct)
        drawn = jax.random.normal(key, x.shape, x.dtype) / np.sqrt(x.shape[-1])
        ones = jnp.ones(x.shape, x.dtype)
        drawn = -0.1 * ones if name.endswith("ssm_a") else drawn
        weights[name] = ones if "norm" in name else drawn
    return Decoder(of, weights)


def main() -> None:
    n = _N_TOKENS.value
    interval = -(-n // _N_KEPT.value)
    model = hybrid()
    config = CacheConfig(
        n_ctx=n + 512, n_ubatch=interval, n_checkpoints=_N_KEPT.value, type_k="f32", type_v="f32"
    )
    at = Runtime(model, config)
    rng = np.random.default_rng(_SEED)
    old = rng.integers(0, 10_000, n).tolist()
    at.append(old[: interval + _N_DIFFER.value])  # compiled before anything is timed
    at.clear()
    (prefill_s,) = measure.clock(lambda: at.append(old), 1)
    resumed = [resume(at, old, rng) for _ in range(2)]
    written = [write(at, int(i)) for i in rng.integers(0, 10_000, _N_WRITES.value)]
    measure.emit(
        "checkpoints",
        n_tokens=n,
        n_params=sum(x.size for x in jax.tree.leaves(at.programs.params)),
        interval=interval,
        n_checkpoints=at.stats().n_checkpoints,
        checkpoint_bytes=at.stats().checkpoint_bytes // at.stats().n_checkpoints,
        prefill_s=round(prefill_s, 3),
        resume_s=round(resumed[-1][0], 3),
        n_recomputed=resumed[-1][1],
        times_faster=round(prefill_s / resumed[-1][0], 1),
        write_ms=measure.quartiles(written),
        share_of_interval=round(float(np.median(written)) / (prefill_s * interval / n), 4),
    )


def resume(at: Runtime, old: list[int], rng: np.random.Generator) -> tuple[float, int]:
    """Seconds to read a prompt that ends otherwise, and its tokens that were evaluated again."""
    same = len(old) - _N_DIFFER.value
    new = old[:same] + rng.integers(0, 10_000, _N_DIFFER.value).tolist()
    start = time.perf_counter()
    plan = plan_reuse(at.token_history(), new, at=at.resume_positions())
    cut, last = operations(plan)
    at.seq_rm(0, cut.p0)  # pyright: ignore[reportAttributeAccessIssue]
    jax.block_until_ready(at.append(new[last.start :]))  # pyright: ignore[reportAttributeAccessIssue]
    return time.perf_counter() - start, same - plan.n_prefix


def write(at: Runtime, token: int) -> float:
    """Seconds to write one checkpoint at the end of the sequence, a token later."""
    jax.block_until_ready(at.decode({0: token})[0])
    kept = at._cache.checkpoints
    assert kept is not None, "the model has recurrent layers"
    start = time.perf_counter()
    planned = kept.planned(0)
    assert planned is not None, "there is none at this position"
    of_seq = planned.checkpoints.of(0)
    jax.block_until_ready([x.state for x in of_seq if isinstance(x, DeviceCheckpoint)])
    return time.perf_counter() - start


if __name__ == "__main__":
    commands.run(main)
