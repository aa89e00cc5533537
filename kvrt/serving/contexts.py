"""Which policy or SelfExtend a request has, the context it works in, and what is refused so."""

import dataclasses
from collections.abc import Callable

from kvrt.config import GroupSpec, layer_traits
from kvrt.errors import BadConfig, BadRequest
from kvrt.options.cache import CacheConfig
from kvrt.options.compose import Traits, refusal
from kvrt.policies import DropSchedule, Policy, Schedule, policy_traits
from kvrt.policies.schedule import n_first
from kvrt.policies.self_extend import ExtendSchedule, extend_schedule
from kvrt.program.layout import Layout
from kvrt.serving.cache.space import Space
from kvrt.serving.request import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contexts:
    """Makes the contexts of requests that have a policy.

    Attributes:
      policy: of requests that name none of their own; None is no policy.
      n_ctx: tokens of one request in the cache at most.
      n_step: tokens of a step.
      requantizes: `CacheConfig.requantizes`, whether a K-shift rounds keys again.
      fits: whether the cache has room for a request of a context.
      cache: traits of what requests' policies have to go with.
      extend: SelfExtend in the cache; None without it.
      n_sink: first tokens that layers see beside their windows, where they keep no others.
    """

    policy: Policy | None
    n_ctx: int
    n_step: int
    requantizes: bool
    fits: Callable[[DropSchedule], bool]
    cache: Traits = dataclasses.field(default_factory=dict)
    extend: ExtendSchedule | None = None
    n_sink: int = 0

    def check(self) -> "Contexts":
        """Refuses a default policy that no request could have; itself.

        Raises:
          BadConfig: it could not.
        """
        if self.policy is not None and (wrong := self._wrong(self.policy)):
            raise BadConfig(wrong)
        return self

    def of(self, request: Request) -> Schedule | None:
        """The schedule of a request; None where nothing will ever be due.

        Raises:
          BadRequest: its policy does not fit the cache or the model.
        """
        policy = self.policy if request.policy == "default" else request.policy
        n_prompt, n_whole = len(request.tokens), request.n_whole
        if policy is None or policy == "none":
            extend = self.extend
            return extend if extend and n_whole > n_first(extend, n_prompt) else None
        n_ctx = min(self.n_ctx, request.quota or self.n_ctx)
        here = self if n_ctx == self.n_ctx else dataclasses.replace(self, n_ctx=n_ctx)
        if wrong := here._wrong(policy):
            raise BadRequest(f"{request.name}: {wrong}")
        context = here._context(policy)
        if n_whole <= n_first(context, n_prompt):
            return None
        context = dataclasses.replace(context, n_left=context.left_of(n_prompt, n_whole))
        if wrong := self._no_room(context):
            raise BadRequest(f"{request.name}: {wrong}")
        return context

    def _context(self, policy: Policy) -> DropSchedule:
        return DropSchedule(
            policy=policy, n_ctx=self.n_ctx, n_step=self.n_step, requantizes=self.requantizes
        )

    def _wrong(self, policy: Policy) -> str:
        """Why no request may have a policy, or an empty text."""
        name = type(policy).__name__
        if found := refusal(policy_traits(policy), self.cache):
            return found[1]
        if policy.n_keep > self.n_ctx - 2 or self._context(policy).n_least < 1:
            return (
                f"{name} keeps {policy.n_keep} tokens, which leaves nothing to drop in the "
                f"{self.n_ctx} of one request; keep fewer or raise n_ctx (and n_ctx_seq, quota)"
            )
        if policy.n_keep < self.n_sink:
            return (
                f"{name} keeps {policy.n_keep} tokens, and layers with a window see the first "
                f"{self.n_sink} for ever: tokens that move there have left their window before; "
                f"keep {self.n_sink}, or set swa_full"
            )
        return self._no_room(self._context(policy).endless())

    def _no_room(self, context: DropSchedule) -> str:
        """That the cache has no room for a request of a context; empty if it has."""
        if self.fits(context):
            return ""
        return (
            f"{type(context.policy).__name__} keeps up to {context.n_most} tokens, and needs two "
            "blocks more for the cells of dropped ones; lower n_ctx_seq or raise n_ctx"
        )


def contexts_of(
    policy: Policy | None, config: CacheConfig, layout: Layout, space: Space, n_ctx: int
) -> Contexts:
    """The contexts of an engine's requests.

    Args:
      policy: of requests that name none of their own.
      config: sizes and types.
      layout: groups of layers, and their stores.
      space: the cache.
      n_ctx: tokens of one request at most.

    Raises:
      BadConfig: no request could have the policy.
    """
    return Contexts(
        policy=policy,
        n_ctx=n_ctx,
        n_step=config.n_ubatch,
        requantizes=config.requantizes,
        fits=space.fits,
        cache={**config.traits, **layer_traits(layout.groups, layout.recurrent)},
        extend=extend_schedule(config),
        n_sink=max((g.mask.n_sink for g in layout.groups if _passes(g, config)), default=0),
    ).check()


def _passes(group: GroupSpec, config: CacheConfig) -> bool:
    return group.mask.kind in ("window", "chunked") and not config.swa_full
