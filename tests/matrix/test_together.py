"""All at once, as Character.AI has it: one kv head, windows and full layers, shared layers, int8.

One tiny random model with checkpoints and sessions, through a Runtime and both modes of an Engine,
beside a dense one in float64 that hands keys and values on from layer to layer, rounded.

Source: research.character.ai/optimizing-inference (2024).
"""

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime, session
from kvrt.options.engine import EngineConfig
from kvrt.serving.engine import Engine
from kvrt.serving.request import Request
from tests.matrix.plaincache import rounded
from tests.oracle import rotated as turned
from tests.sharedlm import Dense, SharedLm

WINDOW, FULL = MaskSpec(kind="window", size=9), MaskSpec()
# Logits lie within 1, and differ by some 1e-3 where nothing is rounded; by more than LIMIT only
# where tokens come again in other pieces, and a number next to a tie rounds otherwise.
LIMIT, AGAIN = 2e-4, 2e-3
# A full layer in three; windowed layers share, and so do full ones.
KV_OF = (0, 1, 0, 0, 1, 0)
MASKS = [WINDOW, FULL, WINDOW] * 2
TEXT = [(11 * i + i // 4 + i * i // 7) % 32 for i in range(70)]


@pytest.fixture(scope="module")
def model():
    return SharedLm(KV_OF, masks=MASKS, n_heads=4, n_kv_heads=1)


class Rounding(Dense):
    """Keeps keys and values as int8; a step's tokens see each other as they are.

    Keys are rounded as they are stored: rotated, or with rope="read" as they come.
    """

    def __init__(self, model, rope):
        super().__init__(model)
        self.rope = rope

    def step(self, tokens):
        n = len(self.rows)
        logits = super().step(tokens)
        for row in self.rows[n:]:
            row.k = {layer: self.kept(k, row.pos) for layer, k in row.k.items()}
            row.v = {layer: rounded(v, "int8") for layer, v in row.v.items()}
        return logits

    def kept(self, k, pos):
        if self.rope == "read":
            return rounded(k, "int8")
        at = turned(k[None], [pos])
        return turned(rounded(at, "int8"), [-pos])[0]

    def copy(self):
        other = Rounding(self.model, self.rope)
        other.rows = super().copy().rows
        return other


def config(rope="write", **options):
    sizes = {"n_ctx": 96, "block_size": 8, "n_ubatch": 16, **options}
    return CacheConfig(type_k="int8", type_v="int8", rope=rope, **sizes)


def read(at, oracle, tokens, seq_id=0, limit=LIMIT):
    found = np.asarray(at.append(tokens, seq_id, out_ids=range(len(tokens))))
    np.testing.assert_allclose(found, oracle.step(tokens), atol=limit, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("rope", ["write", "read"])
def test_a_runtime_with_checkpoints_and_a_session(model, rope, tmp_path):
    at = Runtime(model, config(rope, n_checkpoints=4, checkpoint_interval=16))
    oracle = Rounding(model, rope)
    assert [len(s.k) for s in at.cache.stores] == [1, 1]
    for start, end in ((0, 16), (16, 32), (32, 41), (41, 42)):
        read(at, oracle, TEXT[start:end])
    path = tmp_path / "together.kv"
    session.save(path, at.snapshot())
    other = Runtime(model, config(rope, n_checkpoints=4, checkpoint_interval=16))
    other.restore(session.read(path))
    for token in TEXT[42:45]:
        read(other, oracle, [token])
    # Back to a checkpoint, far behind the windows, and on with another text.
    assert 16 in other.checkpoints()
    other.seq_rm(0, 16)
    oracle.remove(16, 99)
    for start, end in ((50, 60), (60, 61)):
        read(other, oracle, TEXT[start:end], limit=AGAIN)
    assert other.stats().n_rewinds == 1


def test_the_oracle_counts_what_is_rounded_and_shared(model):
    other = SharedLm((0, 1, 2, 2, 1, 2), masks=MASKS, n_heads=4, n_kv_heads=1)
    exact, rounding, apart = Dense(model), Rounding(model, "write"), Rounding(other, "write")
    for start, end in ((0, 16), (16, 32)):
        wanted, *others = (x.step(TEXT[start:end]) for x in (rounding, exact, apart))
    assert min(abs(x - wanted).max() for x in others) > 5 * LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("swa_full", [False, True])
def test_a_gap_that_closes(model, swa_full):
    """Keys are stored unrotated, so that moving them rounds nothing once more."""
    at, oracle = Runtime(model, config("read", swa_full=swa_full)), Rounding(model, "read")
    for start, end in ((0, 16), (16, 30)):
        read(at, oracle, TEXT[start:end])
    at.seq_rm(0, 4, 14)
    at.seq_add(0, 14, None, -10)
    oracle.remove(4, 14)
    oracle.move(14, -10)
    read(at, oracle, TEXT[30:40])  # a step of 16, as those before it
    read(at, oracle, TEXT[40:41])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["paged", "cell"])
def test_an_engine_with_a_prefix_hit(model, mode):
    engine = Engine(model, config(n_seq_max=4), EngineConfig(mode=mode))
    text, _ = served(engine, "a", TEXT[:26], Rounding(model, "write"))
    # Behind the hit a step of 16, as those before it.
    again = [*text[:24], *[9] * 9]
    _, n_cached = served(engine, "b", again, Rounding(model, "write"))
    assert n_cached >= 16
    engine.close()


def served(engine, name, tokens, oracle):
    """Runs a request alone; the logits of each of its tokens are the oracle's."""
    engine.add_request(Request(id=name, tokens=tuple(tokens), n_predict=5))
    text, n_cached, wanted = list(tokens), 0, None
    while engine.has_work:
        for out in engine.step():
            n_cached = out.n_cached
            for token in out.tokens:
                if wanted is None:
                    wanted = of_prompt(oracle, tokens, n_cached)
                found = np.asarray(engine.logits(name))
                np.testing.assert_allclose(found, wanted, atol=LIMIT, rtol=0)
                text.append(token)
                wanted = oracle.step([token])[-1]
    return text, n_cached


def of_prompt(oracle, tokens, n_cached):
    """Logits behind a prompt, whose first tokens an earlier request read in steps of 16."""
    cuts = sorted({*range(0, n_cached, 16), *range(n_cached, len(tokens), 16)})
    parts = zip(cuts, [*cuts[1:], len(tokens)], strict=True)
    return [oracle.step(tokens[a:b])[-1] for a, b in parts][-1]
