"""Names that flags had in former versions, and those that took their place.

An old name is understood for as long as it stands here; a line on standard error names the new one.
"""

from collections.abc import Mapping
from types import MappingProxyType

# By command: old name -> new name.
OLD_NAMES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "batch": {"by_prefix": "group_by_prefix", "n_seq": "n_seq_max"},
        "convert": {"old": "legacy_format"},
        "fit": {"n_seq": "n_seq_max"},
        "verify": {"probe": "check_logits"},
    }
)
