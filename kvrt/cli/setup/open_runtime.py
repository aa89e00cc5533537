"""Opens what a command evaluates with: the devices, and a model's empty runtime."""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jax

from kvrt import Runtime
from kvrt.attention import registry
from kvrt.cli.flags.context import BY_POSITION
from kvrt.cli.flags.evaluate import EvalFlags
from kvrt.cli.flags.mesh import MeshFlags
from kvrt.cli.flags.serving import BatchOptions
from kvrt.cli.process import devices, output, startup, status
from kvrt.cli.report.summary import kept_line
from kvrt.cli.setup import config, policy
from kvrt.options.cache import CacheConfig
from kvrt.policies import AnyPolicy
from kvrt_models.load import Opened


@contextlib.contextmanager
def ready(options: EvalFlags | BatchOptions) -> Iterator[None]:
    """A block with the devices that the flags name; memory that runs out in it is one line.

    Raises:
      KvrtError: there is no such device, or the processes do not meet.
    """
    joined = contextlib.nullcontext()
    if isinstance(options, MeshFlags):
        joined = devices.other_processes(options)
    with joined:
        startup.check_device(options.attention)
        startup.keep_programs_or_warn()
        with startup.enough_memory():
            yield


def open_runtime(
    options: EvalFlags,
    model: Opened,
    ids: list[int],
    check: Callable[[CacheConfig, AnyPolicy | None], Any],
    *,
    n_prompt: int,
    quiet: bool,
) -> Runtime:
    """A runtime without weights, in which a prompt has its cells.

    What can be refused without the weights is refused here.

    Args:
      options: the flags, and what a session says in place of those that were not given.
      model: its shapes.
      ids: the prompt's tokens, of which the policy keeps --keep.
      check: refuses a session or a prompt that does not go with the cache.
      n_prompt: tokens of the longest prompt.
      quiet: says nothing of a context that is shorter than the trained length.

    Raises:
      KvrtError: a flag, the prompt, the session or memory does not go with the model.
    """
    spec = model.spec
    left = startup.available_bytes()
    options = config.sized(options, spec, n_prompt, left, quiet=quiet)
    cache = config.cache_config(options, spec.n_ctx_train)
    policy.check_prompt(options, n_prompt, spec, cache)
    drops: AnyPolicy | None = None
    if options.policy_name not in BY_POSITION:
        drops = policy.by_score(options, spec, cache.n_ctx)
        if n_prompt >= drops.budget + drops.interval and not quiet:
            output.warn(f"the prompt has {n_prompt:,} tokens: {kept_line(drops)}")
    elif not policy.stays(options, spec, cache):
        drops = policy.policy_of_run(options, cache.n_ctx, ids, model.tokenizer)
    layers = policy.layers_of_spec(spec, cache, drops)
    check(cache, drops)
    mesh = devices.mesh(options)
    startup.check_memory(
        layers.groups, layers.config, layers.recurrent, mesh=mesh, widened=model.widened_bytes
    )
    with choosing(cache.attention, quiet=quiet):
        return Runtime(model.shapes, cache, policy=drops, identity=model.identity, mesh=mesh)


def choosing(attention: str, *, quiet: bool) -> AbstractContextManager[Any]:
    """A status line while "auto" may test a kernel of this device, which takes seconds once."""
    kernels = registry.kernels(jax.default_backend()) if attention == registry.AUTO else ()
    return status.waiting(f"self-test of {', '.join(kernels)}", bool(kernels) and not quiet)
