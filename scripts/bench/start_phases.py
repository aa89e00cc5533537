"""`kvrt` with a clock: the phases of its start, as one JSON line at the end of standard error."""

import json
import sys
import time
from typing import Any

_START = time.perf_counter()


def run() -> None:
    """Runs the command line and prints seconds by phase, up to the first token of `kvrt run`."""
    from kvrt.cli.main import main

    ends: dict[str, float] = {}

    def end(phase: str) -> None:
        ends.setdefault(phase, time.perf_counter() - _START)

    end("flags")
    import flax.nnx  # noqa: F401
    import jax  # noqa: F401

    end("import of JAX and flax")
    import kvrt.cli.run.run_command  # noqa: F401
    from kvrt.cli.run import generation, prompt_run
    from kvrt.program.programs import Programs
    from kvrt.runtime.stepper import Stepper

    end("other imports")
    _timed(prompt_run, "open_with_status", end, "header and tokenizer")
    _timed(prompt_run, "open_runtime", end, "empty cache")
    _timed(Programs, "_traced", end, "trace of the prompt's step")
    _timed(Programs, "compile_all", end, "load of programs, other traces behind it")
    _timed(prompt_run, "compile_programs", end, "weights that are not there yet")
    _timed(Stepper, "append", end, "prompt")
    _timed(generation.output, "write_generated", end, "first token")
    main(sys.argv[1:])
    times = [0.0, *ends.values()]
    spent = {phase: b - a for phase, a, b in zip(ends, times, times[1:], strict=False)}
    print(json.dumps(spent), file=sys.stderr)


def _timed(owner: Any, name: str, end: Any, phase: str) -> None:
    """Lets a function note when it first returns."""
    run = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        end(phase)
        return out

    setattr(owner, name, timed)
