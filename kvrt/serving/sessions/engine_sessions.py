"""Snapshots of cached prefixes, and the way of a snapshot into the prefix cache."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from kvrt.attention.contract import Decoder
from kvrt.cache import capture
from kvrt.cache.cell_cache import layers_of
from kvrt.cellcache import history
from kvrt.errors import (
    BadConfig,
    BadRequest,
    BadSequence,
    BadSession,
    CacheFull,
    KvrtError,
    SessionMismatch,
    UsageError,
)
from kvrt.options.engine import EngineConfig
from kvrt.policies import AnyPolicy, Schedule
from kvrt.program.device import Device
from kvrt.reuse.diff import common_prefix
from kvrt.serving.cache.space import Space
from kvrt.serving.request import Request, SeqState
from kvrt.serving.sessions.folder import SessionFolder
from kvrt.serving.sessions.prefix import SessionPrefix, snapshot_of
from kvrt.serving.sessions.private_prefix import PrivatePrefix, new_salt
from kvrt.session import fingerprint
from kvrt.session.fingerprint import Fingerprint
from kvrt.session.snapshot import Snapshot


class EngineSessions:
    """Saves and loads prefixes of one engine."""

    def __init__(
        self,
        model: Decoder,
        device: Device,
        space: Space,
        options: EngineConfig,
        policy: AnyPolicy | None,
    ):
        """Opens the folder of sessions, if there is one, which each request is looked up in.

        Raises:
          UsageError: there is no such folder.
          BadSession: its index is damaged.
        """
        self._layers = layers_of(model, device.spec.config, policy)
        self._n_vocab: int = model.n_vocab
        self._device, self._space, self._options = device, space, options
        self._folder = options.sessions and SessionFolder(options.sessions)
        if self._folder is not None:
            space.sessions = self

    @property
    def fingerprint(self) -> Fingerprint:
        """See `Engine.fingerprint`."""
        layers, config = self._layers, self._device.spec.config
        found = fingerprint.describe(
            layers.groups,
            layers.recurrent,
            config,
            self._n_vocab,
            self._device.programs.weights_digest,
            self._options.identity,
        )
        return fingerprint.with_scored(found, layers.scored, config)

    def save(self, tokens: Sequence[int], salt: bytes) -> Snapshot:
        """A snapshot of what the prefix cache has of some tokens, as sequence 0.

        Raises:
          BadConfig: there is no prefix cache.
          UsageError: it has nothing of them.
        """
        self._check_cache()
        taken = self._space.take_prefix(tokens, salt)
        if taken is None:
            raise UsageError(
                f"the prefix cache has nothing of these {len(tokens)} tokens to save: they were "
                "not computed here (in paged mode a block of them), or evicted; compute them first"
            )
        return snapshot_of(self.fingerprint, tokens, taken)

    def load(
        self,
        snapshot: Snapshot,
        sequences: Sequence[int] | None,
        salt: bytes,
        *,
        convert: bool,
    ) -> dict[int, int]:
        """See `Engine.load`."""
        self._check_cache()
        config = self._device.spec.config
        snapshot = capture.fitted(snapshot, self.fingerprint, config, convert=convert)
        wanted = snapshot.seq_ids if sequences is None else tuple(sequences)
        for s in wanted:
            if s not in snapshot.seq_ids:
                raise BadSequence(
                    f"sequence {s} is not in the session, which holds {list(snapshot.seq_ids)}"
                )
        ends = self._space.put_prefixes([SessionPrefix(snapshot, s, salt=salt) for s in wanted])
        return dict(zip(wanted, ends, strict=True))

    def fill(self, state: SeqState, tokens: Sequence[int], n_held: int) -> None:
        """Takes the best session of the folder in for a request that is to be admitted.

        Args:
          state: the request's sample; `n_session` is set.
          tokens: those of it that may be hit.
          n_held: tokens of the hit that there is already.
        """
        if state.request.private_prefix is not None:
            self._fill_private(state, state.request.private_prefix)
            return
        folder, state.n_session = self._folder, 0
        if folder is None:
            return
        here, size = self.fingerprint, self._space.hit_size
        match = folder.best(fingerprint.digest(here), tokens)
        if match is None or match.n_common // size * size <= n_held:
            return
        try:
            snapshot = folder.read(match)
            fingerprint.check_match(snapshot.fingerprint, here, convert=False)
            n = self._put_best(snapshot, state.request.salt, tokens)
        except (BadSession, CacheFull, SessionMismatch) as error:
            folder.leave_out(match, error)
            return
        state.n_session = max(n - n_held, 0)
        folder.used(match)

    def private(self, request: Request, schedule: Schedule | None) -> Request:
        """A request with a salt of its own, where it has a private prefix.

        Args:
          request: as it was asked.
          schedule: of its policy or SelfExtend, which will move positions; None moves none.

        Raises:
          BadRequest: it has one, and there is no prefix cache, it moves, or there are several
            processes; or it has none, and the policy has to read its prompt whole.
        """
        if request.private_prefix is None:
            self._check_reads(request)
            return request
        why = ""
        if not self._options.prefix_cache:
            why = "goes into the prefix cache, and there is none; set prefix_cache"
        elif schedule is not None:
            why = (
                "is found as long as nothing of it moves, and its policy or SelfExtend would move "
                "it; shorten the request, or turn that off"
            )
        elif jax.process_count() > 1:
            why = "is read by one process, and there are several; serve it with one"
        if why:
            raise BadRequest(f"{request.name}: a private prefix {why}")
        self._space.sessions = self
        return dataclasses.replace(request, salt=new_salt())

    def _check_reads(self, request: Request) -> None:
        """Refuses a long prompt of a policy that has it repeated; raises BadRequest."""
        policy = self._device.layout.policy
        if policy is None or not policy.reads_whole:
            return
        n_most = policy.budget + policy.interval - 1
        if len(request.tokens) > n_most:
            raise BadRequest(
                f"{request.name}: {type(policy).__name__} has a prompt of more than {n_most} "
                "tokens repeated when it was read whole, and an engine reads prompts in parts, "
                "once; give it a private_prefix of `compressed_prefix`, or use SnapKV"
            )

    def shared(self, state: SeqState) -> list[int]:
        """The tokens of a sample that others may find.

        Raises:
          UsageError: it has a private prefix.
        """
        if state.request.private_prefix is not None:
            raise UsageError(
                f"{state.request.name} goes on from a private prefix, which may be approximate, so "
                "nothing of it is for others; save what computed the prefix"
            )
        return state.as_computed

    def _fill_private(self, state: SeqState, prefix: PrivatePrefix) -> None:
        """Takes in what a request brings along; `state.error` says why it cannot be."""
        try:
            snapshot = prefix.read()
            config = self._device.spec.config
            snapshot = capture.fitted(snapshot, self.fingerprint, config, convert=False)
            _check_begins(snapshot, prefix.tokens)
            # What is approximate may be found here, for nobody else finds it.
            exact = dataclasses.replace(snapshot.history, exact={})
            snapshot = dataclasses.replace(snapshot, history=exact)
            state.n_session = self._put_best(snapshot, state.request.salt, prefix.tokens)
        except CacheFull:
            return  # it is asked again when there may be room
        except KvrtError as error:
            state.error = f"{state.request.name}: its private prefix cannot be used: {error}"

    def _put_best(self, snapshot: Snapshot, salt: bytes, tokens: Sequence[int]) -> int:
        """Takes in what the first sequence of a session has of some tokens; how many."""
        first = min(snapshot.seq_ids, default=0)
        held = history.tokens(snapshot.history, first)
        n_common = common_prefix(held, np.asarray(tokens, np.int32))
        prefix = SessionPrefix(snapshot, first, salt=salt, n_most=n_common)
        return self._space.put_prefixes([prefix])[0]

    def _check_cache(self) -> None:
        if not self._options.prefix_cache:
            raise BadConfig(
                "a session goes into the prefix cache, and there is none; set prefix_cache"
            )


def _check_begins(snapshot: Snapshot, tokens: Sequence[int]) -> None:
    """Refuses a session whose first sequence begins otherwise; raises SessionMismatch."""
    held = history.tokens(snapshot.history, min(snapshot.seq_ids, default=0))
    n = common_prefix(held, np.asarray(tokens, np.int32))
    if n < len(tokens):
        raise SessionMismatch(
            f"the session has {n} of its {len(tokens)} tokens; read one that begins with all"
        )
