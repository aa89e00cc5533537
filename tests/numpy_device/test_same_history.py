"""The device in NumPy computes what the compiled one does: what proves it, proves its tests."""

import numpy as np
import pytest

from kvrt import (
    CacheConfig,
    Engine,
    EngineConfig,
    MaskSpec,
    PromptLookup,
    Request,
    Runtime,
    SelfExtend,
    Speculation,
)
from tests.marks import slow
from tests.numpy_device.device import NumpyDevice, installed
from tests.toys import HybridLm, ToyLm, allclose

SIZES = dict(n_ctx=40, n_seq_max=4, block_size=8, n_ubatch=8)
WINDOWS = [MaskSpec(kind="window", size=6), MaskSpec()]


def moved(make, **options):
    """Logits after positions moved, cells were shared, cut back and packed; and a text."""
    runtime = Runtime(make(), CacheConfig(**SIZES, **options))
    runtime.append([3, 1, 4, 1, 5, 9, 2, 6, 5], 0)
    runtime.seq_cp(0, 1)
    out = [*runtime.decode({0: 7, 1: 8}).values()]
    if make is not HybridLm:  # which has one position after another
        runtime.seq_add(0, 4, None, 3)
    runtime.append([2, 7, 1, 8], 2)
    runtime.seq_keep(0)
    runtime.defrag()
    out.append(runtime.append([1, 2, 3], 0)[0])
    text = [t.id for t in runtime.generate(6, 0, stride=3)]
    drafts = Speculation(drafter=PromptLookup(n_min=1), n_draft=3)
    text += [t.id for t in runtime.generate(9, 0, speculation=drafts)]
    return runtime, out, text


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: ToyLm(n_vocab=32, masks=WINDOWS), dict(swa_full=True)),
        slow(HybridLm, dict(n_rs_seq=2)),
        slow(ToyLm, dict(rope="read", self_extend=SelfExtend(ga_n=2, ga_w=4, kind="paper"))),
        slow(ToyLm, dict(self_extend=SelfExtend(ga_n=2, ga_w=4, kind="paper"))),
    ],
)
def test_a_history_gives_the_same_logits_and_text(make, options):
    _, out, text = moved(make, **options)
    with installed():
        here, other_out, other_text = moved(make, **options)
    assert isinstance(here._cache.device, NumpyDevice)
    for a, b in zip(out, other_out, strict=True):
        allclose(a, b, 2e-4)
    assert other_text == text


@pytest.mark.parametrize("mode", ["paged", slow("cell")])
def test_requests_get_the_same_tokens(mode):
    def served():
        options = EngineConfig(mode=mode, prefix_cache=True, shared_reads=mode == "paged")
        engine, tokens = Engine(ToyLm(n_vocab=32), CacheConfig(**SIZES), options), {}
        for i in range(5):
            text = (3, 1, 4, 1, 5, 9, 2, 6, *range(i))
            engine.add_request(Request(id=str(i), tokens=text, n_predict=6))
        while engine.has_work:
            for x in engine.step():
                tokens.setdefault(x.id, []).extend(x.tokens)
        return type(engine.device), tokens

    with installed():
        device, tokens = served()
    assert device is NumpyDevice
    assert np.ptp([len(x) for x in tokens.values()]) == 0
    assert served()[1] == tokens
