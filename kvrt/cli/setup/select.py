"""From flags to sparse reads."""

from kvrt.cli.flags.cache import SelectFlags
from kvrt.cli.setup.flag_map import taken
from kvrt.errors import BadConfig
from kvrt.runtime.heavy_channels import read_channels
from kvrt.select_spec import DoubleSparsity, Quest, Select


def select_config(options: SelectFlags) -> Select | None:
    """Sparse reads as the flags ask for them, or None.

    Raises:
      BadConfig: sizes leave no choice, or a file has no channels.
    """
    if options.select == "none":
        return None
    try:
        if options.select == "quest":
            return Quest(**taken("Quest", options))
        assert options.select_channels is not None, "checked with the flags"
        channels, weights = read_channels(options.select_channels)
        return DoubleSparsity(
            channels=channels, weights=weights, **taken("DoubleSparsity", options)
        )
    except BadConfig as error:
        raise BadConfig(f"--select {options.select}: {error}") from error
