"""What identifies a model beside its weights: digests of its tokenizer and of its description."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from kvrt_models.spec import DecoderSpec, Experts, Latent
from kvrt_models.tokenizer.vocab import Vocab, ordinary_ends
from kvrt_models.weights.types import WeightType

# Of a description, what changes no key or value: the trained length, and the attention layers,
# which a session file describes by themselves.
_LEFT_OUT = ("n_ctx_train", "groups")
# What a description always says. Fields that came later are said where they differ from their
# default: sessions of before know nothing of them.
_ALWAYS = {
    DecoderSpec: "post_norms activation embed_scale logit_cap attn_sinks experts unit_qk_norm "
    "residual_scale logit_divisor ssm",
    Latent: "q_rank norm_eps",
    Experts: "bias n_ff_shared",
}


def identity(
    spec: DecoderSpec, tokenizer: str, weights: WeightType, name: str = ""
) -> dict[str, str]:
    """Name, architecture, digests of tokenizer and decoder, and type of the weights.

    Args:
      spec: of the decoder.
      tokenizer: digest of the tokenizer.
      weights: type of the matrices.
      name: for people.
    """
    said = json.dumps(description(spec), sort_keys=True).encode()
    return {
        "name": name,
        "arch": spec.arch,
        "tokenizer": tokenizer,
        "decoder": hashlib.sha256(said).hexdigest(),
        "weight_type": weights,
    }


def tokenizer_digest(vocab: Vocab, rules: Iterable[bytes]) -> str:
    """sha256 of a vocabulary and of what else decides how text is cut, hexadecimal.

    Args:
      vocab: texts, kinds, special ids and template.
      rules: merges, scores, the name of a rule; their order counts.
    """
    hashed = hashlib.sha256(b"kvrt tokenizer 1\0")
    for part in (*_fields(vocab), *rules):
        # With its length, so that no two lists of parts give the same bytes.
        hashed.update(len(part).to_bytes(8, "little"))
        hashed.update(part)
    return hashed.hexdigest()


def _fields(vocab: Vocab) -> Iterable[bytes]:
    """A vocabulary in parts."""
    # These texts were ends once whatever their kind; sessions of then keep their digest.
    ends = sorted(vocab.eos_ids | ordinary_ends(vocab.texts))
    special = [vocab.bos_id, vocab.eos_id, ends, vocab.add_bos, vocab.add_eos, vocab.chat_template]
    yield json.dumps(special).encode()
    yield json.dumps([int(kind) for kind in vocab.kinds]).encode()
    yield json.dumps(list(vocab.texts)).encode()


def description(spec: DecoderSpec) -> dict[str, Any]:
    """What the digest of a decoder is of."""
    fields = _said(spec)
    for name in ("experts", "latent"):
        if fields.get(name):
            fields[name] = _said(getattr(spec, name))
    return {name: x for name, x in fields.items() if name not in _LEFT_OUT}


def _said(of: Any) -> dict[str, Any]:
    """The fields of a part, but for later ones that have their default."""
    values, always = dataclasses.asdict(of), _ALWAYS[type(of)].split()
    usual = {f.name: f.default for f in dataclasses.fields(of) if f.name not in always}
    return {
        name: x for name, x in values.items() if name in always or getattr(of, name) != usual[name]
    }
