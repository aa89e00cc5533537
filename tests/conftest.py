"""Strict settings for every test: checked annotations, strict promotion, no network by default."""

import contextlib
import ctypes
import functools
import gc
import os
import sys
from collections import Counter, OrderedDict

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.extend.core import get_opaque_trace_state

from tests import typechecker, xla_defects

# XLA's older code generator for the CPU: the same numbers, compiled in half the time. From JAX 0.11
# on there is only the newer one, and a flag that XLA does not know ends the process.
_OLDER = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
# Two workers keep both cores busy: code in one piece is compiled with a fifth less work.
_FLAGS = {**_OLDER, "xla_cpu_parallel_codegen_split_count": 1}
_NAMED = [f"--{name}={str(value).lower()}" for name, value in _FLAGS.items()]

# Workers and commands in processes of their own import the tree two hundred times: it is compiled
# once, whatever the environment says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


def pytest_addoption(parser):
    parser.addoption(
        "--as-shipped",
        action="store_true",
        help="compile every test's programs as users have them: optimised, by the code generator "
        "that JAX takes; several times slower",
    )
    parser.addoption(
        "--programs",
        metavar="FOLDER",
        help="keep compiled programs there (write --programs=FOLDER): what one process compiles no "
        "other has to, in this run or the next",
    )
    parser.addoption(
        "--full",
        action="store_true",
        help="whole grids and budgets, for which CI has no time: `budget`, and the marker `full`",
    )


# Before the conftest.py of a folder imports the package: it is read ahead of `pytest_configure`.
jaxtyping.jaxtyped = typechecker.checked
_hook = jaxtyping.install_import_hook("kvrt", None)


def pytest_configure(config):
    config.add_cleanup(_hook.uninstall)
    from tests.exact import compute_exactly  # late: the hook has to see its imports

    compute_exactly()
    # XLA reads them when the first program is compiled.
    if not config.getoption("--as-shipped"):
        os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_NAMED])


# The tests of the kernels are compiled where this names a GPU or TPU; all others want a CPU.
jax.config.update("jax_platforms", os.environ.get("KVRT_TEST_PLATFORM", "cpu"))
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples compile programs of their own: a first one takes seconds, whatever the machine.
hypothesis.settings.register_profile("kvrt", deadline=None)
# The same examples each time, and the first one that fails: for scripts.soak.mutants.
hypothesis.settings.register_profile(
    "first",
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("kvrt")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collecting makes millions of objects and no garbage, so that none is looked for.

    It takes half the time so, and later collections walk through fewer objects.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)  # traces make objects by the million, and few circles
        gc.enable()


# Files of few tests that take three seconds and more.
_LONG = {
    *("attend", "blend", "by_layer", "coming_back", "engine", "indexed_layers", "int8_agreement"),
    *("latent_layers", "layer_skip", "machine", "matrix_few", "one_token", "own_tokens", "pieces"),
    *("per_channel", "programs", "same_history", "scored", "select", "speculation", "together"),
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Workers begin with files of real models, then with long ones and those of many slow tests.

    So none ends with a long one.

    One process runs files in the order in which they are named.
    """
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    if not hasattr(config, "workerinput"):
        return
    n_tests = Counter(item.path for item in items)
    # A slow test takes as long as ten others and more.
    n_tests += Counter(item.path for item in items for _ in range(10) if _is_slow(item))
    real = {item.path for item in items if item.get_closest_marker("model")}

    def turn(item):
        name = item.path.stem.removeprefix("test_")
        return item.path not in real, name not in _LONG, -n_tests[item.path]

    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Slow tests check no annotation: a sixth faster, and the default suite has their code."""
    with typechecker.switched_off() if _is_slow(item) else contextlib.nullcontext():
        return (yield)


def _is_slow(item):
    return any(mark.name in ("slow", "model") for mark in item.iter_markers())


@pytest.fixture
def budget(request):
    """How much a test tries: of two numbers the first, with --full the second."""
    full = request.config.getoption("--full")
    return lambda few, many: many if full else few


_compile = jax.stages.Lowered.compile


def _compile_as_shipped(self, compiler_options=None, **rest):
    newer = dict.fromkeys(_OLDER, True)
    return _compile(self, {**newer, **(compiler_options or {})}, **rest)


# What users run is looked through for what their jaxlib is known to compute wrongly.
_searched = xla_defects.searched(_compile_as_shipped)


@pytest.fixture(scope="module", autouse=True)
def _quick_compiles(request):
    """Most tests compare numbers, and programs without optimisation give them in half the time.

    Tests of the model marker want speed, and a module with OPTIMISED looks at the programs: the
    runtime's, which are compiled ahead of their calls, are there what users get. OPTIMISED = False
    is for models too small to gain from it. `pytest --as-shipped` compiles all tests so.
    """
    if request.config.getoption("--as-shipped"):
        jax.config.update("jax_disable_most_optimizations", False)
        jax.stages.Lowered.compile = xla_defects.searched(_compile)
        return True
    marks = getattr(request.module, "pytestmark", [])
    marks = marks if isinstance(marks, list) else [marks]
    wanted = getattr(request.module, "OPTIMISED", any(m.name == "model" for m in marks))
    jax.config.update("jax_disable_most_optimizations", not wanted)
    jax.stages.Lowered.compile = _searched if wanted else _compile
    return wanted


_MADE = {True: OrderedDict(), False: OrderedDict()}
_Cached = type(functools.cache(len))
_MOST_BYTES = 5 << 30  # of a process, beyond which it forgets what it compiled: two fit in CI


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(request, _quick_compiles):
    """Programs that were optimised are others than those that were not.

    A module with ALONE looks at what is compiled when, and finds nothing that was before.
    """
    from kvrt.program import programs  # late: the hook has to see the import

    programs._made = _MADE[_quick_compiles]
    if getattr(request.module, "ALONE", False):
        programs.forget_programs()
    yield
    _forget_cached(request.module)
    if _rss_bytes() > _MOST_BYTES:
        _give_memory_back()
    if _rss_bytes() > _MOST_BYTES:
        for made in _MADE.values():
            made.clear()
        jax.clear_caches()
        _give_memory_back()


def _forget_cached(module):
    """Empties the caches of functions of a module: models, logits, texts that no other reads.

    With those of every module that ran, a process would stay beyond `_MOST_BYTES`, and forget its
    programs after each.
    """
    for x in vars(module).values():
        if isinstance(x, _Cached) and x.__module__ == module.__name__:
            x.cache_clear()


def _give_memory_back():
    """What nothing refers to; Linux's allocator keeps it until it is told to return it.

    Without, 2.9 GB of real models and their programs stay of 0.8 that are in use.
    """
    gc.collect()
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # of another libc
            ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="module")
