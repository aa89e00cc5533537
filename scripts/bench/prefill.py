"""Prefill: steps of a prompt's tokens, behind others or none, of known shapes; and attention alone.

    python -m scripts.bench.prefill --n_new 512
    python -m scripts.bench.prefill --n_new 512,2048 --shape llama-3.1-8b --dtype bf16 \
        --type_k bf16 --type_v bf16 --context 0,8192,32768,131072

Weights and cached keys and values are random. --what: "step", a whole step of --n_new tokens of
each sequence behind --context tokens that are in the cache, with its share of what a product of
large matrices reaches in the same run; "attention", attention alone beside its peers, as in
`bench/decode.py`. A whole prompt is such steps, one behind the other. The default model's prefill
beside llama.cpp is in `bench/decode.py --what model`.
"""

from absl import app, flags

from scripts._lib import attention_alone, commands, grid, measure, whole_steps

_KINDS = ["step", "attention"]
_WHAT = flags.DEFINE_list("what", _KINDS, f"Of {', '.join(_KINDS)}.")
_N_NEW = flags.DEFINE_list("n_new", ["512"], "Tokens of each sequence in a step.")


def main() -> None:
    grid.check(_WHAT, _KINDS)
    if not all(x.isdecimal() and int(x) > 1 for x in _N_NEW.value):
        raise app.UsageError(f"--n_new={','.join(_N_NEW.value)}; whole numbers above 1 wanted")
    found, weights = [], whole_steps.Weights()
    for n_new in map(int, _N_NEW.value):
        asked = list(grid.cases(n_new))
        if "attention" in _WHAT.value:
            found += [
                measure.emit("prefill attention", **line) for line in attention_alone.lines(asked)
            ]
        if "step" in _WHAT.value:
            lines = (whole_steps.run(case, weights, "step") for case in asked)
            found += [measure.emit("prefill step", **line) for line in lines]
    grid.plot(found)


if __name__ == "__main__":
    commands.run(main)
