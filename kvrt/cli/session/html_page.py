"""A page with what a session holds and the map of its cells; it needs no other file."""

import html
import json
from typing import Any

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


def render(facts: dict[str, Any]) -> str:
    """The page of what `contents.session_facts` gives, with "cells"."""
    title = html.escape(facts["path"])
    out = [_HEAD % title, f"<h1>{title}</h1>"]
    simple = {k: v for k, v in facts.items() if not isinstance(v, (list, dict))}
    simple |= {f"model {k}": v for k, v in facts["model"].items()}
    out.append(_table(("", ""), [(k, v) for k, v in simple.items() if k != "path"]))
    for name in ("sequences", "groups"):
        rows = facts[name]
        if rows:
            out.append(f"<h2>{name}</h2>")
            out.append(_table(list(rows[0]), [list(row.values()) for row in rows]))
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
