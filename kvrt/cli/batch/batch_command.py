"""`kvrt batch`: many requests on one cache; what is left of them, if it was interrupted before."""

import contextlib
import dataclasses
from typing import Any

from kvrt.cli.batch.digest import Digests, types_of_results
from kvrt.cli.batch.requests import Requests
from kvrt.cli.batch.results import Expected, Results, failed
from kvrt.cli.batch.together import first_says
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output

_TYPES: tuple[str, ...] = "dtype", "cache_type_k", "cache_type_v"


def execute(options: BatchOptions) -> int:
    """Runs the command and returns its exit code: 1 where a request failed; raises KvrtError."""
    if options.coordinator is None:
        return _execute(options)
    # Late: for a single process, results that are there need no JAX.
    from kvrt.cli.process.startup import ready

    with ready(options):
        return _execute(options)


def _execute(options: BatchOptions) -> int:
    types = first_says(options, lambda: _types(options))
    options = dataclasses.replace(options, **types)
    assert options.input is not None and options.output is not None
    requests = Requests(options.input, options, Digests(options).of)
    try:
        with contextlib.closing(_results(options, requests)) as results:
            return _serve(options, requests, results)
    finally:
        requests.close()


def _results(options: BatchOptions, requests: Requests) -> Results:
    """Where results go, and which are there; the first process has the file."""
    opened: list[Results] = []

    def begun() -> dict[str, list]:
        assert options.output is not None
        expected = Expected(
            digests={e.id: e.digest for e in requests.entries},
            bad={x.line: x.error for x in requests.bad},
            restart=options.restart,
            tell=(lambda line: None) if options.quiet else output.note,
        )
        opened.append(Results(options.output, n_samples, expected))
        return {"done": list(opened[0].done), "reported": list(opened[0].reported)}

    n_samples = {e.id: e.n for e in requests.entries}
    there = first_says(options, begun)
    if opened:
        return opened[0]
    # Nobody sees what another process prints.
    results = Results("-", n_samples)
    results.done, results.reported = set(there["done"]), set(there["reported"])
    return results


def _types(options: BatchOptions) -> dict[str, Any]:
    """Types of weights, keys and values, by flag: those of the results, or the defaults."""
    wanted = options.dtype, options.cache_type_k, options.cache_type_v
    if None not in wanted:
        return dict(zip(_TYPES, wanted, strict=True))
    found = types_of_results(options)
    if found is not None:
        return {name: getattr(found, name) for name in _TYPES}
    # Late: results that are there need no JAX.
    from kvrt.cli.process import startup
    from kvrt.cli.setup.config import kv_dtypes
    from kvrt.cli.setup.model import choose_weights

    startup.check_device()
    dtype = options.dtype or choose_weights(None).dtype
    return dict(zip(_TYPES, (dtype, *kv_dtypes(options)), strict=True))


def _serve(options: BatchOptions, requests: Requests, results: Results) -> int:
    n_before = len(results.done)
    for bad in requests.bad:
        if bad.line not in results.reported:
            results.write([failed(bad.id, bad.error, line=bad.line)])
    if results.n_cut and not options.quiet:
        output.note(f"{options.output}: {results.n_cut:,} bytes of an interrupted request cut off")
    todo = [e for e in requests.entries if e.id not in results.done]
    if not todo:
        if not options.quiet:
            output.note(f"requests   {n_before:,} were there already, nothing is left to do")
        return 1 if results.n_failed else 0
    # All that can be refused without JAX has been.
    from kvrt.cli.batch.engine_run import BatchRun
    from kvrt.cli.process.startup import ready

    # Several processes have met before they read what there is to do.
    with ready(options) if options.coordinator is None else contextlib.nullcontext():
        return BatchRun(options, requests, results, todo).run()
