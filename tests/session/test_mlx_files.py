"""Prompt caches of mlx-lm: its own ones, see tests/golden/README.md, and damaged ones."""

import functools
import io
import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from kvrt import CacheConfig, GroupSpec, MaskSpec, RopeSpec, Runtime
from kvrt.cellcache import history as texts
from kvrt.errors import BadSession, SessionMismatch
from kvrt.session.fingerprint import describe
from kvrt.session.interop import mlx
from kvrt_models.load import load

GOLDEN = Path(__file__).parents[1] / "golden"
LAYOUTS = ["0.31", "0.32"]
GROUPS = (
    GroupSpec(layers=(0, 1), n_kv_heads=2, head_dim=16, rope=RopeSpec(n_rot=16, layout="neox")),
)
NORM = (GroupSpec(**{**vars(GROUPS[0]), "rope": RopeSpec(n_rot=16, layout="norm")}),)


@functools.cache
def expected():
    with np.load(GOLDEN / "mlx" / "expected.npz") as data:
        return dict(data)


def read(path, groups=GROUPS, tokens="known", **config):
    if tokens == "known":
        tokens = expected()["tokens"].tolist()
    fingerprint = describe(groups, None, CacheConfig(**config), 256, "w", {})
    return mlx.read(path, fingerprint, groups, arch="llama", n_vocab=256, tokens=tokens)


def written(snapshot, groups=GROUPS, **options):
    file = io.BytesIO()
    mlx.write(file, snapshot, groups, arch="llama", **options)
    return file.getvalue()


def header_of(content):
    (n,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + n]), content[8 + n :]


def remade(content, change):
    """With another header."""
    header, data = header_of(content)
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.slow
def test_a_cache_of_mlx_lm_goes_on():
    model = load(GOLDEN / "hf" / "llama")
    runtime = Runtime(model.decoder, CacheConfig(n_ctx=64, n_ubatch=16, block_size=16))
    tokens = expected()["tokens"].tolist()
    about = {"arch": model.spec.arch, "n_vocab": 256, "tokens": tokens}
    for layout in LAYOUTS:
        path = GOLDEN / "mlx" / f"{layout}.safetensors"
        runtime.restore(mlx.read(path, runtime.fingerprint, model.spec.groups, **about))
        assert runtime.token_history(0)[1].tolist() == tokens[:-1]
        worst = np.abs(np.asarray(runtime.prefill(tokens[-1:])) - expected()["logits"]).max()
        print(f"{layout}: largest difference {worst:.1e}")
        assert worst < 1e-4
        assert [t.id for t in runtime.generate(16)] == expected()["greedy"].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_is_what_mlx_lm_writes(tmp_path, layout):
    path = GOLDEN / "mlx" / f"{layout}.safetensors"
    snapshot = read(path)
    content = written(snapshot, notes={"model": "tiny"}, old=layout == "0.31")
    header, _ = header_of(content)
    theirs, _ = header_of(path.read_bytes())
    noted = header["__metadata__"].pop("0.kvrt_tokens" if layout == "0.32" else "1.kvrt_tokens")
    assert json.loads(noted) == expected()["tokens"][:-1].tolist()
    assert header.pop("__metadata__") == theirs.pop("__metadata__")
    assert {k: x["dtype"] for k, x in header.items()} == {k: x["dtype"] for k, x in theirs.items()}
    (tmp_path / "again").write_bytes(content)
    ours, known = load_file(tmp_path / "again"), load_file(path)
    for name, value in known.items():
        np.testing.assert_array_equal(ours[name], value[:, :, :24] if value.ndim else value)
    again = read(tmp_path / "again", tokens=None)
    for a, b in zip(again.groups, snapshot.groups, strict=True):
        np.testing.assert_array_equal(a.blocks[0].k, b.blocks[0].k)
        np.testing.assert_array_equal(a.blocks[0].v, b.blocks[0].v)
    assert texts.tokens(again.history, 0).tolist() == texts.tokens(snapshot.history, 0).tolist()


def test_keys_change_the_order_of_their_channels(tmp_path):
    path = GOLDEN / "mlx" / "0.31.safetensors"
    plain, turned = (read(path, groups).groups[0].blocks[0] for groups in (GROUPS, NORM))
    np.testing.assert_array_equal(turned.k[..., 0::2], plain.k[..., :8])
    np.testing.assert_array_equal(turned.k[..., 1::2], plain.k[..., 8:])
    np.testing.assert_array_equal(turned.v, plain.v)
    content = written(read(path, NORM), NORM, old=True)
    assert content == written(read(path), old=True)


@pytest.fixture(scope="module")
def fine():
    return written(read(GOLDEN / "mlx" / "0.31.safetensors"))


