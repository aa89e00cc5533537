"""Calls from Python: the defaults, whole numbers of NumPy, and mistakes in kvrt's words."""

import dataclasses
import inspect
import pydoc
import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import kvrt
from kvrt import (
    AttentionSinks,
    CacheConfig,
    ContextShift,
    Engine,
    EngineConfig,
    GenerationSpec,
    MeshSpec,
    Request,
    Rules,
    Runtime,
    Sampling,
    SelfExtend,
    session,
)
from kvrt.cache import checks
from kvrt.errors import BadConfig, BadRequest, KvrtError, UsageError
from kvrt.program.mesh import Placement
from tests import typechecker
from tests.numpy_device.device import compiled
from tests.toys import RowModel


@pytest.fixture(autouse=True)
def _as_users_call():
    with typechecker.switched_off():
        yield


pytestmark = pytest.mark.usefixtures("numpy_device")

MODEL = RowModel()
SMALL = CacheConfig(n_ctx=64, n_seq_max=4, block_size=16, n_ubatch=16)
ROOT = Path(__file__).parent.parent


# --- defaults -----------------------------------------------------------------------------------


def test_the_default_types_are_those_of_the_platform():
    fields = {f.name: f.default for f in dataclasses.fields(CacheConfig)}
    assert fields["type_k"] == fields["type_v"] == "auto"
    config = CacheConfig(type_k="auto", type_v="int8")
    for platform, usual in (("cpu", "f16"), ("gpu", "bf16"), ("tpu", "bf16")):
        found = config.for_platform(platform)
        assert (found.type_k, found.type_v) == (usual, "int8")
    assert SMALL.for_platform("tpu") is SMALL


def test_a_runtime_and_an_engine_say_what_auto_was():
    auto = dataclasses.replace(SMALL, type_k="auto", type_v="auto")
    for made in (Runtime(MODEL, auto), Engine(MODEL, auto)):
        assert (made.config.type_k, made.config.type_v) == ("f16", "f16")
    assert Runtime(MODEL, auto).stats().type_k == "f16"


def test_sizes_of_auto_are_refused_with_the_remedy():
    auto = dataclasses.replace(SMALL, type_k="auto")
    with pytest.raises(BadConfig, match=r"type_k is 'auto'.*for_platform"):
        kvrt.program.estimate.of_cells(MODEL.groups, None, auto)


# --- whole numbers ------------------------------------------------------------------------------

WHOLE = np.int32(2)


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (lambda n: CacheConfig(n_ctx=n, n_seq_max=n, checkpoint_interval=None), "n_ctx n_seq_max"),
        (lambda n: SelfExtend(ga_n=n, ga_w=n), "ga_n ga_w"),
        (lambda n: MeshSpec(tensor=n), "tensor"),
        (lambda n: Sampling(top_k=n, seed=n), "top_k seed"),
        (lambda n: Rules(n_batch=n, n_wait=n), "n_batch n_wait"),
        (lambda n: EngineConfig(n_recent=n), "n_recent"),
        (lambda n: ContextShift(n_keep=n, n_discard=n), "n_keep n_discard"),
        (lambda n: AttentionSinks(n_window=n), "n_window"),
    ],
)
def test_a_configuration_takes_whole_numbers_of_any_kind_and_no_others(make, fields):
    made = make(WHOLE)
    assert {type(getattr(made, name)) for name in fields.split()} == {int}
    assert made == make(2)
    for wrong in (64.0, "64", np.float32(2), object()):
        with pytest.raises(BadConfig, match=f"{fields.split()[0]} is .*; a whole number is wanted"):
            make(wrong)


def test_a_request_takes_ids_in_lists_and_arrays():
    ids = np.array([1, 2, 3], np.int32)
    plain = Request(id="a", tokens=(1, 2, 3), n_predict=2, stop_ids=(7,))
    for tokens in (ids, list(ids), tuple(ids), jax.numpy.asarray(ids)):
        asked = Request(id="a", tokens=tokens, n_predict=WHOLE, stop_ids=np.array([7]))
        assert asked == plain and {type(t) for t in asked.tokens} == {int}
    for wrong in ((1.5, 2), np.array([1.5]), "12"):
        with pytest.raises(BadRequest, match="is no whole number"):
            Request(id="a", tokens=wrong, n_predict=2)


def test_a_runtime_takes_ids_of_numpy_and_saves_them(tmp_path):
    runtime, ids = Runtime(MODEL, SMALL), np.array([1, 2, 3], np.int32)
    one, two = np.int32(1), np.int64(2)
    runtime.append(ids, one)
    runtime.seq_cp(one, two, np.int32(0), two)
    runtime.decode({one: np.int32(4), two: np.int64(5)})
    session.save(tmp_path / "a.kv", runtime.snapshot())
    other = Runtime(MODEL, SMALL)
    other.restore(session.read(tmp_path / "a.kv"), {one: np.int32(3)})
    assert list(other.token_history(3)[1]) == [1, 2, 3, 4] and other.seq_pos_max(two) == -1
    asked = GenerationSpec(
        n_predict=two,
        seq_id=one,
        sampling=Sampling(),
        stop_ids=np.array([9]),
        recent=[one],
        n_best=0,
        stride=1,
    )
    assert (asked.stop_ids, asked.recent, type(asked.seq_id)) == ((9,), (1,), int)


