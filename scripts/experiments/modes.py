"""Ways of reading a text that is longer than a window, by name, as runtimes.

`full` is plain attention to every token. In bounded cells: `shift` drops the older half when they
are full, `sinks` keeps four tokens and the newest, `window` the newest alone, `recompute` the
newest too, evaluated afresh for each chunk by the script that asks for it, and `h2o`, `snapkv` and
`tova` what each kv head keeps by score, compared by place. With a cell for every token: `cache` and
`paper` are the two kinds of SelfExtend, `grouped` the paper's without a window of exact positions,
as a control.
"""

import dataclasses

from kvrt import AttentionSinks, CacheConfig, ContextShift, Decoder, Runtime, SelfExtend
from kvrt.policies import SCORED, AnyPolicy

SCORES = ("h2o", "snapkv", "tova")
BOUNDED = ("shift", "sinks", "window", "recompute", *SCORES)
EXTENDED = ("cache", "paper", "grouped")
MODES = ("full", *BOUNDED, *EXTENDED)

N_SINK = 4
# Tokens between two evictions by score.
N_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a mode needs to know.

    Attributes:
      n_tokens: the longest text.
      n_window: cells of the bounded modes.
      n_ubatch: tokens of a step.
      ga_n: SelfExtend's group.
      ga_w: SelfExtend's window.
    """

    n_tokens: int
    n_window: int
    n_ubatch: int = 512
    ga_n: int = 4
    ga_w: int = 1024


def runtime_of(mode: str, decoder: Decoder, sizes: Sizes) -> Runtime:
    """A runtime that reads as the mode says.

    Raises:
      BadConfig: sizes that do not fit, or a mode that the model's layers cannot do.
    """
    paper = mode in ("paper", "grouped")
    extend = None
    if mode in EXTENDED:
        window = 1 if mode == "grouped" else sizes.ga_w
        extend = SelfExtend(ga_n=sizes.ga_n, ga_w=window, kind="paper" if paper else "cache")
    config = CacheConfig(
        n_ctx=sizes.n_window if mode in BOUNDED else sizes.n_tokens,
        n_ubatch=sizes.n_ubatch,
        rope="read" if paper else "write",
        self_extend=extend,
        type_k="f32",
        type_v="f32",
    )
    return Runtime(decoder, config, policy=_policy(mode, sizes.n_window))


def _policy(mode: str, n_window: int) -> AnyPolicy | None:
    if mode == "shift":
        return ContextShift(n_keep=N_SINK)
    if mode in ("sinks", "window"):
        n_sink = N_SINK if mode == "sinks" else 0
        return AttentionSinks(n_sink=n_sink, n_window=n_window - n_sink)
    if mode in SCORES:
        n_at_once = min(N_AT_ONCE, n_window // 4)
        n = n_window - n_at_once
        return SCORED[mode](budget=n, interval=n_at_once, n_sink=N_SINK, close_up=True)
    return None
