"""The form of an eight-bit product by its number of tokens: a fixed rule of processor features."""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import xxhash

from kvrt_models.layers.int8 import Forms
from kvrt_models.weights import measured_forms
from kvrt_models.weights.measured_forms import Few

# Tokens up to which a form is taken (Zen 4, jaxlib 0.10.2, 64 inputs a scale); products of more are
# computed with widened weights.
_MOST_TOKENS: Mapping[Few, int] = {"sum": 8, "int8": 4}
# Features with which LLVM makes widening multiply-adds of an integer sum; measured on x86 alone.
_MULTIPLY_ADD = frozenset({"avx2", "avx512bw"})
# Versions of jaxlib whose XLA leaves that sum as it is, from the first to before the second.
_SUMMING = ((0, 10), (0, 13))


def forms_here() -> Forms:
    """The forms of products on this machine: the rule, unless `kvrt doctor` found it slower."""
    return forms_of(measured_forms.kept_fastest(processor()) or few_by_processor())


def few_by_processor() -> Few:
    """The form of few tokens by the rule of processor and jaxlib; nothing is measured."""
    sums = _MULTIPLY_ADD & set(_features()) and _SUMMING[0] <= _jaxlib() < _SUMMING[1]
    return "sum" if sums else "int8"


def forms_of(few: Few) -> Forms:
    """The forms of products, of which those of few tokens take this one."""
    return Forms(limits=((_MOST_TOKENS[few], few), (1 << 30, "f32")))


def processor() -> str:
    """The key of a measurement: features of the processor and the version of jaxlib."""
    said = " ".join([*sorted(_features()), *map(str, _jaxlib())])
    return xxhash.xxh3_128_hexdigest(said.encode())


def forms_line(forms: Forms) -> str:
    """One line for people, e.g. "sum to 8 tokens, then f32"."""
    *parts, (_, last) = forms.limits
    told = [f"{form} to {most}" + ("" if i else " tokens") for i, (most, form) in enumerate(parts)]
    return ", ".join([*told, f"then {last}"]) if told else f"always {last}"


def _jaxlib() -> tuple[int, ...]:
    """The first two numbers of jaxlib's version."""
    return tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))


def _features() -> list[str]:
    """Names of the processor's features; none where /proc/cpuinfo is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((x.partition(":")[2].split() for x in lines if x.startswith("flags")), [])
