"""What identifies a model beside its weights: digests of its tokenizer and of its description."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from kvrt_models.spec import DecoderSpec
from kvrt_models.tokenizer.vocab import Vocab, ordinary_ends
from kvrt_models.weights.types import WeightType

# Of a description, what changes no key or value: the trained length, and the attention layers,
# which a session file describes by themselves.
_LEFT_OUT = ("n_ctx_train", "groups")
# What a description says only where it differs from this: sessions of before know nothing of it.
_LATER = {
    **{"attn_gate": False, "latent": None, "layer_inputs": None, "unit_v_norm": False},
    **{"v_of_k": (), "layer_scale": False, "n_ff_readers": 0, "producers": ()},
    **{"altup": None, "laurel_rank": 0, "ffn_cutoffs": ()},
    **{"layer_heads": (), "layer_ff": ()},
}
_LATER_OF_LATENTS = {"indexer": None}
_LATER_OF_EXPERTS = {
    **{"shared_gate": False, "choice_bias": False, "beside": False},
    **{"scale": 1.0, "n_groups": 1, "n_groups_used": 1},
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
    return {
        "name": name,
        "arch": spec.arch,
        "tokenizer": tokenizer,
        "decoder": _decoder_digest(spec),
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


def _decoder_digest(spec: DecoderSpec) -> str:
    return hashlib.sha256(json.dumps(description(spec), sort_keys=True).encode()).hexdigest()


def description(spec: DecoderSpec) -> dict[str, Any]:
    """What the digest of a decoder is of."""
    fields = dataclasses.asdict(spec)
    for name in _LEFT_OUT:
        del fields[name]
    fields = _without(fields, _LATER)
    if fields.get("latent"):
        fields["latent"] = _without(fields["latent"], _LATER_OF_LATENTS)
    if fields["experts"] is not None:
        fields["experts"] = _without(fields["experts"], _LATER_OF_EXPERTS)
    return fields


def _without(fields: dict[str, Any], unsaid: dict[str, Any]) -> dict[str, Any]:
    """Fields but for those that have the value by which they say nothing."""
    return {k: x for k, x in fields.items() if k not in unsaid or x != unsaid[k]}
