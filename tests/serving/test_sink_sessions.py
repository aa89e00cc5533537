"""Sessions of windows with sinks: out of blocks, where most of the window's past is gone."""

import numpy as np
import pytest

from kvrt.errors import CannotRewind
from tests.serving.engines import ask, make, one, runtime

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("numpy_device")]

TEXT = np.random.default_rng(0).integers(0, 32, 60).tolist()


def test_sinks_and_a_window_go_to_a_runtime_and_to_another_engine():
    engine = make("sinks")
    tokens, _ = one(engine, ask("first", TEXT, 4))
    saved = engine.save(TEXT[:-2])
    part = saved.groups[0]
    assert part.pos.tolist() == [0, 1, 2, 3, *range(48, 56)] and part.lost == {0: ((4, 48),)}
    at = runtime("sinks")
    at.clear()
    at.restore(saved)
    logits = at.append(TEXT[56:])
    assert int(np.asarray(logits)[0].argmax()) == tokens[0]
    # Position 9 would become a sink, which blocks no longer had.
    at.seq_rm(0, 1, 9)
    before = at.token_history(0)[0].tolist()
    with pytest.raises(CannotRewind, match="lost the position 1 of layers that see the first 3"):
        at.seq_add(0, 9, None, -8)
    assert at.token_history(0)[0].tolist() == before
    other = make("sinks")
    assert other.load(saved) == {0: 56}
    other.add_request(ask("again", TEXT, 4))
    (out,) = other.step()
    assert out.n_cached == 56 and out.tokens[0] == tokens[0]
