"""A conversation with a real model goes on, turn by turn, as the whole text of it would.

Optimised, as modules of this marker alone are: else products of eight bits take five times longer.
"""

import json

import pytest

from kvrt_models import chat, load
from tests.cli.test_conversation import ids_of, told, written

pytestmark = [pytest.mark.model, pytest.mark.usefixtures("one_layer_a_program")]


def test_a_real_conversation(kvrt, tmp_path, monkeypatch):
    monkeypatch.delenv("KVRT_CACHE")
    path = tmp_path / "a.kv"
    size = ["-c", 512, "--n_ubatch", 32]
    talk = ["run", *size, "--chat", "--session", path, "--temp", 0, "--json", "--quiet"]
    tokenizer = load.open_tokenizer("smollm2-135m")
    system = "You answer in one word."
    first = told(kvrt(*talk, "-n", 40, "--system", system, "-p", "What is the capital of France?"))
    second = told(kvrt(*talk, "-n", 5, "--system", system, "-p", "And of Italy?"))
    third = told(kvrt(*talk, "-n", 5, "-p", "Thanks."))
    said = ["What is the capital of France?", first["text"], "And of Italy?", second["text"]]
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(said)]
    messages += [{"role": "user", "content": "Thanks."}]
    text = chat.render_template(tokenizer.chat_template, messages, bos="", eos="")
    assert written(ids_of(path), tokenizer).startswith(text)
    plain = tmp_path / "all.json"
    plain.write_text(json.dumps(ids_of(path)[: third["n_prompt"]]))
    again = ["run", *size, "--tokens", plain, "-n", 5, "--temp", 0, "--json", "--quiet"]
    assert told(kvrt(*again))["tokens"] == third["tokens"]
