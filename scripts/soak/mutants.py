"""Faults put into a copy of the tree, one at a time: which tests of the default suite find each.

    python -m scripts.soak.mutants
    python -m scripts.soak.mutants --only tiers --jobs 2

A fault replaces a piece of code that stands once in its file. Its tests are the files of the
default suite that should find it; a fault is found when one of them fails. Prints a line for each
fault, then how many were found; ends with 1 if one was not.
"""

import concurrent.futures
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

_ONLY = flags.DEFINE_string("only", "", "Faults whose name begins so.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Faults tried at once.", lower_bound=1)

ROOT = Path(__file__).parents[2]
SELECT = ("tests/attention/test_select.py", "tests/runtime/test_select_runtime.py")
KVZIP = ("tests/policies/test_kvzip.py",)
READS = ("tests/policies/test_coming_back.py", "tests/policies/test_scored.py")
TIERS = (
    "tests/paged/test_tier_index.py",
    "tests/paged/test_tiers.py",
    "tests/paged/test_two_phases.py",
    "tests/paged/test_block_file.py",
    "tests/paged/test_disk_tiers.py",
    "tests/serving/test_engine_tiers.py",
)


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
      name: what it does wrong.
      path: file it is put into.
      old: code that stands there once.
      new: code in its place.
      tests: files of tests that should find it.
    """

    name: str
    path: str
    old: str
    new: str
    tests: Sequence[str]


_LABELS = "kvrt/attention/select/labels.py"
_CHOOSE = "kvrt/attention/select/choose.py"
_UPKEEP = "kvrt/program/labels/upkeep.py"
_ZIP = "kvrt/policies/scored/kvzip.py"
_COMPRESS = "kvrt/runtime/compress.py"
_READS = "kvrt/attention/scored/reads.py"
_OFFLOAD = "kvrt/serving/offload.py"
_TIERING = "kvrt/paged/tiers/tiering.py"

MUTANTS = (
    Mutant(
        "labels: empty cells count in extremes",
        _LABELS,
        "jnp.max(jnp.where(held, keys, -far), axis=-1)",
        "jnp.max(keys, axis=-1)",
        SELECT,
    ),
    Mutant(
        "labels: a rebuilt block's labels go to the place of another",
        _LABELS,
        "(zero, zero, block * new.shape[-1])",
        "(zero, zero, block)",
        SELECT,
    ),
    Mutant(
        "labels: a step of one token labels nothing",
        _LABELS,
        "found.append(jax.tree.map(_at_cells(at), old, new))",
        "found.append(old)",
        SELECT,
    ),
    Mutant(
        "labels: a prefill step marks nothing",
        _UPKEEP,
        "self.mark_slots(i, slots[..., n_labelled(of_group) :])",
        "self.mark_slots(i, slots[..., slots.shape[-1] :])",
        SELECT,
    ),
    Mutant(
        "labels: removed cells are not marked",
        _UPKEEP,
        "self.mark_slots(store, changed)",
        "self.mark_slots(store, changed[:0])",
        SELECT,
    ),
    Mutant(
        "labels: a K-shift leaves them behind",
        "kvrt/program/labels/shift.py",
        "if labelled is None:",
        "if labelled is None or cells is not None:",
        SELECT,
    ),
    Mutant(
        "labels: greatest and least keys are confused",
        _CHOOSE,
        "[jnp.maximum(q, 0.0), jnp.minimum(q, 0.0)]",
        "[jnp.minimum(q, 0.0), jnp.maximum(q, 0.0)]",
        SELECT,
    ),
    Mutant(
        "labels: sinks are not kept",
        _CHOOSE,
        "(pos < select.n_sink)[None] | near",
        "(pos < 0)[None] | near",
        SELECT,
    ),
    Mutant(
        "KVzip: the prompt's own queries count",
        _ZIP,
        ">= self.n_prompt",
        ">= 0",
        KVZIP,
    ),
    Mutant(
        "KVzip: attention is summed",
        _ZIP,
        "Tap(greatest=True)",
        "Tap()",
        KVZIP,
    ),
    Mutant(
        "KVzip: scores are those before the repetition",
        _COMPRESS,
        "_one(spec, repeated).sums",
        "_one(spec, prompt).sums",
        KVZIP,
    ),
    Mutant(
        "KVzip: what asks for the repetition is left out",
        _COMPRESS,
        "read([*ask, *tokens], n)",
        "read([*tokens], n)",
        KVZIP,
    ),
    Mutant(
        "n_read: the query that reads all comes one late",
        _READS,
        "return lax.rem(pos, jnp.int32(reads.every)) == 0",
        "return lax.rem(pos, jnp.int32(reads.every)) == 1",
        READS,
    ),
    Mutant(
        "n_read: the newest are chosen as well",
        _READS,
        "slots.pos < pos + reads.every - reads.n_recent",
        "slots.pos < pos + reads.every",
        READS,
    ),
    Mutant(
        "n_read: one more of the newest is read",
        _READS,
        "> pos[None, :, None] - reads.n_recent",
        ">= pos[None, :, None] - reads.n_recent",
        READS,
    ),
    Mutant(
        "n_read: a token is read twice",
        _READS,
        "(near ^ is_chosen[None, None])",
        "(near | is_chosen[None, None])",
        READS,
    ),
    Mutant(
        "n_read: chosen slots do not follow an eviction",
        "kvrt/attention/scored/head_slots.py",
        "return jnp.take_along_axis(now, chosen, axis=1)",
        "return chosen",
        READS,
    ),
    Mutant(
        "n_read: sums fade twice as fast between two that read all",
        "kvrt/attention/scored/attend.py",
        "sums=_faded(spec, after.sums, n)), out",
        "sums=_faded(spec, after.sums, 2 * n)), out",
        READS,
    ),
    Mutant(
        "tiers: a damaged block is taken",
        "kvrt/paged/tiers/block_file.py",
        "return found == name and digest == _digest(name, out)",
        "return found == name",
        TIERS,
    ),
    Mutant(
        "tiers: blocks of one copy are stored in another order",
        "kvrt/paged/tiers/host.py",
        "self.data[list(ids)] = host[: len(ids)]",
        "self.data[list(ids)] = host[: len(ids)][::-1]",
        TIERS,
    ),
    Mutant(
        "tiers: blocks of one load come in another order",
        _TIERING,
        "self._scatter(ids, self._host.read(where))",
        "self._scatter(ids, self._host.read(where)[::-1])",
        TIERS,
    ),
    Mutant(
        "tiers: a loaded block is registered under its neighbour's hash",
        _OFFLOAD,
        "in zip(new, keys, strict=True):",
        "in zip(new[::-1], keys, strict=True):",
        TIERS,
    ),
    Mutant(
        "tiers: groups share the names of their blocks",
        "kvrt/paged/tiers/disk.py",
        'return group.to_bytes(4, "big") + b"".join',
        'return b"".join',
        TIERS,
    ),
    Mutant(
        "tiers: a copy that failed counts as stored",
        _TIERING,
        "self._host.index.complete_store(keys, bool(ok))",
        "self._host.index.complete_store(keys, True)",
        TIERS,
    ),
)


def tried(mutant: Mutant) -> tuple[bool, str]:
    """Whether the default suite finds a fault, and the line of the first test that does."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("kvrt", "models", "tests", "scripts"):
            shutil.copytree(ROOT / name, Path(folder, name))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, folder)
        path = Path(folder, mutant.path)
        code = path.read_text()
        assert code.count(mutant.old) == 1, f"{mutant.path} has {mutant.old!r} not once"
        path.write_text(code.replace(mutant.old, mutant.new))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, f"{folder}/models"])}
        words = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", *mutant.tests]
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}: {done.stdout}")
    failed = [x for x in done.stdout.splitlines() if x.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1, failed[0].split(" - ")[0] if failed else ""


def main(argv: Sequence[str]) -> None:
    """Tries all of them."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    mutants = [m for m in MUTANTS if m.name.startswith(_ONLY.value)]
    n_found = 0
    with concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool:
        for mutant, (found, test) in zip(mutants, pool.map(tried, mutants), strict=True):
            n_found += found
            print(f"{'found' if found else 'MISSED'}  {mutant.name}  {test}", flush=True)
    print(f"{n_found} of {len(mutants)} faults found")
    if n_found < len(mutants):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
