"""Every family and RoPE rule against Hugging Face transformers; see tests/golden/hf/README.md."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from kvrt_models.load import load
from tests.marks import full

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
TOLERANCE = 1e-4
# In the default suite: attention, recurrences beside it, and latents.
QUICK = ("llama", "bamba", "deepseek-v3")
# Whose last layers only read, and run for those tokens alone whose logits are wanted.
READERS = ("gemma4", "gemma3n")
# Rules that choose frequencies by the length of the context come with a short case as well.
BY_LENGTH = ("llama-dynamic", "llama-longrope")
CASES = [
    pytest.param(f, "", "write", marks=[pytest.mark.slow] if f.name not in QUICK else [])
    for f in FOLDERS
]
CASES += [
    pytest.param(f, "_short", "write", marks=pytest.mark.slow)
    for f in FOLDERS
    if f.name in BY_LENGTH
]
READ = ("llama", "llama-yarn", "mistral-window", "gemma3", "llama4", "bamba", "qwen3-next")
READ += ("deepseek-v3", "deepseek-v32", "gemma4", "gemma3n", "kimi-linear")
CASES += [pytest.param(f, "", "read", marks=pytest.mark.slow) for f in FOLDERS if f.name in READ]
# Families whose layers differ, or whose feed-forward networks do.
HYBRIDS = ("mistral-window", "gemma2", "gemma3-linear", "gpt-oss", "llama4")
HYBRIDS += ("jamba", "bamba", "qwen3-next", "qwen3-next-experts", "deepseek-v3", "gemma4")
HYBRIDS += ("gemma3n", "kimi-linear", "deepseek-v32")
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


@pytest.mark.parametrize(("folder", "case", "rope"), CASES, ids=lambda x: getattr(x, "name", x))
def test_logits_are_those_of_transformers(folder, case, rope):
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data[f"tokens{case}"].tolist(), data[f"logits{case}"]
    # Rules by length follow n_ctx here and the length of the sequence in transformers.
    config = CacheConfig(n_ctx=len(tokens), rope=rope, block_size=16, n_ubatch=16)
    worst = float(np.abs(read(folder, config, tokens, PARTS) - expected).max())
    print(f"{folder.name}{case} {rope}: largest difference {worst:.1e}")
    assert worst < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, full(7), 64])
@pytest.mark.parametrize("name", HYBRIDS)
def test_pieces_of_any_size_give_the_same_logits(name, size):
    folder = next(f for f in FOLDERS if f.name == name)
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data["tokens"].tolist(), data["logits"]
    config = CacheConfig(n_ctx=64, block_size=8, n_ubatch=64)
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
    runtime = Runtime(load(folder).decoder, CacheConfig(n_ctx=64, block_size=8, n_ubatch=16))
    found = [runtime.append(tokens[:32], out_ids=[17, 31]), runtime.append(tokens[32:48])]
    wanted = expected[[17, 31, 47]]
    assert float(np.abs(np.concatenate(found) - wanted).max()) < TOLERANCE


def read(folder, config, tokens, parts):
    """Logits of all tokens, read in parts of these sizes as far as they go; ones are decoded."""
    runtime, logits = Runtime(load(folder).decoder, config), []
    for size in parts:
        part, tokens = tokens[:size], tokens[size:]
        if size == 1 and part and logits:
            logits.append(np.asarray(runtime.decode({0: part[0]})[0])[None])
        elif part:
            logits.append(np.asarray(runtime.append(part, out_ids=range(len(part)))))
    assert not tokens
    return np.concatenate(logits)
