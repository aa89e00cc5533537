"""The run of a day: command after command as long as there is time, then the tables."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console

from kvrt.attention.pallas import tiles
from scripts._lib import measure
from scripts.gpu_day import machine, plan
from scripts.gpu_day.ledger import Ledger, Line
from scripts.gpu_day.plan import PARTS, ROOT, Command

_OWN_TILES = ROOT / "kvrt" / "attention" / "pallas" / "tiles.json"
# Kept back for the tables; and the most that a command may take.
_END_S, _LIMIT_S = 5.0, 600.0
# Fields of the tables, of all benches.
_COLUMNS = ("file", "passed", "n_failed", "n_skipped", "failures", "side", "shape", "mask", "batch")
_COLUMNS += ("context", "n_ctx", "n_moved", "n_new", "type_k", "block_size", "layer_us", "step_ms")
_COLUMNS += ("ms", "apply_ms", "tokens_a_second", "share_of_product", "share_of_copy", "aim")
_COLUMNS += ("device_ms", "host_gap", "alone", "tiles", "rule_us", "best_us", "sizes", "n_tried")
_COLUMNS += ("skipped", "failed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What was asked for, as the flags say."""

    out: Path
    smoke: bool
    only: tuple[str, ...]
    minutes: float
    retry: bool = False
    keep_tiles: bool = False


class Budget:
    """Minutes that a run may take, of which commands of each part learn what they need."""

    def __init__(self, minutes: float, *, now: Callable[[], float] = time.monotonic):
        """Begins now."""
        self._now, self._end = now, now() + 60 * minutes - _END_S
        self._taken: defaultdict[str, list[float]] = defaultdict(list)

    @property
    def left_s(self) -> float:
        """Seconds until the tables have to be made."""
        return self._end - self._now()

    def fits(self, part: str) -> bool:
        """Whether a command of a part is likely to end in time."""
        taken = self._taken[part][-5:]
        expected_s = sum(taken) / len(taken) if taken else PARTS[part]
        return 0 < self.left_s >= expected_s

    def learn(self, part: str, seconds: float) -> None:
        """Counts what a command has taken."""
        self._taken[part].append(seconds)


def run(options: Options) -> int:
    """Runs what is not done yet; 2 where nothing can be measured."""
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    try:
        here = machine.describe(out, _environment(options), smoke=options.smoke)
    except subprocess.CalledProcessError as error:
        return _say(f"JAX does not start: {error}") or 2
    refused = machine.refusal(here)
    if refused:
        return _say(refused) or 2
    asked = plan.smoke(options.only)
    if not options.smoke:
        asked = plan.plan(here["backend"], here["tiled"], options.only)
    ledger = Ledger(out / "results.jsonl", here, retry=options.retry)
    if ledger.began:
        _say(ledger.began)
    waiting = [command for command in asked if command.name not in ledger.done]
    _say(f"{here['device']}: {len(asked) - len(waiting)} of {len(asked)} commands are done")
    write_tiles(out, ledger)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        run_all(waiting, options, Budget(options.minutes), ledger)
    text = report(here, asked, ledger)
    (out / "tables.md").write_text(text)
    print(text, end="", flush=True)
    n_left = sum(command.name not in ledger.done for command in asked)
    _say(f"{n_left} are left; the same command continues with them" if n_left else "all done")
    if options.keep_tiles:
        _keep_tiles(out)
    return 0


def run_all(waiting: Sequence[Command], options: Options, budget: Budget, ledger: Ledger) -> None:
    """Runs commands in their order; those for which the time is too short are left."""
    for command in waiting:
        if not options.smoke and not budget.fits(command.part):
            continue
        start = budget.left_s
        end = run_one(command, options, start, ledger)
        if budget.left_s <= 0:
            return  # whatever it said, it had no time
        seconds = start - budget.left_s
        budget.learn(command.part, seconds)
        ledger.add({"command": command.name, "seconds": round(seconds, 1), **end})
        write_tiles(options.out, ledger)
        failed = f", {end['failed']}" if end else ""
        _say(f"{command.name} ({seconds:.0f} s{failed}; {budget.left_s / 60:.1f} min left)")


