"""Schemas: where modules and parameters stand, and what is refused."""

import numpy as np
import pytest

from kvrt.errors import UsageError
from kvrt.reuse.schema import lay_out, modules_of, read_request, read_schema

LETTER = """
<schema name="letter">
  You answer.
  <union>
    <module name="polite">Be most polite.</module>
    <module name="short">Be short.</module>
  </union>
  <module name="to">For <parameter name="who" length="3"/>, who is busy.</module>
</schema>
"""


def encode(text):
    """A token a word, by its length: blanks do not count."""
    return [len(word) + 1 for word in text.split()]


def test_modules_stand_behind_each_other_and_choices_at_one_place():
    layout = lay_out(read_schema(LETTER), encode, 0, lead=[1])
    found = {m.name: (m.start, m.end, m.choice) for m in layout.modules}
    assert found == {"": (1, 3, 0), "polite": (3, 6, 0), "short": (3, 5, 1), "to": (6, 14, 0)}
    to = layout.modules[-1]
    assert to.reserved == {"who": (7, 3)}
    assert to.ids.tolist() == [4, 0, 0, 0, 2, 4, 3, 6]
    assert layout.end == 14 and layout.n_choices == 2 and layout.lead == (1,)


def test_a_prompt_names_modules_and_fills_parameters():
    wanted = read_request("<prompt><to who='the mayor'/><short/>\n Thank them. </prompt>")
    assert wanted.modules == ("to", "short") and wanted.text == "Thank them."
    assert wanted.arguments == {("to", "who"): "the mayor"}
    layout = lay_out(read_schema(LETTER), encode, 0)
    assert [m.name for m in modules_of(layout, wanted.modules)] == ["", "short", "to"]


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ("<schema><module name='a'>x</schema>", "is no XML"),
        ("<plan/>", "<plan> where a <schema>"),
        ("<schema>text</schema>", "has no module"),
        ("<schema><module>x</module></schema>", "is named ''"),
        ("<schema><module name='a b'>x</module></schema>", "is named 'a b'"),
        ("<schema><module name='a'>x</module><module name='a'>y</module></schema>", "two modules"),
        ("<schema><union>x<module name='a'>x</module></union></schema>", "modules alone"),
        ("<schema><modul name='a'>x</modul></schema>", "<modul> in a schema"),
        ("<schema><module name='a'><b/></module></schema>", "<b> in module 'a'"),
        ("<schema><module name='a'><parameter name='p'/></module></schema>", "length ''"),
        (
            "<schema><module name='a'><parameter name='p' length='0'/></module></schema>",
            "how many tokens",
        ),
        (
            "<schema><module name='a'><parameter name='p' length='1'/>"
            "<parameter name='p' length='2'/></module></schema>",
            "two parameters",
        ),
    ],
)
def test_what_is_no_schema_is_refused(schema, said):
    with pytest.raises(UsageError, match=said):
        read_schema(schema)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("Hello", "is no XML"),
        ("<prompt>before <a/> behind</prompt>", "'before' stands before a module"),
        ("<prompt><a>inside</a> behind</prompt>", "arguments are attributes"),
    ],
)
def test_what_is_no_prompt_is_refused(prompt, said):
    with pytest.raises(UsageError, match=said):
        read_request(prompt)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["other"], "no module 'other'; the schema has polite, short, to"),
        (["to", "to"], "named twice"),
        (["polite", "short"], "are of one union"),
    ],
)
def test_what_cannot_be_served_is_refused(names, said):
    layout = lay_out(read_schema(LETTER), encode, 0)
    with pytest.raises(UsageError, match=said):
        modules_of(layout, names)


def test_a_module_without_a_token_is_refused():
    with pytest.raises(UsageError, match="'a' has no token"):
        lay_out(read_schema("<schema><module name='a'> </module></schema>"), encode, 0)


def test_tokens_of_a_module_are_those_of_it_alone():
    layout = lay_out(read_schema(LETTER), encode, 9)
    assert all(m.ids.dtype == np.int32 for m in layout.modules)
    assert lay_out(read_schema(LETTER), encode, 9, [5]).end == layout.end + 1
