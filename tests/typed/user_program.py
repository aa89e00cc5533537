# pyright: strict
"""A user's program: a decoder, a policy and a drafter of one's own; mypy and pyright check it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

import kvrt
from kvrt import (
    Attend,
    CacheConfig,
    ContextShift,
    Decoder,
    DraftContext,
    Engine,
    EngineConfig,
    GroupSpec,
    KvrtError,
    MaskSpec,
    MeshSpec,
    Request,
    RopeSpec,
    Runtime,
    Sampling,
    Speculation,
)
from kvrt.policies import Drop, Policy


class TinyDecoder(nnx.Module):
    """One attention layer, as the documentation of `kvrt.Decoder` says."""

    def __init__(self, n_vocab: int = 32, *, rngs: nnx.Rngs) -> None:
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 8
        rope = RopeSpec(n_rot=self.head_dim)
        group = GroupSpec(layers=(0,), n_kv_heads=2, head_dim=8, rope=rope, mask=MaskSpec())
        self.groups = (group,)
        self.recurrent = None
        self.n_vocab = n_vocab
        n = self.n_heads + 2 * self.n_kv_heads
        self.embedding = nnx.Embed(n_vocab, 32, rngs=rngs)
        self.qkv = nnx.Linear(32, n * self.head_dim, rngs=rngs)
        self.out = nnx.Linear(32, n_vocab, rngs=rngs)

    def __call__(self, tokens: jax.Array, attend: Attend, out_ids: jax.Array) -> jax.Array:
        x = self.embedding(tokens)
        rows = self.qkv(x).reshape(x.shape[0], -1, self.head_dim)
        q, k, v = jnp.split(rows, [self.n_heads, self.n_heads + self.n_kv_heads], axis=1)
        x = x + attend(0, q, k, v).reshape(x.shape)
        return self.out(x[out_ids])


@dataclasses.dataclass(frozen=True)
class KeepHalf:
    """A policy: drops the older half of all tokens."""

    n_keep: int = 0

    def n_fit(self, n_free: int, n_past: int) -> int:
        return n_free

    def drop(self, n_past: int, n_new: int = 1) -> Drop | None:
        return Drop(p0=0, p1=n_past // 2) if n_past > 1 else None


class Repeats:
    """A drafter: says the newest token again."""

    def check(self, n_vocab: int) -> None:
        pass

    def draft(self, context: DraftContext, n: int) -> Sequence[int]:
        return [int(context.tokens[-1])] * n


def answer(
    model: Decoder, prompt: np.ndarray, policy: Policy, mesh: Mesh | None = None
) -> list[int]:
    config = CacheConfig(n_ctx=64, n_seq_max=2, block_size=16)
    with Runtime(model, config, policy=policy, mesh=mesh) as runtime:
        logits: jax.Array = runtime.prefill(prompt)
        first = int(jnp.argmax(logits))
        speculation = Speculation(drafter=Repeats(), n_draft=2)
        sampling = Sampling(temp=0.8, top_k=4, seed=1)
        tokens = [t.id for t in runtime.generate(8, sampling=sampling, speculation=speculation)]
        runtime.seq_cp(0, 1)
        kvrt.session.save(Path("a.kv"), runtime.snapshot())
        runtime.restore(kvrt.session.read(Path("a.kv")), {0: 1})
        return [first, *tokens]


def serve(model: Decoder, prompts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {}
    config = CacheConfig(n_ctx=128, n_seq_max=4, block_size=16, type_k="int8")
    with Engine(model, config, EngineConfig(mode="paged"), policy=ContextShift(n_keep=4)) as engine:
        for i, prompt in enumerate(prompts):
            engine.add_request(Request(id=str(i), tokens=tuple(prompt), n_predict=4))
        while engine.has_work:
            for output in engine.step():
                texts.setdefault(output.id, []).extend(output.tokens)
    return texts


def main() -> None:
    kvrt.keep_programs()
    model = TinyDecoder(rngs=nnx.Rngs(0))
    assert len(answer(model, np.arange(1, 9, dtype=np.int32), KeepHalf())) == 9
    assert set(serve(model, [[1, 2, 3], [4, 5]])) == {"0", "1"}
    print(Runtime(model, mesh=MeshSpec()), Runtime(model).config.type_k)
    try:
        Runtime(model).append([99])
    except KvrtError as error:
        print(error)


if __name__ == "__main__":
    main()
