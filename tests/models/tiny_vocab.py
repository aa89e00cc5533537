"""Tiny vocabularies, and GGUF files around them, for the tests of this folder."""

import functools
import json
import random
from pathlib import Path

import gguf
import numpy as np

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer-tiny.json"
# Name of a case -> vocabulary and the metadata that it sets.
CASES = {
    **{
        f"bpe-{pre}": ("bpe", {"tokenizer.ggml.pre": pre})
        for pre in ("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "tekken", "default")
    },
    "bpe": ("bpe", {}),
    "bpe-bos-eos": (
        "bpe",
        {
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_eos_token": True,
        },
    ),
    "spm": ("spm", {}),
    "spm-bare": (
        "spm",
        {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False},
    ),
}
_ATOMS = [
    *"a the 12 7 's 'T don't naïve é 東京 🚀 👩‍👩‍👧 ٣٤ ½ Ⅷ ſ ß İ привет".split(),  # noqa: RUF001
    *"МИР мир مرحبا ไทย . ... !?".split(),
    *"# $ ^ | ` ~ < = > <|im_start|> <|im_end|> <tool> _ camelCase HTTP ▁ <s> </s> <0x0A>".split(),
    *'x**2 ( ) [0] \\n " – — “ € ™ ʰ ǅ ªº <end_of_turn> <unk>'.split(),  # noqa: RUF001
    *" |  |   |    |\n|\r\n|\t|\u00a0|\u3000|\u2028|\u200b|\x01|\x7f|\x85|\ufeff|\U000e0001".split(
        "|"
    ),
    "e\u0301",
    "नमस्ते",
    "\u0378",
]


@functools.cache
def golden() -> dict:
    """The vocabularies, texts and token ids written by `write_tokenizer_tiny.py`."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def metadata(case: str) -> dict:
    """GGUF metadata of a case."""
    vocab, extra = CASES[case]
    return golden()[vocab] | extra


def draw_text(rng: random.Random, *, ascii_only: bool = False) -> str:
    """A text that is hard on tokenizers: scripts, spaces, marks, special tokens."""
    atoms = [atom for atom in _ATOMS if not ascii_only or atom.isascii()]
    return "".join(rng.choice(atoms) for _ in range(rng.randint(1, 12)))


def write_llama(path: Path, metadata: dict, n_rows: int | None = None) -> None:
    """A llama of one layer with random weights around a vocabulary; `n_rows` of its embedding."""
    n_vocab = n_rows or len(metadata["tokenizer.ggml.tokens"])
    n_embd, n_ff = 32, 64
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(512)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(n_vocab)
    for key, value in metadata.items():
        _add(writer, key, value)
    shapes = {
        "token_embd": (n_vocab, n_embd),
        "output_norm": (n_embd,),
        "output": (n_vocab, n_embd),
        "blk.0.attn_norm": (n_embd,),
        "blk.0.attn_q": (32, n_embd),
        "blk.0.attn_k": (16, n_embd),
        "blk.0.attn_v": (16, n_embd),
        "blk.0.attn_output": (n_embd, 32),
        "blk.0.ffn_norm": (n_embd,),
        "blk.0.ffn_gate": (n_ff, n_embd),
        "blk.0.ffn_up": (n_ff, n_embd),
        "blk.0.ffn_down": (n_embd, n_ff),
    }
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_string(key, value)
