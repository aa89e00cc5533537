"""From flags to how an engine serves: its rules, tiers and sessions."""

from collections.abc import Mapping

from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import output
from kvrt.cli.setup.sampling import named_drafter
from kvrt.drafts.drafter import Speculation
from kvrt.drafts.prompt_lookup import PromptLookup
from kvrt.options.engine import EngineConfig, SessionDir
from kvrt.options.serving import Rules, TierConfig


def engine_config(options: BatchOptions, identity: Mapping[str, str]) -> EngineConfig:
    """How an engine serves, as the flags ask for it.

    Args:
      options: of batch.
      identity: of the model.

    Raises:
      BadConfig: a value is none that an engine can have.
    """
    return EngineConfig(
        rules=Rules(**options.part(Rules)),
        # A flag that looks further back is meant for every line.
        n_recent=max(options.n_recent, options.repeat_last_n),
        tiers=None if options.host_cache is None else TierConfig(**options.part(TierConfig)),
        sessions=_sessions(options),
        speculation=_speculation(options),
        identity=identity,
        **options.part(EngineConfig),
    )


def _speculation(options: BatchOptions) -> Speculation | None:
    """Drafts that requests bring to the steps in which they decode; a model is opened later."""
    if options.draft is None:
        return None
    drafter = named_drafter(options.draft) or PromptLookup()
    return Speculation(drafter=drafter, n_draft=options.n_draft)


def _sessions(options: BatchOptions) -> SessionDir | None:
    """The folder that requests begin from."""
    if options.session_dir is None:
        return None
    tell = None if options.quiet else output.note
    return SessionDir(tell=tell, **options.part(SessionDir))
