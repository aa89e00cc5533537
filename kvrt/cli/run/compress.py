"""A prompt that is read whole and compressed once, by a policy by score."""

import time

import jax

from kvrt import Runtime
from kvrt.cli.flags.evaluate import EvalFlags, TextFlags
from kvrt.cli.process import output
from kvrt.cli.process.interrupt import Interrupt, Interrupted
from kvrt.cli.report import summary
from kvrt.cli.run.generation import Reading
from kvrt.runtime.compress import REPEAT, compress_prompt
from kvrt_models.tokenizer.encode import Tokenizer


def is_compressed(options: EvalFlags, runtime: Runtime, reading: Reading) -> bool:
    """Whether a prompt is read so: it is asked for, and nothing of the text is there yet."""
    policy = runtime.stats().scored
    if policy is None or not isinstance(options, TextFlags):
        return False
    wanted = options.compress or policy.reads_whole
    if wanted and reading.n_restored:
        output.note("tokens behind a session are read as they come, not compressed at their end")
    return wanted and not reading.n_restored


def read_compressed(
    runtime: Runtime, reading: Reading, tokenizer: Tokenizer, interrupt: Interrupt, *, quiet: bool
) -> None:
    """Reads a prompt and compresses it; says before what that takes, and after what it took.

    A signal ends it between two steps, and nothing of the prompt is read then.
    """
    interrupt.check()
    policy = runtime.stats().scored
    assert policy is not None, "asked before"
    name, n, ask = type(policy).__name__, len(reading.ids), list[int]()
    n_all = n
    if policy.reads_whole and n >= policy.budget + policy.interval:
        ask = tokenizer.encode(REPEAT, add_special=False)
        n_all = 2 * n + len(ask)
        if not quiet:
            output.note(
                f"{name} has the prompt repeated: {n_all:,} tokens are evaluated for "
                f"its {n:,}, each time beside all of them: several times a prefill"
            )
    compiled, start = runtime.stats().compile_s, time.perf_counter()
    try:
        with summary.prefill_bar(n_all, not quiet) as show:

            def step(done: int, total: int) -> None:
                show(done)
                interrupt.check()

            found = compress_prompt(runtime, reading.ids, ask=ask, progress=step)
            jax.block_until_ready(found.logits)
    except Interrupted:
        return
    finally:
        compiled = runtime.stats().compile_s - compiled
        reading.seconds = time.perf_counter() - start - compiled
    reading.n_done = reading.n_compressed = n
    reading.seconds -= found.compile_s
    if not quiet:
        if found.transient_bytes:
            kept = f"{policy.budget:,} tokens a kv head"
        else:
            kept = "all of it, for it fits the slots"
        output.note(
            f"{name} keeps {kept}; {found.n_evaluated:,} tokens were evaluated, "
            f"{found.transient_bytes / 1e6:.1f} MB taken and programs compiled in "
            f"{found.compile_s:.2f} s meanwhile"
        )
