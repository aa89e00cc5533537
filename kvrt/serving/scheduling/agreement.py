"""Processes of one mesh plan the same: what each decided is compared before it is computed.

Programs of a mesh wait for each other, so that processes which run different ones hang, or compute
something else without a word.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
import xxhash

from kvrt.errors import BadConfig, KvrtError
from kvrt.options.engine import EngineConfig
from kvrt.serving.request import SeqState


class Agreement:
    """A digest of all requests and plans so far, compared among processes once a step.

    It is a chain: processes that differed once differ ever after, so each later step fails as well.
    """

    def __init__(self, options: EngineConfig) -> None:
        """Begins with what decides besides requests.

        Raises:
          BadConfig: a decision would depend on a process's own clock or files.
        """
        for name, why in (
            ("tiers", "what has arrived from a tier depends on each process's clock and disk"),
            ("sessions", "which sessions there are depends on each process's files"),
        ):
            if getattr(options, name) is not None:
                raise BadConfig(
                    f"{name} in an engine of {jax.process_count()} processes: {why}, and they have "
                    f"to plan alike; leave out {name}, or serve from one process"
                )
        self._n_steps = 0
        self._hashed = xxhash.xxh3_64(repr((options.mode, options.rules)).encode())

    def add(self, states: Iterable[SeqState]) -> None:
        """Adds samples that were added, in their order."""
        for state in states:
            asked = state.request
            said = (asked.id, state.sample, asked.n_predict, asked.sampling)
            self._hashed.update(repr(said).encode())
            self._update(np.asarray(state.tokens, np.int32))

    def check(self, arrays: Any) -> None:
        """Compares what all processes are about to run; collective.

        Args:
          arrays: of the step, a pytree on the host; None where it computes nothing.

        Raises:
          KvrtError: the processes differ; it is raised in all of them, and nothing is computed.
        """
        for array in jax.tree.leaves(arrays):
            self._update(np.asarray(array))
        self._n_steps += 1
        own = self._hashed.intdigest()
        found = _gather((own >> 32, own & 0xFFFFFFFF))
        other = next((i for i, x in enumerate(found) if x != found[0]), None)
        if other is not None:
            raise KvrtError(
                f"process {other} plans step {self._n_steps} otherwise than process 0; give all "
                "processes the same requests in the same order, and make the engines anew"
            )

    def _update(self, array: np.ndarray) -> None:
        self._hashed.update(repr((array.shape, array.dtype.str)).encode())
        self._hashed.update(np.ascontiguousarray(array).tobytes())


def agreement_for(options: EngineConfig, *, on_mesh: bool) -> Agreement | None:
    """How the processes of a mesh agree; None where one plans by itself; raises BadConfig."""
    return Agreement(options) if on_mesh and jax.process_count() > 1 else None


def _gather(words: Sequence[int]) -> list[tuple[int, ...]]:
    """The words of every process, by its number."""
    # Imported where it is needed: a single process has no use for it.
    from jax.experimental import multihost_utils

    # sync: a process that differs must not run its program
    found = multihost_utils.process_allgather(np.asarray(words, np.uint32))
    return [tuple(row) for row in np.asarray(found).reshape(-1, len(words)).tolist()]
