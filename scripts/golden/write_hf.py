r"""Writes tests/golden/hf and tests/golden/rope_hf.json: what Hugging Face transformers computes.

Tiny models with random weights, their logits for one prompt, and the frequencies of RoPE rules at
real sizes. Needs the extra `golden`; takes a minute on a laptop, without a network:

    pip install 'kvrt[golden]'
    python -m scripts.golden.write_hf --out=tests/golden
"""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from absl import app, flags, logging
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from scripts._lib import commands
from scripts.golden.hf_cases import CASES, FAR, NEAR, ROPE_CASES, Case
from scripts.golden.hf_gemma import NEWER_GEMMAS
from scripts.golden.hf_indexed import INDEXED
from scripts.golden.hf_recurrent import RECURRENT

_OUT = flags.DEFINE_string("out", "tests/golden", "Folder that holds hf/ and rope_hf.json.")
_SEED = flags.DEFINE_integer("seed", 20250607, "Seed of weights and prompts.", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "Tiny models to write; all where none is named.")

N_TOKENS = 48
N_SHORT = 24
MIN_EFFECT = 0.05
NUDGE = 1e-5
# Weights whose products are wide: what makes scores, and what begins and ends a model.
_WIDE = ("q_proj", "k_proj", "embed_tokens", "lm_head", "q_b_proj", "kv_a_proj", "kv_b_proj")


def _config(case: Case, changes: dict[str, Any]) -> transformers.PreTrainedConfig:
    values = {
        "vocab_size": 256,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_parameters": {"rope_theta": 1e4, **(case.rope or {"rope_type": "default"})},
        **case.config,
        **changes,
    }
    for key in ("head_dim", "rope_parameters"):
        if values[key] is None:
            del values[key]
    made = getattr(transformers, f"{case.arch}Config")(**values)
    made._attn_implementation = "eager"
    return made


def _model(case: Case, changes: dict[str, Any], seed: int) -> transformers.PreTrainedModel:
    """A float32 model whose attention is neither uniform nor one peak: scores deviate by 3."""
    model = transformers.AutoModelForCausalLM.from_config(
        _config(case, changes), dtype=torch.float32, attn_implementation="eager"
    ).eval()
    rng = np.random.default_rng(seed)
    less_one = case.arch.startswith(("Gemma2", "Gemma3Text", "Qwen3Next"))
    unscaled = case.arch.startswith(("Gemma3n", "Gemma4"))
    for name, weight in sorted(model.named_parameters()):
        if name.endswith("A_log"):  # some states forget at once, some hardly in the whole prompt
            values = rng.uniform(-4.0, 1.0, weight.shape)
        elif name.endswith("bias"):
            values = rng.normal(0.0, 0.5, weight.shape)
        elif name.endswith("sinks"):
            values = rng.normal(2.0, 2.0, weight.shape)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            values = rng.uniform(1.0, 2.5, weight.shape) * (0.5 if unscaled else 1.0)
        elif weight.ndim == 1:
            values = rng.uniform(0.5, 1.5, weight.shape)
        else:
            wide = any(part in name for part in _WIDE)
            deviation = (1.7 if wide else 0.57) / weight.shape[1] ** 0.5
            values = rng.normal(0.0, deviation, weight.shape)
        gated = name.endswith("linear_attn.norm.weight")
        if less_one and name.endswith("norm.weight") and not gated:
            values = values - 1.0
        weight.data.copy_(torch.from_numpy(values.astype(np.float32)))
    for name, bias in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):  # it moves choices, and weighs nothing
            bias.data.copy_(torch.from_numpy(rng.normal(0.0, 0.2, bias.shape).astype(np.float32)))
        elif name.endswith("layer_scalar"):
            bias.data.fill_(rng.uniform(0.6, 1.4))
    return model


def _logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        ids = torch.from_numpy(tokens)[None]
        return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


def _chosen(model: transformers.PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Which tokens each query reads, `chosen` bool[layers, queries, tokens], with an indexer."""
    found: list[np.ndarray] = []

    def see(_: Any, __: Any, indices: torch.Tensor) -> None:
        at, n = indices[0].long(), len(tokens)
        chosen = torch.zeros(n, n, dtype=torch.bool).scatter(1, at, True)
        found.append((chosen & torch.ones(n, n, dtype=torch.bool).tril()).numpy())

    indexers = [x for name, x in model.named_modules() if name.endswith("indexer")]
    handles = [x.register_forward_hook(see) for x in indexers]
    _logits(model, tokens)
    for handle in handles:
        handle.remove()
    return {"chosen": np.stack(found)} if found else {}


def _save_config(folder: Path, case: Case, model: transformers.PreTrainedModel) -> None:
    model.config.save_pretrained(folder)
    if not case.old_form:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rules = config.pop("rope_parameters")
    if NEAR in rules:
        config["rope_local_base_freq"] = rules[NEAR]["rope_theta"]
        rules = rules[FAR]
    if case.arch.startswith("Gemma"):
        del config["layer_types"]
    config["rope_theta"] = rules.pop("rope_theta")
    plain = rules["rope_type"] == "default"
    config["rope_scaling"] = None if plain else rules
    if rules["rope_type"] == "linear":  # the oldest files call it type
        rules["type"] = rules.pop("rope_type")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _save_weights(folder: Path, model: transformers.PreTrainedModel) -> None:
    # As transformers writes them, which for some families is not how it keeps them: experts apart.
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        tensors = load_file(Path(written) / "model.safetensors")
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it to its owner alone


def _save_tokenizer(folder: Path) -> None:
    """One token for each byte, so that the folder loads as a whole model."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"), pretty=False)


