"""Tokenizers of Hugging Face folders, built here with the library that reads them."""

import json

import pytest
import tiny_vocab
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from kvrt.errors import BadModelFile, BadToken, UnsupportedModel, UsageError
from kvrt_models.tokenizer.encode import tokenizer_from_folder
from kvrt_models.tokenizer.stream import TextStream


def byte_level() -> tokenizers.Tokenizer:
    """The tiny BPE vocabulary as a Hugging Face tokenizer, cut as GPT-2 cuts."""
    metadata = tiny_vocab.metadata("bpe")
    words = metadata["tokenizer.ggml.tokens"][5:]
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def spm() -> tokenizers.Tokenizer:
    """A SentencePiece-like vocabulary as Llama-2 folders have it."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    model = models.BPE(
        {w: i for i, w in enumerate(words)}, [("▁", "a")], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write(path, tokenizer, **files) -> None:
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def bpe_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bpe")
    settings = {"bos_token": None, "eos_token": {"content": "<|im_end|>"}, "chat_template": "T"}
    write(
        path,
        byte_level(),
        tokenizer_config=settings,
        config={"vocab_size": 448, "eos_token_id": 438},
        generation_config={"eos_token_id": [440, 5]},
    )
    return path


@pytest.fixture(scope="module")
def bpe_tokenizer(bpe_folder):
    return tokenizer_from_folder(bpe_folder)


def test_roles_of_a_byte_level_folder(bpe_tokenizer):
    tokenizer = bpe_tokenizer
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (None, 440, False)
    assert tokenizer.eos_ids == {5, 438, 440} and tokenizer.chat_template == "T"
    # Ids up to the embedding's size exist and stand for nothing.
    assert tokenizer.n_vocab == 448 and tokenizer.decode([445, 447]) == ""
    with pytest.raises(BadToken, match="0 to 447"):
        tokenizer.token_bytes(448)


def test_special_tokens_of_a_folder(bpe_tokenizer):
    text = "<|im_start|>a<tool><|im_end|>"
    parsed = bpe_tokenizer.encode(text, parse_special=True)
    plain = bpe_tokenizer.encode(text)
    assert (parsed[0], parsed[-1]) == (439, 440) and bpe_tokenizer.decode(parsed) == "a<tool>"
    assert not {438, 439, 440} & set(plain) and bpe_tokenizer.decode(plain) == text
    assert bpe_tokenizer.encode(text, parse_special=True) == parsed


@given(text=st.text())
def test_byte_level_round_trip_and_stream(bpe_tokenizer, text):
    ids = bpe_tokenizer.encode(text)
    assert bpe_tokenizer.decode(ids) == text
    stream = TextStream(bpe_tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == text


def test_an_ordinary_token_that_is_spelled_like_an_end(tmp_path):
    tokenizer = byte_level()
    tokenizer.add_tokens(["</s>", "<|file_sep|>"])
    tokenizer.add_special_tokens(["<EOT>"])
    write(tmp_path, tokenizer, config={"eos_token_id": 438})
    found = tokenizer_from_folder(tmp_path)
    ends = {found.vocab.texts[i] for i in found.eos_ids}
    assert ends == {"<|endoftext|>", "<|im_end|>", "<|file_sep|>", "<EOT>"}
    assert found.decode(found.encode("a</s>b")) == "a</s>b"
    (tmp_path / "config.json").write_text('{"eos_token_id": 442}')
    found = tokenizer_from_folder(tmp_path)
    assert found.vocab.texts[442] == "</s>" and 442 in found.eos_ids


def test_added_tokens_beyond_the_embedding_are_ignored(tmp_path):
    tokenizer = byte_level()
    n_rows = tokenizer.get_vocab_size()
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.add_tokens(["<sound>"])
    write(tmp_path, tokenizer)
    whole = tokenizer_from_folder(tmp_path)
    found = whole.for_embedding(n_rows)
    assert (whole.n_vocab, found.n_vocab, found.digest) == (n_rows + 2, n_rows, whole.digest)
    assert found.encode("a <image> b") == whole.encode("a <image> b")  # as text
    for text, i in [("a <image>", n_rows), ("a <sound>", n_rows + 1)]:
        with pytest.raises(UsageError, match=rf"has the token '<\w+>', id {i}, .* {n_rows} rows"):
            found.encode(text, parse_special=True)
    with pytest.raises(BadToken):
        found.decode([n_rows])
    with pytest.raises(BadModelFile, match="different models"):
        whole.for_embedding(n_rows - 5)  # a word of the vocabulary


def test_sentencepiece_folder(tmp_path):
    write(tmp_path, spm(), tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer = tokenizer_from_folder(tmp_path)
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, {2})
    ids = tokenizer.encode("a é b")
    assert ids[:2] == [1, 262] and tokenizer.decode(ids) == " a é b"
    assert tokenizer.encode("a", add_special=False) == [262]
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3" and tokenizer.token_bytes(1) == b""


def test_a_text_is_neither_cut_nor_padded_nor_drawn_at_random(tmp_path):
    tokenizer = byte_level()
    texts = ["the cat " * 12, "a"]
    whole = [tokenizer.encode(text).ids for text in texts]
    # Some models are published with the settings they were trained with.
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=16, pad_id=5)
    tokenizer.model.dropout = 0.9
    write(tmp_path, tokenizer)
    assert [len(tokenizer.encode(text).ids) for text in texts] == [16, 16]
    assert [tokenizer_from_folder(tmp_path).encode(text) for text in texts] == whole
    write(tmp_path, byte_level())
    clean = tokenizer_from_folder(tmp_path).digest
    write(tmp_path, tokenizer)
    assert tokenizer_from_folder(tmp_path).digest == clean


def test_templates(tmp_path):
    named = [{"name": "tool", "template": "X"}, {"name": "default", "template": "D"}]
    write(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    assert tokenizer_from_folder(tmp_path).chat_template == "D"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert tokenizer_from_folder(tmp_path).chat_template == "J"


def test_named_templates_without_a_default(tmp_path):
    named = [{"name": name, "template": "X"} for name in ("tool_use", "rag")]
    write(tmp_path, byte_level(), tokenizer_config={"chat_template": named})
    tokenizer = tokenizer_from_folder(tmp_path)
    assert tokenizer.encode("a")
    with pytest.raises(UsageError, match=r"are 'rag', 'tool_use' and none is named 'default'; "):
        assert tokenizer.chat_template
    (tmp_path / "chat_template.jinja").write_text("J")
    assert tokenizer_from_folder(tmp_path).chat_template == "J"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (3, "chat_template is 3; a text, or a list of objects with a name and a template"),
        ({"default": "X"}, "chat_template is an object of 1 keys; a text, or"),
        (["X"], "chat_template is a list of 1; a text, or"),
        ([{"name": ["default"], "template": "X"}], "chat_template is a list of 1; a text, or"),
        ([{"name": "default", "template": ["X"]}], "chat_template is a list of 1; a text, or"),
        ([{"name": "default"}], "chat_template is a list of 1; a text, or"),
        ([{"name": "default", "template": "X"}] * 2, "two chat templates are named 'default'"),
    ],
)
def test_templates_of_wrong_types(value, words, tmp_path):
    write(tmp_path, byte_level(), tokenizer_config={"chat_template": value})
    with pytest.raises(BadModelFile, match=rf"tokenizer_config\.json: {words}"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(BadModelFile, match=r"chat_template\.jinja: not UTF-8 at byte 0"):
        tokenizer_from_folder(tmp_path)


def test_missing_and_damaged_files(tmp_path):
    with pytest.raises(BadModelFile, match=r"tokenizer\.json: missing; save the model with"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadModelFile, match="not JSON"):
        tokenizer_from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadModelFile, match="refused by the tokenizers library"):
        tokenizer_from_folder(tmp_path)


BAD = {
    "json": ({"config": []}, BadModelFile, "config.json: holds no JSON object"),
    "eos": ({"config": {"eos_token_id": 9999}}, BadModelFile, "id 9999 is outside"),
    "bos": ({"tokenizer_config": {"bos_token": "<none>"}}, BadModelFile, "bos_token is '<none>'"),
    "eos type": ({"config": {"eos_token_id": [[1]]}}, BadModelFile, "eos_token_id is a list of 1"),
    "eos flag": (
        {"generation_config": {"eos_token_id": True}},
        BadModelFile,
        "eos_token_id is True, an id or a list of ids is wanted",
    ),
    "bos type": ({"tokenizer_config": {"bos_token": [1]}}, BadModelFile, "bos_token is a list"),
    "size type": ({"config": {"vocab_size": "9"}}, BadModelFile, "'vocab_size' is '9'"),
    "half a character": (
        {"tokenizer_config": {"chat_template": "\ud800"}},
        BadModelFile,
        r"tokenizer_config\.json: not JSON: .*surrogates not allowed",
    ),
    "size": ({"config": {"vocab_size": 10**9}}, BadModelFile, "vocabulary has 1000000000 ids"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_folders(case, tmp_path):
    files, error, words = BAD[case]
    write(tmp_path, byte_level(), **files)
    with pytest.raises(error, match=words):
        tokenizer_from_folder(tmp_path)


def test_a_key_that_stands_twice_and_too_many_objects(tmp_path, monkeypatch):
    # Two readers of such a file may see two models.
    write(tmp_path, byte_level())
    file = tmp_path / "tokenizer.json"
    text = file.read_text()
    file.write_text(text.replace('"normalizer"', '"decoder"', 1))
    with pytest.raises(BadModelFile, match="not JSON: key 'decoder' stands twice"):
        tokenizer_from_folder(tmp_path)
    file.write_text(text)
    monkeypatch.setattr("kvrt_models.hf.json_file.MAX_NESTED", 10)
    with pytest.raises(BadModelFile, match="lists and objects, 10 are allowed"):
        tokenizer_from_folder(tmp_path)


def test_byte_tokens_of_a_folder_that_are_none(tmp_path):
    tokenizer = spm()
    tokenizer.add_tokens(["<0xZZ>"])
    rules = json.loads(tokenizer.to_str())
    rules["model"]["vocab"]["<0xGG>"] = 263
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    read = tokenizer_from_folder(tmp_path)
    assert read.token_bytes(263) == b"<0xGG>" and read.token_bytes(3 + 0xFE) == b"\xfe"
    rules["model"]["vocab"]["<0xGG>"] = 264
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    with pytest.raises(BadModelFile, match="gives the id 264 to two tokens, '<0xGG>' and '<0xZZ>'"):
        tokenizer_from_folder(tmp_path)


def test_unknown_decoder(tmp_path):
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    write(tmp_path, tokenizer)
    with pytest.raises(UnsupportedModel, match=r"decoder \['WordPiece'\]"):
        tokenizer_from_folder(tmp_path)
