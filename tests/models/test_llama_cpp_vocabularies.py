"""Vocabularies of real models, with the tokens that llama.cpp expects of 47 hard texts each."""

import random
import re

import pytest
import tiny_vocab
from llama_cpp_files import llama_cpp_files

from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.encode import tokenizer_from_gguf
from kvrt_models.tokenizer.pre_tokenizers import PRE_TOKENIZERS

pytestmark = pytest.mark.model

NAMES = (
    "command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 "
    "qwen2 qwen35 refact starcoder"
).split()
# Models that read a text whole and generate none.
ENCODERS = set(
    "bert-bge bert-bge-large jina-v1-en jina-v2-en jina-v2-es jina-v2-de jina-v2-code jina-v5-nano "
    "roberta-bpe modern-bert granite-embed-multi-97m granite-embed-multi-311m".split()
)
SEPARATOR = "\n__ggml_vocab_test__\n"


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_real_vocabularies_equal_those_of_llama_cpp(name):
    path = llama_cpp_files() / "models" / f"ggml-vocab-{name}.gguf"
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_suffix(".gguf.out").read_text().splitlines()
    tokenizer = tokenizer_from_gguf(open_gguf(path).metadata)
    assert len(lines) >= 46
    for text, line in zip(texts, lines, strict=False):  # An empty last text has no separator.
        ids = tokenizer.encode(text, add_special=False)
        assert ids == [int(i) for i in line.split()], text
        # SentencePiece puts a space before a text.
        assert tokenizer.decode(ids) in (text, f" {text}")


def test_each_name_that_the_converter_writes_is_known():
    source = (llama_cpp_files() / "conversion" / "base.py").read_text("utf-8")
    names = set(re.findall(r'^ +res = "([^"]+)"', source, re.MULTILINE))
    assert len(names) > 80
    assert names - PRE_TOKENIZERS.keys() == ENCODERS


# There llama.cpp joins what stands before a number with its first digits; the models do not.
FROM_THE_RIGHT = ("afmoe", "tiny_aya")
# Where words are cut by case it looks at ASCII letters alone and at no combining marks, and not at
# case at all in the latter.
BY_CASE, NOT_THERE = ("gpt-4o", "tekken"), ("kimi-k2", "tiny_aya", "youtu")


@pytest.mark.full
@pytest.mark.parametrize("pre", sorted(n for n, of in PRE_TOKENIZERS.items() if not of.spaced))
def test_each_pre_tokenizer_cuts_as_a_live_llama_cpp(pre, tmp_path):
    from llama_server import Peer

    path = tmp_path / "tiny.gguf"
    tiny_vocab.write_llama(path, tiny_vocab.metadata("bpe") | {"tokenizer.ggml.pre": pre})
    tokenizer = tokenizer_from_gguf(open_gguf(path).metadata)
    by_right, by_case, not_there = (
        PRE_TOKENIZERS[pre] in map(PRE_TOKENIZERS.get, names)
        for names in (FROM_THE_RIGHT, BY_CASE, NOT_THERE)
    )
    rng = random.Random(pre)
    with Peer(path) as peer:
        for _ in range(300):
            text = tiny_vocab.draw_text(rng, ascii_only=by_right or by_case or not_there)
            text = text.replace("\x01", "") + str(rng.randrange(10 ** rng.randrange(1, 12)))
            text = text.lower() if not_there else text
            text = re.sub(r"\d", "", text) if by_right else text
            assert tokenizer.encode(text, add_special=False) == peer.tokenize(text, False), text


@pytest.mark.parametrize("pre", FROM_THE_RIGHT)
def test_digits_are_cut_from_the_right(pre):
    tokenizer = tokenizer_from_gguf(tiny_vocab.metadata("bpe") | {"tokenizer.ggml.pre": pre})
    words = tokenizer.codec._inner._tokenizer.pre_tokenizer.pre_tokenize_str("a 12 1234567 123")
    assert [word.replace("Ġ", " ") for word, _ in words] == (
        ["a", " ", "12", " ", "1", "234", "567", " ", "123"]
    )
