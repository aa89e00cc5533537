"""One formula for sizing and for admission: what is sized for is what a block manager admits."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from layer_lists import attention, state
from plan_sizes import for_sequences

from kvrt.paged.layout.groups import group_layers
from kvrt.paged.manager import BlockManager
from kvrt.paged.pool import BlockPool
from kvrt.paged.rules import BlockRules

pytestmark = pytest.mark.slow

SIZES = st.integers(1, 60)


@settings(max_examples=150)
@given(
    window=SIZES,
    chunk=SIZES,
    block_size=st.sampled_from([1, 2, 4, 6, 16]),
    n_inflight=st.integers(1, 40),
    n_tokens=st.integers(1, 200),
)
def test_a_block_manager_counts_the_same_peaks(window, chunk, block_size, n_inflight, n_tokens):
    b = {"block_size": block_size}
    layers = [attention(0, **b), attention(1, "window", window, **b)]
    layers += [attention(2, "chunked", chunk, **b), state(3, (4,), **b)]
    layers.append(attention(4, "window", window, shares=1, **b))
    layout = group_layers(layers)
    plan = for_sequences(layout, n_ctx=n_tokens, n_seq=1, n_inflight=n_inflight)
    pools = [BlockPool(pool.n_blocks) for pool in plan.pools]
    rules = BlockRules(n_in_flight=n_inflight, n_ctx=n_tokens)
    manager = BlockManager(layout.groups, pools, rules)
    assert [1 + n for n in manager.n_peak(n_tokens)] == [p.n_blocks for p in plan.pools]
