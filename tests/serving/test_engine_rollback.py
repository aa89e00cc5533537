"""States of the last tokens in an engine's cells: hits end at any of them."""

import pytest

from kvrt import CacheConfig, Engine, EngineConfig, PromptLookup, Speculation
from kvrt.errors import BadConfig
from tests.serving.engines import alone, ask, make
from tests.serving.test_engine_checkpoints import FIRST, served
from tests.toys import HybridLm

pytestmark = pytest.mark.usefixtures("numpy_device")

SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("states", "delta")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["recurrent", *SLOW])
def test_a_hit_ends_within_the_last_tokens_of_a_text(kind):
    """As many tokens before its end as there are states, beside another text; else its prompt's."""
    first, beside = ask("first", FIRST, 8), ask("beside", [*FIRST[:9], 1, 2], 12)
    text = [*FIRST, *alone(kind, first)]
    n_computed = len(text) - 1  # the last one is sampled, and not computed
    for n_back, n_found in ((1, 1), (3, 3), (5, None)):
        engine = make(kind, "cell", n_rs_seq=4)
        served(engine, [first, beside])
        other = ask("other", [*text[: n_computed - n_back], 3, 4], 6)
        found, n_cached = served(engine, [other])
        wanted = len(FIRST) if n_found is None else n_computed - n_found
        assert n_cached["other"] == wanted
        assert found["other", 0] == alone(kind, other)


DRAFTS = Speculation(drafter=PromptLookup(), n_draft=2)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"mode": "paged"}, "are kept by block, a hit ends with one, and no call of an engine"),
        ({"mode": "cell", "prefix_cache": False}, "there is no prefix cache; set prefix_cache"),
        ({"mode": "cell", "speculation": DRAFTS}, "a round of drafts keeps one state a request"),
    ],
)
def test_where_nothing_could_be_found_by_them_they_are_refused(told, message):
    config = CacheConfig(n_ctx=64, block_size=4, n_ubatch=16, n_rs_seq=4)
    with pytest.raises(BadConfig, match=message) as found:
        Engine(HybridLm(), config, EngineConfig(**told))
    assert "\n" not in str(found.value)
