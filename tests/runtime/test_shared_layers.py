"""Layers that read keys and values of others: against a dense implementation that hands them on."""

import dataclasses
import functools

import pytest

from kvrt import CacheConfig, GroupSpec, MaskSpec, RecurrentSpec, Runtime, session
from kvrt.errors import BadConfig
from kvrt.program.estimate import of_blocks, of_cells
from kvrt.program.layout import cell_layout
from kvrt.reuse.blend import BlendSpec
from kvrt.upkeep.sharded import shift_buffers
from tests.marks import slow
from tests.runtime.alongside import TEXT, read, run_history
from tests.sharedlm import CLA2, CLA3, UNEVEN, D, Dense, SharedLm, mlkv_map
from tests.toys import RowModel, allclose

WINDOW = MaskSpec(kind="window", size=9)
# Windowed layers read windowed ones, as in Gemma 3n and 4.
ALTERNATING = dict(kv_of=(0, 1, 0, 1), masks=[WINDOW, MaskSpec()] * 2)
MODELS = {
    "cla2": dict(kv_of=CLA2),
    "cla3": dict(kv_of=CLA3, n_kv_heads=4),
    "uneven": dict(kv_of=UNEVEN),
    "mlkv": dict(kv_of=mlkv_map(6, 2), n_kv_heads=1),
    "windows": ALTERNATING,
}
EACH = [
    ("cla2", "write"),
    *(slow("uneven", "read"), slow("mlkv", "write"), slow("windows", "read")),
]
GROUP = dict(n_kv_heads=2, head_dim=D, rope=None)


@functools.cache
def model(name):
    return SharedLm(**MODELS[name])


@functools.cache
def shared_runtime(name, **options):
    config = {"n_ctx": 80, "block_size": 8, "n_ubatch": 8, "n_seq_max": 3, **options}
    return Runtime(model(name), CacheConfig(**config))


def runtime(name, **options):
    found = shared_runtime(name, **options)
    found.clear()
    return found


@pytest.mark.parametrize(("name", "rope"), EACH)
def test_logits_are_those_of_a_dense_model(name, rope):
    run_history(runtime(name, rope=rope), Dense(model(name)))


@pytest.mark.slow
def test_a_shift_of_every_layer_is_seen(monkeypatch):
    """The control: keys that two layers read would be rotated once for each of them."""

    def by_layer(shards, store, plan, some, config):
        readers = [(read, read) for _, read in some.spec.kv_of]
        for layer, _ in [*((x, x) for x in some.spec.layers), *readers]:
            one = dataclasses.replace(some, buffers=(some.spec.layers.index(layer),))
            store = shift_buffers(shards, store, plan, one, config)
        return store

    monkeypatch.setattr("kvrt.program.labels.shift.shift_buffers", by_layer)
    # Of a size that no other test has: caches of one size share programs.
    config = CacheConfig(n_ctx=8 * 19, block_size=8, n_ubatch=16, n_seq_max=3)
    wrong = Runtime(model("cla2"), config)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        run_history(wrong, Dense(model("cla2")))


def test_a_session_has_each_array_once(tmp_path):
    at, oracle = runtime("cla2", rope="write"), Dense(model("cla2"))
    read(at, oracle, TEXT[:16])
    snapshot = at.snapshot()
    assert snapshot.groups[0].blocks[0].k.shape[0] == 2
    session.save(tmp_path / "x.kv", snapshot)
    at.clear()
    at.restore(session.read(tmp_path / "x.kv"))
    read(at, oracle, TEXT[23:24])


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_of_what_is_kept(name):
    """L/c of a model without sharing (CLA), m * g / (L * n_q) of one with a kv head a query."""
    of = model(name)
    config = CacheConfig(n_ctx=80, block_size=8)
    alone = SharedLm(
        tuple(range(len(of.kv_of))), masks=of.masks, n_kv_heads=of.n_heads, n_heads=of.n_heads
    )
    for estimate in (of_cells, of_blocks):
        part, whole = (
            sum(p.n_bytes for p in estimate(m.groups, None, config).parts) for m in (of, alone)
        )
        m, n = len(set(of.kv_of)), len(of.kv_of)
        assert part * n * of.n_heads == whole * m * of.n_kv_heads
    kept = Runtime(of, config).cache.stores
    assert sum(len(x.k) for x in kept) == len(set(of.kv_of))


