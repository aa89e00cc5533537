"""Runs the short history of a cell, and says how it ended: equal to the oracle, or how not."""

import dataclasses
import itertools
import tempfile
from pathlib import Path
from typing import Any

from kvrt import session
from kvrt.errors import BadRequest, KvrtError
from tests.matrix import drafted, reused
from tests.matrix.axes import Cell
from tests.matrix.build import build, extend_of, policy_of, sizes_of
from tests.matrix.engine_history import engine_history
from tests.matrix.plaincache import PlainSeq
from tests.matrix.plainmodel import STATES, drawn, pieces
from tests.matrix.tolerance import Different, Judge

REUSED = ("chunks", "modules")
# Layers that keep every position.
COMPLETE = {"full", "latent", "indexed", "shared", "produced", "sink_window"}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a cell ended; kinds as in `axes.Rule`, and "equal" and "crash"."""

    kind: str
    text: str = ""
    error: str = ""


def outcome(cell: Cell) -> Outcome:
    """Builds the object of a cell, runs its history and compares."""
    stage = "refused"
    try:
        made = build(cell)
        stage = "mid-run"
        with tempfile.TemporaryDirectory() as folder:
            run = engine_history if cell.is_engine else runtime_history
            worst = run(cell, made, Path(folder))
    except BadRequest as error:
        # A request has a policy and sizes of its own: it is refused when it is made.
        return Outcome("refused", str(error), type(error).__name__)
    except KvrtError as error:
        return Outcome(stage, str(error), type(error).__name__)
    except (TypeError, AttributeError) as error:
        offered = "unexpected keyword" in str(error) or "no attribute" in str(error)
        return Outcome("missing" if offered else "crash", str(error), type(error).__name__)
    except Different as error:
        return Outcome("different", str(error))
    except Exception as error:
        return Outcome("crash", f"{type(error).__name__}: {error}", type(error).__name__)
    return Outcome("equal", f"{worst:.1e}")


# --- a Runtime -------------------------------------------------------------------------------


class RuntimeHistory:
    """A Runtime and the oracle of its sequences, told the same things."""

    def __init__(self, cell: Cell, made: Any):
        self.cell, self.made, self.sizes, self.judge = cell, made, sizes_of(cell), Judge(cell)
        plain = reused.BlendedSeq if cell.state == "chunks" else PlainSeq
        # Of three the last has modules, all of which the first shares, or chunks on their way.
        n_seq = min(self.sizes.n_seq, 2)
        self.seqs = [plain(cell, policy_of(cell), extend_of(cell)) for _ in range(n_seq)]
        parts = cell.layers.split("+")
        complete = COMPLETE & set(parts)
        self.n_ctx = self.sizes.n_ctx if complete else 2**31 - 1

    def append(self, what: str, tokens: list[int], seq: int = 0) -> None:
        """Tokens that the runtime takes in, in steps of its choice; the logits of the last one.

        A step ends where a checkpoint is due, and what the next one reads of it is rounded.
        """
        mine, ends = self.seqs[seq], [0]
        n_others = sum(len(x.rows) for x in self.seqs if x is not mine)
        mine.make_room(len(tokens), self.n_ctx, n_others)
        found = self.made.append(tokens, seq, progress=lambda n_done, _: ends.append(n_done))[0]
        for start, end in itertools.pairwise(ends):
            wanted = mine.step(tokens[start:end])[-1]
        self.judge(what, found, wanted)
        self.last = wanted

    def reuse(self) -> list[int]:
        """Begins a prompt with chunks or modules; what is left of it."""
        first = self.seqs[0]
        if isinstance(first, reused.BlendedSeq):
            found = reused.blend(self.made, self.sizes.n_step)
            first.blend(reused.ENDS[-1])
        else:
            found = reused.serve(self.made.modules)
            reused.held_modules(first)
        self.judge("the suffix", found[0], first.step(reused.PROMPT[reused.ENDS[-1] :])[-1])
        if self.cell.where == "blocks":
            self.made.to_blocks(0)
        return drawn(2, self.sizes.n_prompt)[len(reused.PROMPT) :]

    def cut(self) -> None:
        """Back into the prompt, to where layers or a checkpoint let it."""
        positions, before = self.made.resume_positions(), self.made.stats().n_rewinds
        pos = positions.nearest(max(self.seqs[0].n_past - 11, 0))
        self.made.seq_rm(0, pos)
        self.seqs[0].cut(pos)
        needed = any(a <= pos < b for a, b in positions.gaps)
        if (self.made.stats().n_rewinds > before) != needed:
            raise Different(f"cut back to {pos}, with a checkpoint: {not needed}")
        if self.cell.policy == "none" and not pos:
            raise Different("nothing of the prompt was left to continue from")

    def check(self) -> None:
        """Positions that the runtime holds are those of the oracle."""
        for s, seq in enumerate(self.seqs):
            found = self.made.token_history(s)[0].tolist()
            wanted = sorted(row.pos for row in seq.rows)
            if not set(wanted) <= set(found) or self.made.seq_pos_max(s) != seq.n_past - 1:
                raise Different(f"positions of sequence {s}: {found}, wanted {wanted}")
            if seq.kept and not seq.keeps(self.made.kept_positions(s)[0]):
                raise Different(f"sequence {s} keeps other tokens than {seq.kept.heads}")


def runtime_history(cell: Cell, made: Any, folder: Path) -> float:
    """A prompt, decode past the context where a policy drops, perhaps a file, a second turn."""
    at = RuntimeHistory(cell, made)
    sizes = at.sizes
    if sizes.n_seq > 1:
        at.append("another sequence", drawn(1, sizes.n_step), 1)
    prompt = at.reuse() if cell.state in REUSED else drawn(2, sizes.n_prompt)
    for i, part in enumerate(pieces(prompt, sizes.n_step)):
        at.append(f"prompt, step {i}", part)
    for i, token in enumerate(drawn(3, sizes.n_decode)):
        at.append(f"decode {i}", [token])
    if cell.speculation != "none":
        drafted.generate(at, 12)
    at.check()
    if cell.state == "session":
        at.made = _reloaded(cell, at.made, folder)
    if cell.state == "checkpoints":
        at.cut()
    at.append("second turn", drawn(4, sizes.n_step))
    for i, token in enumerate(drawn(5, 2)):
        at.append(f"decode {i} after it", [token])
    if sizes.n_seq > 1:
        at.append("the other sequence", [7], 1)
    at.check()
    if cell.where == "blocks" and any(table is None for table in _tables(cell, at.made)):
        raise Different("the sequence lies in cells: its placement in blocks was lost")
    return at.judge.worst


def _tables(cell: Cell, made: Any) -> list[Any]:
    """Block tables of sequence 0 in the groups that keep every position."""
    parts = [x for x in cell.layers.split("+") if x not in STATES]
    parts = ["full", *parts] if cell.state == "chunks" else parts
    parts = [*parts, "indexed"] if cell.layers == "indexed" else parts
    return [t for t, x in zip(made.table(0), parts, strict=True) if x in COMPLETE]


def _reloaded(cell: Cell, made: Any, folder: Path) -> Any:
    path = folder / "saved.kvrt"
    session.save(path, made.snapshot())
    fresh = build(cell)
    fresh.restore(session.read(path))
    return fresh
