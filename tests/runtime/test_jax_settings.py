"""JAX's settings of the process change no token: a short text with a context shift under each."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from kvrt import CacheConfig, ContextShift, Engine, Request, Runtime, Sampling
from kvrt.exclusive import Exclusive, one_call_at_a_time
from kvrt.jax_settings import own_settings
from tests.toys import ToyLm

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(temp=0.9, seed=3)
# Those that kvrt sets for its calls, and what else says how numbers are made or checked.
OWN = {
    "jax_enable_x64": True,
    "jax_disable_jit": True,
    "jax_threefry_partitionable": False,
    "jax_default_matmul_precision": "BF16_BF16_F32",
    "jax_transfer_guard_host_to_device": "disallow_explicit",
    "jax_transfer_guard_device_to_device": "disallow",
    "jax_transfer_guard_device_to_host": "disallow",
}
RANDOM = {
    "jax_default_prng_impl": "rbg",
    "jax_random_seed_offset": 7,
    "jax_high_dynamic_range_gumbel": True,
}
OTHERS = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_legacy_prng_key": "error",
    "jax_enable_checks": True,
    "jax_check_tracer_leaks": True,
    "jax_explicit_x64_dtypes": "error",
    "jax_threefry_gpu_kernel_lowering": True,
}


@pytest.fixture
def setting(request):
    name, value = request.param
    if name not in jax.config.values:
        pytest.skip(f"this JAX has no {name}")
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    yield
    jax.config.update(name, before)


def each(settings):
    return pytest.mark.parametrize("setting", settings.items(), indirect=True, ids=list(settings))


@one_call_at_a_time(free=())
class Asked:
    """What a setting is where a Runtime or an Engine is made, called and asked."""

    def __init__(self, name):
        self._exclusive, self._name = Exclusive("Asked"), name
        self.at_first = getattr(jax.config, name)

    def by_call(self):
        return getattr(jax.config, self._name)

    @property
    def by_property(self):
        return getattr(jax.config, self._name)


@pytest.mark.parametrize("setting", OWN.items(), indirect=True, ids=list(OWN))
def test_calls_run_under_kvrts_settings_and_leave_the_process_its_own(request, setting):
    name, value = request.node.callspec.params["setting"]
    object_ = Asked(name)
    inside = {object_.at_first, object_.by_call(), object_.by_property}
    with own_settings():
        inside.add(getattr(jax.config, name))
    assert len(inside) == 1 and value not in inside
    assert getattr(jax.config, name) == value


@pytest.fixture(scope="module")
def model():
    return ToyLm()


@pytest.fixture(scope="module")
def wanted(model):
    return texts(model)


def texts(model):
    """Of a Runtime and of an Engine, behind a context shift."""
    config = CacheConfig(n_ctx=32, n_seq_max=2, block_size=16, n_ubatch=8)
    runtime = Runtime(model, config, policy=ContextShift(n_keep=2))
    runtime.append(list(range(1, 20)))
    alone = [t.id for t in runtime.generate(30, sampling=SAMPLING)]
    assert runtime.stats().n_shift
    engine = Engine(model, config)
    request = Request(id="a", tokens=tuple(range(1, 9)), n_predict=12, sampling=SAMPLING)
    return alone, [x for out in engine.generate(request) for x in out.tokens]


@pytest.mark.slow
@each(OWN | RANDOM | OTHERS)
def test_a_text_is_the_same_under_each_setting(model, wanted, setting):
    assert texts(model) == wanted


@pytest.mark.slow
def test_a_command_writes_the_same_text_under_several_settings_at_once(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/peer"))
    import tiny_gguf

    path = tiny_gguf.write_gguf(tmp_path / "tiny.gguf", tiny_gguf.TinyModel(n_layers=1))
    flags = "-p the -c 64 -n 80 --temp 0.9 --seed 3 --ignore_eos --context_shift --quiet"
    command = [sys.executable, "-m", "kvrt", "run", "-m", str(path), *flags.split()]
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    kept |= {"KVRT_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    own = {k.upper(): str(v) for k, v in (OWN | RANDOM | {"jax_no_tracing": True}).items()}
    outputs = [
        subprocess.run(command, capture_output=True, cwd=ROOT, env=kept | more, check=False)
        for more in ({}, own)
    ]
    a, b = outputs
    assert (a.returncode, b.returncode) == (0, 0), b.stderr.decode()
    assert a.stdout == b.stdout and a.stdout
