"""Compiled programs: made on first use, counted and timed, one of each for the whole process.

A program is a module-level function, what it is traced for, and the shapes of its arguments; these
three are its key, so that a second `Runtime` of the same kind compiles nothing. Compiling ahead of
the call keeps compile time apart from run time, and makes a silent recompile impossible: a compiled
program refuses other shapes.
"""

import dataclasses
import functools
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from flax import nnx

from kvrt.arrays import AnyArray
from kvrt.attention import registry
from kvrt.attention.contract import Decoder, KindedDecoder, LayeredDecoder
from kvrt.errors import BadConfig
from kvrt.jax_settings import compiler_options, own_settings
from kvrt.options.select import DoubleSparsity
from kvrt.program.disk_hits import CompileProgress, DiskHits
from kvrt.program.labels.arrays import check_weights
from kvrt.program.mesh import Placement
from kvrt.program.serialized import program_file
from kvrt.program.serialized.digests import program_digest, values_digest
from kvrt.program.serialized.program_file import ProgramFile
from kvrt.program.step import NanScores, StepSpec
from kvrt.program.weights import param_path, param_shardings

# In the place of parameters that a program does not use.
_NOT_GIVEN = np.zeros(0, np.int8)
# Programs that a process keeps beside those of its Runtimes and Engines, the newest used.
_MOST = 256
_lock = threading.Lock()
_made: OrderedDict[Hashable, "_Made"] = OrderedDict()
_kinds: weakref.WeakValueDictionary[Hashable, "ModelKind"] = weakref.WeakValueDictionary()


class ModelKind:
    """A model without its weights, and the cache that it runs on.

    Equal ones are the same object (`model_kind`): a step compares them by identity. `spec` has
    defaults where a field changes no program; `layers` are of a model that tells its layers apart.
    """

    def __init__(self, graph: Any, params: Any, spec: StepSpec, layers: "LayerParams | None"):
        """Takes the graph of a model, and its parameters or their shapes."""
        leaves, self._tree = jax.tree.flatten(params)
        self._graph, self.spec, self.layers = graph, spec, layers
        made = registry.IMPLEMENTATIONS[spec.config.attention]
        # They tell kinds apart, `_tree` beside them.
        self._values = graph, tuple((x.shape, x.dtype) for x in leaves), spec, made, layers
        # Of a model that tells of other layers than its groups have, whole steps alone run.
        self.has_runs = layers is not None and len(layers.kinds) == spec.layout.n_layers

    @property
    def key(self) -> Hashable:
        """What tells kinds apart, but for where their arrays lie."""
        return self._tree, *self._values

    @functools.cached_property
    def digest(self) -> str | None:
        """See `values_digest`."""
        return values_digest((str(self._tree), *self._values))

    def model(self, params: tuple) -> Any:
        """The model of some parameters, for functions that are traced."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, params))

    def in_parts(self, params: tuple) -> LayeredDecoder:
        """As `model`, of one that can be run in parts.

        Raises:
          BadConfig: it cannot.
        """
        model = self.model(params)
        if not isinstance(model, LayeredDecoder):
            raise BadConfig(
                f"{type(model).__name__} cannot be run in parts; give it embed, layers and head, "
                "see kvrt.LayeredDecoder"
            )
        return model

    def outer(self, params: tuple) -> KindedDecoder:
        """A model that can embed tokens and give logits: of its parameters outside of layers."""
        assert self.layers is not None
        return self._of_some(params, self.layers.rest)

    def inner(self, params: tuple, layers: range) -> KindedDecoder:
        """A model that can run some layers, whose parameters are given."""
        assert self.layers is not None
        return self._of_some(params, self.layers.of(layers))

    def _of_some(self, params: tuple, which: Sequence[int]) -> Any:
        found: list[Any] = [_NOT_GIVEN] * self._tree.num_leaves
        for i, x in zip(which, params, strict=True):
            found[i] = x
        return self.model(tuple(found))


# Calls what it is given with programs, and gets the shapes of their results.
Wanted = Callable[[Callable[["Program"], Any]], Any]


@dataclasses.dataclass(frozen=True)
class LayerParams:
    """Which of a model's parameters, by number, are of which layer.

    Attributes:
      kinds: by layer, what its program follows from beside the arrays that it keeps.
      by_layer: by layer, its parameters.
      rest: parameters of no layer.
    """

    kinds: tuple[Hashable, ...]
    by_layer: tuple[tuple[int, ...], ...]
    rest: tuple[int, ...]

    def of(self, layers: range) -> list[int]:
        """Parameters of some layers, in their order."""
        return [i for layer in layers for i in self.by_layer[layer]]


class TracedParams:
    """The parameters of a step that is traced, by layer; stands in the place of `Programs`."""

    def __init__(self, kind: ModelKind, params: tuple):
        """Takes all parameters of a model that tells its layers apart."""
        self.kind, self.spec, self._params = kind, kind.spec, params

    @property
    def rest(self) -> tuple:
        """Parameters of no layer."""
        return self.params_of(0, 0)

    def params_of(self, first: int, last: int) -> tuple:
        """Parameters of layers [first, last), or those of no layer where there are none."""
        layers = self.kind.layers
        assert layers is not None, "the model does not tell its layers apart"
        which = layers.of(range(first, last)) if last else layers.rest
        return tuple(self._params[i] for i in which)


def reason_for_whole(model: Any) -> str | None:
    """Why a model's step is one program; None where its layers can be told apart."""
    if not isinstance(model, KindedDecoder):
        name = type(model).__name__
        return f"{name} does not tell its layers apart by kind: see kvrt.KindedDecoder"
    # What a subclass computes otherwise, the kinds of its base know nothing of.
    order = [vars(x) for x in type(model).__mro__]
    said = next((i for i, has in enumerate(order) if "layer_kinds" in has), len(order))
    for name in ("__call__", "embed", "layers", "head"):
        if any(name in has for has in order[:said]):
            return f"{type(model).__name__} has {name} of its own, and no layer_kinds"
    return None


