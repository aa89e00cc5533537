"""`kvrt prefill --schema`: computes the modules of a schema, and keeps them as a session."""

import dataclasses
import time
from pathlib import Path

import jax
import numpy as np

from kvrt import PromptCache, Runtime, session
from kvrt.cli.flags.session_files import PrefillOptions
from kvrt.cli.process import output, status
from kvrt.cli.run.prompt import Prompt
from kvrt.cli.schema import opened
from kvrt.cli.setup.model import compile_programs, open_with_status
from kvrt.cli.setup.open_runtime import ready
from kvrt.cli.setup.weights import choose_weights
from kvrt.errors import UsageError
from kvrt.reuse.schema import PlacedSchema
from kvrt.session.change import replace


def execute(options: PrefillOptions, given: Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      KvrtError: what keeps it from starting, or ended it.
    """
    assert options.output is not None
    if not given.is_none:
        raise UsageError("--schema has its text in it; leave out -p, -f and --tokens")
    path = Path(options.output)
    if not options.overwrite:
        replace.refuse_existing(path)
    with ready(options):
        _encode(options, path)
    return 0


def _encode(options: PrefillOptions, path: Path) -> None:
    assert options.schema is not None
    quiet = options.quiet
    weights = choose_weights(options.dtype, None)
    model = open_with_status(options.model, dtype=weights.dtype, on_host=False, quiet=quiet)
    placed = opened.read_placed(options.schema, model)
    # Beside the modules, room for what their loss is measured with.
    runtime = opened.open_modules(options, model, placed, placed.end, lambda _: None)
    longest = max(len(m.ids) for m in placed.modules)
    compile_programs(runtime, model, options, longest, quiet=quiet)
    compiled, start = runtime.stats().compile_s, time.perf_counter()
    with status.waiting(f"computing {len(placed.modules)} modules", not quiet):
        PromptCache.encode(runtime, placed, opened.FIRST_SEQ)
        jax.block_until_ready(runtime.cache.cells[0].pos)
    seconds = time.perf_counter() - start - (runtime.stats().compile_s - compiled)
    with status.waiting("saving", not quiet):
        _save(path, runtime, overwrite=options.overwrite)
    if quiet:
        return
    n = opened.n_tokens_of(placed)
    output.note(f"{len(placed.modules)} modules of {n:,} tokens computed in {seconds:.2f} s")
    if any(m.reserved for m in placed.modules):
        token = opened.placeholder(model.tokenizer)
        output.note(f"arguments were held a place by {model.tokenizer.piece(token)!r}")
    _say_loss(runtime, placed)


def _save(path: Path, runtime: Runtime, *, overwrite: bool) -> None:
    def keep(there: Path) -> None:
        if there.exists():
            output.note(f"{there}: the former session is kept as {replace.keep_former(there)}")

    session.save(path, runtime.snapshot(), before=keep if overwrite else replace.refuse_existing)


def _say_loss(runtime: Runtime, placed: PlacedSchema) -> None:
    """What modules lose that have not seen each other: over the last one, behind all before it."""
    *others, last = (m for m in placed.modules if m.choice == 0)
    if not others:
        output.note("one module alone is as exact as a cached prefix")
        return
    before = tuple(m for m in placed.modules if m.start < last.start)
    modules = PromptCache(
        runtime, dataclasses.replace(placed, modules=before, end=last.start), opened.FIRST_SEQ
    )
    ids = last.ids.tolist()
    held = {
        (m.name, name): m.ids[at - m.start : at - m.start + n].tolist()
        for m in others
        for name, (at, n) in m.reserved.items()
    }
    modules.serve(0, [m.name for m in others if m.name], ids[:1], held)
    served = _following(runtime, ids)
    runtime.append([*placed.lead, *(t for m in others for t in m.ids.tolist()), ids[0]], 0)
    exact = _following(runtime, ids)
    kl = float((np.exp(exact) * (exact - served)).sum(axis=1).mean())
    output.note(
        f"modules do not see each other: over {last.name or 'the last text'!r}, behind the others, "
        f"KL {kl:.3f} from a prefill of the whole text"
    )


def _following(runtime: Runtime, ids: list[int]) -> np.ndarray:
    """Log-probabilities after each of some tokens, the first of which ends the sequence.

    The sequence is empty after it.
    """
    found = [runtime.last_logits(0)]
    if ids[1:]:
        found.append(runtime.append(ids[1:], 0, out_ids=range(len(ids) - 1)))
    runtime.seq_rm(0)
    return np.concatenate([np.asarray(jax.nn.log_softmax(x), np.float64) for x in found])
