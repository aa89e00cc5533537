"""Decode: whole steps and attention alone of known shapes, and the default model beside its peer.

    python -m scripts.bench.decode --what step,attention
    python -m scripts.bench.decode --what step,loop,attention --shape llama-3.1-8b --dtype bf16 \
        --type_k bf16 --type_v bf16 --batch 1,8,64 --context 1024,8192,32768,131072
    python -m scripts.bench.decode --what beside --context 200 --attention chunked
    python -m scripts.bench.decode --what types --types bf16,int8 --context 8192 --attention chunked

Weights and cached keys and values are random. What is measured (--what): "step", one token of each
sequence; "beside", that step and, in interleaved runs, its products with weights alone, and what is
left of the step without them; "loop", many steps in one program; "types", steps over caches of
several --types, in interleaved runs, beside the first type's; "attention", attention alone beside
`jax.nn.dot_product_attention` and, on a GPU with PyTorch, its compiled attention, both over static
caches; "model", the default model beside llama.cpp (`_lib/real_model.py`; --peer, --long, --bf16,
--threads and --rounds are for it alone, and it is fetched). Bytes are those of the weights and of
the cached keys and values that a step must read, beside a copy measured in the same run. A case
that cannot fit is reported and not tried. Nothing of a shape is fetched, so this runs where no
network is, but for "model".
"""

from typing import Any, get_args

from absl import flags

from kvrt.errors import FetchError
from kvrt.kv_types import KVDtype
from scripts._lib import attention_alone, commands, grid, measure, real_model, whole_steps

_KINDS = ["step", "beside", "loop", "types", "attention", "model"]
_WHAT = flags.DEFINE_list("what", ["step", "attention", "model"], f"Of {', '.join(_KINDS)}.")
_TYPES = flags.DEFINE_list(
    "types", ["bf16", "int8"], f"types: of {', '.join(get_args(KVDtype))}; keys and values alike."
)
_PEER = flags.DEFINE_bool("peer", True, "model: also time llama.cpp.")
_LONG = flags.DEFINE_bool("long", True, "model: also time long contexts and large caches.")
_BF16 = flags.DEFINE_bool("bf16", True, "model: also time bf16 weights.")
_N_THREADS = flags.DEFINE_integer("threads", 2, "model: llama.cpp's threads.", lower_bound=1)
_N_ROUNDS = flags.DEFINE_integer("rounds", 5, "model: runs of each side.", lower_bound=1)


def main() -> None:
    grid.check(_WHAT, _KINDS)
    commands.check_names(_TYPES, get_args(KVDtype))
    asked, found, weights = list(grid.cases()), [], whole_steps.Weights()
    if "attention" in _WHAT.value:
        found += [measure.emit("decode attention", **line) for line in attention_alone.lines(asked)]
    for what in ("step", "loop"):
        if what in _WHAT.value:
            lines = (whole_steps.run(case, weights, what) for case in asked)
            found += [measure.emit(f"decode {what}", **line) for line in lines]
    if "beside" in _WHAT.value:
        lines = (whole_steps.beside_products(case, weights) for case in asked)
        found += [measure.emit("decode beside products", **line) for line in lines]
    if "types" in _WHAT.value:
        types: Any = _TYPES.value  # flags know no literal types
        lines = (line for case in asked for line in whole_steps.in_turn(case, weights, types))
        found += [measure.emit("decode types", **line) for line in lines]
    grid.plot(found)
    if "model" in _WHAT.value:
        try:
            real_model.run(
                real_model.Compared(
                    peer=_PEER.value,
                    long=_LONG.value,
                    bf16=_BF16.value,
                    n_threads=_N_THREADS.value,
                    n_rounds=_N_ROUNDS.value,
                )
            )
        except FetchError as error:
            measure.emit("decode", skipped=str(error))


if __name__ == "__main__":
    commands.run(main)