# --- mistakes -----------------------------------------------------------------------------------


class NoLogits(RowModel):
    """A decoder without the width of its logits."""

    @property
    def n_vocab(self):
        raise AttributeError


@pytest.mark.parametrize(
    ("model", "config", "policy", "told"),
    [
        (
            object(),
            SMALL,
            None,
            r"the model is of type object; give a flax.nnx module.*kvrt\.Decoder",
        ),
        (None, SMALL, None, "the model is of type NoneType"),
        (NoLogits, SMALL, None, "NoLogits lacks groups, n_vocab"),
        (MODEL, 64, None, "the config is of type int; give a kvrt.CacheConfig"),
        (MODEL, SMALL, object(), "the policy is of type object; give one of kvrt.policies"),
    ],
)
def test_what_is_no_model_config_or_policy_is_refused(model, config, policy, told):
    model = object.__new__(model) if model is NoLogits else model
    with pytest.raises(BadConfig, match=told):
        checks.settled(model, config, policy)


@compiled()
@pytest.mark.parametrize("make", [Runtime, Engine])
def test_a_cache_beyond_memory_is_refused_with_its_size(make):
    wide = RowModel(n_heads=32, n_kv_heads=32, head_dim=256)  # of 32 TB a matrix
    with pytest.raises(BadConfig, match=r"n_ctx = 10{9} cells take \d+\.\d\d GB.*lower n_ctx"):
        make(wide, CacheConfig(n_ctx=10**9, block_size=16))


def test_a_mesh_of_jax_is_one_of_kvrt():
    device = np.array(jax.devices()[:1])
    for mesh in (
        Mesh(device, ("tensor",)),
        Mesh(device.reshape(1, 1), ("tensor", "context")),
        Mesh(device.reshape(1, 1, 1), ("data", "context", "tensor")),
    ):
        place = Placement(mesh)
        assert place.spec == MeshSpec() and list(place.shards.mesh.devices.flat) == list(device)
    with pytest.raises(BadConfig, match=r"mesh is 4; give a kvrt.MeshSpec"):
        MeshSpec.of(4)


# --- a runtime's end ----------------------------------------------------------------------------


@compiled()
def test_a_runtime_is_closed_by_its_with_block():
    with Runtime(MODEL, SMALL) as runtime:
        runtime.append([1, 2], 0)
        n_bytes = runtime.stats().cache_bytes
        assert repr(runtime) == "<Runtime of RowModel: 2 of 64 cells used, f32, chunked>"
    assert runtime.stats().cache_bytes == n_bytes and "2 of 64" in repr(runtime)
    assert not hasattr(runtime._cache.device, "cache")
    with pytest.raises(UsageError, match=r"Runtime\.append: the Runtime is closed; make another"):
        runtime.append([3], 0)
    with runtime:
        pass


# --- what a module shows ------------------------------------------------------------------------


def test_dir_shows_every_public_name_and_each_is_there():
    assert set(kvrt.__all__) <= set(dir(kvrt))
    assert {"KvrtError", "ScoredPolicy", "H2O", "session", "policies", "load"} <= set(kvrt.__all__)
    assert all(getattr(kvrt, name) is not None for name in kvrt.__all__)
    text = pydoc.plain(pydoc.render_doc(kvrt))
    assert "class Runtime(" in text and "class KvrtError(" in text and "load(name_or_path" in text
    assert kvrt.KvrtError is KvrtError and kvrt.load.__module__ == "kvrt_models.load"


def test_the_example_of_prometheus_names_what_there_is(tmp_path, monkeypatch):
    from kvrt.serving import prometheus

    example = re.split(r"\n\n", inspect.getdoc(prometheus) or "", maxsplit=1)[1]
    engine = Engine(MODEL, SMALL)
    monkeypatch.chdir(tmp_path)
    exec(inspect.cleandoc(example), {"engine": engine, "Path": Path})
    assert "kvrt_steps_total 0.0" in (tmp_path / "kvrt.prom").read_text()


MADE_BY_PROGRAMS = {"tables.md"}  # of scripts/gpu_day
OTHERS = {"gguf.md"}  # ggml's specification


def test_no_file_refers_to_a_page_that_is_not_here():
    pages = {p.name for p in ROOT.rglob("*.md")} | MADE_BY_PROGRAMS | OTHERS
    roots = ("kvrt", "models", "scripts", "tests", "docs")
    files = [p for root in roots for p in (ROOT / root).rglob("*") if p.suffix in (".py", ".md")]
    lost = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*files, ROOT / "README.md", ROOT / "CHANGELOG.md"]
        for name in re.findall(r"([\w-]+\.md)\b", path.read_text())
        if name not in pages and path != Path(__file__)
    }
    assert not lost


def test_a_folder_of_programs_that_was_chosen_stays(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 7)
        assert kvrt.keep_programs() == tmp_path
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        assert jax.config.jax_persistent_cache_min_compile_time_secs == 7
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
