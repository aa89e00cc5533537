"""Heads that stream beside heads that keep the text: each kind is the plain list of its heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import Runtime
from kvrt.attention.scored.layers import by_kind
from kvrt.attention.scored.split import divided_recurrence, positions_kept
from kvrt.errors import BadConfig
from kvrt.policies.scored import DuoAttention
from kvrt.policies.scored.duo_attention import read_streaming
from tests.policies.plainscored import PlainLayer
from tests.policies.test_scored import (
    CONFIG,
    GROUP,
    N_KV,
    N_TOKENS,
    TEXT,
    logits,
    padded_part,
    tokens,
)
from tests.toys import ToyLm

SIZES = {"budget": 60, "n_stream": 12, "interval": 8, "n_sink": 2, "n_recent": 5}
DUO = DuoAttention(streaming=((1,),), **SIZES)


LAYERS = functools.cache(lambda: by_kind([GROUP], None, CONFIG, DUO, {}))
PROGRAM = functools.cache(lambda spec: jax.jit(divided_recurrence(spec, None)[1]))


@pytest.mark.slow
@pytest.mark.parametrize("parts", [[1] * N_TOKENS, [33, 1, 40, 26]], ids=["one", "many"])
def test_each_head_keeps_and_gives_what_its_list_does(parts):
    (spec,) = LAYERS().scored[0].slots
    state = tuple(jnp.zeros((1, *x.shape), x.dtype) for x in LAYERS().recurrent.arrays[0])
    rows, many, outs, start = tokens(1), PROGRAM(spec), [], 0
    for n in parts:
        at = padded_part(start, n, max(parts))
        q, k, v = (jnp.asarray(x[at], jnp.float32) for x in rows[:3])
        given = q, k, v, jnp.asarray(at, jnp.int32)
        state, (out, _) = many(state, jnp.int32(0), given, jnp.int32(n))
        outs.append(np.asarray(out)[:n])
        start += n
    found, kept, group = np.concatenate(outs), positions_kept(spec, [x[0] for x in state]), 2
    for h, budget in ((0, 60), (1, 12)):
        sizes = {"budget": budget, "interval": 8, "n_sink": 2, "n_recent": 5, "n_kv": 1}
        plain, mine = PlainLayer("recent_only", **sizes), slice(h * group, (h + 1) * group)
        for i in range(N_TOKENS):
            wanted = plain.step(rows[0][i, mine], *(x[i, h : h + 1] for x in rows[1:3]), i)
            np.testing.assert_allclose(found[i, mine], wanted, atol=2e-5)
        assert list(kept[h]) == [t.pos for t in plain.heads[0]]
    assert N_KV == 2 and len(kept[0]) > len(kept[1])


@pytest.mark.slow
def test_a_model_without_streaming_heads_is_plain_attention():
    duo = DuoAttention(streaming=(), **{**SIZES, "budget": 64})
    found = logits(Runtime(ToyLm(), CONFIG, policy=duo), TEXT, [32, 28])
    np.testing.assert_allclose(found, logits(Runtime(ToyLm(), CONFIG), TEXT, [32, 28]), atol=2e-4)
    streams = DuoAttention(streaming=((0,), (1,)), **{**SIZES, "budget": 64})
    runtime = Runtime(ToyLm(), CONFIG, policy=streams)
    assert abs(logits(runtime, TEXT, [32, 28]) - found).max() > 1e-2
    assert [[len(head) for head in x] for x in runtime.kept_positions().values()] == [
        [12 + (60 - 20) % 8, 60],
        [60, 12 + (60 - 20) % 8],
    ]


@pytest.mark.slow
def test_streaming_heads_save_their_bytes():
    n_bytes = []
    for streaming in ((), ((0,), (1,))):
        duo = DuoAttention(streaming=streaming, **{**SIZES, "budget": 1000})
        n_bytes.append(Runtime(ToyLm(), CONFIG, policy=duo).stats().cache_bytes)
    # Half of the heads have 20 slots in place of 1,008; a layer's part says how many are taken.
    one = 2 * (2 * 16 * 4 + 8)
    assert n_bytes[0] - n_bytes[1] == CONFIG.n_seq_max * (one * (1008 - 20) - 2 * 4)


BAD = [
    ({"streaming": ((1, 0),)}, "ascending numbers, each once"),
    ({"n_stream": 7}, "n_stream is 7; from 8"),
    ({"n_stream": 61}, "to the budget of 60 tokens"),
    ({"pyramid": 1.5}, "use one of both"),
]


@pytest.mark.parametrize(("changed", "says"), BAD, ids=str)
def test_bad_settings_are_refused_in_one_line(changed, says):
    with pytest.raises(BadConfig, match=says) as found:
        DuoAttention(**{"streaming": ((1,),)} | SIZES | changed)
    assert "\n" not in str(found.value)


def test_heads_of_another_model_are_refused_at_construction():
    duo = DuoAttention(streaming=((5,),), **SIZES)
    with pytest.raises(BadConfig, match="head 5 of layer 0 is to stream, which has 2 kv heads"):
        Runtime(ToyLm(), CONFIG, policy=duo)


def test_heads_are_read_from_a_file_or_as_they_are(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text('{"streaming": [[1], [0, 2]], "others": [[0], [1]]}')
    assert read_streaming(str(path)) == read_streaming("[[1],[0,2]]") == ((1,), (0, 2))
    path.write_text('{"others": [[0]]}')
    for text, says in (
        (str(path), "name a file of streaming heads, which"),
        ("[[1.5]]", "name a file of streaming heads"),
        ("[[1]", "name a file of streaming heads"),
        (str(tmp_path / "nowhere"), "name a file of streaming heads"),
        ("[" * 100_000, "nested too deeply; name a file"),
        (str(tmp_path), "it is a folder, not a regular file"),
        ("/dev/zero", "it is a device, not a regular file"),
    ):
        with pytest.raises(BadConfig, match=says) as found:
            read_streaming(text)
        assert "\n" not in str(found.value) and len(str(found.value)) < 300
