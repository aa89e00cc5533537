"""Perplexity where a policy drops in attention alone and recurrent states have all tokens.

Run it with `python -m scripts.experiments.policies.kept_states`. A small hybrid, a layer of
attention and one of gated linear recurrence, learns the bytes of docs/ and README.md at 128 tokens;
the last bytes of each file are held out. Then it reads them in a cache of 128 cells: `keep` drops
by the policy with `on_states="keep"`, `recompute` reads what a drop leaves anew, states included,
`full` drops nothing. One JSON line a policy and way: perplexity of the tokens behind the first 128.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from flax import nnx
from jax.example_libraries import optimizers

from kvrt import CacheConfig, GroupSpec, RecurrentSpec, RopeSpec, Runtime
from kvrt.policies import AttentionSinks, ContextShift, Policy
from kvrt.store import rope
from scripts._lib import measure

_N_STEPS = flags.DEFINE_integer("n_steps", 1500, "Steps of training.", lower_bound=1)
_N_TOKENS = flags.DEFINE_integer("n_tokens", 3000, "Tokens that are read.", lower_bound=257)

N_CTX, WIDTH, N_HEADS, N_BATCH, CHUNK = 128, 96, 4, 16, 16
POLICIES: dict[str, Policy] = {
    "context_shift": ContextShift(n_keep=4),
    "attention_sinks": AttentionSinks(n_sink=4, n_window=N_CTX - 4, n_drop=CHUNK),
}


class Hybrid(nnx.Module):
    """Attention in layer 0, a gated sum of all tokens in layer 1, and a feed-forward after each."""

    n_vocab = 256
    spec = RopeSpec(n_rot=WIDTH // N_HEADS)
    groups = (GroupSpec(layers=(0,), n_kv_heads=N_HEADS, head_dim=WIDTH // N_HEADS, rope=spec),)
    recurrent = RecurrentSpec(layers=(1,), shapes=((WIDTH,),))

    def __init__(self):
        """Draws the weights."""
        rng = np.random.default_rng(0)

        def weight(n_in: int, n_out: int) -> nnx.Param:
            drawn = rng.standard_normal((n_in, n_out), np.float32) * n_in**-0.5
            return nnx.Param(jnp.asarray(drawn))

        self.embed, self.head = weight(256, WIDTH), weight(WIDTH, 256)
        self.qkv, self.out = weight(WIDTH, 3 * WIDTH), weight(WIDTH, WIDTH)
        self.gates, self.mix = weight(WIDTH, 2 * WIDTH), weight(WIDTH, WIDTH)
        self.up0, self.down0 = weight(WIDTH, 2 * WIDTH), weight(2 * WIDTH, WIDTH)
        self.up1, self.down1 = weight(WIDTH, 2 * WIDTH), weight(2 * WIDTH, WIDTH)

    def __call__(self, tokens: jax.Array, attend: Any, out_ids: jax.Array) -> jax.Array:
        """Logits of the tokens `out_ids`."""
        x = self.embed[...][tokens]
        heads = (norm(x) @ self.qkv[...]).reshape(len(x), 3, N_HEADS, -1)
        x += attend(0, heads[:, 0], heads[:, 1], heads[:, 2]).reshape(x.shape) @ self.out[...]
        x += jax.nn.gelu(norm(x) @ self.up0[...]) @ self.down0[...]
        x += attend.recur(1, gated, (norm(x) @ self.gates[...],)) @ self.mix[...]
        x += jax.nn.gelu(norm(x) @ self.up1[...]) @ self.down1[...]
        return norm(x)[out_ids] @ self.head[...]


class Causal:
    """What a training step attends to: all tokens before each of a text, and no cache."""

    def __call__(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Causal attention with RoPE."""
        pos = jnp.arange(len(q), dtype=jnp.int32)
        cos, sin = rope.angles(jnp.asarray(rope.frequencies(Hybrid.spec, N_CTX)), pos)
        q, k = (rope.rotate(x, cos, sin, Hybrid.spec.layout) for x in (q, k))
        scores = jnp.einsum("qhd,khd->hqk", q, k) * q.shape[2] ** -0.5
        scores = jnp.where(pos[:, None] >= pos, scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=2), v)

    def recur(self, layer: int, step: Any, rows: Any) -> jax.Array:
        """All tokens in their order."""
        return jax.lax.scan(step, (jnp.zeros(WIDTH),), rows)[1]


