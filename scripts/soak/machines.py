"""The tests' state machines by name, each with programs as users have them."""

import dataclasses
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path += [str(_TESTS), *sorted({str(p.parent) for p in _TESTS.glob("*/*.py")})]

import hypothesis  # noqa: E402
import test_schedule_machine as scheduling  # noqa: E402  # pyright: ignore[reportMissingImports]
from hypothesis import HealthCheck, settings  # noqa: E402
from hypothesis.stateful import invariant, run_state_machine_as_test  # noqa: E402

# Found beside the tests, at run time.
from machine import CacheMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from machine_blocks import BlockMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_engine_machine import Requests  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_paged_machine import PagedMachine  # noqa: E402  # pyright: ignore[reportMissingImports]
from test_tier_index import IndexMachine  # noqa: E402  # pyright: ignore[reportMissingImports]

from kvrt import MaskSpec  # noqa: E402

_WINDOW, _CHUNKS = (MaskSpec(kind=kind, size=3) for kind in ("window", "chunked"))


@dataclasses.dataclass(frozen=True)
class Machine:
    """A state machine, and what it is made with.

    Attributes:
      kind: its class.
      args: of its class.
      on_device: whether its steps run programs; the others are bookkeeping on the host.
    """

    kind: type
    args: tuple = ()
    on_device: bool = True


def _requests(kind: str, mode: str, fine: int | None = None) -> Machine:
    """Engines of one kind of layers; `fine` is their hash_block_size."""
    return Machine(type("Requests", (Requests,), {"kind": kind, "mode": mode, "fine": fine}))


MACHINES: dict[str, Machine] = {
    "runtime-write": Machine(CacheMachine, ("write",)),
    "runtime-read": Machine(CacheMachine, ("read",)),
    "runtime-blocks-of-one": Machine(CacheMachine, ("write", (), 1)),
    "window-write": Machine(CacheMachine, ("write", (_WINDOW,))),
    "window-read": Machine(CacheMachine, ("read", (_WINDOW,))),
    "chunked-write": Machine(CacheMachine, ("write", (_CHUNKS,))),
    "blocks": Machine(BlockMachine, ("write",)),
    "blocks-read": Machine(BlockMachine, ("read",)),
    "blocks-window": Machine(BlockMachine, ("write", (_WINDOW,))),
    "engine-paged": _requests("full", "paged"),
    "engine-cell": _requests("full", "cell"),
    "engine-window": _requests("window", "paged"),
    "engine-recurrent": _requests("recurrent", "paged"),
    "engine-fine": _requests("full", "paged", 2),
    "engine-recurrent-fine": _requests("recurrent", "paged", 2),
    "paged": Machine(PagedMachine, (), on_device=False),
    "scheduler": Machine(scheduling.SchedulerMachine, (), on_device=False),
    "tier-index": Machine(IndexMachine, (), on_device=False),
}


@dataclasses.dataclass(frozen=True)
class Budget:
    """Of one run of a machine.

    Attributes:
      examples: histories.
      steps: of a history, at most.
      is_over: whether the time is over, asked before each history.
    """

    examples: int
    steps: int
    is_over: Callable[[], bool] = lambda: False


class _TimeIsOver(KeyboardInterrupt):
    """Ends a run between two histories: any other error would be a history that failed."""


def run(machine: Machine, seed: int, budget: Budget) -> tuple[Counter[str], str]:
    """Runs random histories of a machine.

    Returns:
      Its histories and steps, and the shortest history that failed with its error, or "".
    """
    counts: Counter[str] = Counter()
    counted = hypothesis.seed(seed)(_counted(machine, counts, budget.is_over))
    asked = settings(
        max_examples=budget.examples,
        stateful_step_count=budget.steps,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=[*HealthCheck],  # pyright: ignore[reportArgumentType]
    )
    try:
        run_state_machine_as_test(counted, settings=asked)
    except _TimeIsOver:
        pass
    # Several failures are a group, of BaseException where one of them is pytest's own.
    except (Exception, BaseExceptionGroup):
        return counts, traceback.format_exc()
    return counts, ""


def _counted(machine: Machine, counts: Counter[str], is_over: Callable[[], bool]) -> Any:
    """The machine's class, whose histories and steps are counted."""

    def start(self: Any) -> None:
        if is_over():
            raise _TimeIsOver
        machine.kind.__init__(self, *machine.args)
        counts["histories"] += 1

    def step(self: Any) -> None:
        counts["steps"] += 1

    made = {"__init__": start, "counted": invariant()(step)}
    return type(machine.kind.__name__, (machine.kind,), made)
