"""Programs in files: a second start traces nothing, and a file that is no use is not taken."""

import contextlib
import functools
import os
import pathlib
import pickle
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import xxhash
from jax.experimental.compilation_cache import compilation_cache

import kvrt
from kvrt import CacheConfig, Runtime
from kvrt.program.programs import Programs, forget_programs
from kvrt.program.serialized import digests
from kvrt_models.load import load
from tests.peer.tiny_gguf import TinyModel, write_gguf
from tests.toys import ToyLm

ALONE = True  # another folder than --programs
ROOT = pathlib.Path(__file__).parents[2]
_KIND = """
import sys
from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
print(Runtime(load(sys.argv[1], dtype="f32").decoder, CacheConfig(n_ctx=64)).programs.kind.digest)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyModel(n_layers=1))


@pytest.fixture(scope="module")
def start(path):
    """A start of a process, as far as programs go: the tokens and last logits of a text."""
    decoder = load(path, dtype="f32").decoder

    def run(model=decoder):
        forget_programs()
        runtime = Runtime(model, CacheConfig(n_ctx=64, n_ubatch=8))
        first = runtime.append([1, 2, 3])
        cache = runtime.cache
        tokens = [x.id for x in runtime.generate(4)]
        # Arrays were given away, not copied.
        assert all(x.is_deleted() for x in jax.tree.leaves(cache.stores))
        last = runtime.last_logits(0)
        return tokens, np.asarray(first), np.asarray(last), runtime.stats()

    return run


@contextlib.contextmanager
def kept_in(cache):
    """Where `kvrt.keep_programs` has programs kept."""
    before = jax.config.values
    jax.config.update("jax_compilation_cache_dir", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVRT_CACHE", str(cache))
        yield kvrt.keep_programs() / "kvrt_programs"
    for name, value in before.items():
        if name.startswith(("jax_compilation_cache_dir", "jax_persistent_cache_min")):
            jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def folder(tmp_path):
    """One that is empty."""
    with kept_in(tmp_path / "cache") as folder:
        yield folder


@pytest.fixture(scope="module")
def first(start, tmp_path_factory):
    """What a first start gave, its cache folder, whose path digests have, and a copy of that."""
    cache = tmp_path_factory.mktemp("first") / "cache"
    with kept_in(cache) as folder:
        found = start()
        assert len(names(folder, found[-1].n_compiles)) == found[-1].n_compiles > 3
    return found, cache, shutil.copytree(cache, cache.with_name("copy"))


@pytest.fixture
def left(first):
    """The programs that a first start left."""
    _, cache, copy = first
    shutil.rmtree(cache)
    shutil.copytree(copy, cache)
    with kept_in(cache) as folder:
        yield folder


def names(folder, n):
    """Names of files, when there are n: they are written after a program is there."""
    end = time.monotonic() + 20
    while True:
        found = sorted(x.name for x in folder.iterdir()) if folder.exists() else []
        if (len(found) == n and found[0][0] != ".") or time.monotonic() > end:
            return found
        time.sleep(0.01)


def no_trace(*_):
    raise AssertionError("a program is traced that is in a file")


def test_a_second_start_traces_nothing_and_gives_the_same_bits(left, start, first, monkeypatch):
    first, found = first[0], names(left, first[0][-1].n_compiles)
    assert first[-1].n_from_disk == 0
    monkeypatch.setattr(Programs, "_traced", no_trace)
    second = start()
    assert second[0] == first[0]
    assert (second[1] == first[1]).all() and (second[2] == first[2]).all()
    assert second[-1].n_from_disk == second[-1].n_compiles == first[-1].n_compiles
    assert names(left, len(found)) == found


@pytest.mark.parametrize("damage", ["cut short", "a bit", "no executable", "a folder"])
def test_a_file_that_is_no_use_costs_time_and_a_line(left, start, first, damage):
    first = first[0]
    found = max(left.iterdir(), key=lambda x: x.stat().st_size)
    data = found.read_bytes()
    found.unlink()
    if damage == "cut short":
        found.write_bytes(data[:100])
    elif damage == "a bit":
        found.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    elif damage == "no executable":
        other = pickle.dumps((*pickle.loads(data[16:])[:2], b"no executable"))
        found.write_bytes(xxhash.xxh3_128(other).digest() + other)
    else:
        found.mkdir()
    with pytest.warns(UserWarning, match=f"{found.name}: .*this program is compiled again"):
        second = start()
    assert second[0] == first[0] and (second[2] == first[2]).all()
    # JAX's cache had it, and XLA cannot serialize what it has loaded.
    n = first[-1].n_compiles
    assert second[-1].n_from_disk == n and found.is_dir() == (damage == "a folder")
    if damage != "a folder":
        assert len(names(left, n - 1)) == n - 1
        assert start()[-1].n_from_disk == n and len(names(left, n - 1)) == n - 1


def test_a_program_of_a_useless_file_is_made_under_kvrts_settings_of_jax(folder, start):
    """Another thread makes it, which has those of the process."""
    jax.config.update("jax_enable_x64", True)
    try:
        first = start()
        for path in [folder / x for x in names(folder, first[-1].n_compiles)]:
            other = pickle.dumps((*pickle.loads(path.read_bytes()[16:])[:2], b"no executable"))
            path.write_bytes(xxhash.xxh3_128(other).digest() + other)
        with pytest.warns(UserWarning, match="this program is compiled again"):
            second = start()
    finally:
        jax.config.update("jax_enable_x64", False)
    assert second[0] == first[0] and (second[2] == first[2]).all()
    # The same text as before, which JAX's cache has.
    assert second[-1].n_from_disk == first[-1].n_compiles


def test_a_decoder_of_ones_own_is_traced_at_each_start(folder, start):
    start(ToyLm(n_layers=1))
    # Only what samples knows nothing of the decoder.
    assert len(names(folder, 1)) == 1


def test_programs_are_kept_where_keep_programs_said_so(folder, start):
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    start()
    assert not folder.exists()


def test_a_digest_follows_all_that_a_program_follows(monkeypatch):
    device = jax.devices()[0]

    def named(*values):
        return digests.program_digest(values, device)

    first = named(1, "a", np.add)
    assert first == named(1, "a", np.add) != named(1, "b", np.add)
    with jax.default_matmul_precision("highest"):
        assert named(1, "a", np.add) != first
    assert named(no_trace) is None and named(lambda: 1) is None
    assert named(functools.partial(jax.nn.gelu, approximate=True)) is not None
    read = pathlib.Path.read_bytes

    def changed(path):
        return read(path) + (b"#" if path.name == "decoder.py" else b"")

    environment = digests._environment.__wrapped__
    before = environment(device)
    assert environment(device) == before
    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "read_bytes", changed)
        assert environment(device) != before
    monkeypatch.setenv("XLA_FLAGS", "--xla_of_another_start=1")
    assert environment(device) != before


@pytest.mark.slow
def test_processes_give_a_kind_the_same_digest(path):
    found = set()
    for seed in "1", "2":
        env = os.environ | {
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT}/models",
        }
        done = subprocess.run(
            [sys.executable, "-c", _KIND, str(path)], env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.strip())
    assert len(found) == 1 and found != {"None"}
