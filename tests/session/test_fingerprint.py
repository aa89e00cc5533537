"""What makes two caches another: each difference is refused by its name, with both values."""

import dataclasses
import hashlib
import json

import pytest
from snapshots import snapshot

from kvrt import (
    CacheConfig,
    GroupSpec,
    MaskSpec,
    RecurrentSpec,
    RopeSpec,
    SelfExtend,
    errors,
    session,
)
from kvrt.session import fingerprint
from kvrt.session import manifest as manifests
from kvrt.session.kv_file import file as kv_file
from kvrt.session.kv_file import frame

ROPE = RopeSpec(n_rot=8, base=1e5)
GROUP = GroupSpec(
    layers=(0, 1), n_kv_heads=2, head_dim=8, rope=ROPE, mask=MaskSpec(kind="window", size=4)
)
LONG = dataclasses.replace(
    ROPE,
    scaling="longrope",
    n_ctx_orig=64,
    short_factors=(1.0,) * 4,
    long_factors=(2.0,) * 4,
)


def described(group=GROUP, *, recurrent=None, n_vocab=50, weights="a", identity=None, **options):
    config = CacheConfig(**{"n_ctx": 64, **options})
    found = fingerprint.describe((group,), recurrent, config, n_vocab, weights, identity or {})
    # As a file gives it back.
    return json.loads(json.dumps(found))


def other(**change):
    return described(dataclasses.replace(GROUP, **change))


def turned(**change):
    return other(rope=dataclasses.replace(ROPE, **change))


CASES = {
    "groups[0].rope.base is 20000.0 in the session and 100000.0 here": turned(base=2e4),
    "groups[0].rope.scaling is linear in the session and missing here": turned(
        scaling="linear", factor=2.0
    ),
    "groups[0].rope.freq_factors": turned(freq_factors=(1.0, 1.0, 2.0, 2.0)),
    "groups[0].rope.layout is norm": turned(layout="norm"),
    "groups[0].rope.n_rot": turned(n_rot=4),
    "groups[0].mask.size is 5 in the session and 4 here": other(
        mask=MaskSpec(kind="window", size=5)
    ),
    "groups[0].mask.kind is chunked": other(mask=MaskSpec(kind="chunked", size=4)),
    "groups[0].layers": other(layers=(0, 2)),
    "groups[0].n_kv_heads is 1": other(n_kv_heads=1),
    "groups[0].scale is 0.5": other(scale=0.5),
    "groups[0].soft_cap": other(soft_cap=30.0),
    "model.weights is b in the session and a here": described(weights="b"),
    "model.n_vocab is 51": described(n_vocab=51),
    "model.tokenizer is x in the session and missing here": described(identity={"tokenizer": "x"}),
    "rope is read in the session and write here": described(rope="read"),
    "type_k is f16 in the session and f32 here; use type_k f16, or convert": described(
        type_k="f16"
    ),
    "recurrent.layers": described(recurrent=RecurrentSpec(layers=(3,), shapes=((2,),))),
    "self_extend.ga_n is 2": described(self_extend=SelfExtend(ga_n=2, ga_w=8)),
}


@pytest.mark.parametrize("message", CASES)
def test_a_difference_is_refused_by_its_name(message):
    with pytest.raises(errors.SessionMismatch) as caught:
        fingerprint.check(CASES[message], described(), convert=False)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert fingerprint.digest(CASES[message]) != fingerprint.digest(described())


def test_what_decides_no_row_is_no_difference():
    for options in ({"n_ctx": 128}, {"block_size": 16}, {"n_seq_max": 4}, {"swa_full": True}):
        fingerprint.check(described(**options), described(), convert=False)


def test_rules_that_look_at_the_size_of_the_context_are_told_it():
    long = dataclasses.replace(GROUP, rope=LONG)
    with pytest.raises(errors.SessionMismatch, match=r"rope\.n_ctx is 128"):
        fingerprint.check(described(long, n_ctx=128), described(long), convert=False)


def test_types_alone_can_be_converted():
    fingerprint.check(described(type_k="f16"), described(), convert=True)
    with pytest.raises(errors.SessionMismatch, match="weights"):
        fingerprint.check(described(type_k="f16", weights="b"), described(), convert=True)


# --- files made on purpose, with digests that hold -----------------------------------------------


def forged(path, change):
    """A session whose manifest was changed, and everything that proves it with it."""
    session.save(path, snapshot(n_cells=(300,)))
    data = path.read_bytes()
    first = frame.parse(data[: frame.PAGE], len(data))
    said = json.loads(data[first.offset :])
    change(said)
    body = json.dumps(said).encode()
    again = frame.of_manifest(body, first.offset, first.turn)
    path.write_bytes(frame.page(again) + data[frame.PAGE : first.offset] + body)
    return path


def overlap(said):
    blocks = said["groups"][0]["blocks"]
    blocks[1]["offset"] = blocks[0]["offset"] + 1


def far(said):
    said["meta"]["offset"] = 2**62


def huge(said):
    said["groups"][0]["blocks"][0]["n_bytes"] = 2**62


FORGERIES = {
    "overlaps another one": overlap,
    "overlaps another one or the end": far,
    "of 4611686018427387904 bytes": huge,
    "n_used": lambda said: said["groups"][0].update(n_used=10**12),
    "tensor '0.index' is int32[300]": lambda said: said["groups"][0].update(n_used=299),
    "group 0: its cells are damaged": lambda said: said["groups"][0].update(n_cells=300),
    "manifest.groups is": lambda said: said.update(groups={"a": 1}),
    "manifest.n_tokens.x": lambda said: said.update(n_tokens={"x": 1}),
    "tensor 'text.7' is missing": lambda said: said["n_tokens"].update({"7": 3}),
    "the fingerprint does not tell the groups": lambda said: said.update(fingerprint={}),
    "bytes for block 0 of group 0, from": lambda said: said["fingerprint"].update(type_k="f16"),
    "lost": lambda said: said["groups"][0].update(lost={"0": [[5, 2]]}),
    "sampling": lambda said: said["draws"]["0"].update(sampling={"temp": "hot"}),
    "ga_i": lambda said: said.update(ga_i={"0": -1}),
}


@pytest.mark.parametrize("message", FORGERIES)
def test_a_forged_manifest_is_refused(tmp_path, message):
    path = forged(tmp_path / "x.kv", FORGERIES[message])
    with pytest.raises(errors.BadSession) as caught:
        kv_file.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600
    assert message in text


def test_no_manifest_is_too_deep(tmp_path):
    path = forged(tmp_path / "x.kv", lambda said: None)
    data = path.read_bytes()
    first = frame.parse(data[: frame.PAGE], len(data))
    body = b"[" * 200_000
    again = frame.of_manifest(body, first.offset, 1)
    path.write_bytes(frame.page(again) + data[frame.PAGE : first.offset] + body)
    with pytest.raises(errors.BadSession, match="no JSON"):
        kv_file.read(path)
    assert hashlib.sha256(body).digest() == again.sha256
    assert len(body) < manifests.MAX_BYTES
