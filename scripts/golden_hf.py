r"""Writes tests/golden/hf and tests/golden/rope_hf.json: what Hugging Face transformers computes.

Tiny models with random weights, their logits for one prompt, and the frequencies of RoPE rules at
real sizes. Needs the extra `golden`; takes a minute on a laptop, without a network:

    pip install 'kvrt[golden]'
    python scripts/golden_hf.py --out=tests/golden
"""

# The extra is not installed where the code is checked.
# pyright: reportMissingImports=false

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import golden_recurrent
import numpy as np
import torch
import transformers
from absl import app, flags, logging
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_OUT = flags.DEFINE_string("out", "tests/golden", "Folder that holds hf/ and rope_hf.json.")
_SEED = flags.DEFINE_integer("seed", 20250607, "Seed of weights and prompts.", lower_bound=0)
_ONLY = flags.DEFINE_list("only", [], "Tiny models to write; all where none is named.")

N_TOKENS = 48
N_SHORT = 24
MIN_EFFECT = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One tiny model.

    Attributes:
      arch: class name of its configuration, without "Config".
      config: what differs from `_config`.
      rope: rule in transformers' terms, None for the plain one.
      old_form: config.json as before transformers 5, with rope_theta and rope_scaling.
      by_length: the rule depends on the length, so a shorter prompt is recorded too.
      without: configurations of which each must give other logits, or the case would prove nothing.
    """

    arch: str
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    rope: dict[str, Any] | None = None
    old_form: bool = False
    by_length: bool = False
    without: Sequence[dict[str, Any]] = ()


_NO_RULE = ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},)


def _bases(near: float, far: float, **far_rule: Any) -> dict[str, Any]:
    """RoPE of Gemma 3: one base for windowed layers, one and perhaps a rule for full ones."""
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": near},
        "full_attention": {"rope_type": "default", "rope_theta": far, **far_rule},
    }


_NEAR, _FAR = "sliding_attention", "full_attention"
# Heads are wider than the residual by their number, and scores are not scaled by their width.
_GEMMA3 = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 10,
    "sliding_window": 8,
    "tie_word_embeddings": True,
}
# Caps and scores are of one size, or the caps would hardly count.
_GEMMA2 = {
    **_GEMMA3,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 3.0,
}
# Ramps from pair 1.6 to pair 4.0; whole pairs would be 1 and 5.
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
_LLAMA4 = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "intermediate_size_mlp": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "attn_scale": 0.5,
}
CASES = {
    "llama": Case(
        arch="Llama", without=[{"rope_parameters": {"rope_type": "linear", "factor": 2.0}}]
    ),
    "llama-tied": Case(arch="Llama", config={"tie_word_embeddings": True}, old_form=True),
    "llama-llama3": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        old_form=True,
        without=_NO_RULE,
    ),
    "llama-linear": Case(
        arch="Llama",
        rope={"rope_type": "linear", "factor": 4.0},
        old_form=True,
        without=_NO_RULE,
    ),
    "llama-dynamic": Case(
        arch="Llama",
        config={"max_position_embeddings": 32},
        rope={"rope_type": "dynamic", "factor": 4.0},
        by_length=True,
        without=_NO_RULE,
    ),
    "llama-yarn": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 4.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 16,
        },
        without=_NO_RULE,
    ),
    "llama-longrope": Case(
        arch="Llama",
        config={"max_position_embeddings": 128},
        rope={
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
            "long_factor": [1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0],
            "original_max_position_embeddings": 32,
        },
        by_length=True,
        without=_NO_RULE,
    ),
    "mistral": Case(arch="Mistral", config={"sliding_window": None}),
    "mistral-window": Case(
        arch="Mistral", config={"sliding_window": 16}, without=[{"sliding_window": None}]
    ),
    "qwen2": Case(
        arch="Qwen2",
        # No head_dim in its configuration, so the residual is as wide as the heads; tied, for size.
        config={
            "hidden_size": 64,
            "head_dim": None,
            "intermediate_size": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3": Case(arch="Qwen3", old_form=True),
    # Seven layers, so that one is full by the pattern alone, which is all that old files have.
    "gemma3": Case(
        arch="Gemma3Text",
        config={**_GEMMA3, "num_hidden_layers": 7, "rope_parameters": _bases(1e4, 1e6)},
        old_form=True,
        without=[
            {"sliding_window": 48},
            {"query_pre_attn_scalar": 16},
            {"rope_parameters": _bases(1e4, 1e4)},
            {"rope_parameters": _bases(1e6, 1e6)},
        ],
    ),
    "gemma3-linear": Case(
        arch="Gemma3Text",
        config={
            **_GEMMA3,
            "num_hidden_layers": 4,
            "layer_types": [_FAR, _NEAR, _NEAR, _FAR],
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": _bases(1e4, 1e5, rope_type="linear", factor=8.0),
        },
        without=[
            {"sliding_window": 48},
            {"layer_types": [_NEAR, _FAR, _NEAR, _FAR]},
            {"final_logit_softcapping": None},
            {"rope_parameters": _bases(1e4, 1e5)},
        ],
    ),
    "gemma2": Case(
        arch="Gemma2",
        config=_GEMMA2,
        old_form=True,
        without=[
            {"sliding_window": 48},
            {"layer_types": [_FAR, _NEAR, _FAR]},
            {"query_pre_attn_scalar": 16},
            {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None},
        ],
    ),
    # The limit is low enough to be reached by weights of this size.
    "gpt-oss": Case(
        arch="GptOss",
        config={
            "intermediate_size": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 8,
            "swiglu_limit": 0.75,
            "max_position_embeddings": 512,
        },
        rope=_YARN,
        without=[
            {"sliding_window": 48},
            {"layer_types": [_FAR, _NEAR]},
            {"swiglu_limit": 7.0},
            {"swiglu_alpha": 1.0},
            {"num_experts_per_tok": 1},
            {"rope_parameters": {**_YARN, "truncate": True}},
        ],
    ),
    # Three chunked layers with RoPE and a full one without; experts in the second and the fourth.
    "llama4": Case(
        arch="Llama4Text",
        config={
            **_LLAMA4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        without=[
            {"attention_chunk_size": 48},
            {"no_rope_layers": [1, 1, 1, 1]},
            {"layer_types": ["chunked_attention"] * 4},
            {"attn_temperature_tuning": False},
            {"use_qk_norm": False},
            {"num_experts_per_tok": 1},
        ],
    ),
    # Each kind of mask with and without RoPE, experts where a list puts them.
    "llama4-listed": Case(
        arch="Llama4Text",
        config={
            **_LLAMA4,
            "num_hidden_layers": 4,
            "num_local_experts": 3,
            "moe_layers": [0],
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": ["chunked_attention", _FAR, "chunked_attention", _FAR],
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128,
        },
        rope={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
        without=[
            {"attention_chunk_size": 48},
            {"attn_temperature_tuning": False},
            {"use_qk_norm": True},
            *_NO_RULE,
        ],
    ),
}
# Seeds of their own, so that a new case above changes nothing here.
RECURRENT = {name: Case(**case) for name, case in golden_recurrent.CASES.items()}


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
    less_one = case.arch.startswith("Gemma")
    for name, weight in sorted(model.named_parameters()):
        if name.endswith("A_log"):  # some states forget at once, some hardly in the whole prompt
            values = rng.uniform(-4.0, 1.0, weight.shape)
        elif name.endswith("bias"):
            values = rng.normal(0.0, 0.5, weight.shape)
        elif name.endswith("sinks"):
            values = rng.normal(2.0, 2.0, weight.shape)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            values = rng.uniform(1.0, 2.5, weight.shape)
        elif weight.ndim == 1:
            values = rng.uniform(0.5, 1.5, weight.shape)
        else:
            wide = any(part in name for part in ("q_proj", "k_proj", "embed_tokens", "lm_head"))
            deviation = (1.7 if wide else 0.57) / weight.shape[1] ** 0.5
            values = rng.normal(0.0, deviation, weight.shape)
        if less_one and name.endswith("norm.weight"):
            values = values - 1.0
        weight.data.copy_(torch.from_numpy(values.astype(np.float32)))
    return model


def _logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        ids = torch.from_numpy(tokens)[None]
        return model(input_ids=ids, use_cache=False).logits[0].float().numpy()


def _save_config(folder: Path, case: Case, model: transformers.PreTrainedModel) -> None:
    model.config.save_pretrained(folder)
    if not case.old_form:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    rules = config.pop("rope_parameters")
    if _NEAR in rules:
        config["rope_local_base_freq"] = rules[_NEAR]["rope_theta"]
        rules = rules[_FAR]
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


ROPE_CASES = [
    {"head_dim": 128, "max_position_embeddings": 8192, "rule": {"rope_type": "linear",
     "rope_theta": 1e4, "factor": 4.0}},
    {"head_dim": 64, "max_position_embeddings": 131072, "rule": {"rope_type": "llama3",
     "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 8192}},
    {"head_dim": 128, "max_position_embeddings": 4096, "n_ctx": 16384,
     "rule": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {"head_dim": 128, "max_position_embeddings": 4096, "n_ctx": 1024,
     "rule": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    {"head_dim": 128, "max_position_embeddings": 131072, "rule": {"rope_type": "yarn",
     "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}},
    {"head_dim": 64, "max_position_embeddings": 65536, "rule": {"rope_type": "yarn",
     "rope_theta": 1e4, "factor": 16.0, "beta_fast": 16.0, "beta_slow": 2.0,
     "original_max_position_embeddings": 4096}},
    {"head_dim": 64, "max_position_embeddings": 131072, "rule": {"rope_type": "yarn",
     "rope_theta": 1.5e5, "factor": 32.0, "truncate": False,
     "original_max_position_embeddings": 4096}},
    *({"head_dim": 96, "max_position_embeddings": 131072, "n_ctx": n_ctx,
       "rule": {"rope_type": "longrope", "rope_theta": 1e4, "factor": 32.0,
                "short_factor": [1.0 + 0.03125 * i for i in range(48)],
                "long_factor": [1.0 + 1.25 * i for i in range(48)],
                "original_max_position_embeddings": 4096}} for n_ctx in (4096, 8192)),
]  # fmt: skip


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

Written by `python scripts/golden_hf.py` with transformers {transformers.__version__}, torch
{torch.__version__}, seed {seed}: tiny models with random float32 weights, eager attention on a CPU.
Nothing here was trained or fetched.

{rows}

Each folder holds `config.json`, `model.safetensors`, `tokenizer.json` (one token a byte) and
`expected.npz`: `tokens` int64[{N_TOKENS}] and `logits` float32[{N_TOKENS}, 256] of one forward.
`llama-dynamic` and `llama-longrope` choose frequencies by length: `logits` holds for a context of
{N_TOKENS} tokens (longrope: any above its original length), `tokens_short` and `logits_short` for
one of {N_SHORT} (at most the original length). Files in the form of before transformers 5, with
`rope_theta` and `rope_scaling`: {", ".join(n for n, c in CASES.items() if c.old_form)}.

`../rope_hf.json` has frequencies and attention factors of scaling rules at sizes of real models.
"""


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    out, seed = Path(_OUT.value), _SEED.value
    every = CASES | RECURRENT
    if unknown := set(_ONLY.value) - set(every):
        raise app.UsageError(f"--only names {sorted(unknown)}; cases are {', '.join(every)}")
    # A case keeps its seed as long as new ones come last.
    for i, (name, case) in [*enumerate(CASES.items()), *enumerate(RECURRENT.items(), 100)]:
        if not _ONLY.value or name in _ONLY.value:
            _write_case(out / "hf" / name, case, seed + 10 * i)
    (out / "hf" / "README.md").write_text(_readme(list(every), seed))
    made = {"transformers": transformers.__version__, "cases": [_rope_case(c) for c in ROPE_CASES]}
    (out / "rope_hf.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    app.run(main)
