"""What an engine can serve, and why it refuses a request."""

import dataclasses
from collections.abc import Container

from kvrt.errors import BadRequest
from kvrt.serving.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What an engine can serve.

    Attributes:
      n_vocab: token ids of the model.
      n_ctx: tokens that the model can tell apart.
      n_max: tokens that the cache holds for one sequence when no other one is there.
    """

    n_vocab: int
    n_ctx: int
    n_max: int

    def check(self, request: Request, live: Container[str], *, drops: bool = False) -> None:
        """Refuses a request that this engine cannot serve.

        Args:
          request: what is asked.
          live: ids that are being served.
          drops: whether its policy will have to drop tokens.

        Raises:
          BadRequest: its id is taken, a token is outside the vocabulary, or it is too long.
        """
        name = request.name
        if request.id in live:
            raise BadRequest(f"{name} is being served already; wait for it or give another id")
        for ids, what in ((request.tokens, "token"), (request.stop_ids, "stop id")):
            if ids and not (min(ids) >= 0 and max(ids) < self.n_vocab):
                bad = next(t for t in ids if not 0 <= t < self.n_vocab)
                raise BadRequest(
                    f"{name}: {what} {bad} is not in [0, {self.n_vocab}), the model's vocabulary"
                )
        n_other = len(set(request.stop_ids))
        if request.num_beams > 1 and request.num_beams + n_other > self.n_vocab:
            raise BadRequest(
                f"{name}: {request.num_beams} beams begin with as many tokens, of {self.n_vocab} "
                f"in the vocabulary {n_other} are stop ids; lower num_beams"
            )
        need = f"{name}: {len(request.tokens)} prompt tokens and n_predict {request.n_predict}"
        if drops:
            return
        if request.n_whole > self.n_ctx:
            raise BadRequest(
                f"{need} need {request.n_whole} positions, the cache has n_ctx = {self.n_ctx} (-c "
                "of the command); raise that, shorten the request, or give it a policy"
            )
        if request.quota is not None and request.n_whole > request.quota:
            raise BadRequest(
                f"{need} need room for {request.n_whole} tokens, its quota is {request.quota}; "
                "shorten it, or give it a policy, or raise its quota"
            )
        if request.n_whole > self.n_max:
            raise BadRequest(
                f"{need} need room for {request.n_whole} tokens, the cache holds {self.n_max} of "
                "one request; shorten it, or give it a policy, or raise n_ctx (and n_ctx_seq)"
            )
