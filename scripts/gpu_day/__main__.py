"""A day on a GPU or a TPU in one command: tests, tile sizes, speed beside peers, tables.

    python -m scripts.gpu_day --out ~/day
    python -m scripts.gpu_day --out ~/day --minutes 60 --only decode,upkeep
    python -m scripts.gpu_day --out /tmp/day --smoke

It looks at the machine and runs a list of commands (`plan.py`), the most important first: the
kernels' tests compiled for it, searches of tile sizes, and benches of decode, prefill and upkeep
in the shapes of known models with random weights, beside peers. What a command prints is a line of
OUT/results.jsonl at once; a day that was killed, or came to the end of its --minutes, continues
with the commands that are left when it is given again. Another commit, device or version of JAX
begins anew. A side that a command hangs or dies of is recorded, and the command run without it. At
the end OUT/tables.md has all lines as tables for docs/benchmarks.md, which are printed as well, and
OUT/tiles.json the tile sizes; --keep_tiles also merges them into kvrt's own.

--smoke tries everything out on a CPU in a minute, with tiny shapes and interpreted kernels.
"""

from pathlib import Path

from absl import app, flags

from scripts._lib import commands
from scripts.gpu_day import day, plan

_OUT = flags.DEFINE_string("out", None, "Folder of results, tables and logs.", required=True)
_SMOKE = flags.DEFINE_bool("smoke", False, "Tiny shapes and interpreted kernels, on a CPU.")
_ONLY = flags.DEFINE_list("only", list(plan.PARTS), f"Parts, of {', '.join(plan.PARTS)}.")
_MINUTES = flags.DEFINE_float("minutes", 30.0, "Time that the run may take.", lower_bound=0.1)
_RETRY = flags.DEFINE_bool("retry", False, "Also measure again what failed.")
_KEEP_TILES = flags.DEFINE_bool("keep_tiles", False, "Merge tile sizes into kvrt's own table.")


def main() -> int:
    commands.check_names(_ONLY, plan.PARTS)
    if _SMOKE.value and _KEEP_TILES.value:
        raise app.UsageError("--keep_tiles with --smoke: sizes of a trial are no measurement")
    return day.run(
        day.Options(
            out=Path(_OUT.value).expanduser().resolve(),
            smoke=_SMOKE.value,
            only=tuple(_ONLY.value),
            minutes=_MINUTES.value,
            retry=_RETRY.value,
            keep_tiles=_KEEP_TILES.value,
        )
    )


if __name__ == "__main__":
    commands.run(main)
