"""Words that only kvrt used stay out of help, public docstrings, docs and scripts' descriptions.

The list is of phrases, not of words: a chat has turns, a table has rows, and so have weights.
`docs/concepts.md` has the words of the field that are used instead.
"""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

from kvrt.cli.commands import COMMANDS
from kvrt.cli.flags.topics import TOPICS
from kvrt.cli.main import main

ROOT = Path(__file__).parent.parent

# Phrase, and what is said instead.
BANNED = {
    # KV cache, cached keys and values, cell, KV dtype
    r"(key|value|cached|kv|empty|recurrent|bf16|f16|f32|int8|quantized) rows": "keys and values",
    r"rows of (types|keys|values|cells|k|v|layers|sequences)\b": "keys, values, cells",
    r"(types?|kinds?) of (key |value |cached )?rows": "KV dtype",
    r"row types?": "KV dtype",
    r"rows (of|in) (the|a|its) cache": "cached keys and values",
    r"rows? (of|for) (a|each) (sequence|cell)": "slot, seq_id, cells",
    r"rows that hold nothing": "fragmentation",
    r"n_rows": "n_seqs",
    # slot, state index
    r"(free|no|a|its|their) rows? in the batch": "slot",
    r"lose (its|their) rows?": "are preempted",
    r"(has|have|got|gets?|given) (a|no) row\b": "is running",
    # rotate, RoPE applied, unrotated
    r"(un)?turned (keys?|when|by|to|at|in|cells)": "rotated, unrotated",
    r"(keys?|rows?|cells) (is|are|was|were|that are) (un)?turned": "rotated, unrotated",
    r"turns? (the |each |all |its )?(keys?|rows)": "rotates keys",
    r"raw keys?": "unrotated keys",
    r"\bkey frames?": "keys rotated at write or at read",
    # Hadamard transform
    r"hadamard turn": "Hadamard transform",
    # quantized, dequantize, scale
    r"(un)?coded (keys?|values?|rows?|cells?|caches?|types?)": "quantized",
    r"(keys?|values?|rows?) (is|are|that are) (un)?coded": "quantized",
    r"(in|of|to|from|into|beside|than) codes\b": "quantized",
    # block table, block list, view
    r"(a|the|their|each|every) sights?\b|sight of (a|the|each)\b": "view",
    # grouped positions
    r"far (positions?|keys?|quer(y|ies)|groups?)\b": "grouped positions",
    # token history
    r"(a|the) sequence's text|text of (a|the|each) sequence|\bn_text\b": "token history",
    # sampling
    r"\bdrawers?\b|drawn tokens?|tokens? (is|are|was|were) drawn|draws? (a|the|one|next) token": (
        "sampled"
    ),
    r"(is|was|are|were) drawn from|drawing (was|is) left|newly drawn": "sampled from",
    # evict, offload, preempt, admit, resume, finish, release
    r"g(i|a)ves? (up|way)\b|given (up|way)\b|giving (up|way)\b": "evict, preempt, release",
    r"g(o|oes|one|oing) on with": "resume, continue",
    r"\buntold\b|(is|are|was|were|been) told\b|what is told|\btells so\b": "output, reported",
    # prefix hit, shared prefix, recomputed
    r"begins? alike|beginning alike": "share a prefix",
    r"what is found": "prefix hit",
    # the rest of the list
    r"same best token": "top-1 agreement",
    r"programs a multiprocessor": "occupancy",
    r"takes? turns|taking turns|turn and turn about|turns of each side": "interleaved runs",
}
PATTERN = re.compile("|".join(f"(?:{phrase})" for phrase in BANNED), re.IGNORECASE)
ROOMS = [p.parent for p in sorted((ROOT / "kvrt").glob("*/__init__.py"))]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCS += [*sorted(ROOT.glob("kvrt/**/README.md")), *sorted(ROOT.glob("models/**/README.md"))]


def found(text: str) -> list[str]:
    """Banned phrases of a text, whose lines may be broken anywhere."""
    return [hit.group(0) for hit in PATTERN.finditer(" ".join(text.split()))]


def test_the_field_s_words_are_not_banned():
    good = (
        "The next turn of a chat; a row of the table, rows of weights; keys are rotated, not raw."
    )
    assert found(good) == []
    assert found("KV\nrows, and keys that\n are coded") == ["KV rows", "keys that are coded"]


@pytest.mark.parametrize("words", [["--help"], *(["help", c.name] for c in COMMANDS)], ids=" ".join)
def test_help_has_the_field_s_words(words, capfd):
    assert main(words) == 0
    text = capfd.readouterr().out
    assert len(text) > 100 and found(text) == []


@pytest.mark.parametrize("topic", sorted(TOPICS))
def test_topics_have_the_field_s_words(topic):
    assert found(TOPICS[topic]) == []


def test_docs_have_the_field_s_words():
    hits = {path: found(path.read_text()) for path in DOCS}
    assert len(hits) > 20 and {path: phrases for path, phrases in hits.items() if phrases} == {}


def public(module) -> dict[str, object]:
    """What a room offers, and the public members of its classes."""
    things = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    for name, thing in list(things.items()):
        if inspect.isclass(thing):
            members = {k: v for k, v in vars(thing).items() if not k.startswith("_")}
            things |= {f"{name}.{k}": v for k, v in members.items() if inspect.getdoc(v)}
    return things


@pytest.mark.parametrize("room", ["kvrt", *(f"kvrt.{folder.name}" for folder in ROOMS)])
def test_public_docstrings_have_the_field_s_words(room):
    module = importlib.import_module(room)
    docs = {name: inspect.getdoc(thing) or "" for name, thing in public(module).items()}
    docs[room] = module.__doc__ or ""
    assert {name: found(text) for name, text in docs.items() if found(text)} == {}


def test_scripts_describe_themselves_in_the_field_s_words():
    hits = {path: phrases_of(path) for path in sorted((ROOT / "scripts").rglob("*.py"))}
    assert len(hits) > 50 and {path: phrases for path, phrases in hits.items() if phrases} == {}


def phrases_of(path):
    """Banned phrases of a script's docstrings and flags."""
    tree = ast.parse(path.read_text())
    kinds = ast.Module | ast.FunctionDef | ast.ClassDef
    docs = [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, kinds)]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    for call in calls:
        if ast.unparse(call.func).startswith("flags.DEFINE"):
            docs.append(" ".join(ast.unparse(a) for a in call.args))
    return [hit for text in docs for hit in found(text)]