def layer_params(model: Any, params: Any) -> LayerParams:
    """Parameters by layer, as a model says."""
    said, leaves = model.layer_kinds(), jax.tree.leaves_with_path(params)
    by_path = {path: i for i, (_, path) in enumerate(said)}
    depths = sorted({len(path) for path in by_path})
    mine: list[list[int]] = [[] for _ in said]
    shapes: list[list[Hashable]] = [[] for _ in said]
    rest = []
    for n, (keys, x) in enumerate(leaves):
        path = param_path(keys)
        layer = next((by_path[path[:d]] for d in depths if path[:d] in by_path), None)
        if layer is None:
            rest.append(n)
            continue
        mine[layer].append(n)
        behind = jax.tree_util.keystr(keys[len(said[layer][1]) :])
        shapes[layer].append((behind, x.shape, x.dtype))
    kinds = (((kind, tuple(of))) for (kind, _), of in zip(said, shapes, strict=True))
    return LayerParams(tuple(kinds), tuple(map(tuple, mine)), tuple(rest))


def model_kind(
    graph: Any, params: Any, spec: StepSpec, where: Hashable, layers: LayerParams | None
) -> ModelKind:
    """The kind of a model and a cache, `where` its arrays lie."""
    config = dataclasses.replace(
        spec.config,
        programs="whole",
        defrag_threshold=0.0,
        n_checkpoints=0,
        checkpoint_interval=None,
        checkpoint_bytes=None,
    )
    kind = ModelKind(graph, params, dataclasses.replace(spec, config=config), layers)
    try:
        with _lock:
            return _kinds.setdefault((where, kind.key), kind)
    except TypeError:
        # A model with fields that cannot be compared shares its programs with no other.
        return kind


def forget_programs() -> None:
    """Forgets programs, but for those that a Runtime or an Engine has."""
    with _lock:
        _made.clear()


