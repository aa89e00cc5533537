"""A tier after a power loss: it can be opened, blocks may be missing, a wrong one is never read."""

import numpy as np
import pytest
from powerloss import recording
from powerloss_states import states, write_tree

from kvrt.errors import BadConfig
from kvrt.paged.tiers import block_file
from kvrt.paged.tiers.block_file import BlockFile
from kvrt.paged.tiers.disk import DiskTier

N_BYTES = 600


def block(name: bytes) -> np.ndarray:
    seed = int.from_bytes(name, "big")
    return np.random.default_rng(seed).integers(0, 256, N_BYTES).astype(np.uint8)


def tier(path, n_blocks=2):
    return DiskTier(BlockFile(path, N_BYTES, n_blocks, b"model", n_name=8), name=lambda key: key)


def store(made, *names):
    places, _ = made.prepare_write(names, len(names))
    oks = made.write(list(places.values()), [block(name) for name in places])
    made.complete_write(list(places), oks)


def load(made, name):
    """The block, None if there is none."""
    if not made.has(name):
        return None
    out = np.zeros(N_BYTES, np.uint8)
    (ok,) = made.read(made.prepare_read([name]), [out])
    made.complete_read([name], [ok])
    return out if ok else None


NAMES = [b"a", b"b", b"c", b"d"]


def recorded(root, monkeypatch):
    """Two slots that are written twice, in a new file and in one that is opened again."""
    root.mkdir()
    with recording(root, monkeypatch) as recorder:
        for some in ([b"a", b"b"], [b"c"], [b"d"]):
            made = tier(root / "x")
            store(made, *some)
            made.close()
    return recorder


def n_served(recorder, folder, most):
    """Blocks that were read over all states; each of them is what its name says."""
    folder.mkdir()
    n = n_states = 0
    for i, state in enumerate(states(recorder, matters=lambda path: True, most=most)):
        root = folder / str(i)
        write_tree(root, state.tree)
        made = tier(root / "x")
        for name in NAMES:
            found = load(made, name)
            assert found is None or np.array_equal(found, block(name)), (name, state.fates)
            n += found is not None
        store(made, b"e")
        assert np.array_equal(load(made, b"e"), block(b"e"))
        made.close()
        n_states += 1
    return n, n_states


def test_a_tier_serves_what_its_names_say_or_nothing(tmp_path, monkeypatch):
    n, n_states = n_served(recorded(tmp_path / "done", monkeypatch), tmp_path / "states", most=100)
    assert n_states > 100 and n > n_states // 4


@pytest.mark.slow
def test_all_that_may_become_of_a_tier(tmp_path, monkeypatch, budget):
    recorder, most = recorded(tmp_path / "done", monkeypatch), budget(1000, 5000)
    n, n_states = n_served(recorder, tmp_path / "states", most=most)
    # Something is served at all: what must never be is a wrong block.
    assert n_states > most // 2.5 and n > most // 50


def test_blocks_without_digests_are_found_to_be_wrong(tmp_path, monkeypatch):
    """What the digest is for: without it the same states serve torn blocks."""
    monkeypatch.setattr(block_file, "_digest", lambda name, data: b"d" * 16)
    recorder = recorded(tmp_path / "done", monkeypatch)
    with pytest.raises(AssertionError):
        n_served(recorder, tmp_path / "states", most=100)


@pytest.mark.parametrize("n_head", [0, 1, 11, 12, 20, 40])
def test_a_file_whose_beginning_was_torn_is_begun_again(tmp_path, n_head):
    BlockFile(tmp_path / "x", N_BYTES, 2, b"model", n_name=8).close()
    head = (tmp_path / "x").read_bytes()
    for torn in (head[:n_head], head[:n_head].ljust(40, b"\0"), head[n_head:].rjust(40, b"\0")):
        (tmp_path / "x").write_bytes(torn)
        made = tier(tmp_path / "x")
        store(made, b"a")
        made.close()
        again = tier(tmp_path / "x")
        assert np.array_equal(load(again, b"a"), block(b"a"))
        again.close()


@pytest.mark.parametrize("data", [b"\0" * 41, b"a short note", b"\0" * 20 + b"other things"])
def test_what_is_no_torn_beginning_stays(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(BadConfig, match="holds no blocks of kvrt"):
        tier(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == data