@pytest.fixture
def refused(tmp_path):
    """Reads bytes that must be refused."""

    def at(content, error, message, **options):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(error, match=message) as found:
            read(tmp_path / "x", **options)
        assert "\n" not in str(found.value)

    return at


def at_key(key, value, name=None):
    def change(header):
        (header["__metadata__"] if name is None else header[name])[key] = value

    return change


WRONG = {
    "rotating": (at_key("1.1", "RotatingKVCache"), SessionMismatch, "layer 1 has a 'RotatingKVC"),
    "quantised": (at_key("1.0", "QuantizedKVCache"), SessionMismatch, "only 'KVCache' is support"),
    "layers": (at_key("1.2", "KVCache"), SessionMismatch, "caches of 3 layers, the model has 2"),
    "classes": (lambda h: h.pop("__metadata__"), BadSession, "names no classes"),
    "tokens": (at_key("0.kvrt_tokens", "[1, 2"), BadSession, "its tokens: "),
    "words": (at_key("0.kvrt_tokens", '["a"]'), BadSession, "a whole number is wanted"),
    "few": (at_key("0.kvrt_tokens", "[1, 2]"), BadSession, "2 tokens for 24 positions"),
    "other": (at_key("0.kvrt_tokens", "[300]"), SessionMismatch, "token 300 .* has 256"),
    "type": (at_key("dtype", "I32", "0.0"), BadSession, "layers differ in length or type"),
    "shape": (at_key("shape", [1, 4, 12, 16], "0.0"), SessionMismatch, "0.0 has shape"),
    "layout": (at_key("2.0", "KV"), SessionMismatch, "has a '"),
    "missing": (lambda h: h.update({"1.3": h.pop("1.2")}), BadSession, "6 tensors are not"),
    "offsets": (at_key("data_offsets", [0, 1 << 60], "0.0"), BadSession, "cannot be read"),
    "number": (at_key("dtype", "F32", "0.2"), BadSession, r"0\.2 is no number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_told_in_one_line(refused, fine, what):
    change, error, message = WRONG[what]
    refused(remade(fine, change), error, message, tokens=None)


def test_counts_that_do_not_fit(refused, fine):
    for counts in ((25, 25), (-1, -1), (24, 23)):
        content = fine[:-8] + struct.pack("<ii", *counts)
        refused(content, BadSession, "tokens in 24 positions")


def test_other_models_and_caches_are_refused(refused, fine):
    window = (GroupSpec(**{**vars(GROUPS[0]), "mask": MaskSpec(kind="window", size=4)}),)
    refused(fine, SessionMismatch, "layers with windows", groups=window)
    refused(fine, SessionMismatch, "use rope='write'", rope="read")
    other = (GroupSpec(**{**vars(GROUPS[0]), "n_kv_heads": 1}),)
    refused(fine, SessionMismatch, r"\(1, 1, n, 16\) is wanted", groups=other)
    bare = (GOLDEN / "mlx" / "0.31.safetensors").read_bytes()
    refused(bare, BadSession, "notes no tokens", tokens=None)


def test_a_huge_header_takes_no_memory(refused, fine):
    tracemalloc.start()
    for n in (2**63, 2**32, len(fine)):
        refused(struct.pack("<Q", n) + fine[8:], BadSession, "the header at byte 8 needs")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_file_cut_anywhere_is_refused(refused, fine):
    for n in [*range(0, 1000, 7), *range(1000, len(fine), 501), len(fine) - 1]:
        refused(fine[:n], BadSession, "truncated|cannot be read|needs")
    refused(fine + b"x", BadSession, "cannot be read")


@settings(max_examples=50)
@given(at=st.integers(0, 1200), bit=st.integers(0, 7))
def test_a_bit_flipped_in_the_header(tmp_path_factory, fine, at, bit):
    content = bytearray(fine)
    content[at] ^= 1 << bit
    path = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    path.write_bytes(content)
    try:
        found = read(path, tokens=None)
    except (BadSession, SessionMismatch) as error:
        assert "\n" not in str(error)
        return
    assert found.groups[0].blocks[0].k.shape == (2, 24, 2, 16)


def test_positions_that_mlx_lm_does_not_have(tmp_path):
    snapshot = read(GOLDEN / "mlx" / "0.31.safetensors")
    held = texts.entries(snapshot.history, 0).copy()
    held[0, -1] += 1
    moved = type(snapshot)(
        **{**vars(snapshot), "history": texts.TokenHistory(pieces={0: (held,)}, n_marks=24)}
    )
    with pytest.raises(SessionMismatch, match="do not stand at 0, 1, 2 and so on"):
        written(moved)
