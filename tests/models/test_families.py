"""Every family and RoPE rule against Hugging Face transformers; see tests/golden/hf/README.md."""

from pathlib import Path

import numpy as np
import pytest
from gguf.constants import MODEL_ARCH_NAMES
from gguf.tensor_mapping import get_tensor_name_map

from kvrt import CacheConfig, Runtime
from kvrt_models import load
from kvrt_models.layers.tensors import tensors_of
from tests.marks import full, slow

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
TOLERANCE = 1e-4
# In the default suite: attention, recurrences beside it, and latents.
QUICK = ("llama", "bamba", "deepseek-v3")
# Whose last layers only read, and run for those tokens alone whose logits are wanted.
READERS = ("gemma4", "gemma3n")
# Rules that choose frequencies by the length of the context come with a short case as well.
BY_LENGTH = ("llama-dynamic", "llama-longrope")
CASES = [(pytest.param if f.name in QUICK else slow)(f, "", "write") for f in FOLDERS]
CASES += [slow(f, "_short", "write") for f in FOLDERS if f.name in BY_LENGTH]
# Families whose layers differ, or whose feed-forward networks do.
HYBRIDS = ("mistral-window", "gemma2", "gemma3-linear", "gpt-oss", "llama4")
HYBRIDS += ("jamba", "bamba", "qwen3-next", "qwen3-next-experts", "deepseek-v3", "gemma4")
HYBRIDS += ("gemma3n", "kimi-linear", "deepseek-v32")
# Keys that are rotated as they are read: a rule of RoPE each, and a kind of layer.
READ = ("llama", "llama-yarn", "mistral-window", "gemma3", "llama4", "bamba", "qwen3-next")
READ += ("deepseek-v3", "deepseek-v32", "gemma4", "gemma3n", "kimi-linear")
CASES += [
    full(f, "", "read") if f.name in HYBRIDS else slow(f, "", "read")
    for f in FOLDERS
    if f.name in READ
]
# Whose steps of 64 tokens are not those of 16 with more padding: chunks of a recurrence, tokens
# that read a few of their own step, layers that only read.
BY_SIZE = ("qwen3-next", "kimi-linear", "deepseek-v32", "gemma3n")
# What these have beside the others is not the number of tokens.
OTHERS = ("gemma3-linear", "qwen3-next-experts")
IN_CI = [(name, 1) for name in HYBRIDS if name not in OTHERS] + [(name, 64) for name in BY_SIZE]
PIECES = [
    (slow if (name, size) in IN_CI else full)(name, size) for name in HYBRIDS for size in (1, 7, 64)
]
# Uneven parts of one program each; the second and the third end inside a block.
PARTS = (16, 9, 11, 12)


def test_no_family_is_missing():
    names = {folder.name for folder in FOLDERS}
    rules = {"llama-llama3", "llama-linear", "llama-dynamic", "llama-yarn", "llama-longrope"}
    families = {"llama", "llama-tied", "mistral", "mistral-window", "qwen2", "qwen3"}
    families |= {"gemma2", "gemma3", "gemma3-linear", "gpt-oss", "llama4", "llama4-listed"}
    families |= {"deepseek-v2", "deepseek-v3", "deepseek-v3-dense", "deepseek-v32"}
    families |= {"jamba", "jamba-bias", "jamba-experts", "bamba", "bamba-bias"}
    families |= {"qwen3-next", "qwen3-next-experts", "gemma4", "gemma4-wide"}
    families |= {"kimi-linear", "kimi-linear-dense"}
    families |= {"gemma4-experts", "gemma3n", "gemma3n-second"}
    assert names >= rules | families


# What llama.cpp calls the families of folders, where not as in `general.architecture` of ours.
GGUF_ARCHS = {
    **{"mistral": "llama", "gemma3_text": "gemma3", "gemma3n_text": "gemma3n"},
    **{"gemma4_text": "gemma4", "gpt_oss": "gpt-oss", "llama4_text": "llama4"},
    **{"deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "deepseek_v32": "deepseek2"},
    **{"bamba": "granitehybrid", "qwen3_next": "qwen3next", "kimi_linear": "kimi-linear"},
}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tensors_are_those_of_the_file_and_of_the_gguf_package(folder):
    _, source, _ = load._folder(folder)  # refuses a folder that has more, or lacks one
    arch = GGUF_ARCHS.get(source.spec.arch, source.spec.arch)
    known = next(x for x, name in MODEL_ARCH_NAMES.items() if name == arch)
    names, n_found = get_tensor_name_map(known, source.spec.n_layers), 0
    for name, row in tensors_of(source.spec).items():
        if row.make is not None:  # several tensors make it up, or one is several here
            continue
        (called,) = source.called[name]
        assert source.stored[called].shape == row.shape
        found = names.get_name(called, try_suffixes=(".weight", ".bias"))
        assert found in (None, row.gguf, row.gguf.removesuffix(".weight"))
        n_found += found is not None
    assert n_found > 10


@pytest.mark.parametrize(("folder", "case", "rope"), CASES, ids=lambda x: getattr(x, "name", x))
def test_logits_are_those_of_transformers(folder, case, rope):
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data[f"tokens{case}"].tolist(), data[f"logits{case}"]
    # Rules by length follow n_ctx here and the length of the sequence in transformers.
    config = CacheConfig(n_ctx=len(tokens), rope=rope, block_size=16, n_ubatch=16)
    worst = float(np.abs(read(folder, config, tokens, PARTS) - expected).max())
    print(f"{folder.name}{case} {rope}: largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.parametrize(("name", "size"), PIECES)
def test_pieces_of_any_size_give_the_same_logits(name, size):
    """Keys of each kind of layer are rotated as they are read here, and as written above."""
    folder = next(f for f in FOLDERS if f.name == name)
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data["tokens"].tolist(), data["logits"]
    rope = "read" if name in READ else "write"
    config = CacheConfig(n_ctx=64, rope=rope, block_size=8, n_ubatch=64)
    worst = float(np.abs(read(folder, config, tokens, [size] * len(tokens)) - expected).max())
    print(f"{name} in pieces of {size}: largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_layers_that_only_read_run_for_wanted_tokens(name):
    """A prompt in three steps, of which the first has no logits and the others some."""
    folder = next(f for f in FOLDERS if f.name == name)
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data["tokens"].tolist(), data["logits"]
    # Those of the first test, and their programs.
    config = CacheConfig(n_ctx=len(tokens), rope="write", block_size=16, n_ubatch=16)
    runtime = Runtime(load.load(folder).decoder, config)
    found = [runtime.append(tokens[:32], out_ids=[17, 31]), runtime.append(tokens[32:48])]
    wanted = expected[[17, 31, 47]]
    assert float(np.abs(np.concatenate(found) - wanted).max()) < TOLERANCE


def read(folder, config, tokens, parts):
    """Logits of all tokens, read in parts of these sizes as far as they go; ones are decoded."""
    runtime, logits = Runtime(load.load(folder).decoder, config), []
    for size in parts:
        part, tokens = tokens[:size], tokens[size:]
        if size == 1 and part and logits:
            logits.append(np.asarray(runtime.decode({0: part[0]})[0])[None])
        elif part:
            logits.append(np.asarray(runtime.append(part, out_ids=range(len(part)))))
    assert not tokens
    return np.concatenate(logits)
