"""Session files of llama.cpp: its own ones, such as it could write, and damaged ones."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrt import MaskSpec
from kvrt.cellcache import history as texts
from kvrt.errors import BadSession, SessionMismatch, UsageError
from kvrt.session.snapshot import GroupPart, KVBlock, Snapshot
from tests.session import llama_bytes as made
from tests.session.llama_bytes import (
    MIXED,
    SMALL,
    WINDOW,
    example,
    fingerprint,
    group,
    read,
    small,
    written,
)

GOLDEN = Path(__file__).parents[1] / "golden"
DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def k_of(part):
    return np.concatenate([b.k for b in part.blocks], axis=1)


def v_of(part):
    return np.concatenate([b.v for b in part.blocks], axis=1)


def same(a, b):
    """All that two snapshots say, to the bit."""
    assert a.fingerprint == b.fingerprint
    for x, y in zip(a.groups, b.groups, strict=True):
        np.testing.assert_array_equal(x.pos, y.pos)
        np.testing.assert_array_equal(x.seqs, y.seqs)
        assert dict(x.lost) == dict(y.lost)
        assert k_of(x).tobytes() == k_of(y).tobytes()
        assert v_of(x).tobytes() == v_of(y).tobytes()
    assert a.seq_ids == b.seq_ids
    for s in a.seq_ids:
        np.testing.assert_array_equal(
            texts.entries(a.history, s)[:2], texts.entries(b.history, s)[:2]
        )


@pytest.mark.parametrize("trans", [False, True])
def test_an_example_of_known_size(load, trans):
    content, k, v = example(trans)
    assert len(content) == 1669
    head = "6e736767 0a000000 03000000 01000000 05000000 09000000 05000000 6c6c616d61 01000000"
    head += "03000000 00000000 01000000 00000000 01000000 01000000 00000000"
    assert content.startswith(bytes.fromhex(head))
    found = load(content)
    (part,) = found.groups
    assert part.pos.tolist() == [0, 1, 2] and part.index.tolist() == [0, 1, 2]
    assert part.seqs.tolist() == [[1]] * 3
    assert texts.tokens(found.history, 0).tolist() == [1, 5, 9]
    assert found.fingerprint["type_k"] == found.fingerprint["type_v"] == "f16"
    np.testing.assert_array_equal(k_of(part).reshape(2, 3, 64), k)
    np.testing.assert_array_equal(v_of(part).reshape(2, 3, 64), v)
    assert written(found, whole=True) == example(False)[0]


def gemma():
    near = tuple(i for i in range(18) if i % 6 != 5)
    mask = MaskSpec(kind="window", size=512)
    return (
        group(near, heads=1, dim=256, layout="neox", mask=mask),
        group((5, 11, 17), heads=1, dim=256, layout="neox"),
    )


REAL = {
    "smollm2": ("llama", (group(tuple(range(30)), heads=3, dim=64),), 49152),
    "gemma3": ("gemma3", gemma(), 262144),
}


@pytest.mark.parametrize("kind", ["session", "seq"])
@pytest.mark.parametrize("name", REAL)
def test_files_of_llama_cpp(tmp_path, name, kind):
    arch, groups, n_vocab = REAL[name]
    path = GOLDEN / name / f"{kind}.bin"
    found = read(path, groups, arch, n_vocab=n_vocab)
    with np.load(GOLDEN / name / "session.npz") as known:
        assert texts.tokens(found.history, 0).tolist() == known["tokens"][:20].tolist()
    for part in found.groups:
        assert part.pos.tolist() == list(range(20)) and not part.lost
        assert k_of(part).dtype == np.float16
    again = written(found, groups, arch, whole=kind == "session")
    content = path.read_bytes()
    assert len(again) == len(content)
    assert again[:300] == content[:300]  # up to the layout of values
    (tmp_path / "again.bin").write_bytes(again)
    same(found, read(tmp_path / "again.bin", groups, arch, n_vocab=n_vocab))


def test_a_file_of_the_newer_version():
    path = GOLDEN / "tiny-session.bin"
    found = read(path, (group((0, 1)),), n_vocab=300)
    assert found.groups[0].pos.tolist() == list(range(39))
    # Flash attention was on, so that values are where they are written: not a byte differs.
    assert written(found, whole=True, old=False) == path.read_bytes()


@st.composite
def cases(draw):
    """Some text in some layers; further sequences share parts of the first one's cells."""
    arch = draw(st.sampled_from(["llama", "gemma3", "qwen2"]))
    layout = draw(st.sampled_from(["norm", "neox"])) if arch == "llama" else "neox"
    shape = {"heads": draw(st.integers(1, 3)), "dim": 2 * draw(st.integers(1, 3)), "layout": layout}
    types = draw(st.tuples(*[st.sampled_from(sorted(DTYPES))] * 2))
    n = draw(st.integers(1, 12))
    pos = draw(st.permutations(range(2 * n)))[:n]
    others = draw(st.dictionaries(st.integers(1, 70), st.sets(st.integers(0, n - 1), min_size=1)))
    ids = draw(st.lists(st.integers(0, 63), min_size=n, max_size=n))
    return arch, shape, types, pos, {0: set(range(n)), **dict(list(others.items())[:3])}, ids


