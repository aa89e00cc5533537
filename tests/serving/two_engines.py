"""One of the processes that `test_two_engines.py` starts: engines on a mesh of all their devices.

Prints a JSON object: tokens by mode and request, and what refused what it must.
"""

import dataclasses
import json
import sys

import jax

from kvrt import CacheConfig
from kvrt.errors import KvrtError
from kvrt.options.engine import EngineConfig
from kvrt.options.sampling import Sampling
from kvrt.options.serving import Rules
from kvrt.program.mesh import MeshSpec
from kvrt.serving.engine import Engine
from kvrt.serving.request import Request
from tests.toys import ToyLm

CONFIG = CacheConfig(n_ctx=64, n_seq_max=2, block_size=4, n_ubatch=8, type_k="f32", type_v="f32")
SAME = tuple(range(1, 14))
REQUESTS = [
    Request(id="a", tokens=SAME, n_predict=5),
    Request(id="b", tokens=(*SAME, 3), n_predict=4, sampling=Sampling(temp=1.0, seed=3)),
    Request(id="c", tokens=(*SAME, 7, 8), n_predict=3),
]


def made(mode, mesh):
    options = EngineConfig(mode=mode, prefix_cache=True, rules=Rules(n_batch=8))
    return Engine(ToyLm(), CONFIG, options, mesh=mesh)


def served(engine, requests):
    for request in requests:
        engine.add_request(request)
    tokens = {request.id: [] for request in requests}
    n_hit = 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.id] += output.tokens
            n_hit = max(n_hit, output.n_cached)
    return tokens | {"n_hit": n_hit}


def refused(call):
    try:
        call()
    except KvrtError as error:
        return str(error)
    return None


def main():
    address, index = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, index)
    mesh = MeshSpec(tensor=2, context=2)
    found = {}
    for mode in ("cell", "paged"):
        engine = made(mode, mesh)
        found[mode] = served(engine, REQUESTS)
    options = EngineConfig(mode="paged", sessions="nowhere", prefix_cache=True)
    found["sessions"] = refused(lambda: Engine(ToyLm(), CONFIG, options, mesh=mesh))
    # The second process is asked for something else, of the same shapes.
    other = dataclasses.replace(REQUESTS[0], id="d", tokens=[5 + index, *SAME[1:]])
    found["differs"] = refused(lambda: served(engine, [other]))
    found["again"] = refused(engine.step)
    print(json.dumps(found))
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
