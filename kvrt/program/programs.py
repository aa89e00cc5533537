"""Compiled programs of one model and one cache, made on first use, counted and timed.

Compiling ahead of the call keeps compile time apart from run time, and makes a silent recompile
impossible: a compiled program refuses other shapes.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx

from kvrt.arrays import AnyArray
from kvrt.attention.contract import Decoder
from kvrt.errors import BadConfig
from kvrt.program.disk_hits import CompileProgress, DiskHits
from kvrt.program.labels.arrays import check_weights
from kvrt.program.mesh import Placement
from kvrt.program.step import NanScores, StepSpec
from kvrt.program.weights import param_shardings
from kvrt.select_spec import DoubleSparsity


@dataclasses.dataclass(frozen=True)
class Program:
    """What a program computes, before it is compiled.

    Attributes:
      key: its kind and what its shapes follow from.
      run: the function; its first arguments are `args`.
      donate: arguments that it may overwrite, by number.
      args: arguments; where nothing is computed yet, shapes in their place will do.
    """

    key: tuple
    run: Callable
    donate: tuple[int, ...]
    args: tuple[Any, ...]


class Programs:
    """Compiled programs by kind and bucket, and the parameters that they are called with.

    `n_compiles` of them were compiled so far, of which `n_from_disk` came from JAX's persistent
    compilation cache; callers waited `compile_s` for them. `nan_scores` are those of a policy that
    they evicted by.
    """

    def __init__(self, model: Decoder, spec: StepSpec, place: Placement | None = None):
        """Splits the model into its graph and its parameters; compiles nothing yet."""
        self.spec, self._place = spec, place
        self._graph, params = nnx.split(model)
        self._tree = jax.tree.structure(params)
        # A flat tuple: flattening nnx's nested state anew would cost every step a millisecond.
        self._shardings = param_shardings(model, params, place.shards.mesh) if place else ()
        self.params = self._placed(params)
        self._compiled: dict[tuple, jax.stages.Compiled] = {}
        self._pending: dict[tuple, Future[tuple[jax.stages.Compiled, int]]] = {}
        self.compile_s, self.n_from_disk = 0.0, 0
        self._digest, self.nan_scores = "", NanScores()
        self._check_weights()

    @property
    def n_compiles(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def compiled(self) -> dict[tuple, jax.stages.Compiled]:
        """The programs by kind and shape, for whoever inspects memory or cost."""
        return dict(self._compiled)

    def temp_bytes(self, kind: str) -> int:
        """The most memory that a compiled program of this kind takes beside its arguments."""
        found = [p.memory_analysis() for key, p in self._compiled.items() if key[0] == kind]
        return max((a.temp_size_in_bytes for a in found if a is not None), default=0)

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
        self,
        now: Sequence[Program],
        later: Sequence[Program],
        progress: CompileProgress | None = None,
    ) -> None:
        """Compiles programs, those for `later` in the background; what calls one waits for it.

        Tracing holds the interpreter and compiling does not, so each is traced while those before
        it are compiled. They follow one another: side by side the first would be late.

        Args:
          now: programs that are there on return.
          later: programs that may come after it.
          progress: called at the beginning and after each of `now`, in this thread; counts those
            for `later` as well.
        """
        start = time.perf_counter()
        new = [x for x in (*now, *later) if x.key not in {*self._compiled, *self._pending}]
        n_all = len({*self._compiled, *self._pending, *(x.key for x in new)})
        if progress:
            progress(len(self._compiled), n_all, self.n_from_disk)
        worker = ThreadPoolExecutor(1)
        for x in new:
            self._pending[x.key] = worker.submit(_compiled, self._lowered(x))
        worker.shutdown(wait=False)
        self._await([x.key for x in now if x.key not in self._compiled], n_all, progress)
        self.compile_s += time.perf_counter() - start

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
        compiled = self._compiled.get(program.key) or self._program(program)
        return compiled(*program.args)

    def model(self, params: tuple) -> Any:
        """The model of some parameters, for functions that are traced."""
        return nnx.merge(self._graph, jax.tree.unflatten(self._tree, params))

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

    def _program(self, program: Program) -> jax.stages.Compiled:
        if program.key not in self._compiled:
            self.compile_all([program], [])
        return self._compiled[program.key]

    def _await(self, keys: Sequence[tuple], n_all: int, progress: CompileProgress | None) -> None:
        """Takes programs on their way, one after the other."""
        for key in keys:
            self._take(key)
            if progress:
                progress(len(self._compiled), n_all, self.n_from_disk)

    def _take(self, key: tuple) -> None:
        """Waits for a program on its way."""
        program, n_from_disk = self._pending[key].result()
        self._compiled[key] = program
        self.n_from_disk += n_from_disk
        del self._pending[key]

    def _lowered(self, program: Program) -> jax.stages.Lowered:
        run, donate, place = program.run, program.donate, self._place
        jitted = place.jit(run, donate, program.args) if place else None
        return (jitted or jax.jit(run, donate_argnums=donate)).lower(*program.args)


def _compiled(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, int]:
    """A program, and 1 if it came from the disk."""
    with DiskHits() as hits:
        return lowered.compile(), hits.n