def numpy_device():
    """Runtimes and engines of a module that uses it have devices in NumPy: nothing is compiled."""
    from tests.numpy_device.device import installed  # late: the hook has to see its imports

    with installed():
        yield


@pytest.fixture(scope="module")
def one_layer_a_program():
    """For real models with several KV dtypes or drafts, whose programs take longest."""
    from tests.one_layer import one_layer_a_program  # late: the hook has to see its imports

    with one_layer_a_program():
        yield


@pytest.fixture(scope="session", autouse=True)
def _zeros_of_numpy():
    """Zeros outside of programs come from NumPy: each shape of a cache is a program of 20 ms.

    Large ones, of caches that are only counted, take no memory as they are.
    """
    plain, outside = jax.numpy.zeros, get_opaque_trace_state()

    def zeros(shape, dtype=np.float32, **placed):
        is_large = np.prod(shape, dtype=float) >= 1 << 20
        if placed or is_large or get_opaque_trace_state() != outside:
            return plain(shape, dtype, **placed)
        return jax.device_put(np.zeros(shape, dtype), may_alias=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.numpy, "zeros", zeros)
        yield


_KEPT = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)


@pytest.fixture(scope="module", autouse=True)
def _kept_programs(request, _quick_compiles):
    """Programs of --programs, but for modules with ALONE, and commands in this process.

    Those keep programs in the cache folder of commands, see cli/conftest.py. JAX's key of a program
    does not say whether it was optimised, so both kinds have folders of their own.
    """
    before = {name: getattr(jax.config, name) for name in _KEPT}
    folder = request.config.getoption("--programs")
    alone = getattr(request.module, "ALONE", False) or "cli" in request.path.parts
    if folder and not alone:
        own = os.path.join(folder, "optimised" if _quick_compiles else "quick")
        for name, value in zip(_KEPT, (own, 0.2, 0), strict=True):
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    yield
    if any(getattr(jax.config, name) != value for name, value in before.items()):
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()


@pytest.fixture(scope="session", autouse=True)
def _handed_over():
    """JAX may read a host array after the call that got it returned: nobody changes one then.

    A program that got another array's next content gives wrong numbers, on busy machines and
    seldom. Here whoever changes one fails each time.
    """
    from kvrt.program.programs import Programs  # late: the hook has to see the import

    run = Programs.run

    def freezing(self, program):
        for x in jax.tree.leaves(program.args):
            while isinstance(x, np.ndarray):
                x.flags.writeable, x = False, x.base
        return run(self, program)

    Programs.run = freezing
    yield
    Programs.run = run


def _rss_bytes() -> int:
    """Memory of this process, 0 where the system does not say."""
    try:
        with open("/proc/self/statm") as pages:
            return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
