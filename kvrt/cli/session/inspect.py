"""`kvrt inspect`: what a session holds, from its manifest and its cells."""

import json
from pathlib import Path
from typing import Any

from kvrt.cellcache import history as texts
from kvrt.cli.flags.session_files import InspectOptions
from kvrt.cli.process import output
from kvrt.cli.process.output import printable
from kvrt.cli.report.tables import table
from kvrt.cli.session import contents, html_page
from kvrt.cli.session.open_session import open_existing
from kvrt.files import kinds


def execute(options: InspectOptions) -> int:
    """Runs the command and returns its exit code.

    Raises:
      UsageError: there is no such session.
      BadSession: the session is damaged.
    """
    assert options.session is not None
    opened = open_existing(Path(options.session))
    facts = contents.session_facts(opened)
    if options.cells or options.html:
        facts["cells"] = contents.cell_maps(opened)
    if options.tokens:
        held = sorted(opened.history.pieces)
        facts["tokens"] = {str(s): texts.tokens(opened.history, s).tolist() for s in held}
        if options.model is not None:
            from kvrt_models import load  # late: it imports JAX

            text = load.open_tokenizer(options.model)
            facts["text"] = {s: text.decode(ids) for s, ids in facts["tokens"].items()}
    if options.html is not None:
        kinds.write_whole(options.html, html_page.render(facts).encode(), kinds.PAGE)
    output.write_text(json.dumps(facts) + "\n" if options.json else _tables(facts, options))
    return 0


def _tables(facts: dict[str, Any], options: InspectOptions) -> str:
    simple = [(k, _value(v)) for k, v in facts.items() if not isinstance(v, (list, dict))]
    simple += [(f"model {k}", _value(v)) for k, v in facts["model"].items()]
    out = [table(("", ""), simple)]
    for name in ("sequences", "groups"):
        rows = facts[name]
        if rows:
            heads = list(rows[0])
            out.append(table(heads, [[_value(row[h]) for h in heads] for row in rows]))
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
