"""Runs the tests' state machines for longer than CI does, and counts what they did.

    python -m scripts.machines
    python -m scripts.machines --machines runtime-write,blocks --examples 20 --steps 30

In tests they have 2 to 60 examples (histories) of 15 to 30 steps, and most modules compile without
optimisations, on an older code generator where JAX still has it. Here each has --examples of at
most --steps, and programs are compiled as users have them. A failing history is printed in its
shortest form, with what repeats it, and ends the script with 1. One JSON line a machine: examples,
steps, seconds.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path += [
    str(_TESTS.parent),
    str(_TESTS),
    *sorted({str(p.parent) for p in _TESTS.glob("*/*.py")}),
]

import jax  # noqa: E402
import test_schedule_machine as scheduling  # noqa: E402  # pyright: ignore[reportMissingImports]
from absl import app, flags  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.stateful import invariant, run_state_machine_as_test  # noqa: E402

# Found beside the tests, at run time.
from machine import CacheMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from machine_blocks import BlockMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_engine_machine import Requests  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_paged_machine import PagedMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_tier_index import IndexMachine  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvrt import MaskSpec  # noqa: E402
from scripts._lib import measure  # noqa: E402

_WINDOW, _CHUNKS = (MaskSpec(kind=kind, size=3) for kind in ("window", "chunked"))


def _requests(kind: str, mode: str, fine: int | None = None) -> type:
    """Engines of one kind of layers; `fine` is their hash_block_size."""
    return type("Requests", (Requests,), {"kind": kind, "mode": mode, "fine": fine})


# By name: the machine, and what it is made with.
MACHINES: dict[str, tuple[type, tuple]] = {
    "runtime-write": (CacheMachine, ("write",)),
    "runtime-read": (CacheMachine, ("read",)),
    "runtime-blocks-of-one": (CacheMachine, ("write", (), 1)),
    "window-write": (CacheMachine, ("write", (_WINDOW,))),
    "window-read": (CacheMachine, ("read", (_WINDOW,))),
    "chunked-write": (CacheMachine, ("write", (_CHUNKS,))),
    "blocks": (BlockMachine, ("write",)),
    "blocks-read": (BlockMachine, ("read",)),
    "blocks-window": (BlockMachine, ("write", (_WINDOW,))),
    "engine-paged": (_requests("full", "paged"), ()),
    "engine-cell": (_requests("full", "cell"), ()),
    "engine-window": (_requests("window", "paged"), ()),
    "engine-recurrent": (_requests("recurrent", "paged"), ()),
    "engine-fine": (_requests("full", "paged", 2), ()),
    "engine-recurrent-fine": (_requests("recurrent", "paged", 2), ()),
    "paged": (PagedMachine, ()),
    "scheduler": (scheduling.SchedulerMachine, ()),
    "tier-index": (IndexMachine, ()),
}

_NAMES = flags.DEFINE_list("machines", list(MACHINES), f"Of {', '.join(MACHINES)}.")
_N_EXAMPLES = flags.DEFINE_integer("examples", 200, "Histories of each machine.", lower_bound=1)
_N_STEPS = flags.DEFINE_integer("steps", 50, "Steps of a history, at most.", lower_bound=1)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    strange = sorted(set(_NAMES.value) - set(MACHINES))
    if strange:
        raise app.UsageError(f"--machines={','.join(strange)}; of {', '.join(MACHINES)}")
    jax.config.update("jax_platforms", "cpu")
    # As in the tests.
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    for name in _NAMES.value:
        start = time.perf_counter()
        counts = run(name)
        seconds = round(time.perf_counter() - start, 1)
        measure.emit("machine", machine=name, **counts, seconds=seconds)


def run(name: str) -> Counter[str]:
    """Runs one machine; what it did, by kind.

    Raises:
      Exception: whatever a history found wrong.
    """
    kind, args = MACHINES[name]
    counts: Counter[str] = Counter()
    run_state_machine_as_test(
        counted(kind, args, counts),  # pyright: ignore[reportArgumentType]
        settings=settings(
            max_examples=_N_EXAMPLES.value,
            stateful_step_count=_N_STEPS.value,
            deadline=None,
            suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
        ),
    )
    return counts


def counted(kind: Any, args: tuple, counts: Counter[str]) -> Any:
    """Makes machines that count their examples and steps."""

    def start(self: Any) -> None:
        kind.__init__(self, *args)
        counts["examples"] += 1

    def step(self: Any) -> None:
        counts["steps"] += 1

    return type(kind.__name__, (kind,), {"__init__": start, "counted": invariant()(step)})


if __name__ == "__main__":
    app.run(main)
