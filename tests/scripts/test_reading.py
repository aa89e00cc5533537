"""Losses of a text in chunks, and the runtimes of the modes, against what they stand for."""

import numpy as np
import pytest

from kvrt import CacheConfig, MaskSpec, Runtime
from kvrt.errors import BadConfig
from scripts.experiments import modes, reading
from tests.toys import RowModel, windowed

TOKENS = np.random.default_rng(0).integers(0, 32, 90).tolist()
# One computes each window anew, and one protects 32 tokens, as many as a window has here.
NO_WINDOW = ("recompute", "snapkv")
SIZES = modes.Sizes(n_tokens=90, n_window=32, n_ubatch=16, ga_n=2, ga_w=8)


@pytest.fixture(scope="module")
def model():
    return RowModel()


@pytest.fixture(scope="module")
def plain(model):
    """A cache that nothing is dropped from."""
    return Runtime(model, CacheConfig(n_ctx=128, n_ubatch=128))


def losses(runtime, past, part):
    """Of part[1:], behind past."""
    runtime.clear()
    logits = np.asarray(runtime.append([*past, *part], out_ids=range(len(past), len(past + part))))
    top = logits.max(axis=1)
    scale = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    return [scale[i] - logits[i, token] for i, token in enumerate(part[1:])]


@pytest.mark.slow
def test_chunks_change_nothing_of_plain_attention(model, plain):
    read = reading.read(modes.runtime_of("full", model, SIZES), TOKENS, 16)
    assert read.losses == pytest.approx(losses(plain, [], TOKENS), abs=1e-4)
    assert read.starts.tolist() == [0, 16, 32, 48, 64, 80]


@pytest.mark.slow
def test_recompute_reads_each_window_afresh(model, plain):
    counted = []
    runtime = modes.runtime_of("recompute", model, SIZES)
    read = reading.read(runtime, TOKENS, 16, afresh=32, done=counted.append)
    wanted = []
    for first in range(0, 90, 16):
        past = TOKENS[max(first - 16, 0) : first]
        wanted += losses(plain, past, TOKENS[first : first + 17])
    assert read.losses == pytest.approx(wanted, abs=1e-4)
    assert counted == [16] * 5 + [10]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [m for m in modes.MODES if m not in NO_WINDOW])
def test_a_mode_reads_the_first_window_as_plain_attention_does(model, plain, mode):
    """As long as it has all tokens in its cells, as they are; a shift keeps one cell back."""
    read = reading.read(modes.runtime_of(mode, model, SIZES), TOKENS, 8)
    same = np.abs(read.losses - losses(plain, [], TOKENS)) < 1e-4
    first = {"full": 89, "cache": 8, "paper": 8, "grouped": 1, "shift": 24}.get(mode, 31)
    assert same[:first].all()
    # Beyond it each is another way.
    assert same.all() == (mode == "full")


@pytest.mark.slow
def test_bounded_modes_stay_in_their_cells(model):
    for mode in ("shift", "sinks", "window"):
        runtime = modes.runtime_of(mode, model, SIZES)
        read = reading.read(runtime, TOKENS, 8)
        stats = runtime.stats()
        assert stats.n_ctx == 32 and stats.n_dropped > 90 - 32 - 1
        assert len(set(read.cache_bytes)) == 1
        # Sinks are the first tokens still; a plain window has moved past them.
        assert runtime.seq_pos_max() < 32


@pytest.mark.slow
def test_sinks_are_the_first_four_tokens(model, plain):
    """Behind them the newest, numbered without a gap: in one layer keys know of no others."""
    runtime = modes.runtime_of("sinks", model, SIZES)
    reading.read(runtime, TOKENS[:88], 8)
    found = np.asarray(runtime.last_logits(0))[0]
    kept = [*TOKENS[:4], *TOKENS[60:88]]
    plain.clear()
    assert found == pytest.approx(np.asarray(plain.prefill(kept)), abs=1e-4)


def test_a_mode_that_layers_cannot_do_is_refused():
    group = windowed(RowModel().group, MaskSpec(kind="window", size=8))
    model = RowModel(group=group)
    with pytest.raises(BadConfig, match="window"):
        modes.runtime_of("cache", model, SIZES)


def test_figures_are_those_of_segments():
    read = reading.Reading(
        losses=np.log(np.array([2.0, 8, 3, 3, 5])),
        starts=np.array([0, 1, 2, 3, 4, 5]),
        seconds=np.array([1, 3, 5, 5, 2, 2]) / 1e3,
        cache_bytes=np.array([7, 7, 7, 8, 9, 9]),
        live_bytes=np.array([1, 2, 3, 4, 5, 6]),
    )
    found = reading.figures(read, 2)
    assert found["perplexity"] == [4, 3, 5]
    assert found["step_ms"] == [2, 5, 2]
    assert found["cache_bytes"] == [7, 8, 9] and found["live_bytes"] == [2, 4, 6]
    assert found["whole"] == pytest.approx(720 ** (1 / 5), abs=1e-3)
