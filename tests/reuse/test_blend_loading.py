"""Chunks that are read while those before them are computed, and the ratio that follows from it."""

import dataclasses
import threading

import numpy as np
import pytest
from test_blend import CONFIG, LEAD, N_LAYERS, texts

from kvrt import BlendSpec, Runtime, StoredChunk, session
from kvrt.errors import BadSession, SessionMismatch, UsageError
from kvrt.program.layer_range import LayerRange
from kvrt.reuse.blend import hidden_ratio
from kvrt.runtime.chunks.loading import Pace
from tests.toys import ToyLm

SUFFIX = texts()[1].tolist()


@pytest.fixture(scope="module")
def runtime():
    return Runtime(ToyLm(n_layers=N_LAYERS), CONFIG)


@pytest.fixture
def chunks(runtime, tmp_path):
    """Three chunks, and the files that have them."""
    runtime.clear()
    found = [runtime.chunk(x[LEAD:].tolist(), [1]) for x in texts()[0]]
    for i, chunk in enumerate(found):
        chunk.save(tmp_path / f"{i}.kv")
    return found, [tmp_path / f"{i}.kv" for i in range(3)]


def stored(files):
    return [StoredChunk(x, [1]) for x in files]


def test_stored_chunks_are_blended_as_those_in_memory(runtime, chunks):
    held, files = chunks
    wanted = runtime.blend(held, SUFFIX)
    runtime.clear()
    lazily = stored(files)
    assert [x.tokens.tolist() for x in lazily] == [x.tokens.tolist() for x in held]
    found = runtime.blend(lazily, SUFFIX)
    assert (np.asarray(found.logits) == np.asarray(wanted.logits)).all()
    assert found.computed.tolist() == wanted.computed.tolist()
    assert found.load_s == pytest.approx(sum(x.load_s for x in lazily)) and found.load_s > 0
    assert (wanted.load_s, wanted.ratio, wanted.prefill_s) == (0, 0.15, None)
    # Once read they are in memory, and a mixture is as good.
    for again in (lazily, [held[0], lazily[1], *stored(files[2:])]):
        runtime.clear()
        more = runtime.blend(again, SUFFIX)
        assert (np.asarray(more.logits) == np.asarray(wanted.logits)).all()


def test_a_chunk_is_read_while_those_before_it_are_computed(runtime, chunks, monkeypatch):
    _, files = chunks
    computing, readers, check, read = threading.Event(), [], LayerRange.check, StoredChunk.read

    def checked(self, *args):
        computing.set()
        return check(self, *args)

    def waiting(self):
        if self.tokens.tolist() != texts()[0][0].tolist():
            assert computing.wait(60), "nothing is computed before all chunks are read"
        readers.append(threading.current_thread())
        return read(self)

    monkeypatch.setattr(LayerRange, "check", checked)
    monkeypatch.setattr(StoredChunk, "read", waiting)
    runtime.clear()
    runtime.blend(stored(files), SUFFIX)
    assert len(readers) == 3 and threading.current_thread() not in readers


def test_the_ratio_is_the_greater_of_the_least_and_what_loading_hides():
    assert [hidden_ratio(x, 4.0) for x in (0.0, 1.0, 3.0, 4.0, 9.0)] == [0, 0.25, 0.75, 1, 1]
    assert hidden_ratio(0.0, 0.0) == 1


@pytest.mark.parametrize(("load_s", "ratio"), [(0.0, 0.15), (0.2, 0.4), (0.4, 0.8), (9.0, 1.0)])
def test_auto_ratio_goes_by_measured_times(runtime, chunks, monkeypatch, load_s, ratio):
    _, files = chunks
    monkeypatch.setattr(Pace, "of", lambda self, n, programs: _Fixed(self, 0.25 / 58))
    lazily = stored(files)
    timed = property(lambda x: load_s / 3, lambda x, taken: None)
    monkeypatch.setattr(StoredChunk, "load_s", timed, raising=False)
    runtime.clear()
    # Two of four layers take 0.25 s, so all take 0.5.
    found = runtime.blend(lazily, SUFFIX, BlendSpec(auto_ratio=True))
    assert found.prefill_s == pytest.approx(0.5)
    assert found.ratio == pytest.approx(ratio) and len(found.computed) == int(58 * found.ratio)
    runtime.clear()
    wanted = runtime.blend(stored(files), SUFFIX, BlendSpec(ratio=found.ratio))
    assert (np.asarray(found.logits) == np.asarray(wanted.logits)).all()


@dataclasses.dataclass
class _Fixed:
    """In place of a clock."""

    pace: Pace
    per_token_s: float

    def __enter__(self):
        self.pace.per_token_s = self.per_token_s

    def __exit__(self, *_):
        pass


def test_chunks_in_memory_hide_nothing(runtime, chunks):
    runtime.clear()
    found = runtime.blend(chunks[0], SUFFIX, BlendSpec(auto_ratio=True, ratio=0.2))
    assert (found.ratio, found.load_s) == (0.2, 0) and found.prefill_s > 0


def test_damage_found_by_the_worker_leaves_no_trace(runtime, chunks):
    held, files = chunks
    blob = session.read_manifest(files[2]).groups[0].blocks[0]
    data = bytearray(files[2].read_bytes())
    data[blob.offset + 4] ^= 1
    files[2].write_bytes(data)
    runtime.clear()
    used = runtime.stats().cells_used
    with pytest.raises(BadSession, match=r"2\.kv"):
        runtime.blend(stored(files), SUFFIX)
    assert runtime.seq_pos_max(0) == -1 and runtime.stats().cells_used == used
    runtime.blend([*stored(files[:2]), held[2]], SUFFIX)


def test_what_does_not_fit_is_refused_and_leaves_no_trace(runtime, chunks):
    _, files = chunks
    other = Runtime(ToyLm(n_layers=N_LAYERS), dataclasses.replace(CONFIG, rope="read"))
    with pytest.raises(SessionMismatch, match="rope"):
        other.blend(stored(files), SUFFIX)
    assert other.seq_pos_max(0) == -1
    with pytest.raises(UsageError, match="lead"):
        StoredChunk(files[0], [7])
