r"""Writes tests/golden/mlx: prompt caches of mlx-lm for the tiny llama of tests/golden/hf.

Each file is named by the layout, the first version of mlx-lm that writes it. Needs mlx-lm, on a CPU
as well; takes seconds, without a network:

    pip install 'mlx[cpu]' mlx-lm==0.32.2
    python -m scripts.golden.write_mlx --name=0.32 --out=tests/golden

With --check it goes on from a prompt cache instead, e.g. one that kvrt wrote, and prints tokens.
"""

# mlx-lm is not installed where the code is checked.
# pyright: reportMissingImports=false

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
from absl import app, flags
from mlx_lm.models import cache, llama

_OUT = flags.DEFINE_string("out", "tests/golden", "Folder that holds hf/ and mlx/.")
_NAME = flags.DEFINE_string("name", "0.32", "Name of the layout, for the file.")
_CHECK = flags.DEFINE_string("check", "", "A prompt cache to go on from instead.")

N_PROMPT, N_PREDICT = 24, 16


def _model(folder: Path) -> llama.Model:
    config = json.loads((folder / "config.json").read_text())
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.load_weights(list(mx.load(str(folder / "model.safetensors")).items()))
    return model


def _step(model: llama.Model, tokens: list[int], held: list[cache.KVCache]) -> np.ndarray:
    return np.array(model(mx.array([tokens]), cache=held)[0, -1])


def _greedy(model: llama.Model, logits: np.ndarray, held: list[cache.KVCache], n: int) -> list[int]:
    tokens = [int(logits.argmax())]
    while len(tokens) < n:
        tokens.append(int(_step(model, tokens[-1:], held).argmax()))
    return tokens


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    out = Path(_OUT.value)
    model = _model(out / "hf" / "llama")
    with np.load(out / "hf" / "llama" / "expected.npz") as data:
        tokens = data["tokens"][: N_PROMPT + 1].tolist()
    path = str(out / "mlx" / f"{_NAME.value}.safetensors")
    if not _CHECK.value:
        held = cache.make_prompt_cache(model)
        _step(model, tokens[:-1], held)
        (out / "mlx").mkdir(exist_ok=True)
        cache.save_prompt_cache(path, held, {"model": "tiny"})
    held = cache.load_prompt_cache(_CHECK.value or path)
    logits = _step(model, tokens[-1:], held)
    greedy = _greedy(model, logits, held, N_PREDICT)
    print(*greedy)
    if not _CHECK.value:
        np.savez_compressed(
            out / "mlx" / "expected.npz",
            tokens=np.array(tokens),
            logits=logits,
            greedy=np.array(greedy),
        )


if __name__ == "__main__":
    app.run(main)
