"""The form of an eight-bit product by its number of tokens: a fixed rule of processor features."""

from pathlib import Path

from kvrt_models.layers.int8 import Forms, Limits

# Features of processors that multiply and add eight-bit integers in one instruction.
_VNNI = frozenset({"avx512_vnni", "avx_vnni"})
# Measured on Zen 4 with jaxlib 0.10.2. `Forms()` was measured on Zen 3, which has no VNNI.
_WITH_VNNI = Forms(whole=((64, "int8"), (1 << 30, "f32")), pieces=((32, "int8"), (1 << 30, "f32")))


def forms_by_processor() -> Forms:
    """The forms of products on this processor; nothing is measured."""
    return _WITH_VNNI if _VNNI & set(_features()) else Forms()


def forms_line(forms: Forms) -> str:
    """One line for people, e.g. "int8 to 22 tokens, then f32; large matrices: always int8"."""
    return f"{_limits_line(forms.whole)}; large matrices: {_limits_line(forms.pieces)}"


def _limits_line(limits: Limits) -> str:
    *parts, (_, last) = limits
    told = [f"{form} to {most}" + ("" if i else " tokens") for i, (most, form) in enumerate(parts)]
    return ", ".join([*told, f"then {last}"]) if told else f"always {last}"


def _features() -> list[str]:
    """Names of the processor's features; none where /proc/cpuinfo is missing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return next((x.partition(":")[2].split() for x in lines if x.startswith("flags")), [])
