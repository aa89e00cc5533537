"""`kvrt explain`: what a new prompt would reuse of a session, and why not the rest.

Of a folder of sessions it first says which of them the prompt shares most with.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.cli.flags.session_files import ExplainOptions
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.run import prompt, turns
from kvrt.errors import SessionMismatch, UsageError
from kvrt.reuse.plan import ReusePlan, plan_reuse
from kvrt.reuse.tree import RadixTree
from kvrt.session import OpenedSession
from kvrt.session.change import edit
from kvrt.session.io import is_library, open_existing
from kvrt.session.library.library import Library
from kvrt_models import load
from kvrt_models.tokenizer.encode import Tokenizer

_SHOWN = 12  # tokens of each side
_ALIKE, _SKIPPED = 8, 3  # tokens that say that a text continues as held, and how far behind


def execute(options: ExplainOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None
    path = Path(options.session)
    tokenizer = load.open_tokenizer(options.model)
    ids = prompt.prompt_ids(given, tokenizer, chat=given.chat)
    choice = None
    if is_library(path):
        opened, choice = _choice(path, ids, tokenizer, options.model)
    else:
        opened = open_existing(path).choose(options.seq, name="--seq")
    _check(opened, tokenizer, options.model)
    plan, chunks = (_plan(opened, ids, chunks=chunks) for chunks in (False, True))
    held = opened.held[1]
    sides = _sides(plan, held, np.asarray(ids, np.int32), tokenizer)
    gone = turns.left_out(held.tolist(), tokenizer) if given.chat else None
    if options.json:
        facts: dict[str, Any] = {"folder": dataclasses.asdict(choice)} if choice else {}
        if given.chat:
            facts["left_out_by_template"] = gone and gone.fields()
        output.write_text(json.dumps(facts | _fields(plan, chunks, sides)) + "\n")
    else:
        lines = choice.lines(path) if choice else []
        lines += _lines(opened.path, plan, chunks, sides) + ([str(gone)] if gone else [])
        output.write_text("\n".join(lines) + "\n")
    return 0


@dataclasses.dataclass(frozen=True)
class Choice:
    """The sessions of a folder that share the beginning of a prompt, as JSON has them.

    Attributes:
      session: the one that shares most with it.
      n_common: tokens that it shares at the beginning.
      others: sessions that share as many, the one used last first.
      n_sessions: sessions of the same model and settings.
      leaves: those whose tokens no other one continues, the one used longest ago first.
    """

    session: str
    n_common: int
    others: tuple[str, ...]
    n_sessions: int
    leaves: tuple[str, ...]

    def lines(self, folder: Path) -> list[str]:
        """For a reader."""
        like = f", as {', '.join(self.others)}" if self.others else ""
        return [
            f"{folder}: {phrases.counted(self.n_sessions, 'session')} of this kind",
            f"{self.session} shares the first {phrases.counted(self.n_common, 'token')}{like}",
            f"no other continues: {', '.join(self.leaves)}",
        ]


def _choice(
    folder: Path, ids: list[int], tokenizer: Tokenizer, model: str
) -> tuple[OpenedSession, Choice]:
    """The session of a folder to resume, of those that the model's tokenizer made.

    Raises:
      UsageError: there is none.
    """
    library, found = (
        Library(folder, tell=output.note),
        list[tuple[RadixTree, OpenedSession, int, tuple[str, ...]]](),
    )
    for kind in dict.fromkeys(e.fingerprint for e in library.entries()):
        tree = library.tree(kind)
        shared = tree.longest(ids)
        first, *others = (Path(str(name)) for name in shared.names)
        opened = open_existing(first)
        if _has_tokenizer(opened, tokenizer):
            found.append((tree, opened, shared.n_common, tuple(x.name for x in others)))
    if not found:
        raise UsageError(
            f"{folder} has no indexed session of the tokenizer of {model}; save one there, or use "
            "kvrt ls --rebuild"
        )
    tree, opened, n_common, others = max(found, key=lambda x: x[2])
    leaves = tuple(Path(str(name)).name for name in tree.leaves())
    return opened, Choice(opened.path.name, n_common, others, len(tree), leaves)


def _plan(opened: OpenedSession, ids: list[int], *, chunks: bool) -> ReusePlan:
    found = opened.manifest
    # Layers that take tokens in at the end alone cannot fill what chunks leave open.
    chunks = chunks and not any(g.lost for g in found.groups) and found.held is None
    n_exact = found.exact.get(opened.seq_id)
    at = edit.resume_positions(found, opened.seq_id)
    return plan_reuse(opened.held, ids, chunks=chunks, at=at, n_exact=n_exact)


@dataclasses.dataclass(frozen=True)
class Sides:
    """The first difference: where, and what stands there.

    `n_left_out` tokens are held there that the prompt leaves out before it continues as held.
    """

    at: int
    held: str
    wanted: str
    n_left_out: int


def _sides(plan: ReusePlan, held: np.ndarray, wanted: np.ndarray, text: Tokenizer) -> Sides | None:
    at = plan.first_difference
    if at is None:
        return None
    old, new = (text.decode(x[at : at + _SHOWN].tolist()) for x in (held, wanted))
    return Sides(at, old, new, _n_left_out(held, wanted, at))


def _n_left_out(held: np.ndarray, wanted: np.ndarray, at: int) -> int:
    """Held tokens that are left out at a difference, 0 where the text does not continue as held."""
    for skip in range(_SKIPPED):  # where two parts meet, they may be tokenized otherwise
        rest, part = held[at + 1 :], wanted[at + skip : at + skip + _ALIKE]
        if len(part) == _ALIKE <= len(rest):
            same = (np.lib.stride_tricks.sliding_window_view(rest, _ALIKE) == part).all(1)
            if same.any():
                return max(int(same.argmax()) + 1 - skip, 0)
    return 0


def _lines(path: Path, plan: ReusePlan, chunks: ReusePlan, sides: Sides | None) -> list[str]:
    n = plan.n_wanted
    out = [f"{path}: {plan.n_reused:,} of {phrases.counted(n, 'token')} would be reused"]
    if sides is not None:
        out += [
            f"first difference at token {sides.at:,}",
            f"  held    {json.dumps(sides.held, ensure_ascii=True)}",
            f"  wanted  {json.dumps(sides.wanted, ensure_ascii=True)}",
        ]
        if sides.n_left_out:
            thoughts = sides.held.lstrip().startswith("<think")
            like = ", as chat templates do with thoughts of earlier answers" if thoughts else ""
            out.append(f"  the prompt leaves {sides.n_left_out:,} held tokens out there{like}")
    for miss in plan.reasons:
        out.append(f"recomputed  {miss.start:,} to {miss.end - 1:,}: {phrases.WHY[miss.reason]}")
    if chunks.n_reused > plan.n_reused:
        out.append(
            f"with --reuse_chunks {chunks.n_reused:,} would be reused, approximate from token "
            f"{chunks.n_exact or 0:,} on"
        )
    return out


def _fields(plan: ReusePlan, chunks: ReusePlan, sides: Sides | None) -> dict[str, Any]:
    return {
        "n_wanted": plan.n_wanted,
        "n_reused": plan.n_reused,
        "n_evaluated": plan.n_evaluated,
        "n_reused_with_chunks": chunks.n_reused,
        "first_difference": sides and dataclasses.asdict(sides),
        "evaluated": [
            {"start": m.start, "end": m.end, "reason": str(m.reason)} for m in plan.reasons
        ],
    }


def _made_by(opened: OpenedSession) -> str | None:
    return (opened.manifest.fingerprint.get("model") or {}).get("tokenizer")


def _has_tokenizer(opened: OpenedSession, tokenizer: Tokenizer) -> bool:
    return _made_by(opened) in (None, tokenizer.digest)


def _check(opened: OpenedSession, tokenizer: Tokenizer, model: str) -> None:
    if not _has_tokenizer(opened, tokenizer):
        said = _made_by(opened)
        raise SessionMismatch(
            f"{opened.path}: its tokenizer is {str(said)[:60]}, that of {model} is "
            f"{tokenizer.digest}; name the model that it was made with by -m"
        )
