"""Pictures of figures, by matplotlib (extra [viz])."""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from kvrt.errors import UsageError


def check_viz() -> None:
    """Refuses to draw where matplotlib is missing.

    Raises:
      UsageError: it is.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("pictures are drawn by matplotlib; pip install 'kvrt[viz]'")


@contextlib.contextmanager
def panels(path: str, n_down: int = 1, n_across: int = 1, **how: Any) -> Iterator[tuple[Any, Any]]:
    """Yields a figure and its axes `[n_down, n_across]`, and writes it when the body has drawn.

    Raises:
      UsageError: matplotlib is missing.
    """
    check_viz()
    import matplotlib  # pyright: ignore[reportMissingImports]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

    figure, axes = pyplot.subplots(n_down, n_across, squeeze=False, **how)
    yield figure, axes
    figure.savefig(path, dpi=110, bbox_inches="tight")