def snapshot_of(arch, shape, types, pos, owners, ids):
    """Groups and a snapshot of them."""
    groups = (group((0, 1), **shape),)
    if arch == "gemma3":
        groups = (group((0, 2), mask=WINDOW, **shape), group((1,), **shape))
    n, pos = len(pos), np.array(pos, np.int32)
    seqs = np.zeros((n, max(owners) // 32 + 1), np.uint32)
    pieces = {}
    for s, cells in owners.items():
        seqs[list(cells), s // 32] |= np.uint32(1 << s % 32)
        by_pos = sorted(cells, key=lambda cell: pos[cell])
        entries = [[pos[cell], ids[cell], cell] for cell in by_pos]
        pieces[s] = (np.array(entries, np.int32).T,)
    parts = []
    for g in groups:
        keep = np.full(n, g.mask.kind == "full")
        for cells in owners.values():
            newest = max(pos[cell] for cell in cells)
            keep[[cell for cell in cells if pos[cell] >= newest - WINDOW.size]] = True
        gone = {s: sorted(int(pos[c]) for c in cells if not keep[c]) for s, cells in owners.items()}
        parts.append(_part(g, pos[keep], seqs[keep], gone, *(DTYPES[t] for t in types)))
    return groups, Snapshot(
        fingerprint=fingerprint(groups, type_k=types[0], type_v=types[1]),
        groups=tuple(parts),
        states=None,
        history=texts.TokenHistory(pieces=pieces, n_marks=n),
        ga_i={},
        logits={},
    )


def _part(g, pos, seqs, gone, type_k, type_v):
    n = len(pos)
    rng = np.random.default_rng(n)
    shape = (len(g.layers), n, g.n_kv_heads, g.head_dim)
    lost = {}
    for s, missing in gone.items():
        runs = []
        for p in missing:
            if runs and runs[-1][1] == p:
                runs[-1] = (runs[-1][0], p + 1)
            else:
                runs.append((p, p + 1))
        if runs:
            lost[s] = tuple(runs)
    k, v = (rng.standard_normal(shape).astype(t) for t in (type_k, type_v))
    # Blocks of any size: a writer must not count on 256.
    cut = n // 2
    both = [KVBlock(k=k[:, a:b], v=v[:, a:b]) for a, b in ((0, cut), (cut, n)) if a < b]
    return GroupPart(
        n_cells=2 * n,
        head=0,
        index=np.arange(n, dtype=np.int32) * 2,
        pos=pos,
        seqs=seqs,
        lost=lost,
        blocks=both,
    )


@settings(max_examples=20)
@given(case=cases())
def test_what_was_written_is_read(tmp_path_factory, case):
    arch, (groups, snapshot) = case[0], snapshot_of(*case)
    path = tmp_path_factory.getbasetemp() / "round.bin"
    path.write_bytes(written(snapshot, groups, arch, whole=True))
    same(snapshot, read(path, groups, arch))
    for s in snapshot.seq_ids:
        path.write_bytes(written(snapshot, groups, arch, whole=False, seq_id=s, old=False))
        alone = read(path, groups, arch)
        assert alone.seq_ids == (0,)
        for kept in (0, 1):
            expected = texts.entries(snapshot.history, s)[kept]
            np.testing.assert_array_equal(texts.entries(alone.history, 0)[kept], expected)
        part, whole = alone.groups[-1], snapshot.groups[-1]
        mine = (whole.seqs[:, s // 32] >> np.uint32(s % 32) & 1).astype(bool)
        np.testing.assert_array_equal(part.pos, whole.pos[mine])
        assert k_of(part).tobytes() == k_of(whole)[:, mine].tobytes()
        assert v_of(part).tobytes() == v_of(whole)[:, mine].tobytes()


def test_keys_change_the_order_of_their_channels(load):
    content, k, v = example(False)
    found = load(content, (group((0, 1), layout="neox"),))
    (part,) = found.groups
    wide = np.stack(k).reshape(2, 3, 2, 32)
    # llama.cpp turns channels (0, 1) together, Hugging Face (0, 16).
    np.testing.assert_array_equal(k_of(part)[..., :16], wide[..., 0::2])
    np.testing.assert_array_equal(k_of(part)[..., 16:], wide[..., 1::2])
    np.testing.assert_array_equal(v_of(part).reshape(2, 3, 64), v)
    assert written(found, (group((0, 1), layout="neox"),), whole=True) == content


def windowed(near, far, arch="gemma3"):
    """A file of MIXED with cells of sequence 0 at these positions."""
    return made.whole(
        made.tokens(range(len(far))),
        arch,
        made.section([(p, [0]) for p in far], *[made.rows(1, len(far), 64)] * 2),
        made.section([(p, [0]) for p in near], *[made.rows(2, len(near), 64)] * 2),
    )


def test_windowed_layers_note_what_they_lost(load):
    found = load(windowed([3, 6, 7, 8, 9], [0, 1, 3, 4, 6, 7, 8, 9]), MIXED, arch="gemma3")
    assert found.groups[0].lost == {0: ((0, 2), (4, 5))}
    assert found.groups[1].lost == {}
    assert [len(part.pos) for part in found.groups] == [5, 8]
    assert k_of(found.groups[0]).shape[0] == 2


@pytest.mark.parametrize(
    "near, message",
    [([6, 8, 9], "lack position 7 of sequence 0, and see all from 6"), ([5, 6, 7, 8, 9], "alone")],
)
def test_windows_that_do_not_fit_are_refused(load, near, message):
    with pytest.raises(BadSession, match=message):
        load(windowed(near, [0, 1, 6, 7, 8, 9]), MIXED, arch="gemma3")


def test_tokens_of_a_server_slot(load):
    found = load(small(made.slot_tokens([7, 8])), SMALL)
    assert texts.tokens(found.history, 0).tolist() == [7, 8]
    with pytest.raises(SessionMismatch, match="1 pieces of pictures or sound"):
        load(small(made.slot_tokens([7, 8], media=1, rest=[0, 0])), SMALL)
    with pytest.raises(SessionMismatch, match="version 2 of the server's tokens"):
        load(small(made.slot_tokens([7, 8], version=2)), SMALL)
    with pytest.raises(BadSession, match="2 words follow"):
        load(small(made.slot_tokens([7, 8], rest=[0])), SMALL)
    with pytest.raises(BadSession, match="names 9 tokens in 6 words"):
        load(small(made.tokens([-1, 1, 9, 7, 8, 0])), SMALL)


def test_tokens_that_were_not_evaluated_yet_are_left_out(load):
    found = load(small(made.tokens([7, 8, 9])), SMALL)
    assert texts.entries(found.history, 0)[:2].tolist() == [[0, 1], [7, 8]]


@pytest.mark.parametrize(
    "ids, cells",
    [([7], [(0, [0]), (1, [0])]), ([7, 8, 9], [(0, [0]), (2, [0])]), ([], [(0, [0])])],
)
def test_tokens_that_do_not_fit_are_refused_unless_given(load, ids, cells):
    content = small(made.tokens(ids), cells)
    with pytest.raises(BadSession, match=r"tokens for .* give the tokens of its positions"):
        load(content, SMALL)
    given_ids = list(range(20, 20 + len(cells)))
    found = load(content, SMALL, tokens={0: given_ids})
    assert texts.tokens(found.history, 0).tolist() == given_ids


def test_sequences_share_cells_or_their_tokens_are_given(load):
    cells = [(0, [0, 40]), (1, [0]), (1, [40])]
    content = small(made.tokens([7, 8]), cells)
    with pytest.raises(BadSession, match="1 of 2 cells of sequence 40 have no token"):
        load(content, SMALL)
    found = load(content, SMALL, tokens={40: [7, 9]})
    assert texts.entries(found.history, 40).tolist() == [[0, 1], [7, 9], [0, 2]]
    assert found.groups[0].seqs.tolist() == [[1, 256], [1, 0], [0, 256]]
    with pytest.raises(SessionMismatch, match="sequence 40 has tokens that sequence 0"):
        written(found, SMALL, whole=True)
    assert written(found, SMALL, whole=False, seq_id=40)
    with pytest.raises(UsageError, match=r"the session holds \[0, 40\]; name one"):
        written(found, SMALL, whole=False)
    with pytest.raises(UsageError, match="sequence 3 is wanted"):
        written(found, SMALL, whole=False, seq_id=3)
