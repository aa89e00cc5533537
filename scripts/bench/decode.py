"""Decode and prefill in known shapes with random weights: whole steps, and attention alone.

    python -m scripts.bench.decode
    python -m scripts.bench.decode --what step,loop,attention --shape llama-3.1-8b --dtype bf16 \
        --type_k bf16 --type_v bf16 --batch 1,8,64 --context 1024,8192,32768,131072
    python -m scripts.bench.decode --n_new 512,2048 --context 0,8192
    python -m scripts.bench.decode --what beside --context 200 --attention chunked
    python -m scripts.bench.decode --what types --types bf16,int8 --context 8192 --attention chunked

What is measured (--what), a line a side, sides interleaved:

    step       --n_new tokens of each sequence, by each of kvrt's implementations of attention
    attention  attention alone, by these and by peers over caches of their own: `jax.nn` and, with
               --peers all, PyTorch and FlashInfer, in a process of their own
    loop       many steps of a token in one program
    beside     a step, its products with weights alone, and what is left of it without them
    types      steps over caches of several --types, and times by the first type's

Weights and cached keys and values are random. Bytes are those of the weights and of the cached keys
and values that a step must read, beside a copy measured in the same run; a prompt's work is beside
a product of large matrices. A side that cannot run or fit says so. Nothing is fetched.
"""

import itertools
from typing import Any, get_args

from absl import flags

from kvrt.kv_types import KVDtype
from scripts._lib import attention_alone, commands, grid, measure, whole_steps

_KINDS = ["attention", "step", "loop", "beside", "types"]
_WHAT = flags.DEFINE_list("what", ["attention", "step"], f"Of {', '.join(_KINDS)}.")
_TYPES = flags.DEFINE_list(
    "types", ["bf16", "int8"], f"types: of {', '.join(get_args(KVDtype))}; keys and values alike."
)
_PEERS = flags.DEFINE_enum("peers", "all", ["none", "quick", "all"], "Who is timed beside kvrt.")


def main() -> None:
    grid.check(_WHAT, _KINDS)
    commands.check_names(_TYPES, get_args(KVDtype))
    asked, peers = list(grid.cases()), _PEERS.value
    types: Any = _TYPES.value  # flags know no literal types
    kinds = {
        "attention": lambda: attention_alone.lines(asked, peers),
        "step": lambda: whole_steps.lines(asked, "step", peers),
        "loop": lambda: whole_steps.lines(asked, "loop", peers),
        "beside": lambda: itertools.chain(*map(whole_steps.beside_products, asked)),
        "types": lambda: itertools.chain(*(whole_steps.by_type(of, types) for of in asked)),
    }
    for what in _WHAT.value:
        for line in kinds[what]():
            part = "decode" if line["n_new"] == 1 else "prefill"
            name = "beside products" if what == "beside" else what
            measure.emit(f"{part} {name}", **line)


if __name__ == "__main__":
    commands.run(main)
