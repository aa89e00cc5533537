"""Every family and RoPE rule against Hugging Face transformers; see tests/golden/hf/README.md."""

from pathlib import Path

import numpy as np
import pytest

from kvrt import CacheConfig, Runtime
from models.load import load

FOLDERS = sorted(p.parent for p in Path(__file__).parents[1].glob("golden/hf/*/config.json"))
TOLERANCE = 1e-4
# Rules that choose frequencies by the length of the context come with a short case as well.
BY_LENGTH = ("llama-dynamic", "llama-longrope")
CASES = [(f, "", "write") for f in FOLDERS]
CASES += [(f, "_short", "write") for f in FOLDERS if f.name in BY_LENGTH]
# The same frequencies turn cells where keys are kept raw; magnitude and layout are what may differ.
CASES += [(f, "", "read") for f in FOLDERS if f.name in ("llama", "llama-yarn", "llama-longrope")]


def test_no_family_is_missing():
    names = {folder.name for folder in FOLDERS}
    assert {"llama", "llama-tied", "mistral", "mistral-window", "qwen2", "qwen3"} <= names


@pytest.mark.parametrize(("folder", "case", "rope"), CASES, ids=lambda x: getattr(x, "name", x))
def test_logits_are_those_of_transformers(folder, case, rope):
    with np.load(folder / "expected.npz") as data:
        tokens, expected = data[f"tokens{case}"].tolist(), data[f"logits{case}"]
    n = len(tokens)
    config = CacheConfig(n_ctx=n, rope=rope, block_size=16, n_ubatch=12)
    runtime = Runtime(load(folder).decoder, config)
    logits = np.asarray(runtime.append(tokens, out_ids=range(n)))
    worst = float(np.abs(logits - expected).max())
    print(f"{folder.name}{case} {rope}: largest difference {worst:.1e}")
    assert worst < TOLERANCE