def _write_case(folder: Path, case: Case, seed: int) -> None:
    """Saves one model and its logits, and checks that the files alone give the same logits."""
    folder.mkdir(parents=True, exist_ok=True)
    model = _model(case, {}, seed)
    tokens = np.random.default_rng(seed + 1).integers(0, 256, N_TOKENS, dtype=np.int64)
    expected = {"tokens": tokens, "logits": _logits(model, tokens)}
    if case.by_length:
        expected |= {"tokens_short": tokens[:N_SHORT]}
        expected |= {"logits_short": _logits(_model(case, {}, seed), tokens[:N_SHORT])}
    expected |= _chosen(model, tokens)
    if "chosen" in expected:
        # Scores that choose nearly alike would make a test of rounding.
        nudged = copy.deepcopy(model)
        nudged.get_input_embeddings().weight.data.add_(torch.randn(256, 1), alpha=NUDGE)
        if not np.array_equal(expected["chosen"], _chosen(nudged, tokens)["chosen"]):
            raise AssertionError(f"{folder.name}: a nudge changes what is chosen; change the seed")
    _save_config(folder, case, model)
    _save_weights(folder, model)
    _save_tokenizer(folder)
    np.savez_compressed(folder / "expected.npz", **expected)

    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    np.testing.assert_array_equal(_logits(loaded, tokens), expected["logits"])
    for change in case.without:
        other = _logits(_model(case, change, seed), tokens)
        effect = np.abs(other - expected["logits"]).max()
        logging.info("%s: with %s logits move by %.2f", folder.name, change, effect)
        if effect < MIN_EFFECT:
            raise AssertionError(f"{folder.name} hardly depends on {change}: {effect}")


def _rope_case(case: dict[str, Any]) -> dict[str, Any]:
    config = transformers.LlamaConfig(
        head_dim=case["head_dim"],
        max_position_embeddings=case["max_position_embeddings"],
        rope_parameters=dict(case["rule"]),
    )
    n_ctx = case.get("n_ctx", case["max_position_embeddings"])
    compute = ROPE_INIT_FUNCTIONS[case["rule"]["rope_type"]]
    freqs, factor = compute(config, torch.device("cpu"), seq_len=n_ctx)
    return {
        **case,
        "n_ctx": n_ctx,
        "attention_factor": float(factor),
        "frequencies": [float(f) for f in freqs.double()],
    }


def _readme(names: Sequence[str], seed: int) -> str:
    rows = "\n".join(f"- `{name}`" for name in names)
    return f"""# Logits of Hugging Face transformers

Written by `python -m scripts.golden.write_hf` with transformers {transformers.__version__}, torch
{torch.__version__}, seed {seed}: tiny models with random float32 weights, eager attention on a CPU.
Nothing here was trained or fetched.

{rows}

Each folder holds `config.json`, `model.safetensors`, `tokenizer.json` (one token a byte) and
`expected.npz`: `tokens` int64[{N_TOKENS}] and `logits` float32[{N_TOKENS}, 256] of one forward.
`llama-dynamic` and `llama-longrope` choose frequencies by length: `logits` holds for a context of
{N_TOKENS} tokens (longrope: any above its original length), `tokens_short` and `logits_short` for
one of {N_SHORT} (at most the original length). Files in the form of before transformers 5, with
`rope_theta` and `rope_scaling`: {", ".join(n for n, c in CASES.items() if c.old_form)}.
`deepseek-v32` has `chosen` too, bool[3, {N_TOKENS}, {N_TOKENS}]: the tokens that each query of each
layer reads by its indexer.

`../rope_hf.json` has frequencies and attention factors of scaling rules at sizes of real models.
"""


def main() -> None:
    out, seed = Path(_OUT.value), _SEED.value
    every = CASES | RECURRENT | NEWER_GEMMAS | INDEXED
    if unknown := set(_ONLY.value) - set(every):
        raise app.UsageError(f"--only names {sorted(unknown)}; cases are {', '.join(every)}")
    # A case keeps its seed as long as new ones come last.
    parts = (0, CASES), (100, RECURRENT), (200, NEWER_GEMMAS), (300, INDEXED)
    for i, (name, case) in [x for n, cases in parts for x in enumerate(cases.items(), n)]:
        if not _ONLY.value or name in _ONLY.value:
            _write_case(out / "hf" / name, case, seed + 10 * i)
    (out / "hf" / "README.md").write_text(_readme(list(every), seed))
    made = {"transformers": transformers.__version__, "cases": [_rope_case(c) for c in ROPE_CASES]}
    (out / "rope_hf.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    commands.run(main)
