"""Chunks as session files: what a blend of them gives, and which sessions are chunks."""

import dataclasses

import numpy as np
import pytest

from kvrt import BlendSpec, CacheConfig, CachedChunk, ChunkStore, MaskSpec, Runtime, session
from kvrt.errors import BadSession, KvrtError, SessionMismatch, UsageError
from tests.toys import ToyLm

CONFIG = CacheConfig(n_ctx=128, n_seq_max=2, n_ubatch=16, block_size=32)
LEAD, A, B = [1], list(range(5, 25)), list(range(30, 47))


def runtime_of(config=CONFIG, seed=0, **more):
    return Runtime(ToyLm(n_layers=4, seed=seed, **more), config)


@pytest.fixture(scope="module")
def runtime():
    return runtime_of()


@pytest.fixture
def clean(runtime):
    runtime.clear()
    return runtime


def same(a, b):
    return (np.asarray(a) == np.asarray(b)).all()


@pytest.mark.slow
def test_a_chunk_from_its_file_blends_to_the_same_bits(clean, tmp_path):
    made = [clean.chunk(x, LEAD) for x in (A, B)]
    expected = clean.blend(made, [9, 8])
    for i, chunk in enumerate(made):
        chunk.save(tmp_path / f"{i}.kv")
    read = [CachedChunk.load(tmp_path / f"{i}.kv", LEAD) for i in range(2)]
    assert [x.tokens.tolist() for x in read] == [LEAD + A, LEAD + B]
    clean.clear()
    found = clean.blend(read, [9, 8])
    assert same(found.logits, expected.logits) and same(found.computed, expected.computed)


@pytest.mark.slow
def test_a_folder_keeps_chunks_by_model_dtypes_and_tokens(clean, tmp_path):
    store, here = ChunkStore(tmp_path / "chunks"), clean.fingerprint
    assert store.find(here, LEAD + A, LEAD) is None
    chunk = clean.chunk(A, LEAD)
    path = store.add(here, chunk)
    found = store.find(here, LEAD + A, LEAD)
    assert found is not None and found.tokens.tolist() == LEAD + A and found.n_lead == 1
    assert store.add(here, chunk) == path and [path] == list(store.folder.glob("*.kv"))
    assert store.find(here, LEAD + A[:-1], LEAD) is None and store.find(here, A) is None
    others = (runtime_of(dataclasses.replace(CONFIG, type_k="f16")), runtime_of(seed=1))
    for other in others:
        assert store.find(other.fingerprint, LEAD + A, LEAD) is None
    # What the name says is compared with what the file holds.
    clean.chunk(B, LEAD).save(path)
    assert store.find(here, LEAD + A, LEAD) is None


@pytest.mark.slow
def test_a_plain_session_behind_the_lead_is_a_chunk(clean, tmp_path):
    expected = clean.blend([clean.chunk(A, LEAD), clean.chunk(B, LEAD)], [9])
    for name, ids in (("a", A), ("b", B)):
        clean.clear()
        clean.prefill(LEAD + ids)
        session.save(tmp_path / name, clean.snapshot())
    clean.clear()
    read = [CachedChunk.load(tmp_path / name, LEAD) for name in "ab"]
    assert same(clean.blend(read, [9]).logits, expected.logits)


def test_a_saved_blend_says_what_is_exact_and_is_no_chunk(clean, tmp_path):
    chunks = [clean.chunk(x, LEAD) for x in (A, B)]
    clean.blend(chunks, [9, 8], BlendSpec(ratio=0.2))
    session.save(tmp_path / "blend.kv", clean.snapshot())
    assert session.read_manifest(tmp_path / "blend.kv").exact == {0: 1 + len(A)}
    other = runtime_of()
    other.restore(session.read(tmp_path / "blend.kv"))
    assert other.n_exact(0) == 1 + len(A)
    with pytest.raises(UsageError, match="moved or blended"):
        CachedChunk.load(tmp_path / "blend.kv", LEAD)


@pytest.mark.parametrize(
    ("sequences", "lead", "message"),
    [
        ({0: A}, LEAD, "--as_chunk"),
        ({0: LEAD}, LEAD, "the lead alone"),
        ({0: LEAD + A, 1: LEAD + B}, LEAD, "2 sequences"),
        ({}, LEAD, "0 sequences"),
    ],
)
def test_what_is_no_chunk_is_refused_in_a_line(clean, tmp_path, sequences, lead, message):
    for s, ids in sequences.items():
        clean.prefill(ids, seq_id=s)
    session.save(tmp_path / "a.kv", clean.snapshot())
    with pytest.raises(UsageError, match=message) as error:
        CachedChunk.load(tmp_path / "a.kv", lead)
    assert "\n" not in str(error.value) and "a.kv" in str(error.value)


def test_a_text_with_a_hole_is_refused(clean, tmp_path):
    clean.prefill(LEAD + A)
    clean.seq_rm(0, 5, 8)
    session.save(tmp_path / "a.kv", clean.snapshot())
    with pytest.raises(UsageError, match="dropped"):
        CachedChunk.load(tmp_path / "a.kv", LEAD)


@pytest.mark.slow
def test_windows_that_have_moved_on_are_refused(tmp_path):
    masks = [MaskSpec(), MaskSpec(kind="window", size=8), MaskSpec(), MaskSpec()]
    config = dataclasses.replace(CONFIG, n_ctx=512)
    runtime = runtime_of(config, masks=masks)
    runtime.prefill([1, *np.random.default_rng(0).integers(2, 60, 300).tolist()])
    session.save(tmp_path / "a.kv", runtime.snapshot())
    with pytest.raises(UsageError, match="swa_full"):
        CachedChunk.load(tmp_path / "a.kv", LEAD)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"seed": 3}, "model.weights"),
        ({"config": dataclasses.replace(CONFIG, rope="read")}, "rope is"),
        ({"config": dataclasses.replace(CONFIG, type_k="bf16")}, "type_k is f32"),
    ],
)
def test_chunks_of_another_model_or_cache_are_refused(clean, tmp_path, other, message):
    clean.chunk(A, LEAD).save(tmp_path / "a.kv")
    runtime = runtime_of(**other)
    with pytest.raises(SessionMismatch, match=message):
        runtime.blend([CachedChunk.load(tmp_path / "a.kv", LEAD)], [9])
    assert runtime.seq_pos_max(0) == -1


def test_another_tokenizer_is_refused(clean, tmp_path):
    clean.chunk(A, LEAD).save(tmp_path / "a.kv")
    runtime = Runtime(ToyLm(n_layers=4), CONFIG, identity={"tokenizer": "other"})
    with pytest.raises(SessionMismatch, match="tokenizer"):
        runtime.blend([CachedChunk.load(tmp_path / "a.kv", LEAD)], [9])


def test_a_damaged_chunk_is_refused(clean, tmp_path):
    path = tmp_path / "a.kv"
    clean.chunk(A, LEAD).save(path)
    data = bytearray(path.read_bytes())
    blob = session.read_manifest(path).groups[0].blocks[0]
    data[blob.offset + 4] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadSession):
        CachedChunk.load(path, LEAD)


def test_the_same_chunk_twice_is_two_chunks(clean):
    chunk = clean.chunk(A, LEAD)
    found = clean.blend([chunk, chunk], [9])
    assert found.n_reused == 1 + 2 * len(A)
    assert clean.token_history(0)[1].tolist() == [*LEAD, *A, *A, 9]


def test_every_mistake_is_one_of_ours(tmp_path):
    with pytest.raises(KvrtError):
        CachedChunk.load(tmp_path / "none.kv", LEAD)
