"""What `CacheConfig` refuses of what a user chooses: KV dtypes, and limits of checkpoints."""

from typing import Any

from kvrt.errors import BadConfig


def check_checkpoints(config: Any) -> None:
    """Refuses an interval that no step ends at, limits below 0 and limits of nothing.

    Raises:
      BadConfig: the config has one of these.
    """
    n, interval, n_bytes = config.n_checkpoints, config.checkpoint_interval, config.checkpoint_bytes
    _check(n >= 0, f"n_checkpoints is {n}; it must not be negative")
    for name, value in (("checkpoint_interval", interval), ("checkpoint_bytes", n_bytes)):
        _check(value is None or n > 0, f"{name} is {value} without checkpoints; set n_checkpoints")
        _check(value is None or value >= 0, f"{name} is {value}; it must not be negative")
    _check(
        not interval or interval >= config.n_ubatch,
        f"checkpoint_interval is {interval} tokens, a step runs n_ubatch = {config.n_ubatch}; "
        "raise the one or lower the other, or give 0 for the ends of appends alone",
    )


def check_types(name: str, types: Any, known: tuple[str, ...]) -> None:
    """Refuses KV dtypes that are unknown, or none.

    Raises:
      BadConfig: `types` has one.
    """
    _check(isinstance(types, str | tuple) and len(types) > 0, f"{name} is {types!r}; give a type")
    if types == "auto":
        return
    for found in (types,) if isinstance(types, str) else types:
        _check(found in known, f"{name} is {found!r}; one of auto, {', '.join(known)}")


def _check(ok: bool, message: str) -> None:
    if not ok:
        raise BadConfig(message)
