"""Sizes in bytes, as people write and read them."""

import re

from kvrt.errors import UsageError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?) *([kmgt]?)(i?)b?", re.IGNORECASE)


def parse_size(flag: str, text: str) -> int:
    """Bytes of a size like 10GB or 512MiB.

    Raises:
      UsageError: it is none.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{flag} {text}: a size is wanted, like 10GB or 512MiB")
    number, unit, binary = found.groups()
    power = " kmgt".index(unit.lower() or " ")
    return int(float(number) * (1024 if binary else 1000) ** power)


def show_size(n_bytes: float) -> str:
    """Bytes with about three digits: 512 B, 1.05 MB, 12.3 GB."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while n_bytes >= 1000 and len(units) > 1:
        n_bytes /= 1000
        units.pop(0)
    digits = 0 if units[0] == "B" or n_bytes >= 100 else 1 if n_bytes >= 10 else 2
    return f"{n_bytes:,.{digits}f} {units[0]}"
