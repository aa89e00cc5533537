"""The families that there are, and the spec of a decoder from the header of its files."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from kvrt.errors import BadConfig, BadModelFile, UnsupportedModel
from kvrt_models import families
from kvrt_models.families.shared.family import Family, refuse_quantized
from kvrt_models.header import REMEDY, Header, check_known, is_number
from kvrt_models.spec import DecoderSpec

_FILES = [module.name for module in pkgutil.iter_modules(families.__path__) if not module.ispkg]
# Each file of the folder names its families; what stands there is known everywhere.
FAMILIES: tuple[Family, ...] = tuple(
    family
    for name in _FILES
    for family in importlib.import_module(f"{families.__name__}.{name}").FAMILIES
)
_BY_ARCH = {name: f for f in FAMILIES for name in (f.hf, f.gguf, f.text_part) if name}
_FOLDERS = {f.hf: f for f in FAMILIES if f.hf}
_GGUFS = {f.gguf: f for f in FAMILIES if f.gguf}
_TEXT_PARTS = {f.text_part: f for f in FAMILIES if f.text_part}
_WITH_PICTURES = {f.pictures: f.hf for f in FAMILIES if f.pictures}


def family_of(arch: str) -> Family:
    """The family of a spec."""
    return _BY_ARCH[arch]


def spec_from_config(config: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from a Hugging Face config.json, as transformers reads it.

    Raises:
      UnsupportedModel: no known model type, or one that uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another.
    """
    keys = Header(config)
    arch = keys.text("model_type")
    if arch in _WITH_PICTURES:
        raise UnsupportedModel(
            f"model type {arch!r} of config.json has parts for pictures and sound, which are not "
            f"supported; take its text model, of type {_WITH_PICTURES[arch]}"
        )
    check_known(arch, "model type {} of config.json", (*_FOLDERS, *_TEXT_PARTS))
    if arch in _FOLDERS:
        return _FOLDERS[arch].describe(_FOLDERS[arch].header(config, None))
    refuse_quantized(keys)
    family, text = _TEXT_PARTS[arch], keys.inner("text_config")
    text.only("model_type", family.hf)
    described = family.describe(family.header(text.values, None))
    return dataclasses.replace(described, arch=arch)


def spec_from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> DecoderSpec:
    """Reads a spec from GGUF metadata, as llama.cpp reads it.

    Args:
      metadata: key-value pairs of the header.
      tensors: tensor descriptions by name, with a `shape`; says what is tied and what has a bias.

    Raises:
      UnsupportedModel: no known architecture, or one that uses what is unknown here.
      BadModelFile: a key is missing, of the wrong type, or contradicts another or the tensors.
    """
    arch = Header(metadata).text("general.architecture")
    check_known(arch, "architecture {} of this GGUF", tuple(_GGUFS))
    return _GGUFS[arch].describe(_GGUFS[arch].header(metadata, tensors))


def with_freq_factors(of: DecoderSpec, factors: tuple[float, ...]) -> DecoderSpec:
    """The spec with the frequency divisors of a GGUF's `rope_freqs.weight`.

    Raises:
      BadModelFile: a divisor is not a finite number above 0, or there are too many or too few.
    """
    if not all(map(is_number, factors)):
        raise BadModelFile(f"'rope_freqs.weight' must hold finite numbers above 0; {REMEDY}")
    try:
        groups = tuple(
            dataclasses.replace(g, rope=dataclasses.replace(g.rope, freq_factors=factors))
            if g.rope
            else g
            for g in of.groups
        )
    except BadConfig as error:
        raise BadModelFile(f"'rope_freqs.weight' does not fit: {error}; {REMEDY}") from error
    return dataclasses.replace(of, groups=groups)


def folder_notes(config: Mapping[str, Any], of: DecoderSpec) -> tuple[str, ...]:
    """Lines about the description of a folder, for people."""
    family = family_of(of.arch)
    return family.notes(family.header(config, None), of)