def run_one(command: Command, options: Options, left_s: float, ledger: Ledger) -> Line:
    """Runs a command, again without each side that it hangs or dies of; why it failed, or {}."""
    ledger.add({"command": command.name, "begins": True})
    words = [sys.executable, "-m", *command.words]
    words += ["--tiles", str(options.out / "tiles.json")] if command.tuned else []
    lost: dict[str, str] = {}
    end = time.monotonic() + left_s
    while True:
        without = ["--without", ",".join(lost)] if lost else []
        with (options.out / "commands.log").open("ab+") as log:
            first = log.tell()
            code = _process([*words, *without], options, (log, end), command, ledger)
            log.seek(first)
            said = log.read().decode(errors="replace")
        sides = [x.removeprefix("side: ") for x in said.splitlines() if x.startswith("side: ")]
        if code == 0:
            return {}
        reason = said.strip().splitlines()[-1] if code == 1 else "see commands.log"
        failed = f"ended with {code}: {reason}"[:200]
        if code == 1 or not sides or sides[-1] in lost or time.monotonic() >= end:
            return {"failed": failed}
        lost[sides[-1]] = failed
        ledger.forget(command.name)
        for side, failed in lost.items():
            line = {"bench": "sides that were left out", "side": side, "failed": failed}
            ledger.add({"command": command.name, **line})


def _process(
    words: list[str], options: Options, where: tuple[Any, float], command: Command, ledger: Ledger
) -> int:
    """Exit code of a process whose lines go to the ledger; it is killed at its end."""
    log, end = where
    limit = max(min(_LIMIT_S, end - time.monotonic()), 0.1)
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env=_environment(options),
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
    )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(limit, kill)
    timer.start()
    aim = {"aim": command.aim} if command.aim else {}
    with process:
        try:
            for line in process.stdout or ():
                if line.startswith("{"):  # else it is a library's
                    ledger.add({"command": command.name, **json.loads(line), **aim})
        except BaseException:
            kill()
            raise
        finally:
            timer.cancel()
    return process.returncode


def _environment(options: Options) -> dict[str, str]:
    # Memory on demand: a peer's process needs some of the same device.
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".90"}
    env["JAX_COMPILATION_CACHE_DIR"] = str(options.out / "programs")
    if options.smoke:
        # Numbers of a trial mean nothing, so its programs need not be fast either.
        env |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, **env, "PYTHONPATH": path}


def report(here: Mapping[str, Any], asked: Sequence[Command], ledger: Ledger) -> str:
    """Markdown tables of what was printed, what failed, and what is left."""
    smoke = " A trial with tiny shapes (--smoke): no figure here means anything." * here["smoke"]
    clocks = here.get("clocks.sm", here.get("clocks", "not readable"))
    driver = here.get("driver_version", here["platform"])
    parts = [
        f"{here['device']} ({here['n_devices']}), driver {driver}, clocks {clocks}; jax "
        f"{here['jax']}, jaxlib {here['jaxlib']}; kvrt {here['commit']}. Medians and quartiles; "
        f"sides were interleaved, but for PyTorch's.{smoke}"
    ]
    lines = [line for command in asked for line in ledger.lines.get(command.name, ())]
    ends = [{"bench": "failed", **x} for x in ledger.done.values() if "failed" in x]
    left = [x.name for x in asked if x.name not in ledger.done]
    left = [{"bench": f"not run: {len(left)}", "command": name} for name in left]
    console = Console(width=1000, color_system=None)
    shown = [*measure.tables(lines, _COLUMNS, box=box.MARKDOWN)]
    shown += measure.tables([*ends, *left], ("command", "failed"), box=box.MARKDOWN)
    for table in shown:
        title, table.title = table.title, None
        with console.capture() as text:
            console.print(table)
        rows = [line.rstrip() for line in text.get().splitlines() if line.strip()]
        parts.append("\n".join([f"**{title}**", "", *rows]))
    return "\n\n".join(parts) + "\n"


def write_tiles(out: Path, ledger: Ledger) -> None:
    """The table of what was found so far, which commands that are "tuned" have in force."""
    table: dict[tiles.Key, Mapping[str, int]] = {}
    notes: dict[tiles.Key, str] = {}
    for line in (line for of in ledger.lines.values() for line in of):
        if line.get("bench") == "tiles" and line.get("sizes"):
            key = tiles.Key(**line["key"])
            table[key] = line["sizes"]
            notes[key] = f"{line['best_us']} us a layer, {line['rule_us']} by the rule"
    (out / "tiles.json").write_text(tiles.table_text(table, notes))


def _keep_tiles(out: Path) -> None:
    found = tiles.parse_table((out / "tiles.json").read_text())
    _OWN_TILES.write_text(tiles.table_text({**tiles.packaged_table(), **found}))
    _say(f"{len(found)} entries are in {_OWN_TILES.relative_to(ROOT)} now")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
