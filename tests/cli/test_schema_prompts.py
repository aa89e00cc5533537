"""Modules of a schema on the command line: computed once, served to prompts, never overwritten."""

import json

import pytest
from test_mistakes import fails

from kvrt import session

pytestmark = pytest.mark.slow

LETTER = """
<schema name="letter">
  the sand
  <union>
    <module name="polite">the mist on the water is white and still</module>
    <module name="short">the mist</module>
  </union>
  <module name="to">the boat of <parameter name="who" length="6"/> is here</module>
</schema>
"""
PROMPT = "<prompt><polite/><to who='the sea'/>the sky</prompt>"


@pytest.fixture
def schema(tmp_path):
    path = tmp_path / "letter.xml"
    path.write_text(LETTER)
    return path


@pytest.fixture
def modules(kvrt, tiny, schema, tmp_path):
    """A session of all modules."""
    path = tmp_path / "letter.kv"
    done = kvrt("prefill", "-m", tiny, "-c", 256, "--schema", schema, "-o", path)
    assert done.code == 0, done.err
    assert "modules do not see each other" in done.err and "KL " in done.err
    assert "arguments were held a place by" in done.err
    return path


def test_modules_are_served_to_prompts(kvrt, tiny, schema, modules):
    held = modules.read_bytes()
    ask = ["ask", modules, "--schema", schema, "-m", tiny, "-n", 4, "--temp", 0]
    texts = []
    for question in (PROMPT, PROMPT, PROMPT.replace("polite", "short")):
        done = kvrt(*ask, question, "--json")
        assert done.code == 0, done.err
        found = json.loads(done.out)
        texts.append(found["text"])
        assert found["n_prompt"] == found["n_restored"] + found["n_recomputed"]
        (reason,) = found["approximations"]
        assert reason["by"] == "modules" and 0 < reason["from_token"] < found["n_prompt"]
        assert "of modules shared" in done.err and "have not seen each other" in done.err
    assert texts[0] == texts[1]
    assert modules.read_bytes() == held
    # Sequence 0 is the prompts'; each choice of the union has one of its own.
    assert sorted(session.read_manifest(modules).n_tokens) == [1, 2]


def test_mistakes_with_a_schema(kvrt, tiny, schema, modules, tmp_path):
    held = modules.read_bytes()
    ask = ["ask", modules, "--schema", schema, "-m", tiny]
    fails(kvrt(*ask, "Dear"), 2, "stands between <prompt> and </prompt>")
    fails(kvrt(*ask, "<prompt><other/>x</prompt>"), 2, "no module 'other'; the schema has polite")
    fails(kvrt(*ask, "<prompt><polite/><short/>x</prompt>"), 2, "are of one union")
    fails(kvrt(*ask, "<prompt><polite/></prompt>"), 2, "nothing stands behind the modules")
    long = PROMPT.replace("the sea", "the sea " * 9)
    fails(kvrt(*ask, long), 2, "'who' of module 'to' has", "and 6 are reserved")
    fails(kvrt(*ask, PROMPT, "--policy", "context_shift"), 2, "other prompts' as well")
    fails(kvrt(*ask, PROMPT, "--seq", 1), 2, "--schema takes one prompt")
    write = ["prefill", "-m", tiny, "--schema", schema, "-o"]
    fails(kvrt(*write, modules), 1, "is there already and stays as it is")
    fails(kvrt(*write, tmp_path / "x.kv", "-p", "the"), 2, "leave out -p, -f and --tokens")
    fails(kvrt("prefill", "-m", tiny, "--schema", "no.xml", "-o", "x.kv"), 2, "no such file")
    schema.write_text(LETTER.replace("the boat", "a boat"))
    fails(kvrt(*ask, PROMPT), 2, "the schema has changed: encode it again")
    schema.write_text("<schema>the sand</schema>")
    fails(kvrt(*write, tmp_path / "x.kv"), 2, "has no module")
    assert modules.read_bytes() == held and not (tmp_path / "x.kv").exists()