def test_a_map_of_all_layers_to_themselves_is_a_plain_group():
    assert GroupSpec.from_map(range(3), **GROUP) == GroupSpec(layers=(0, 1, 2), **GROUP)
    uneven = GroupSpec.from_map(UNEVEN, **GROUP)
    assert uneven.layers == (0, 2, 5) and uneven.all_layers == tuple(range(8))
    assert mlkv_map(6, 2) == (0, 0, 0, 3, 3, 3)


REFUSED = {
    "layer 1 reads the keys and values of layer 2, which runs later; name a layer": (0, 2, 2),
    "layer 2 reads the keys and values of layer 1, which keeps none in this group": (0, 0, 1),
    "layer 3 reads the keys and values of layer 7, which runs later": (0, 0, 2, 7),
    "a group needs at least one layer": (1, 0),
}


@pytest.mark.parametrize("says", REFUSED)
def test_a_map_that_cannot_be_is_refused(says):
    with pytest.raises(BadConfig, match=says) as caught:
        GroupSpec.from_map(REFUSED[says], **GROUP)
    assert "\n" not in str(caught.value)


def test_layers_of_two_kinds_are_refused():
    with pytest.raises(BadConfig, match=r"layer 2 reads .* and keeps its own"):
        GroupSpec(layers=(0, 2), kv_of=((2, 0),), **GROUP)
    with pytest.raises(BadConfig, match=r"must ascend, each layer once"):
        GroupSpec(layers=(0,), kv_of=((2, 0), (1, 0)), **GROUP)
    group, states = GroupSpec(layers=(0,), kv_of=((1, 0),), **GROUP), RecurrentSpec
    with pytest.raises(BadConfig, match="layer 1 is in two groups, or recurrent as well"):
        cell_layout([group], states(layers=(1, 2), shapes=((4,),)), CacheConfig())
    with pytest.raises(BadConfig, match=r"layer 1, which keeps none .* that keep them: 0$"):
        GroupSpec(layers=(0,), kv_of=((2, 1),), **GROUP)  # layer 1 is recurrent


class Wrong(SharedLm):
    """Gives other keys and values than its groups say."""

    def __call__(self, tokens, attend, out_ids):
        x = self.embed(tokens)
        if self.how == "later first":
            return self.layers(x, attend, 1, 2)[out_ids]
        q, kv = x.reshape(len(x), -1, D), x[:, : 2 * D].reshape(len(x), 2, D)
        attend(0, q, *((None, None) if self.how == "none" else (kv, kv)))
        attend(1, q, kv, kv)
        return self.head(x)[out_ids]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("none", "layer 0 keeps keys and values and gives attend none"),
        ("some", "layer 1 reads those of layer 0 and gives attend its own"),
        ("later first", "values of layer 0, which did not run before it in this step; run both"),
    ],
)
def test_a_model_that_does_otherwise_is_refused(how, says):
    wrong = Wrong((0, 0))
    wrong.how = how
    with pytest.raises(BadConfig, match=says):
        Runtime(wrong, CacheConfig(n_ctx=32, attention="chunked")).append([1])


@pytest.mark.slow
def test_a_blend_checks_where_nothing_is_parted():
    at = runtime("cla2")
    chunk = at.chunk(TEXT[:10])
    for layer, says in ((0, "lies between layer 0 and layer 1"), (1, "has none to compare")):
        with pytest.raises(BadConfig, match=says):
            at.blend([chunk], TEXT[10:12], BlendSpec(check_layer=layer))


class Reader(RowModel):
    """Layer 1 reads what layer 0 keeps, for the tokens alone whose logits are asked for."""

    def __init__(self):
        super().__init__()
        self.groups = (GroupSpec.from_map((0, 0), **{**GROUP, "head_dim": 8}),)

    def __call__(self, tokens, attend, out_ids):
        q, k, v = (x[...][tokens] for x in (self.q, self.k, self.v))
        attend(0, q, k, v)
        return attend.for_tokens(out_ids)(1, q[out_ids], None, None).reshape(-1, self.n_vocab)


@pytest.mark.slow
def test_layers_that_read_others_run_for_no_tokens_at_all():
    """Steps before a prompt's last ask for no logits."""
    whole, parts = (Runtime(Reader(), CacheConfig(n_ctx=32, n_ubatch=n)) for n in (16, 4))
    allclose(parts.prefill(TEXT[:11]), whole.prefill(TEXT[:11]))
