"""What tells two models apart beside their weights."""

import dataclasses
import sys
from pathlib import Path

import pytest

from kvrt_models import load
from kvrt_models.gguf import file as gguf
from kvrt_models.identity import description, identity, tokenizer_digest
from kvrt_models.spec import Experts
from kvrt_models.tokenizer import encode as tokenizer

sys.path.append(str(Path(__file__).parents[1] / "peer"))
import tiny_gguf

HF = Path(__file__).parents[1] / "golden" / "hf"
P = "tokenizer.ggml."


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("identity") / "tiny.gguf"
    return tiny_gguf.write_gguf(path, tiny_gguf.TinyModel(n_layers=1))


def test_an_opened_and_a_loaded_model_are_the_same(model):
    opened = load.open_model(model)
    assert opened.identity == opened.wait().identity
    assert set(opened.identity) == {"name", "arch", "tokenizer", "decoder", "weight_type"}
    assert opened.identity["arch"] == "llama"
    assert opened.identity["tokenizer"] == load.open_tokenizer(model).digest


def changed(metadata, name, change):
    return {**metadata, P + name: change(metadata.get(P + name))}


CHANGES = {
    "a text": ("tokens", lambda x: [*x[:-1], "<|end|>"]),
    "a kind": ("token_type", lambda x: [*list(x)[:-3], 4, *list(x)[-2:]]),
    "the merges": ("merges", lambda x: x[:-1]),
    "the pre-tokenizer": ("pre", lambda x: "smollm"),
    "bos": ("add_bos_token", lambda x: True),
    "eos": ("eos_token_id", lambda x: 5),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES)
def test_a_tokenizer_is_told_by_all_that_cuts_text(model, name, change):
    metadata = dict(gguf.open_gguf(model).metadata)
    digest = tokenizer.tokenizer_from_gguf(metadata).digest
    assert len(digest) == 64
    assert tokenizer.tokenizer_from_gguf(dict(metadata)).digest == digest
    assert tokenizer.tokenizer_from_gguf(changed(metadata, name, change)).digest != digest


def test_a_template_is_part_of_it(model):
    metadata = dict(gguf.open_gguf(model).metadata)
    digest = tokenizer.tokenizer_from_gguf(metadata).digest
    metadata["tokenizer.chat_template"] = "{{ messages }}"
    assert tokenizer.tokenizer_from_gguf(metadata).digest != digest


def test_parts_are_told_apart_by_their_lengths(model):
    vocab = tokenizer.tokenizer_from_gguf(gguf.open_gguf(model).metadata).vocab
    assert tokenizer_digest(vocab, [b"a", b"bc"]) != tokenizer_digest(vocab, [b"ab", b"c"])


def test_a_decoder_is_told_by_what_decides_its_rows(model):
    spec = load.open_model(model).spec
    digest = identity(spec, "t", "f32")["decoder"]
    for change in ({"norm_eps": 1e-6}, {"embed_scale": 2.0}, {"activation": "gelu_tanh"}):
        assert identity(dataclasses.replace(spec, **change), "t", "f32")["decoder"] != digest
    trained = dataclasses.replace(spec, n_ctx_train=7)
    assert identity(trained, "t", "f32")["decoder"] == digest


def test_sessions_of_before_are_found_by_models_of_before():
    """A description says what versions before said of the same model, and nothing more."""
    experts = Experts(layers=(0,), n_experts=4, n_used=2, n_ff=8, scoring="softmax")
    spec = load.open_model(HF / "jamba-experts").spec
    found = description(dataclasses.replace(spec, experts=experts))
    wanted = "arch n_vocab n_embd n_ff n_heads norm_eps tied qkv_bias out_bias ffn_bias qk_norm"
    wanted += " post_norms activation embed_scale logit_cap attn_sinks experts unit_qk_norm"
    assert set(found) == {*wanted.split(), "residual_scale", "logit_divisor", "ssm"}
    wanted = "layers n_experts n_used n_ff scoring bias n_ff_shared"
    assert set(found["experts"]) == set(wanted.split())
    more = dataclasses.replace(experts, n_groups=2, scale=1.5)
    found = description(dataclasses.replace(spec, experts=more, attn_gate=True))
    assert found["attn_gate"] and {"n_groups", "scale"} <= set(found["experts"])
