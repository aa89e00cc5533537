"""Drafts by a smaller model of the same vocabulary, in a runtime that follows the texts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from kvrt.drafts.drafter import DraftContext
from kvrt.errors import BadConfig
from kvrt.options.sampling import Sampling
from kvrt.reuse.diff import common_prefix
from kvrt.runtime.generate import After, GenerationSpec
from kvrt.runtime.runtime import Runtime

# Tokens a compiled run: the host sees the drafts together.
_STRIDE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftModel:
    """Drafts what another model would say next.

    It samples with the random numbers that the text is sampled with, so that two models of like
    mind take the same token, and a draft is accepted more often than one that is drawn apart.

    Attributes:
      runtime: of the smaller model, without a policy, which nobody else uses. Its sequences follow
        the texts, sequence i of n_seq_max those of i, i + n_seq_max and so on; what was not
        drafted for lately is removed where there is no room. Recurrent layers need `n_rs_seq` of
        as many tokens as are drafted, or each refused draft costs the whole text again.
      sampling: as the text is sampled; an `Engine` says that of each request itself.

    Source: arXiv:2211.17192 (speculative decoding), with shared random numbers in place of q.
    """

    runtime: Runtime
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    # Sequences that hold a text, the one that was drafted for last at the end.
    _held: list[int] = dataclasses.field(default_factory=list, init=False, repr=False)

    def prepare(self, n_prompt: int) -> None:
        """Compiles what drafts behind a prompt of so many tokens need; nothing is computed."""
        asked = GenerationSpec(
            n_predict=None,
            seq_id=0,
            sampling=self.sampling,
            stop_ids=(),
            recent=(),
            n_best=0,
            stride=_STRIDE,
            after=After(token=0, n_sampled=0),
        )
        # A round lacks a token or two of those that stayed.
        for n in dict.fromkeys((n_prompt, 1, 2)):
            self.runtime.prepare(n, asked)

    def check(self, n_vocab: int) -> None:
        """Refuses a model of another vocabulary; raises BadConfig."""
        if self.runtime.n_vocab != n_vocab:
            raise BadConfig(
                f"the drafting model has {self.runtime.n_vocab} tokens in its vocabulary, the "
                f"model {n_vocab}; drafts need the same"
            )

    def draft(self, context: DraftContext, n: int) -> Sequence[int]:
        """See `Drafter`; none where the text has outgrown its runtime."""
        held, newest = context.tokens[:-1], int(context.tokens[-1])
        n = min(n, self.runtime.config.n_ctx - len(context.tokens))
        if n < 1:
            return ()
        seq_id = context.seq_id % self.runtime.config.n_seq_max
        self._follow(seq_id, held, n)
        asked = context.sampling
        drafted = self.runtime.generate(
            n,
            seq_id=seq_id,
            sampling=asked if isinstance(asked, Sampling) else self.sampling,
            recent=context.tokens.tolist(),
            stride=_STRIDE,
            after=After(token=newest, n_sampled=context.n_sampled),
        )
        return [token.id for token in drafted]

    def _follow(self, seq_id: int, tokens: np.ndarray, n_more: int) -> None:
        """Lets a sequence hold these tokens, with room for more; computes those that it lacks."""
        _, there = self.runtime.token_history(seq_id)
        n = common_prefix(there, tokens)
        if n < len(there):
            if not self.runtime.can_remove(seq_id, n):
                n = 0
            self.runtime.seq_rm(seq_id, n, None)
        self._held[:] = [x for x in self._held if x != seq_id]
        while self._held and self.runtime.n_free < len(tokens) - n + n_more:
            self.runtime.seq_rm(self._held.pop(0))
        self._held.append(seq_id)
        if n < len(tokens):
            self.runtime.prefill(tokens[n:].tolist(), seq_id)