def norm(x: jax.Array) -> jax.Array:
    """Each token's channels over their root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def gated(state: Any, row: Any) -> Any:
    """A sum that forgets by a gate of each channel."""
    keep, new = jnp.split(row[0], 2)
    keep = jax.nn.sigmoid(keep + 2)
    total = keep * state[0] + (1 - keep) * new
    return (total,), total


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    root = Path(__file__).resolve().parents[3]
    texts = [x.read_bytes() for x in sorted([*root.glob("docs/*.md"), root / "README.md"])]
    n = -(-_N_TOKENS.value // len(texts))
    model, loss = trained(np.frombuffer(b"".join(x[:-n] for x in texts), np.uint8))
    held_out = np.frombuffer(b"".join(x[-n:] for x in texts), np.uint8)[: _N_TOKENS.value]
    tokens = held_out.astype(int).tolist()
    told = {"train_loss": round(loss, 3), "n_tokens": len(tokens), "n_ctx": N_CTX}
    measure.emit("kept_states", way="full", perplexity=full(model, tokens), **told)
    for name, policy in POLICIES.items():
        for way, read in (("keep", kept), ("recompute", recomputed)):
            figures = {"policy": name, "way": way, "perplexity": read(model, tokens, policy)}
            measure.emit("kept_states", **figures, **told)


def trained(data: np.ndarray) -> tuple[Hybrid, float]:
    """The model after the steps of training, and its last loss a token."""
    graph, params = nnx.split(Hybrid())
    start, update, get = optimizers.adam(lambda i: 3e-3 * jnp.minimum(1, (i + 1) / 50))

    def loss(params: Any, text: jax.Array) -> jax.Array:
        def one(ids: jax.Array) -> jax.Array:
            logits = nnx.merge(graph, params)(ids[:-1], Causal(), jnp.arange(len(ids) - 1))
            return -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], 1).mean()

        return jax.vmap(one)(text).mean()

    @jax.jit
    def step(i: Any, state: Any, text: jax.Array) -> Any:
        value, slope = jax.value_and_grad(loss)(get(state), text)
        return value, update(i, slope, state)

    rng, state, value = np.random.default_rng(1), start(params), jnp.zeros(())
    for i in range(_N_STEPS.value):
        begins = rng.integers(0, len(data) - N_CTX - 1, N_BATCH)
        text = np.stack([data[b : b + N_CTX + 1] for b in begins]).astype(np.int32)
        value, state = step(jnp.asarray(i), state, jnp.asarray(text))
    return nnx.merge(graph, get(state)), float(value)


def opened(model: Hybrid, n_ctx: int, policy: Policy | None = None) -> Runtime:
    """A runtime, of which states are kept where a policy drops."""
    sizes: dict[str, Any] = {"n_ctx": n_ctx, "block_size": 32, "n_ubatch": N_CTX}
    config = CacheConfig(**sizes, type_k="f32", type_v="f32", on_states="keep")
    return Runtime(model, config, policy=policy)


def full(model: Hybrid, tokens: list[int]) -> float:
    """Perplexity where nothing is dropped."""
    runtime = opened(model, len(tokens))
    return perplexity(tokens, [runtime.append([t])[0] for t in tokens])


def kept(model: Hybrid, tokens: list[int], policy: Policy) -> float:
    """Perplexity where attention drops."""
    runtime = opened(model, N_CTX, policy)
    found = perplexity(tokens, [runtime.append([t])[0] for t in tokens])
    assert runtime.stats().n_dropped > 0, "nothing was dropped"
    return found


def recomputed(model: Hybrid, tokens: list[int], policy: Policy) -> float:
    """Perplexity where what each drop leaves is read anew."""
    runtime, text, logits = opened(model, N_CTX), [], []
    for token in tokens:
        if policy.n_fit(N_CTX - len(text), len(text)) < 1:
            drop = policy.drop(len(text))
            assert drop is not None, "there is something to drop"
            text = text[: drop.p0] + text[drop.p1 :]
            runtime.clear()
            runtime.append(text)
        text.append(token)
        logits.append(runtime.append([token])[0])
    return perplexity(tokens, logits)


def perplexity(tokens: list[int], logits: list[jax.Array]) -> float:
    """Of the tokens behind the first N_CTX."""
    log_probs = np.asarray(jax.nn.log_softmax(jnp.stack(logits[N_CTX - 1 : -1])))
    wanted = np.array(tokens[N_CTX:])
    return round(float(np.exp(-log_probs[np.arange(len(wanted)), wanted].mean())), 3)


if __name__ == "__main__":
    app.run(main)
