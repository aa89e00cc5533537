"""The blocks that a request asks for: what it looks up, keeps when it drops, and reserves."""

from collections.abc import Sequence

from kvrt.paged.hashing import Chain
from kvrt.paged.hits import Wanted
from kvrt.paged.manager import BlockManager
from kvrt.serving.request import SeqState


def chain_of(manager: BlockManager, state: SeqState) -> Chain:
    """The hashes of a sample's tokens so far, or of what it never drops or moves of them."""
    if state.chain is None:
        state.chain = Chain(manager.block_size, salt=state.request.salt)
    state.chain.extend(state.tokens[len(state.chain.tokens) : state.n_unmoved])
    return state.chain


def wanted_of(state: SeqState) -> Wanted:
    """How a sample looks for what others computed: a token is left before anything moves."""
    n = len(state.tokens) if state.n_until is None else min(len(state.tokens), state.n_until)
    return Wanted(n_tokens=n, moving=state.context)


def reserved_of(manager: BlockManager, state: SeqState) -> Sequence[int]:
    """Blocks of each pool that a sample reserves; none at all if it reserves nothing.

    With those that will be forked from it, which share the prompt unless it moves.
    """
    if not state.n_reserved:
        return ()
    if state.context is not None:
        blocks = manager.n_reserved(state.context)
        return tuple(n * (1 + state.n_ahead) for n in blocks)
    n_shared = 0 if state.schedule else state.n_prompt
    return manager.n_peak(state.n_reserved, n_more=state.n_ahead, n_shared=n_shared)
