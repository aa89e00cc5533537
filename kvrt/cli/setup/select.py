"""From flags to sparse reads."""

from kvrt.cli.flags.cache import SelectFlags
from kvrt.errors import BadConfig
from kvrt.options.select import DoubleSparsity, Quest, Select
from kvrt.runtime.heavy_channels import read_channels


def select_config(options: SelectFlags) -> Select | None:
    """Sparse reads as the flags ask for them, or None.

    Raises:
      BadConfig: sizes leave no choice, or a file has no channels.
    """
    if options.select == "none":
        return None
    try:
        if options.select == "quest":
            return Quest(**options.part(Quest))
        assert options.select_channels is not None, "checked with the flags"
        channels, weights = read_channels(options.select_channels)
        return DoubleSparsity(channels=channels, weights=weights, **options.part(DoubleSparsity))
    except BadConfig as error:
        raise BadConfig(f"--select {options.select}: {error}") from error
