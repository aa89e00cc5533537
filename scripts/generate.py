"""Generation from Python in a dozen lines.

Run it with `python -m scripts.generate --prompt "Once upon a time"`.
"""

from collections.abc import Sequence

from absl import app, flags

import kvrt
from kvrt import CacheConfig, ContextShift, Runtime, Sampling
from kvrt_models.tokenizer.stream import TextStream

_PROMPT = flags.DEFINE_string("prompt", "Once upon a time", "The text to go on.")
_N_PREDICT = flags.DEFINE_integer("n_predict", 300, "Tokens to write.", lower_bound=0)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    kvrt.keep_programs()
    model = kvrt.load("smollm2-135m")
    runtime = Runtime(model.decoder, CacheConfig(n_ctx=256), policy=ContextShift(n_keep=4))
    runtime.prefill(model.tokenizer.encode(_PROMPT.value))
    text = TextStream(model.tokenizer)
    for token in runtime.generate(_N_PREDICT.value, sampling=Sampling(temp=0.8, top_k=40)):
        print(text.push(token.id), end="", flush=True)
    print(text.flush(), runtime.stats(), sep="\n")


if __name__ == "__main__":
    app.run(main)
