"""Chat templates: rendered as Hugging Face renders them, refused when they are hostile."""

import datetime
import resource

import pytest

from kvrt.errors import UsageError
from kvrt_models import chat

HI = [{"role": "user", "content": "Hi"}]
PLAIN = "{% for m in messages %}{{ m.role }}:{{ m['content'] }}\n{% endfor %}"


def render(template, messages=HI, **options):
    return chat.render_template(template, messages, bos="<s>", eos="</s>", **options)


def test_values_and_generation_prompt():
    template = PLAIN + "{{ bos_token }}{{ eos_token }}{% if add_generation_prompt %}>{% endif %}"
    assert render(template) == "user:Hi\n<s></s>>"
    assert render(template, add_generation_prompt=False) == "user:Hi\n<s></s>"


def test_blocks_are_trimmed_and_nothing_is_escaped():
    body = "    {% if true %}\n{{ m.content }}\n    {% endif %}\n"
    template = "{%- for m in messages %}\n" + body + "{% endfor %}"
    assert render(template, [{"role": "user", "content": "<b> & 'é' 🚀"}]) == "<b> & 'é' 🚀\n"


def test_python_methods_helpers_and_json():
    assert render("{{ messages[0].content.strip().upper() }}{{ '  a '.lstrip() }}") == "HIa "
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "Hi"}'
    assert render("{{ {'a': '<é>'} | tojson(indent=2) }}") == '{\n  "a": "<é>"\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.datetime.now().year)
    assert render("{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}") == "2"
    assert (
        render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
        == "01"
    )


def test_what_hugging_faces_renderer_defines():
    marked = "a {%- generation %} {%- set x = 1 %}b{{ x }} {%- endgeneration -%} \nc{{ x }}"
    assert render(marked) == "ab1c"
    assert render("{{ tools is none and documents is none }} {{ tools is iterable }}") == (
        "True False"
    )


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "the model has no chat template"),
        ("", "the model has no chat template"),
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% for %}", "chat template failed: syntax error"),
        ("{{ nothing.at.all }}", "chat template failed: undefined value"),
        ("{% include 'passwd' %}", "chat template failed: template not found"),
        ("{{ messages.__class__.__mro__ }}", "chat template failed: undefined value"),
    ],
)
def test_failures_are_one_line(template, words):
    with pytest.raises(UsageError, match=words) as caught:
        render(template)
    assert "\n" not in str(caught.value)


DOUBLE = (
    "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}"
)
HOSTILE = {
    "multiply": "{{ 'a' * 10**9 }}",
    "range": "{% for i in range(10**8) %}x{% endfor %}",
    "nested loops": "{% for i in range(10000) %}" * 3 + "x" + "{% endfor %}" * 3,
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling string": DOUBLE + "{% endfor %}{{ ns.x }}",
    "doubling list": DOUBLE.replace("'aaaaaaaa'", "[1]").replace("~", "+").replace("40", "60")
    + "{% endfor %}{{ ns.x | length }}",
    "nested list": DOUBLE.replace("'aaaaaaaa'", "[1]").replace("ns.x ~ ns.x", "[ns.x, ns.x]")
    + "{% endfor %}{{ ns.x }}",
    "replace": "{% set x = 'a' * 64 %}" + "{% set x = x | replace('a', x) %}" * 6 + "{{ x }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "format": "{{ '%01000000000d' | format(3) }}",
    "batch": "{{ [1] | batch(1000000000, 1) | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "json": "{{ [1] | tojson(indent=1000000000) }}",
    "brackets": "{{ " + "(" * 100000 + "1" + ")" * 100000 + " }}",
    "captured": "{% set x %}{% for i in range(9999) %}{{ messages }}{% endfor %}{% endset %}"
    "{% for i in range(9999) %}{{ x }}{% endfor %}",
    "long": "{% for i in range(9999) %}" + "{{ messages[0].content * 999 }}" * 3 + "{% endfor %}",
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_are_refused_soon(case):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(UsageError, match="chat template") as caught:
        render(HOSTILE[case])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "\n" not in str(caught.value)
    assert after.ru_utime - before.ru_utime < 1


def test_a_renderer_that_does_not_answer(monkeypatch):
    monkeypatch.setattr(chat, "_WALL_S", 0.001)
    with pytest.raises(UsageError, match="took more than 0 s"):
        render("x")
    monkeypatch.setattr(chat, "_WALL_S", 20.0)
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(UsageError, match="could not be rendered: no answer"):
        render("x")


def test_messages_that_are_no_plain_data():
    with pytest.raises(UsageError, match="not plain data"):
        render("x", [{"role": "user", "content": object()}])


GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
    {%- if messages[0]['content'] is string %}{% set first = messages[0]['content'] + '\n\n' %}
    {%- else %}{% set first = messages[0]['content'][0]['text'] + '\n\n' %}{% endif -%}
    {% set rest = messages[1:] -%}
{% else %}{% set first, rest = '', messages %}{% endif %}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('user and assistant must take turns') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}{{ item['text'] | trim }}{%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""


def test_what_gemmas_template_does():
    # Turns of two names, a system text in the first of them, content in parts.
    system = {"role": "system", "content": "Be brief."}
    said = [*HI, {"role": "assistant", "content": " Hello "}]
    said += [{"role": "user", "content": [{"type": "text", "text": "Bye"}]}]
    assert render(GEMMA, [system, *said]) == (
        "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
        "Hello<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    )
    with pytest.raises(UsageError, match="must take turns"):
        render(GEMMA, HI * 2)


@pytest.mark.model
def test_smollm2_template():
    from kvrt_models import hub
    from kvrt_models.gguf.file import open_gguf
    from kvrt_models.tokenizer.encode import tokenizer_from_gguf

    tokenizer = tokenizer_from_gguf(open_gguf(hub.resolve("smollm2-135m", progress=False)).metadata)
    said = chat.render_template(tokenizer.chat_template, HI, bos="<|im_start|>", eos="<|im_end|>")
    assert said == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
