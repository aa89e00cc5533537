"""Writes tokenizer-tiny.json: two small vocabularies, and what llama.cpp makes of texts with them.

    python tests/golden/write_tokenizer_tiny.py

Needs the test extra: `xllamacpp` holds the llama.cpp that answers. The vocabularies are trained
here once and stored, since a later version of the libraries could train others.
"""

import io
import json
import random
import sys
import tempfile
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models"))
import tiny_vocab  # noqa: E402
from llama_server import Peer  # noqa: E402

CONTROL, USER_DEFINED, BYTE, UNKNOWN, NORMAL = 3, 4, 6, 2, 1
TRAIN = (
    "The quick brown fox doesn't jump over 1234 lazy dogs; it's 12:30, isn't it?\n"
    "naïve café — 東京 🚀 Straße ÅNGSTRÖM привет  мир   три    пробела\n\n"
    "def f(x):\n    return x**2  # ok\n\tif (a != b && c[0] == '\\n') { x += 3.14159; }\n"
    "WE'RE I'll they've I'd I'm HTTPServer camelCase snake_case don't DON'T\r\n"
)
N_TEXTS = 60


def train_bpe() -> dict:
    """A byte-level BPE vocabulary: all 256 bytes, 244 merges, five special tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TRAIN] * 3, trainer)
    state = json.loads(tokenizer.to_str())["model"]
    words = sorted(state["vocab"], key=state["vocab"].get)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["merges"]]
    special = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    special |= {"<tool>": USER_DEFINED, "    ": USER_DEFINED}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*special, *words],
        "tokenizer.ggml.token_type": [*special.values(), *[NORMAL] * len(words)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def train_spm() -> dict:
    """A SentencePiece BPE vocabulary of 600 tokens with byte fallback."""
    out = io.BytesIO()
    user = {"<tool>": "<tool>", "▁▁▁▁": "    "}  # GGUF writes their spaces as spaces.
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TRAIN.splitlines() * 3),
        model_writer=out,
        model_type="bpe",
        vocab_size=600,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=list(user),
        control_symbols=["<end_of_turn>"],
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=out.getvalue())
    texts, kinds = [], []
    for i in range(model.vocab_size()):
        text = model.id_to_piece(i)
        texts.append(user.get(text, text))
        kinds.append(
            USER_DEFINED
            if text in user
            else UNKNOWN
            if model.is_unknown(i)
            else CONTROL
            if model.is_control(i)
            else BYTE
            if model.is_byte(i)
            else NORMAL
        )
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(len(texts))],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def main() -> None:
    """Trains, asks llama.cpp, writes the file."""
    golden = {"bpe": train_bpe(), "spm": train_spm(), "texts": [], "cases": {}}
    rng = random.Random(0)
    golden["texts"] = ["", " ", TRAIN]
    golden["texts"] += [tiny_vocab.draw_text(rng, ascii_only=i % 3 == 0) for i in range(N_TEXTS)]
    tiny_vocab.GOLDEN.write_text(json.dumps(golden))
    for case in tiny_vocab.CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tiny.gguf"
            tiny_vocab.write_llama(path, tiny_vocab.metadata(case))
            with Peer(path) as peer:
                golden["cases"][case] = {
                    mode: [peer.tokenize(text, special) for text in golden["texts"]]
                    for mode, special in (("special", True), ("plain", False))
                }
    tiny_vocab.GOLDEN.write_text(
        json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
