"""`kvrt explain`: what a new prompt would reuse of a session, and why not the rest."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.cli import output, prompt, words
from kvrt.cli.head import Head, open_head
from kvrt.cli.session_options import ExplainOptions
from kvrt.errors import SessionMismatch
from kvrt.session import edit
from kvrt.session.reuse import Reuse, plan_reuse
from models import load
from models.tokenizer import Tokenizer

_SHOWN = 12  # tokens of each side


def execute(options: ExplainOptions, given: prompt.Prompt) -> int:
    """Runs the command and returns its exit code.

    Raises:
      BadSession: the session is damaged.
      SessionMismatch: it has another tokenizer.
    """
    assert options.session is not None
    head = open_head(Path(options.session))
    tokenizer = load.open_tokenizer(options.model)
    _check(head, tokenizer, options.model)
    ids = prompt.encode(given, tokenizer, chat=given.chat)
    plan, chunks = (_plan(head, ids, chunks=chunks) for chunks in (False, True))
    sides = _sides(plan, head.held[1], np.asarray(ids, np.int32), tokenizer)
    if options.json:
        output.write_text(json.dumps(_fields(plan, chunks, sides)) + "\n")
    else:
        output.write_text("\n".join(_lines(head.path, plan, chunks, sides)) + "\n")
    return 0


def _plan(head: Head, ids: list[int], *, chunks: bool) -> Reuse:
    found = head.manifest
    lost = [g.lost for g in found.groups]
    earliest = edit.earliest_resume(found.fingerprint, lost, found.held, head.seq_id)
    # Layers that take tokens in at the end alone cannot fill what chunks leave open.
    chunks = chunks and not any(lost) and found.held is None
    n_exact = found.exact.get(head.seq_id)
    return plan_reuse(head.held, ids, chunks=chunks, earliest=earliest, n_exact=n_exact)


@dataclasses.dataclass(frozen=True)
class Sides:
    """The first difference: where, and what stands there."""

    at: int
    held: str
    wanted: str


def _sides(plan: Reuse, held: np.ndarray, wanted: np.ndarray, text: Tokenizer) -> Sides | None:
    at = plan.first_difference
    if at is None:
        return None
    old, new = (text.decode(x[at : at + _SHOWN].tolist()) for x in (held, wanted))
    return Sides(at, old, new)


def _lines(path: Path, plan: Reuse, chunks: Reuse, sides: Sides | None) -> list[str]:
    n = plan.n_wanted
    out = [f"{path}: {plan.n_reused:,} of {n:,} {words.tokens(n)} would be reused"]
    if sides is not None:
        out += [
            f"first difference at token {sides.at:,}",
            f"  held    {json.dumps(sides.held, ensure_ascii=True)}",
            f"  wanted  {json.dumps(sides.wanted, ensure_ascii=True)}",
        ]
    for miss in plan.reasons:
        out.append(f"evaluated  {miss.start:,} to {miss.end - 1:,}: {words.WHY[miss.reason]}")
    if chunks.n_reused > plan.n_reused:
        out.append(
            f"with --reuse_chunks {chunks.n_reused:,} would be reused, approximate from token "
            f"{chunks.n_exact or 0:,} on"
        )
    return out


def _fields(plan: Reuse, chunks: Reuse, sides: Sides | None) -> dict[str, Any]:
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


def _check(head: Head, tokenizer: Tokenizer, model: str) -> None:
    said = (head.manifest.fingerprint.get("model") or {}).get("tokenizer")
    if said is not None and said != tokenizer.digest:
        raise SessionMismatch(
            f"{head.path}: its tokenizer is {str(said)[:60]}, that of {model} {tokenizer.digest}; "
            "name the model that it was made with by -m"
        )
