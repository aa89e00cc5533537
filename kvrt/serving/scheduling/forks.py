"""Forks of samples: another request that begins with all tokens of one, and goes its own way."""

import dataclasses

from kvrt.program.sample import Sampling
from kvrt.serving.request import SeqState


def fork_of(src: SeqState, fork_id: str, sampling: Sampling | None) -> SeqState:
    """A sample of a new request with the tokens so far of another one.

    It is as a sample of that request that was there from the beginning and sampled the same
    tokens: they count for n_predict, for its repeat penalty and for its random numbers.

    Args:
      src: a sample that has not ended.
      fork_id: of the new request.
      sampling: how it is sampled from now on; None is as `src`, with the same random numbers.

    Raises:
      BadRequest: `fork_id` is no id.
    """
    sampling = sampling or src.sampling
    request = dataclasses.replace(src.request, id=fork_id, n=1, sampling=sampling)
    return SeqState(
        request=request,
        sample=0,
        tokens=list(src.tokens),
        context=src.context,
        extend=src.extend,
        reads_sparsely=src.reads_sparsely,
    )
