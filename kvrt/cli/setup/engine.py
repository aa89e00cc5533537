"""From flags to how an engine serves: its rules, tiers and sessions."""

from collections.abc import Mapping
from pathlib import Path

from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output
from kvrt.cli.setup.flag_map import taken
from kvrt.cli.setup.sampling import named_drafter
from kvrt.drafts.drafter import Speculation
from kvrt.drafts.prompt_lookup import PromptLookup
from kvrt.serving.config import EngineConfig
from kvrt.serving.offload import TierConfig
from kvrt.serving.scheduling.step_plan import Rules
from kvrt.serving.sessions.folder import SessionDir


def engine_config(options: BatchOptions, identity: Mapping[str, str]) -> EngineConfig:
    """How an engine serves, as the flags ask for it.

    Args:
      options: of batch.
      identity: of the model.

    Raises:
      BadConfig: a value is none that an engine can have.
    """
    return EngineConfig(
        rules=Rules(**taken("Rules", options)),
        # A flag that looks further back is meant for every line.
        n_recent=max(options.n_recent, options.repeat_last_n),
        tiers=_tiers(options),
        sessions=_sessions(options),
        budget_bytes=options.budget_bytes(),
        speculation=_speculation(options),
        identity=identity,
        **taken("EngineConfig", options),
    )


def _tiers(options: BatchOptions) -> TierConfig | None:
    """Where blocks go beyond the cache."""
    n_bytes = options.host_bytes()
    if n_bytes is None:
        return None
    rules = taken("TierConfig", options)
    if options.disk_cache is None:
        return TierConfig(host_bytes=n_bytes, **rules)
    folder = Path(options.disk_cache)
    return TierConfig(host_bytes=n_bytes, disk=folder, disk_bytes=options.disk_bytes(), **rules)


def _speculation(options: BatchOptions) -> Speculation | None:
    """Drafts that requests bring to the steps in which they decode; a model is opened later."""
    if options.draft is None:
        return None
    drafter = named_drafter(options.draft) or PromptLookup()
    return Speculation(drafter=drafter, **taken("Speculation", options))


def _sessions(options: BatchOptions) -> SessionDir | None:
    """The folder that requests begin from."""
    if options.session_dir is None:
        return None
    tell = None if options.quiet else output.note
    return SessionDir(path=Path(options.session_dir), tell=tell)
