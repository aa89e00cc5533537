"""`kvrt inspect`: facts of a session, from its manifest and its cells, as text, JSON and a page."""

import html
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvrt.cellcache import history as texts
from kvrt.cellcache.history import TokenHistory
from kvrt.cli.flags.session_files import InspectOptions
from kvrt.cli.process import output
from kvrt.cli.process.output import printable
from kvrt.cli.report import phrases
from kvrt.cli.report.tables import signs, table
from kvrt.errors import BadSession
from kvrt.files import kinds
from kvrt.session import OpenedSession, manifest
from kvrt.session.io import open_existing
from kvrt.session.kv_file.frame import PAGE
from kvrt.session.library.stored import bytes_on_disk
from kvrt.session.manifest import Blob, GroupEntry, Manifest

_MAX_CELLS = 1 << 24  # of a map
_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>%s</title>
<style>
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em; max-width: 72em; }
table { border-collapse: collapse; margin: 1em 0; }
td, th { padding: 0.15em 0.8em; text-align: left; border-bottom: 1px solid #ddd; }
td { overflow-wrap: anywhere; }
pre { line-height: 1.1; }
</style>
"""
_SIGNS = "0-9a-z owner, + a later owner, M shared, . empty"


def session_facts(opened: OpenedSession) -> dict[str, Any]:
    """Sizes, model, settings, sequences and groups of a session."""
    found, said = opened.manifest, opened.manifest.fingerprint
    n_file = bytes_on_disk(opened.path)
    n_live = PAGE + _n_bytes(found.blobs) + len(manifest.to_json(found))
    return {
        "path": str(opened.path),
        "kvrt": found.version,
        "n_bytes": n_file,
        "n_row_bytes": sum(_n_bytes(g.blocks) for g in found.groups),
        "n_state_bytes": found.states.n_bytes if found.states else 0,
        # What later saves have replaced, older manifests included.
        "n_waste_bytes": 0 if opened.path.is_dir() else max(n_file - n_live, 0),
        "rope": said.get("rope"),
        "type_k": said.get("type_k"),
        "type_v": said.get("type_v"),
        "self_extend": said.get("self_extend") and str(said.get("self_extend")),
        "policy": found.policy and phrases.named_settings(found.policy),
        "select": found.select and phrases.named_settings(found.select),
        "model": dict(_mapping(said.get("model"))),
        "sequences": [_sequence(s, found, opened.history) for s in sorted(found.n_tokens)],
        "groups": [_group(i, g, said) for i, g in enumerate(found.groups)],
    }


def cell_maps(opened: OpenedSession) -> list[list[str]]:
    """A map of the cells of each group; see `tables.signs`.

    Raises:
      BadSession: there are more than anybody would look at.
    """
    out = []
    for i, group in enumerate(opened.groups):
        n_cells, seqs = group.n_cells, group.seqs
        if n_cells > _MAX_CELLS:
            raise BadSession(f"group {i} has {n_cells:,} cells; a map shows {_MAX_CELLS} at most")
        owners = np.zeros((n_cells, max(seqs.shape[1], 1)), np.uint32)
        owners[group.index] = seqs
        out.append(signs(owners))
    return out


def _sequence(s: int, found: Manifest, held: TokenHistory) -> dict[str, Any]:
    pos = texts.positions(held, s)
    draw = found.draws.get(s)
    return {
        "sequence": s,
        "tokens": found.n_tokens[s],
        "exact": found.exact.get(s, found.n_tokens[s]),
        "pos_min": int(pos[0]) if len(pos) else None,
        "pos_max": int(pos[-1]) if len(pos) else None,
        "logits": s in found.logits,
        "drawn": draw.n_drawn if draw else 0,
        "ga_i": found.ga_i.get(s, 0),
        "policy": _policy(found.policies.get(s)),
    }


def _policy(said: Mapping[str, Any] | None) -> str | None:
    """The policy by position that a run of this sequence takes up; n_keep is --keep and BOS."""
    if not said:
        return None
    return phrases.named_settings({k: v for k, v in said.items() if v is not None})


def _group(i: int, entry: GroupEntry, said: Mapping[str, Any]) -> dict[str, Any]:
    groups = said.get("groups")
    group = _mapping(groups[i]) if isinstance(groups, list) and i < len(groups) else {}
    layers, mask, rope = group.get("layers"), _mapping(group.get("mask")), group.get("rope")
    return {
        "group": i,
        "layers": len(layers) if isinstance(layers, list) else None,
        "kv_heads": group.get("n_kv_heads"),
        "head_dim": group.get("head_dim"),
        "mask": f"{mask['kind']} {mask['size']}" if mask.get("kind", "full") != "full" else "full",
        "rope_base": _mapping(rope).get("base") if rope else None,
        "cells": entry.n_cells,
        "used": entry.n_used,
        "lost": sum(b - a for x in entry.lost.values() for a, b in x),
        "bytes": _n_bytes(entry.blocks),
    }


def _n_bytes(blobs: tuple[Blob, ...]) -> int:
    return sum(b.n_bytes for b in set(blobs))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sections(facts: dict[str, Any]) -> Iterator[tuple[str, list[str], list[list[Any]]]]:
    """Title, heads and rows of each table: of the session, its sequences and its groups."""
    simple = [[k, v] for k, v in facts.items() if not isinstance(v, (list, dict))]
    yield "", ["", ""], simple + [[f"model {k}", v] for k, v in facts["model"].items()]
    for name in ("sequences", "groups"):
        if rows := facts[name]:
            yield name, list(rows[0]), [list(row.values()) for row in rows]


def render(facts: dict[str, Any]) -> str:
    """The page of what `contents.session_facts` gives, with "cells"."""
    title = html.escape(facts["path"])
    out = [_HEAD % title, f"<h1>{title}</h1>"]
    for name, heads, rows in _sections(facts):
        out += [f"<h2>{name}</h2>"] if name else []
        out.append(_table(heads, [row for row in rows if row[0] != "path"]))
    for i, lines in enumerate(facts["cells"]):
        out.append(f"<h2>cells of group {i}</h2>\n<p>{_SIGNS}</p>")
        out.append("<pre>" + html.escape("\n".join(lines)) + "</pre>")
    return "\n".join(out) + "\n"


def _table(heads: Any, rows: Any) -> str:
    lines = ["<table>"]
    if any(heads):
        lines.append("<tr>" + "".join(f"<th>{html.escape(str(h))}</th>" for h in heads) + "</tr>")
    for row in rows:
        lines.append("<tr>" + "".join(f"<td>{_cell(x)}</td>" for x in row) + "</tr>")
    return "\n".join([*lines, "</table>"])


def _cell(value: Any) -> str:
    return html.escape(value if isinstance(value, str) else json.dumps(value))


def execute(options: InspectOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None
    opened = open_existing(Path(options.session))
    facts = session_facts(opened)
    if options.cells or options.html:
        facts["cells"] = cell_maps(opened)
    if options.tokens:
        held = sorted(opened.history.pieces)
        facts["tokens"] = {str(s): texts.tokens(opened.history, s).tolist() for s in held}
        if options.model is not None:
            from kvrt_models import load  # late: it imports JAX

            text = load.open_tokenizer(options.model)
            facts["text"] = {s: text.decode(ids) for s, ids in facts["tokens"].items()}
    if options.html is not None:
        kinds.write_whole(options.html, render(facts).encode(), kinds.PAGE)
    output.write_text(json.dumps(facts) + "\n" if options.json else _tables(facts, options))
    return 0


def _tables(facts: dict[str, Any], options: InspectOptions) -> str:
    out = [
        table(heads, [[_value(x) for x in row] for row in rows])
        for _, heads, rows in _sections(facts)
    ]
    if options.cells:
        for i, lines in enumerate(facts["cells"]):
            out.append(f"cells of group {i}\n" + "\n".join(lines) + "\n")
    for s, ids in facts.get("tokens", {}).items():
        said = facts.get("text", {}).get(s)
        shown = " ".join(map(str, ids)) if said is None else printable(said)
        out.append(f"tokens of sequence {s}\n{shown}\n")
    return "\n".join(out)


def _value(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int):
        return value if isinstance(value, str) else json.dumps(value)
    return f"{value:,}"
