"""Tokenizers from GGUF metadata: equal to llama.cpp, exact on bytes, and hard to fool."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import tiny_vocab
from hypothesis import assume, given
from hypothesis import strategies as st

from kvrt.errors import BadModelFile, BadToken, UnsupportedModel, UsageError
from kvrt_models import load
from kvrt_models.gguf.file import open_gguf
from kvrt_models.tokenizer.bpe import byte_alphabet
from kvrt_models.tokenizer.encode import tokenizer_from_gguf
from kvrt_models.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from kvrt_models.tokenizer.vocab import Kind

SMOLLM2 = Path(__file__).parents[1] / "golden" / "smollm2.json"
GEMMA3 = SMOLLM2.with_name("gemma3.json")
TOKENIZERS = {case: tokenizer_from_gguf(tiny_vocab.metadata(case)) for case in tiny_vocab.CASES}


@pytest.mark.parametrize("case", tiny_vocab.CASES)
@pytest.mark.parametrize("mode", ["special", "plain"])
def test_ids_equal_llama_cpp(case, mode):
    golden, special = tiny_vocab.golden(), mode == "special"
    pairs = list(zip(golden["texts"], golden["cases"][case][mode], strict=True))
    if "tekken" in case:
        # llama.cpp approximates tekken's pattern outside ASCII; ours is the model's own.
        pairs = [(text, ids) for text, ids in pairs if text.isascii()]
    assert len(pairs) > 15
    for text, ids in pairs:
        got = TOKENIZERS[case].encode(text, add_special=special, parse_special=special)
        assert got == ids, text


@pytest.mark.parametrize("case", tiny_vocab.CASES)
@given(text=st.text())
def test_decode_gives_the_text_back(case, text):
    assume("    " not in text)  # A user-defined token: the text after it gets a prefix of its own.
    tokenizer = TOKENIZERS[case]
    got = tokenizer.decode(tokenizer.encode(text, add_special=False))
    if "spm" in case:
        # SentencePiece writes spaces as U+2581, so that character comes back as a space.
        text = text.replace("\u2581", " ")
    assert got == (" " + text if case == "spm" and text else text)


def test_tekken_cuts_as_the_models_own_file():
    tokenizer = TOKENIZERS["bpe-tekken"]
    # An upper-case letter outside ASCII belongs to the run of capitals, so the word is one piece.
    assert len(tokenizer.encode(" ÅNGSTRÖM")) == 2  # bos and the word
    assert tokenizer.encode("it's") == tokenizer.encode("it") + tokenizer.encode(
        "'s", add_special=False
    )


def test_control_tokens_only_when_asked_for():
    tokenizer = TOKENIZERS["bpe-smollm"]
    text = "<|im_start|>a<tool><|im_end|>"
    parsed = tokenizer.encode(text, parse_special=True)
    assert parsed[0] == 1 and parsed[-2:] == [3, 2]
    plain = tokenizer.encode(text)
    assert not {0, 1, 2} & set(plain) and 3 in plain
    assert tokenizer.decode(plain) == text and tokenizer.decode(parsed) == "a<tool>"


def test_roles_and_pieces():
    tokenizer = TOKENIZERS["bpe-smollm"]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.add_bos) == (1, 2, False)
    assert tokenizer.eos_ids == {0, 2} and tokenizer.n_vocab == 443
    assert tokenizer.token_bytes(1) == b"" and tokenizer.piece(1) == "<|im_start|>"
    assert tokenizer.piece(3) == "<tool>" and tokenizer.token_bytes(3) == b"<tool>"
    spm = TOKENIZERS["spm"]
    assert spm.add_bos and spm.encode("") == [1]
    turn = tiny_vocab.metadata("spm")["tokenizer.ggml.tokens"].index("<end_of_turn>")
    assert spm.eos_ids == {2, turn}
    assert spm.token_bytes(spm.vocab.texts.index("<0x0A>")) == b"\n"
    assert TOKENIZERS["bpe-llama-bpe"].add_bos and not TOKENIZERS["spm-bare"].add_bos


def test_bos_and_eos_around_the_text():
    tokenizer = TOKENIZERS["bpe-bos-eos"]
    assert tokenizer.encode("") == [1, 2] and tokenizer.encode("", add_special=False) == []


def test_every_byte_round_trips():
    tokenizer = TOKENIZERS["bpe-gpt-2"]
    ids = {bytes([b]): tokenizer.vocab.texts.index(c) for c, b in byte_alphabet().items()}
    assert len(ids) == 256
    for raw, token in ids.items():
        assert tokenizer.token_bytes(token) == raw
    assert tokenizer.decode([ids[b"\xf0"], ids[b"\x9f"]]) == "\ufffd"


def test_known_pre_tokenizers_all_build():
    spaced = tiny_vocab.metadata("spm") | {"tokenizer.ggml.model": "gpt2"}
    spaced["tokenizer.ggml.merges"] = []
    for name, kind in PRE_TOKENIZERS.items():
        metadata = spaced if kind.spaced else tiny_vocab.metadata("bpe")
        metadata = metadata | {"tokenizer.ggml.pre": name}
        tokenizer = tokenizer_from_gguf(metadata)
        assert tokenizer.decode(tokenizer.encode("Ab 12\n", add_special=False)) == "Ab 12\n"


@pytest.mark.parametrize("token", [-1, 443, 10**9])
def test_ids_outside_the_vocabulary(token):
    with pytest.raises(BadToken, match=f"token id {token} is outside the vocabulary, 0 to 442"):
        TOKENIZERS["bpe"].decode([4, token])


def test_text_that_cannot_be_encoded():
    with pytest.raises(UsageError, match=r"not valid Unicode at character 2 \('\\udcff'\)"):
        TOKENIZERS["bpe"].encode("ab\udcff")
    metadata = tiny_vocab.metadata("bpe")
    letter = metadata["tokenizer.ggml.tokens"].index("é")  # the byte 0xE9
    tokens = list(metadata["tokenizer.ggml.tokens"])
    merges = [m for m in metadata["tokenizer.ggml.merges"] if "é" not in m]
    tokens[letter] = "[gone]"
    tokenizer = tokenizer_from_gguf(
        metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges}
    )
    # 青 is E9 9D 92: a lost byte is an error, not a hole in the text.
    with pytest.raises(UsageError, match=r"no token for character '\\u9752' at 3"):
        tokenizer.encode("東京 青い")


def bpe(**change):
    return tiny_vocab.metadata("bpe") | {f"tokenizer.ggml.{k}": v for k, v in change.items()}


TOKENS = tiny_vocab.metadata("bpe")["tokenizer.ggml.tokens"]
BAD = {
    "no model": (bpe(model=None), BadModelFile, "no tokenizer.ggml.model"),
    "unknown model": (bpe(model="t5"), UnsupportedModel, "is 't5'; gpt2, llama and gemma4 are"),
    "unknown pre": (bpe(pre="kimi-k9"), UnsupportedModel, "pre is 'kimi-k9', none of the"),
    "tokens": (bpe(tokens=None), BadModelFile, "tokens: a list of strings is wanted"),
    "token numbers": (bpe(tokens=[1, 2]), BadModelFile, "tokens: a list of strings is wanted"),
    "token twice": (bpe(tokens=[*TOKENS[:-1], "a"]), BadModelFile, "tokens holds 'a' twice"),
    "kinds": (bpe(token_type=[1, 1]), BadModelFile, "token_type: 443 numbers are wanted"),
    "kind text": (bpe(token_type=["a"] * 443), BadModelFile, "token_type: 443 numbers"),
    "bos": (bpe(bos_token_id=443), BadModelFile, "bos_token_id is 443, 0 to 442 is wanted"),
    "eot": (bpe(eot_token_id="2"), BadModelFile, "eot_token_id is '2'"),
    "add_bos": (bpe(add_bos_token=1), BadModelFile, "add_bos_token' is 1, true or false"),
    "bos missing": (
        bpe(add_bos_token=True, bos_token_id=2**32 - 1),
        BadModelFile,
        "asks for a bos or eos token and names none",
    ),
    "merges": (bpe(merges=None), BadModelFile, "merges: a list of strings is wanted"),
    "merge of nothing": (bpe(merges=["a b", "zz y"]), BadModelFile, "is no token"),
    "merge in one": (bpe(merges=["ab"]), BadModelFile, "merge 'ab' joins or makes"),
    "alphabet": (bpe(tokens=[*TOKENS[:-1], "a東"], merges=["a 東"]), BadModelFile, r"'\\u6771'"),
    "template": (
        bpe() | {"tokenizer.chat_template": 3},
        BadModelFile,
        "chat_template' is 3, a string",
    ),
    "scores": (
        tiny_vocab.metadata("spm") | {"tokenizer.ggml.scores": np.zeros(3)},
        BadModelFile,
        "scores: 600 numbers are wanted",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_metadata_is_refused_in_one_line(case):
    metadata, error, words = BAD[case]
    with pytest.raises(error, match=words) as caught:
        tokenizer_from_gguf(metadata)
    assert "\n" not in str(caught.value)


VALUES = [None, True, -1, 2**63, 1e308, float("nan"), "", "a" * 5000, [], ["a"], ["a"] * 10**5]
VALUES += [[["a"]], np.zeros(0), np.zeros(10**5, np.int32), np.array([np.nan]), np.ones(3, bool)]
VALUES += [[np.zeros(2), np.zeros(3)], np.full(443, 1e308), np.full(600, np.inf), [1] * 442 + [""]]
VALUES += [np.full(443, -7), np.full(600, 1e308), {"a": 1}]
KEYS = "model pre tokens merges scores token_type bos_token_id eot_token_id add_bos_token".split()
KEYS += ["add_space_prefix", "remove_extra_whitespaces"]


@pytest.mark.parametrize("case", ["bpe", "spm"])
@pytest.mark.parametrize("name", KEYS)
def test_wrong_types_are_refused_in_one_line(case, name):
    for value in VALUES:
        try:
            tokenizer = tokenizer_from_gguf(
                tiny_vocab.metadata(case) | {f"tokenizer.ggml.{name}": value}
            )
            assert tokenizer.encode("a")
        except (BadModelFile, UnsupportedModel) as error:
            assert "\n" not in str(error) and len(str(error)) < 600


def test_tokens_that_are_too_long():
    with pytest.raises(BadModelFile, match="a token of 5000 characters, 4096 are allowed"):
        tokenizer_from_gguf(bpe(tokens=[*TOKENS[:-1], "a" * 5000]))


def test_bad_byte_token():
    metadata = tiny_vocab.metadata("spm")
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for name in ("<newline>", "<0xZZ>"):
        tokens[metadata["tokenizer.ggml.tokens"].index("<0x0A>")] = name
        with pytest.raises(BadModelFile, match="sentencepiece refuses the vocabulary"):
            tokenizer_from_gguf(metadata | {"tokenizer.ggml.tokens": tokens})


def test_spm_without_unknown_or_byte_tokens():
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["▁", "a", "b", "ab"],
        "tokenizer.ggml.scores": [-1.0, -2.0, -3.0, -0.5],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("ab b") == [0, 3, 0, 2]
    with pytest.raises(UsageError, match="no token for"):
        tokenizer.encode("aé")


def test_spm_tokens_do_not_collide_with_the_names_of_special_ones():
    # Gemma 3 has a token of the character U+0001, and calls its unknown token a control token.
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<s>", "<unk>", "▁", "\x01", "\x010", "0"],
        "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -0.5, -3.0],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_space_prefix": False,
    }
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.encode("\x01\x010 0") == [0, 3, 4, 2, 5]


def test_user_defined_tokens_do_not_overlap_wrongly():
    # The longest is looked for first over the whole text, as llama.cpp does.
    metadata = bpe()
    tokens = [*TOKENS, "<x>", "x>yy"]
    kinds = [*metadata["tokenizer.ggml.token_type"], 4, 4]
    tokenizer = tokenizer_from_gguf(
        metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    )
    assert tokenizer.encode("<x>yy")[-1] == 444
    assert tokenizer.encode("<x>y")[0] == 443


def test_an_ordinary_token_that_is_spelled_like_an_end():
    metadata = tiny_vocab.metadata("spm") | {"tokenizer.ggml.eos_token_id": 3}
    kinds = list(metadata["tokenizer.ggml.token_type"])
    control = tokenizer_from_gguf(metadata)
    kinds[2] = Kind.USER_DEFINED
    ordinary = tokenizer_from_gguf(metadata | {"tokenizer.ggml.token_type": kinds})
    assert (control.eos_ids, ordinary.eos_ids) == ({2, 3}, {3})
    ids = ordinary.encode("a</s>b")
    assert 2 in ids and ordinary.decode(ids) == " a</s> b"
    assert 2 not in control.encode("a</s>b")
    # Sessions of either are the other's: tokens mean the same.
    assert ordinary.digest == control.digest
    # A role that the file names, or a file without kinds, leaves no doubt.
    named = {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.eos_token_id": 2}
    assert 2 in tokenizer_from_gguf(metadata | named).eos_ids
    bare = {k: v for k, v in metadata.items() if not k.endswith(("token_type", "scores"))}
    assert 2 in tokenizer_from_gguf(bare).eos_ids


def test_an_embedding_with_fewer_or_more_rows_than_tokens(tmp_path):
    metadata = tiny_vocab.metadata("bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "<image>"]
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], Kind.CONTROL]
    n = len(metadata["tokenizer.ggml.tokens"])
    for n_rows in (n - 1, n + 5):
        path = tmp_path / f"{n_rows}.gguf"
        tiny_vocab.write_llama(path, metadata, n_rows)
        tokenizer = load.open_model(path).tokenizer
        assert tokenizer.n_vocab == n_rows
        # Each id that can be sampled has a text and a name.
        assert tokenizer.decode(range(n_rows)) and tokenizer.piece(n_rows - 1)
    tiny_vocab.write_llama(path, metadata, n - 20)
    with pytest.raises(BadModelFile, match="different models"):
        load.open_model(path)


@pytest.mark.model
def test_smollm2_golden_and_roles():
    from kvrt_models import chat, hub

    tokenizer = tokenizer_from_gguf(open_gguf(hub.resolve("smollm2-135m", progress=False)).metadata)
    golden = json.loads(SMOLLM2.read_text(encoding="utf-8"))["cases"]["tokenizer"]
    assert tokenizer.add_bos is golden["add_bos"] and tokenizer.n_vocab == 49152
    for text, ids in zip(golden["samples"], golden["tokens"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (1, 2, {0, 2, 4})
    # The vocabulary lacks 21 bytes, U+0004 among them: llama.cpp drops it, here it is an error.
    with pytest.raises(UsageError, match=r"character '\\x04' at 1"):
        tokenizer.encode("a\x04b")
    assert tokenizer.chat_template is not None
    said = chat.render_template(
        tokenizer.chat_template, [{"role": "user", "content": "Hi"}], bos="", eos=""
    )
    ids = tokenizer.encode(said, add_special=False, parse_special=True)
    assert ids.count(1) == 3 and ids.count(2) == 2


@pytest.mark.model
def test_gemma3_golden_and_roles():
    from kvrt_models import hub

    tokenizer = tokenizer_from_gguf(open_gguf(hub.resolve("gemma3-270m", progress=False)).metadata)
    golden = json.loads(GEMMA3.read_text(encoding="utf-8"))["cases"]["tokenizer"]
    assert tokenizer.add_bos is golden["add_bos"] and tokenizer.n_vocab == 262144
    for text, ids in zip(golden["samples"], golden["tokens"], strict=True):
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.eos_ids) == (2, 1, {1, 106})
    assert tokenizer.decode(tokenizer.encode("<s>x</s>")) == "<s>x</s>"
    assert tokenizer.chat_template is None
    turn = "<start_of_turn>user\nHi<end_of_turn>\n"
    ids = tokenizer.encode(turn, add_special=False, parse_special=True)
    assert ids == [105, 2364, 107, 10979, 106, 107]


@pytest.mark.model
@pytest.mark.parametrize(
    "case", ["smollm2-135m", "gemma3-270m", "bpe-smollm", "bpe-qwen2", "bpe-llama-bpe", "spm"]
)
def test_live_llama_cpp_agrees(case, tmp_path):
    from llama_server import Peer

    from kvrt_models import hub

    if case in tiny_vocab.CASES:
        path = tmp_path / "tiny.gguf"
        tiny_vocab.write_llama(path, tiny_vocab.metadata(case))
    else:
        path = hub.resolve(case, progress=False)
    tokenizer = tokenizer_from_gguf(open_gguf(path).metadata)
    rng = random.Random(case)
    with Peer(path) as peer:
        for _ in range(150):
            # Of a SentencePiece text llama.cpp takes </s> for its end, whatever the file says.
            text = tiny_vocab.draw_text(rng).replace("\x01", "").replace("</s>", "</b>")
            for special in (False, True):
                ids = tokenizer.encode(text, add_special=special, parse_special=special)
                assert ids == peer.tokenize(text, special), text
