"""Every family and RoPE rule against Hugging Face transformers; see tests/golden/hf/README.md."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from models.load import load

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
# Families with recurrent layers: test_recurrent.py runs them without a cache.
FOLDERS = [folder for folder in FOLDERS if not folder.name.startswith(("jamba", "bamba"))]
TOLERANCE = 1e-4
# Rules that choose frequencies by the length of the context come with a short case as well.
BY_LENGTH = ("llama-dynamic", "llama-longrope")
CASES = [(f, "", "write") for f in FOLDERS]
CASES += [(f, "_short", "write") for f in FOLDERS if f.name in BY_LENGTH]
CASES += [pytest.param(f, "", "read", marks=pytest.mark.slow) for f in FOLDERS]
# Uneven parts of one program each; the second and the third end inside a block.
PARTS = (16, 9, 11, 12)


def test_no_family_is_missing():
    names = {folder.name for folder in FOLDERS}
    rules = {"llama-llama3", "llama-linear", "llama-dynamic", "llama-yarn", "llama-longrope"}
    families = {"llama", "llama-tied", "mistral", "mistral-window", "qwen2", "qwen3"}
    families |= {"gemma3", "gemma3-linear"}
    assert names >= rules | families


@pytest.mark.parametrize(("folder", "case", "rope"), CASES, ids=lambda x: getattr(x, "name", x))
def test_logits_are_those_of_transformers(folder, case, rope):
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data[f"tokens{case}"].tolist(), data[f"logits{case}"]
    # Rules by length follow n_ctx here and the length of the sequence in transformers.
    config = CacheConfig(n_ctx=len(tokens), rope=rope, block_size=16, n_ubatch=16)
    runtime = Runtime(load(folder).decoder, config)
    logits, first = [], 0
    while first < len(tokens):
        part = tokens[first : first + PARTS[len(logits)]]
        logits.append(np.asarray(runtime.append(part, out_ids=range(len(part)))))
        first += len(part)
    worst = float(np.abs(np.concatenate(logits) - expected).max())
    print(f"{folder.name}{case} {rope}: largest difference {worst:.1e}")
    assert worst < TOLERANCE