class _Made(NamedTuple):
    """A program that is there or on its way, with 1 if it came from the disk; and its results."""

    compiled: Future[tuple[jax.stages.Compiled, int]]
    outputs: Any


class ProgramKey(NamedTuple):
    """What tells programs apart; `name` is that of their function."""

    name: str
    run: Callable
    static: tuple[Hashable, ...]
    donate: tuple[int, ...]
    tree: Any
    shapes: tuple[tuple, ...]


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program computes, before it is compiled.

    Attributes:
      run: a module-level function, called with `static` and then with `args`.
      static: what it is traced for; most have a `ModelKind` first.
      args: arguments; where nothing is computed yet, shapes in their place will do.
      donate: arguments that it may overwrite, by number.
      n_known: the first arguments, whose shapes follow from `static`.
    """

    run: Callable
    static: tuple[Hashable, ...]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    n_known: int = 0

    @property
    def key(self) -> ProgramKey:
        """What tells it apart from others."""
        leaves, tree = jax.tree.flatten(self.args[self.n_known :])
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        return ProgramKey(self.run.__name__, self.run, self.static, self.donate, tree, shapes)


class Programs:
    """Compiled programs of one model and one cache, and the parameters that they are called with.

    `n_compiles` of them are there so far, of which `n_from_disk` came from JAX's persistent
    compilation cache and `n_shared` from others of this process; callers waited `compile_s` for
    them. `nan_scores` are those of a policy that they evicted by. `kind` is for functions that are
    traced.
    """

    def __init__(self, model: Decoder, spec: StepSpec, place: Placement | None = None):
        """Splits the model into its graph and its parameters; compiles nothing yet."""
        self.spec, self._place = spec, place
        graph, params = nnx.split(model)
        self._tree = jax.tree.structure(params)
        # A flat tuple: flattening nnx's nested state anew would cost every step a millisecond.
        self._shardings = param_shardings(model, params, place.shards.mesh) if place else ()
        self.params = self._placed(params)
        self._some: dict[tuple[int, int], tuple] = {}
        self._where = self._shardings or _device(self.params)
        layers = None if reason_for_whole(model) else layer_params(model, params)
        self.kind = model_kind(graph, params, spec, self._where, layers)
        self._compiled: dict[ProgramKey, jax.stages.Compiled] = {}
        # Those on their way, and whether they are compiled for these programs.
        self._pending: dict[ProgramKey, tuple[_Made, bool]] = {}
        # Shapes of results, by program.
        self._outputs: dict[ProgramKey, Any] = {}
        self.compile_s, self.n_from_disk, self.n_shared = 0.0, 0, 0
        self._digest, self.nan_scores = "", NanScores()
        self._check_weights()

    @property
    def n_compiles(self) -> int:
        """Programs that are there so far."""
        return len(self._compiled)

    def compiled(self) -> dict[ProgramKey, jax.stages.Compiled]:
        """The programs by key, to look at their memory or cost."""
        return dict(self._compiled)

    def temp_bytes(self, name: str | None = None) -> int:
        """The most memory that one of the compiled programs takes beside its arguments.

        Args:
          name: counts programs of this name only; None counts all.
        """
        counted = [p for key, p in self._compiled.items() if name in (None, key.name)]
        analyses = [p.memory_analysis() for p in counted]
        return max((a.temp_size_in_bytes for a in analyses if a is not None), default=0)

    def bind(self, model: Decoder) -> None:
        """Takes the parameters of a model of the same structure; compiled programs stay.

        Raises:
          BadConfig: it is another model.
        """
        params = nnx.split(model)[1]
        leaves, tree = jax.tree.flatten(params)
        shapes = [(x.shape, x.dtype) for x in leaves]
        if tree != self._tree or shapes != [(x.shape, x.dtype) for x in self.params]:
            raise BadConfig("the model to bind has other parameters; make a new Runtime for it")
        self.params, self._digest = self._placed(params), ""
        self._some.clear()
        self._check_weights()

    @property
    def weights_digest(self) -> str:
        """xxh3-128 of all parameters, hexadecimal: their order, shapes, types and bytes.

        Raises:
          BadConfig: there are only shapes so far.
        """
        if not self._digest:
            hashed = xxhash.xxh3_128()
            for x in self.params:
                if not isinstance(x, AnyArray):
                    raise BadConfig("the model has only shapes yet; bind its weights first")
                hashed.update(f"{x.dtype}{x.shape}".encode())
                # sync: once a model, and no copy where the host is the device.
                flat = np.ascontiguousarray(self._fetched(x)).reshape(-1)
                hashed.update(flat.view(np.uint8).data)
            self._digest = hashed.hexdigest()
        return self._digest

    def compile_all(
        self, now: Wanted, later: Wanted | None = None, progress: CompileProgress | None = None
    ) -> list[jax.stages.Compiled]:
        """Compiles programs, those for `later` in the background; what calls one waits for it.

        Tracing holds the interpreter and compiling does not, so each is traced while those before
        it are compiled. They follow one another: side by side the first would be late.

        Args:
          now: names programs that are there on return. It calls what it is given with each, which
            returns the shapes of its results.
          later: names programs that may come after it.
          progress: called at the beginning and after each of `now`, in this thread; counts those
            for `later` as well.

        Returns:
          The programs of `now`, in the order in which they were named.
        """
        start, worker, wanted = time.perf_counter(), ThreadPoolExecutor(1), list[ProgramKey]()

        def begin(program: Program) -> Any:
            key = program.key
            wanted.append(key)
            if key not in self._compiled and key not in self._pending:
                self._pending[key] = made, _ = self._on_its_way(key, program, worker)
                self._outputs[key] = made.outputs
            return self._outputs[key]

        now(begin)
        named = list(wanted)
        if later:
            later(begin)
        worker.shutdown(wait=False)
        n_all = len(self._compiled) + len(self._pending)
        if progress:
            progress(len(self._compiled), n_all, self.n_from_disk)
        awaited = [x for x in dict.fromkeys(named) if x not in self._compiled]
        self._await(awaited, n_all, progress)
        self.compile_s += time.perf_counter() - start
        return [self._compiled[x] for x in named]

    @property
    def n_pending(self) -> int:
        """Programs that are being compiled in the background."""
        return len(self._pending)

    def wait(self, progress: CompileProgress | None = None) -> None:
        """Waits for programs that are compiled in the background; `progress` as `compile_all`."""
        start, n_all = time.perf_counter(), len(self._compiled) + len(self._pending)
        if progress:
            progress(len(self._compiled), n_all, self.n_from_disk)
        self._await([*self._pending], n_all, progress)
        self.compile_s += time.perf_counter() - start

    def run(self, program: Program) -> Any:
        """Results of a program, which is compiled when it is first run."""
        if self._place:
            program = dataclasses.replace(program, args=self._place.inputs(program.args))
        key = program.key
        compiled = self._compiled.get(key)
        if compiled is None:
            (compiled,) = self.compile_all(lambda begin: begin(program))
        return compiled(*program.args)

    @property
    def rest(self) -> tuple:
        """Parameters of no layer."""
        return self.params_of(0, 0)

    def params_of(self, first: int, last: int) -> tuple:
        """Parameters of layers [first, last), or those of no layer where there are none."""
        found = self._some.get((first, last))
        if found is None:
            traced = TracedParams(self.kind, self.params)
            found = self._some[first, last] = traced.params_of(first, last)
        return found

    def _check_weights(self) -> None:
        """Refuses heavy channels of other weights, as soon as there are weights."""
        select = self.spec.config.select
        if isinstance(select, DoubleSparsity) and select.weights:
            if all(isinstance(x, AnyArray) for x in self.params):
                check_weights(select, self.weights_digest)

    def _placed(self, params: Any) -> tuple[Any, ...]:
        if self._place is None:
            return tuple(jax.tree.leaves(params))
        return self._place.weights(params, self._shardings)

    def _fetched(self, x: AnyArray) -> np.ndarray:
        return self._place.fetch(x) if self._place else np.asarray(x)

    def _await(
        self, keys: Sequence[ProgramKey], n_all: int, progress: CompileProgress | None
    ) -> None:
        """Takes programs on their way, one after the other."""
        for key in keys:
            self._take(key)
            if progress:
                progress(len(self._compiled), n_all, self.n_from_disk)

    def _take(self, key: ProgramKey) -> None:
        """Waits for a program on its way."""
        made, is_own = self._pending.pop(key)
        self._compiled[key], n_from_disk = made.compiled.result()
        self.n_from_disk += n_from_disk * is_own
        self.n_shared += not is_own

    def _on_its_way(
        self, key: ProgramKey, program: Program, worker: ThreadPoolExecutor
    ) -> tuple[_Made, bool]:
        """A program that somebody has, or compiles; and whether it is `worker` for this call."""
        whole = key, self._where
        with _lock:
            found = _made.get(whole)
            if found is not None:
                _made.move_to_end(whole)
                return found, False
        file = self._file(key)
        traced = None if file and file.is_there else self._traced(program)
        with _lock:
            # Another thread may have traced it meanwhile.
            made = _Made(Future(), traced.out_info if traced else file and file.outputs)
            found = _made.setdefault(whole, made)
            while len(_made) > _MOST:
                _made.popitem(last=False)
        if found is made:
            lowered = traced and traced.lower()
            worker.submit(
                _compile, lambda: lowered or self._traced(program).lower(), file, made, whole
            )
        return found, found is made

    def _file(self, key: ProgramKey) -> ProgramFile | None:
        """The file of a program, where programs are kept and it has a digest."""
        if program_file.jax_folder is None:
            return None
        folder = program_file.folder_of_programs()
        kinds = [x for x in key.static if isinstance(x, ModelKind)]
        if folder is None or self._place or any(x.digest is None for x in kinds):
            return None
        where: Any = self._where
        (device,) = where
        if device.platform != "cpu":
            return None  # no test has run programs of files there
        static = tuple(x.digest if isinstance(x, ModelKind) else x for x in key.static)
        args = jax.tree.unflatten(key.tree, key.shapes)
        name = program_digest((key.run, static, key.donate, args), device)
        return ProgramFile(folder / name, device) if name else None

    def _traced(self, program: Program) -> jax.stages.Traced:
        run, place = functools.partial(program.run, *program.static), self._place
        if place:
            return place.jit(run, program.donate, program.args).trace(*program.args)
        return jax.jit(run, donate_argnums=program.donate).trace(*program.args)


def _compile(
    lower: Callable[[], jax.stages.Lowered],
    file: ProgramFile | None,
    made: _Made,
    whole: Hashable,
) -> None:
    """Loads or compiles a program, and notes whether it came from the disk."""
    try:
        compiled, n = file and file.load(), 1
        if compiled is None:
            # Where a file is of no use, this thread traces, and it has the process's settings.
            with own_settings():
                lowered = lower()
            with DiskHits() as hits:
                compiled, n = lowered.compile(compiler_options()), hits.n
        made.compiled.set_result((compiled, n))
    except BaseException as error:
        # Who waits for the program gets the error, and who wants it later tries again.
        with _lock:
            _made.pop(whole, None)
        made.compiled.set_exception(error)
        return
    # XLA cannot serialize what it has loaded: the copy lacks functions, and fails when it is run.
    if file and not n:
        file.save(compiled, made.outputs)


def _device(params: tuple) -> Hashable:
    """The device of parameters, or where JAX would put them."""
    for x in params:
        if isinstance(x, jax.Array):
            return frozenset(x.devices())
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    return frozenset([default or jax.local_devices()[0]])
