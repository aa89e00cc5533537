"""What was blended, moved or served from modules never becomes another request's prefix."""

import functools

import numpy as np
import pytest

from kvrt import BlendSpec, CacheConfig, Engine, EngineConfig, PromptCache, Request, Runtime
from kvrt import session as sessions
from kvrt.reuse.schema import lay_out, read_schema
from tests.toys import ToyLm

pytestmark = pytest.mark.slow

B, LEAD = 4, [1]
CONFIG = CacheConfig(n_ctx=128, n_seq_max=4, n_ubatch=16, block_size=32)
A, SECOND = list(range(5, 26)), list(range(30, 47))
SCHEMA = """<schema name="s"><module name="one">5 6 7 8 9 10 11 12 13</module>
<module name="two">20 21 22 23 24 25 26 27 28 29</module></schema>"""


@functools.cache
def model():
    return ToyLm(n_layers=4)


def blended(at):
    chunks = [at.chunk(x, LEAD) for x in (A, SECOND)]
    at.blend(chunks, [9, 8], BlendSpec(ratio=0.2))


def moved(at):
    """Tokens behind an insertion, as `--reuse_chunks` moves them."""
    at.append(LEAD + A + SECOND)
    at.seq_add(0, 22, None, 3)
    at.fill([50, 51, 52], 0, 22)


def served(at):
    """Modules that have not seen each other, at their places one behind the other."""
    layout = lay_out(
        read_schema(SCHEMA), lambda text: [int(x) for x in text.split()], 0, range(1, 6)
    )
    cache = PromptCache.encode(at, layout)
    cache.serve(0, ["one", "two"], [60, 61, 62, 63, 62, 61])


@pytest.mark.parametrize(("make", "n_exact"), [(blended, 22), (moved, 25), (served, 5)])
def test_only_what_a_prompt_would_compute_is_found_again(make, n_exact, tmp_path):
    at = Runtime(model(), CONFIG)
    make(at)
    ids = at.token_history(0)[1].tolist()
    assert at.n_exact(0) == n_exact < len(ids) - B
    sessions.save(tmp_path / "a.kv", at.snapshot())
    config = CacheConfig(n_ctx=128, n_seq_max=4, n_ubatch=16, block_size=B)
    engine = Engine(model(), config, EngineConfig(mode="paged", prefix_cache=True))
    n_hit = n_exact // B * B
    assert engine.load(sessions.read(tmp_path / "a.kv"), [0]) == {0: n_hit}
    engine.add_request(Request(id="a", tokens=(*ids, 3), n_predict=1))
    outputs = []
    while not outputs:
        outputs = engine.step()
    assert [x.n_cached for x in outputs] == [n_hit]
    # Logits up to 30, sums in other pieces; with what was blended they differ by ones.
    plain = Runtime(model(), CONFIG).append([*ids, 3])
    np.testing.assert_allclose(engine.logits("a"), plain[0], atol=2e-3, rtol=0)
