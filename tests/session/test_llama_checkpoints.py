"""Windows' context checkpoints in llama.cpp's slot files, number by number, and damaged ones."""

import struct

import numpy as np
import pytest

from kvrt import session
from kvrt.errors import BadSession, SessionMismatch
from tests.session import llama_bytes as made
from tests.session.llama_bytes import MIXED, u32, written

IDS = [5, 9, 1, 30, 2, 7, 7, 11, 3, 20, 4, 8]
N, WIDTH = len(IDS), 64


def section(positions, n_layers, seed):
    """Cells of sequence 0; keys and values of each layer are as the seed gives them."""
    k, v = (made.rows(n_layers, len(positions), WIDTH, seed=seed + i) for i in range(2))
    return made.section([(pos, [0]) for pos in positions], k, v), k, v


def checkpoint(n_tokens, positions, last=None, *, mark=0xAF143CD8, size=0, data=None, seed=20):
    data = u32(mark, 0) + (section(positions, 2, seed)[0] if data is None else data)
    last = n_tokens if last is None else last
    head = struct.pack("<qiiQ", n_tokens, min(positions), last, len(data) + size)
    return head + data + bytes(16)


def slot(*checkpoints, version=1, count=None):
    """Layers of every position, then windows of 4 with the one before them, then checkpoints."""
    full, near = section(range(N), 1, 1)[0], section(range(N - 5, N), 2, 10)[0]
    n = len(checkpoints) if count is None else count
    end = b"SCKP" + u32(version, n) + b"".join(checkpoints)
    return made.sequence(made.tokens(IDS), full, near) + end


def test_windows_of_a_server_become_checkpoints(load):
    """With the cell that the newest token saw and the next does not; back they are the same."""
    content = slot(checkpoint(6, range(2, 6)), checkpoint(9, range(5, 9), seed=30))
    found = load(content, MIXED, arch="gemma3")
    assert [(x.pos, x.seq_ids) for x in found.checkpoints] == [(6, (0,)), (9, (0,))]
    for part, seed in zip(found.checkpoints, (20, 30), strict=True):
        tail, none = part.tails
        assert none is None and part.state is None
        assert tail.pos.tolist() == list(range(part.pos - 4, part.pos))
        assert tail.lost == {0: ((0, part.pos - 4),)}
        _, k, v = section(tail.pos, 2, seed)
        for got, want in ((tail.blocks[0].k, k), (tail.blocks[0].v, v)):
            np.testing.assert_array_equal(got.reshape(2, -1), np.reshape(want, (2, -1)))
    again = written(found, MIXED, arch="gemma3", whole=False)
    assert again == content


def test_a_session_keeps_them(load, tmp_path):
    found = load(slot(checkpoint(6, range(2, 6))), MIXED, arch="gemma3")
    session.save(tmp_path / "x.kv", found)
    (part,) = session.read(tmp_path / "x.kv").checkpoints
    tail, want = part.tails[0], found.checkpoints[0].tails[0]
    assert (part.pos, tail.lost) == (6, want.lost)
    for name in ("index", "pos"):
        np.testing.assert_array_equal(getattr(tail, name), getattr(want, name))
    for name in "kv":
        got, expected = (getattr(x.blocks[0], name) for x in (tail, want))
        np.testing.assert_array_equal(got, expected)


def test_those_of_all_or_beyond_the_end_are_no_checkpoints(load):
    """The server keeps none of a model whose layers all see every position."""
    beyond = checkpoint(N + 2, range(N - 2, N + 2))
    found = load(slot(beyond, checkpoint(6, range(2, 6))), MIXED, arch="gemma3")
    assert [x.pos for x in found.checkpoints] == [6]
    plain = made.sequence(made.tokens(IDS), section(range(N), 2, 1)[0]) + b"SCKP" + u32(1, 0)
    assert load(plain).checkpoints == ()


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (slot(checkpoint(6, (1, 2, 4, 5))), "windowed layers lack position 3 of sequence 0"),
        (slot(checkpoint(6, range(3))), "a checkpoint of 6 tokens is of position 2 in"),
        (slot(checkpoint(6, range(2, 7))), "a checkpoint of 6 tokens is of position 6 in"),
        (slot(checkpoint(6, range(2, 6), mark=7)), "a checkpoint of 6 tokens is of position 5"),
        (slot(checkpoint(6, range(2, 6), size=-4)), "a checkpoint of 6 tokens is of position 5"),
        (slot(checkpoint(6, range(2, 6), size=1 << 40)), "a checkpoint"),
        (slot(checkpoint(6, range(2, 6), data=u32(1, 0))), "a checkpoint of 6 tokens"),
        (slot(count=1 << 30), "1,073,741,824 checkpoints"),
        (slot(checkpoint(6, range(2, 6)))[:-30], "layer 2|a checkpoint"),
    ],
)
def test_damaged_ones_are_refused(load, content, told):
    with pytest.raises(BadSession, match=told) as error:
        load(content, MIXED, arch="gemma3")
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_other_models_and_versions_are_refused(load):
    wide = section(range(2, 6), 1, 20)[0]
    with pytest.raises(SessionMismatch, match="keys and values of 1 layers, the model has 2"):
        load(slot(checkpoint(6, range(2, 6), data=wide)), MIXED, arch="gemma3")
    with pytest.raises(SessionMismatch, match="version 2 of the server's checkpoints"):
        load(slot(version=2), MIXED, arch="gemma3")
    half = [x.astype(np.float32) for x in made.rows(2, 4, WIDTH)]
    other = made.section([(p, [0]) for p in range(2, 6)], half, half, type_id=0)
    with pytest.raises(BadSession, match="a checkpoint of 6 tokens has keys and values of"):
        load(slot(checkpoint(6, range(2, 6), data=other)), MIXED, arch="gemma3")
