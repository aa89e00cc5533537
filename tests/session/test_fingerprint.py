"""What makes two caches another: each difference is refused by its name, with both values."""

import dataclasses
import hashlib
import json
import typing

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
from kvrt.session import described as described_file
from kvrt.session import fingerprint
from kvrt.session import manifest as manifests
from kvrt.session.fingerprint import completed
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
    "groups[0].rope.scaling is linear in the session and none here": turned(
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
    "groups[0].kv_of[0] is 2,1 in the session and missing here": other(kv_of=((2, 1),)),
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
        fingerprint.check_match(CASES[message], described(), convert=False)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert fingerprint.digest(CASES[message]) != fingerprint.digest(described())


def test_what_decides_no_row_is_no_difference():
    for options in ({"n_ctx": 128}, {"block_size": 16}, {"n_seq_max": 4}, {"swa_full": True}):
        fingerprint.check_match(described(**options), described(), convert=False)


def test_rules_that_look_at_the_size_of_the_context_are_told_it():
    long = dataclasses.replace(GROUP, rope=LONG)
    with pytest.raises(errors.SessionMismatch, match=r"rope\.n_ctx is 128"):
        fingerprint.check_match(described(long, n_ctx=128), described(long), convert=False)


def of_type(weight_type, **rest):
    return described(identity={fingerprint.WEIGHT_TYPE: weight_type}, **rest)


def test_the_type_of_weights_is_named_before_their_digest():
    with pytest.raises(errors.SessionMismatch) as caught:
        fingerprint.check_match(of_type("f32", weights="b"), of_type("int8"), convert=False)
    said = (
        "model.weight_type is f32 in the session and int8 here, and 1 more differ; load the model"
    )
    assert str(caught.value).startswith(said) and str(caught.value).endswith("with f32 weights")


def test_a_session_that_names_no_type_stays_what_it_was():
    for found, here in ((described(), of_type("f32")), (of_type("int8"), described())):
        fingerprint.check_match(found, here, convert=False)
        assert fingerprint.digest(found) == fingerprint.digest(here)
    with pytest.raises(errors.SessionMismatch, match="may have been bf16 or f16"):
        fingerprint.check_match(described(weights="b"), of_type("f32"), convert=False)
    with pytest.raises(errors.SessionMismatch) as caught:
        fingerprint.check_match(of_type("f32", weights="b"), of_type("f32"), convert=False)
    assert "may have been" not in str(caught.value)


def test_types_alone_can_be_converted():
    fingerprint.check_match(described(type_k="f16"), described(), convert=True)
    with pytest.raises(errors.SessionMismatch, match="weights"):
        fingerprint.check_match(described(type_k="f16", weights="b"), described(), convert=True)


# --- files made on purpose, with digests that hold -----------------------------------------------


def forged(path, change):
    """A session whose manifest was changed, and everything that proves it with it."""
    session.save(path, snapshot(n_cells=(300,)))
    data = path.read_bytes()
    first = frame.newest_frame(data[: frame.PAGE], len(data))
    said = json.loads(data[first.offset :])
    change(said)
    body = json.dumps(said).encode()
    again = frame.of_manifest(body, first.offset, first.generation)
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
    'manifest.n_tokens has the key "x"': lambda said: said.update(n_tokens={"x": 1}),
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
    first = frame.newest_frame(data[: frame.PAGE], len(data))
    body = b"[" * 200_000
    again = frame.of_manifest(body, first.offset, 1)
    path.write_bytes(frame.page(again) + data[frame.PAGE : first.offset] + body)
    with pytest.raises(errors.BadSession, match="no JSON"):
        kv_file.read(path)
    assert hashlib.sha256(body).digest() == again.sha256
    assert len(body) < manifests.MAX_BYTES


# --- fields and their defaults -------------------------------------------------------------------

# A base that is a whole number is the same number.
PLAIN = GroupSpec(layers=(0, 1), n_kv_heads=2, head_dim=8, rope=RopeSpec(n_rot=8, base=10000))
EXTEND = SelfExtend(ga_n=2, ga_w=8)
OLDER = {
    "model": {"n_vocab": 50, "weights": "a"},
    "groups": [{"layers": [0, 1], "n_kv_heads": 2, "head_dim": 8, "rope": {"n_rot": 8}}],
    "recurrent": None,
    "rope": "write",
    "type_k": "f32",
    "type_v": "f32",
    "self_extend": {"ga_n": 2, "ga_w": 8},
}


CHANGED = [
    (RopeSpec, "base", 5e5, lambda spec: spec.rope.base, 1e4),
    (RopeSpec, "layout", "norm", lambda spec: spec.rope.layout, "neox"),
    (RopeSpec, "truncate", False, lambda spec: spec.rope.truncate, True),
    (MaskSpec, "n_sink", 4, lambda spec: spec.mask.n_sink, 0),
    (GroupSpec, "soft_cap", 50.0, lambda spec: spec.soft_cap, None),
]


def with_field(kind, *field):
    return dataclasses.make_dataclass(
        kind.__name__, [field], bases=(kind,), frozen=True, kw_only=True
    )


@pytest.mark.parametrize(("kind", "name", "value", "of", "meant"), CHANGED)
def test_a_changed_default_changes_no_file(monkeypatch, kind, name, value, of, meant):
    before = described(PLAIN, self_extend=EXTEND)
    changed = with_field(kind, name, typing.Any, dataclasses.field(default=value))
    group = changed
    if kind is not GroupSpec:
        inner = {RopeSpec: "rope", MaskSpec: "mask"}[kind]
        group = with_field(GroupSpec, inner, changed | None, dataclasses.field(default=None))
    monkeypatch.setattr(described_file, "GroupSpec", group)
    for found in (completed(OLDER), before):
        (spec,) = described_file.groups(found)
        assert of(spec) == meant
    kinds = {RopeSpec: RopeSpec, MaskSpec: MaskSpec, GroupSpec: GroupSpec, kind: changed}
    here = kinds[GroupSpec](
        layers=(0, 1),
        n_kv_heads=2,
        head_dim=8,
        rope=kinds[RopeSpec](n_rot=8),
        mask=kinds[MaskSpec](),
    )
    with pytest.raises(errors.SessionMismatch, match=name):
        fingerprint.check_match(
            completed(OLDER), described(here, self_extend=EXTEND), convert=False
        )


def test_every_field_has_a_place_in_the_schema():
    """A new field of a configuration needs a new schema number, and a table for this one."""
    full = completed(OLDER)
    # These are written where a model has them alone.
    alone = {"kv_of", "latent_rank", "indexed"}
    names = {f.name for f in dataclasses.fields(GroupSpec)} - alone
    assert set(full["groups"][0]) == names
    assert set(full["groups"][0]["rope"]) == {f.name for f in dataclasses.fields(RopeSpec)} | {
        "n_ctx"
    }
    assert set(full["groups"][0]["mask"]) == {f.name for f in dataclasses.fields(MaskSpec)}
    assert set(full["self_extend"]) == {f.name for f in dataclasses.fields(SelfExtend)}
    assert set(full) == set(described())


def test_older_and_newer_files_of_one_cache_have_one_digest():
    new = described(PLAIN, self_extend=EXTEND)
    assert fingerprint.digest(completed(OLDER)) == fingerprint.digest(new)
    assert completed(new) == new


@pytest.mark.parametrize(
    "schema", [0, 2, -1, 10**30, 1.0, True, None, "1", [1], {}, "x" * 300, "\x1b[2J"]
)
def test_other_schemas_are_refused(tmp_path, schema):
    path = forged(tmp_path / "x.kv", lambda said: said["fingerprint"].update(schema=schema))
    with pytest.raises(errors.BadSession) as caught:
        kv_file.read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 400
    assert "\x1b" not in text


@pytest.mark.parametrize("at", ["top", "group", "rope", "mask"])
def test_a_numbered_schema_has_all_fields(tmp_path, at):
    def change(said):
        found = said["fingerprint"]
        found["groups"][0]["rope"] = described()["groups"][0]["rope"] | {"n_rot": 4}
        parts = {"top": found, "group": found["groups"][0]}
        part = parts.get(at) or found["groups"][0][at]
        del part[{"top": "hadamard", "group": "scale", "rope": "base", "mask": "n_sink"}[at]]

    path = forged(tmp_path / "x.kv", change)
    with pytest.raises(errors.BadSession, match="the fingerprint does not tell"):
        kv_file.read(path)


def test_a_models_name_decides_nothing_and_is_told_where_models_differ():
    one, other = (described(identity={"name": n, "tokenizer": n}) for n in ("gemma", "smollm"))
    with pytest.raises(
        errors.SessionMismatch, match=r"made with the model gemma, this is smollm .*-m"
    ):
        fingerprint.check_match(one, other, convert=False)
    renamed = described(identity={"name": "copy", "tokenizer": "gemma"})
    fingerprint.check_match(one, renamed, convert=False)
    assert fingerprint.digest(one) == fingerprint.digest(renamed)
