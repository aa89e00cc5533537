"""The flags of where blocks go that the device has no room for."""

from kvrt.errors import UsageError
from kvrt.options.option import flag_group, flags_of_config
from kvrt.options.serving import TierConfig


@flag_group
class TierFlags(flags_of_config(TierConfig)):
    """Where blocks go that the device has no room for."""

    def check(self) -> None:
        """Refuses tiers without room, and what says something of tiers where there are none."""
        super().check()
        if self.host_cache is not None:
            return
        if self.disk_cache is not None:
            raise UsageError("--disk_cache takes its blocks from the host; add --host_cache SIZE")
        for name in ("disk_cache_size", "eviction_policy", "always_load"):
            if name in self.given:
                raise UsageError(f"--{name} is for tiers, and there is none; add --host_cache SIZE")
        if getattr(self, "preempt", "") == "swap":
            raise UsageError("--preempt swap offloads to the host; add --host_cache SIZE")
