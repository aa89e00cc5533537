"""`kvrt` with a clock: the phases of its start, as one JSON line at the end of standard error."""

import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_START = time.perf_counter()
# Of all threads, within the phases; JAX's own names of what it times.
_WITHIN = {
    "/jax/core/compile/jaxpr_trace_duration": "traces",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowering",
    "/jax/core/compile/backend_compile_duration": "compiling or loading",
}


def run() -> None:
    """Runs the command line and prints seconds by phase, up to the first token of `kvrt run`."""
    from kvrt.__main__ import enter
    from kvrt.cli import main

    main.run = functools.partial(_run, main.run)
    enter()


def _run(command: Callable[[], None]) -> None:
    from kvrt.cli.process import accelerators, output

    ends: dict[str, float] = {}
    within: defaultdict[str, float] = defaultdict(float)

    def end(phase: str) -> None:
        ends.setdefault(phase, time.perf_counter() - _START)

    def note(event: str, duration_secs: float, **more: Any) -> None:
        if event in _WITHIN and "first token" not in ends:
            within[f"within: {_WITHIN[event]}"] += duration_secs

    # As the command does before it imports JAX, whose settings follow.
    output.own_process()
    accelerators.leave_out_libtpu()
    end("flags")
    import flax.nnx  # noqa: F401
    import jax

    end("import of JAX and flax")
    import kvrt.cli.run.run_command  # noqa: F401
    from kvrt.cli.run import conversation, generation
    from kvrt.runtime.stepper import Stepper

    end("other imports")
    jax.monitoring.register_event_duration_secs_listener(note)
    _timed(conversation, "open_with_status", end, "header and tokenizer")
    _timed(conversation.Conversation, "open_runtime", end, "runtime and empty cache")
    _timed(conversation, "compile_programs", end, "programs, and weights not there yet")
    _timed(Stepper, "append", end, "prompt")
    _timed(generation.output, "write_generated", end, "first token")
    try:
        command()
    finally:
        times = [0.0, *ends.values()]
        spent = {phase: b - a for phase, a, b in zip(ends, times, times[1:], strict=False)}
        print(json.dumps(spent | within), file=sys.stderr)


def _timed(owner: Any, name: str, end: Any, phase: str) -> None:
    """Lets a function note when it first returns."""
    run = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        end(phase)
        return out

    setattr(owner, name, timed)
