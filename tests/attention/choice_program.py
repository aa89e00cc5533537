"""One of two processes that choose an implementation for a mesh of both; see `test_choice.py`.

It prints what it chose, as JSON. "first" passes in process 0 alone, "second" in both.
"""

import dataclasses
import json
import sys

import jax

from kvrt import CacheConfig, MeshSpec, Runtime
from kvrt.attention import registry
from kvrt.attention.choice import decide
from kvrt.attention.choice.self_test import Verdict
from kvrt.attention.choice.verdicts import Verdicts
from tests.toys import ToyLm


def main(port: str, process: str) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", 2, int(process))
    registry._PLATFORMS = dict.fromkeys(("first", "second"), ("cpu",))
    for name in registry._PLATFORMS:
        registry.IMPLEMENTATIONS[name] = registry.IMPLEMENTATIONS["chunked"]

    def test(case, kernel):
        assert case.divided and case.group.n_kv_heads == 2
        return Verdict(passed=kernel == "second" or process == "0", why="failed here")

    decide._verdicts = Verdicts(test)
    config = CacheConfig(n_ctx=32, block_size=16, n_ubatch=8)
    runtime = Runtime(ToyLm(n_layers=1), config, mesh=MeshSpec(context=2))
    found = dataclasses.asdict(runtime.stats().attention)
    print(json.dumps(found | {"config": runtime.config.attention}), flush=True)
    jax.distributed.shutdown()


main(*sys.argv[1:])
