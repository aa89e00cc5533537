"""YOCO: one layer's keys and values for half the model, which prompts leave out. A dense oracle.

The same kind of layers is in the matrix (`produced`), with every KV dtype, mode and mesh.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt.arrays import array_bytes
from kvrt.errors import BadConfig
from kvrt.program.estimate import of_cells
from kvrt_models.decoder import Decoder
from tests import yocotoy
from tests.marks import slow
from tests.yocotoy import HALF, N_KV, N_LAYERS, WINDOW, D, Dense, decoder

TEXT = [(7 * i + i // 5) % 32 for i in range(60)]
UBATCH = 16
COUNTED = [0]


class Counting(Decoder):
    """Counts the tokens that go through layers, but not through the one that has no queries."""

    def layers(self, x, attend, first, last):
        def count():
            COUNTED[0] += x.shape[0] * sum(i not in self.spec.producers for i in range(first, last))

        jax.debug.callback(count)
        return super().layers(x, attend, first, last)


def make(**options):
    of, _ = yocotoy.toy()
    config = {"n_ctx": 80, "block_size": 8, "n_ubatch": UBATCH, "n_seq_max": 3, **options}
    counting = Counting.__new__(Counting)
    counting.__dict__.update(of.__dict__)
    return Runtime(counting, CacheConfig(**config))


@functools.cache
def shared(rope):
    return make(rope=rope)


@pytest.fixture(params=["write", slow("read")])
def at(request):
    found = shared(request.param)
    found.clear()
    return found


@functools.cache
def whole():
    return Dense().logits(TEXT)


def counted(call):
    jax.effects_barrier()
    before = COUNTED[0]
    found = np.asarray(call())
    jax.effects_barrier()
    return found, COUNTED[0] - before


def close(found, wanted, tolerance=1e-5):
    np.testing.assert_allclose(np.asarray(found), wanted, atol=tolerance, rtol=0)


@pytest.mark.slow
def test_a_prompt_leaves_half_the_layers_out(at):
    """48 tokens in three steps: N * L / 2 + L / 2, and the logits of all layers over all tokens."""
    n = 3 * UBATCH
    full, n_full = counted(lambda: at.append(TEXT[:n], out_ids=range(n)))
    assert n_full == n * N_LAYERS
    at.clear()
    last, n_last = counted(lambda: at.append(TEXT[:n]))
    assert n_last == n * N_LAYERS // 2 + N_LAYERS // 2
    close(last, full[-1:])
    close(full, whole()[:n], 2e-5)
    for i in range(n, n + 4):
        found, n_one = counted(lambda i=i: at.append(TEXT[i : i + 1]))
        close(found[0], whole()[i], 2e-5)
        assert n_one == N_LAYERS


@pytest.mark.slow
def test_some_tokens_of_a_step_have_logits(at):
    """Windows that end within the step, padding, holes from defrag; a fork that goes on."""
    at.append(TEXT[:10])
    close(at.append(TEXT[10:24], out_ids=[0, 5, 13]), whole()[[10, 15, 23]], 2e-5)
    at.seq_cp(0, 1)
    other = Dense().logits([*TEXT[:24], *TEXT[:5]])
    close(at.append(TEXT[:5], 1), other[-1:], 2e-5)
    at.seq_rm(1)
    at.defrag()
    close(at.append(TEXT[24:30]), whole()[29:30], 2e-5)


def test_bytes_are_of_half_the_layers_windows_and_one_cache():
    at = shared("write")
    kept = [array_bytes(store) for store in at.cache.stores]
    one = 2 * N_KV * D * 4
    assert [len(store.k) for store in at.cache.stores] == [HALF, 1]
    assert kept[1] == 80 * one and kept[0] < 80 * one * HALF
    estimate = of_cells(decoder().groups, None, at.config).parts
    assert [p.n_bytes for p in estimate] == kept


def test_the_oracle_sees_windows():
    assert np.abs(Dense(window=2 * WINDOW).logits(TEXT) - whole()).max() > 1e-2


class Wrong(Decoder):
    """Does what no layer may for some of the step's tokens, or with keys that are not its own."""

    def layers(self, x, attend, first, last):
        heads = x.reshape(x.shape[0], -1, D)
        if self.how == "queries":
            attend(HALF + 1, heads, None, None)
        elif self.how == "reader makes":
            attend.produce(HALF + 1, heads, heads)
        else:
            some = attend.for_tokens(jnp.zeros(1, jnp.int32))
            args = (lambda state, row: (state, row[0]), (x,))
            getattr(some, self.how)(0, *(args if self.how == "recur" else (heads, heads)))
        return x


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("queries", f"values of layer {HALF}, which did not run before it in this step"),
        ("reader makes", f"layer {HALF + 1} reads those of layer {HALF} and gives attend its own"),
        ("produce", "layer 0 makes keys and values and runs for some of the step's tokens; only"),
        ("recur", "layer 0 keeps a state and runs for some of the step's tokens; only layers"),
    ],
)
def test_a_model_that_does_otherwise_is_refused(how, says):
    wrong = Wrong.__new__(Wrong)
    wrong.__dict__.update(decoder().__dict__)
    wrong.how = how
    with pytest.raises(BadConfig, match=says) as caught:
        Runtime(wrong, CacheConfig(n_ctx=32, attention="chunked")).append([1, 2])
    assert "\n" not in str(caught.value)
