"""`kvrt verify`: whether a session is sound, and whether it fits a model."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvrt import session
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.session_files import VerifyOptions
from kvrt.cli.process import output
from kvrt.cli.report import phrases
from kvrt.cli.session.open_session import check_fits, follow
from kvrt.errors import BadSession, CannotRewind
from kvrt.session import OpenedSession, fingerprint
from kvrt.session.change.damage import find_damage
from kvrt.session.io import open_existing
from kvrt.session.snapshot import Snapshot

if TYPE_CHECKING:
    from kvrt import Runtime


def execute(options: VerifyOptions) -> int:
    """Runs the command and returns its exit code; raises KvrtError."""
    assert options.session is not None
    opened = open_existing(Path(options.session))
    snapshot = session.read(opened)
    if found := find_damage(snapshot):
        raise BadSession(f"{opened.path}: {found}; compute the session again")
    n = sum(opened.manifest.n_tokens.values())
    said = f"{opened.path}: sound, {phrases.counted(n, 'token')}"
    if options.model is not None:
        from kvrt.cli.process import startup  # late: only a model needs JAX

        startup.check_device()
        startup.keep_programs_or_warn()
        with startup.enough_memory():
            runtime = _runtime(options, options.model, opened)
            with opened.naming():
                fingerprint.check_match(snapshot.fingerprint, runtime.fingerprint, convert=False)
            said += f"; fits {options.model}"
            if options.check_logits:
                said += f"; {compare_logits(runtime, snapshot, opened)}"
    if not options.quiet:
        output.write_text(said + "\n")
    return 0


def compare_logits(runtime: "Runtime", snapshot: Snapshot, opened: OpenedSession) -> str:
    """Evaluates the newest token again and says how far its logits are from those saved.

    Raises:
      BadSession: they are not the same.
    """
    with opened.naming():
        runtime.restore(snapshot, {opened.seq_id: 0} if snapshot.seq_ids else None)
    pos, ids = runtime.token_history()
    if opened.seq_id not in snapshot.logits or not len(ids):
        return "no logits to compare: the session was cut or moved after its last step"
    saved = np.asarray(snapshot.logits[opened.seq_id][1])
    try:
        runtime.seq_rm(0, int(pos[-1]))
    except CannotRewind:
        return "windowed or recurrent layers cannot go back one token: not checked"
    if int(np.count_nonzero(pos == pos[-1])) > 1:
        return "the last tokens share a position: not checked"
    new = np.asarray(runtime.append([int(ids[-1])]))[0]
    most = float(np.abs(new - saved).max())
    # Steps of other sizes sum in another order; wrong keys and values move logits by far more.
    limit = 0.05 * max(float(np.abs(saved).max()), 1.0)
    if not most <= limit:
        raise BadSession(
            f"{opened.path}: the logits of the last token differ by {most:.3g} from those saved, "
            f"{limit:.3g} at most is rounding; the cached keys and values are not this model's, "
            "save the session again"
        )
    return f"logits of the last token differ by {most:.3g} at most"


def _runtime(options: VerifyOptions, name: str, opened: OpenedSession) -> "Runtime":
    """A runtime like the one that the session is from, with the model's weights."""
    from kvrt import Runtime
    from kvrt.cli.process import startup
    from kvrt.cli.setup.config import cache_config
    from kvrt.cli.setup.model import choose_weights, open_with_status

    weights = choose_weights(options.dtype, opened)
    flags = follow(EvalFlags(model=name), opened.manifest)
    model = open_with_status(flags, weights.dtype, quiet=options.quiet)
    spec = model.spec
    config = cache_config(flags, max(spec.n_ctx_train, flags.n_ctx))
    check_fits(opened, model, config)
    startup.check_memory(spec.groups, config, spec.recurrent, widened=model.widened_bytes)
    with output.waiting("reading weights", not options.quiet):
        loaded = model.wait()
    return Runtime(loaded.decoder, config, identity=loaded.identity)
