"""What prompts of modules lose beside a prefill of the same text, and how many tokens they compute.

    python -m scripts.experiments.reuse.modules
    python -m scripts.experiments.reuse.modules --nolead --n_chunk 100

A prompt is three pieces of a play of --n_chunk tokens that follow each other, each a module that
was computed at its place without the others, and the --n_question tokens that follow them. One JSON
line a number of modules: the divergence (KL, in nats) from a prefill of the whole over the
question's tokens, of each prompt and their mean. One module is a cached prefix, and loses nothing.
"""

import time

import jax
import numpy as np
from absl import flags

from kvrt import CacheConfig, Runtime
from kvrt.reuse.schema import Module, PlacedSchema, lay_out
from kvrt.runtime.prompt_cache import PromptCache
from kvrt_models.load import load
from scripts._lib import commands, measure
from scripts.experiments.divergence import mean_kl
from scripts.experiments.reuse import blend

_COUNTS = flags.DEFINE_list("counts", ["1", "2", "3"], "Modules of which the pieces are made.")


def run() -> None:
    """All numbers of modules over all prompts."""
    model = load(flags.FLAGS.model, dtype="f32")
    prompts = blend.prompts(model.tokenizer)
    n = sum(map(len, prompts[0][0])) + len(prompts[0][1])
    config = CacheConfig(
        n_ctx=2 * -(-n // 256) * 256, n_seq_max=3, swa_full=True, type_k="f32", type_v="f32"
    )
    runtime, bos = Runtime(model.decoder, config), model.tokenizer.bos_id
    lead = [bos] if flags.FLAGS.lead and bos is not None else []
    for count in map(int, _COUNTS.value):
        kls, seconds, counted = [], [], {}
        for pieces, question in prompts:
            runtime.clear()
            ids = [t for piece in pieces for t in piece]
            exact = blend.question_logits(runtime, [*lead, *ids, *question], len(question))
            runtime.clear()
            modules = PromptCache.encode(runtime, layout_of(ids, count, lead))
            jax.block_until_ready(runtime.cache.cells[0].pos)
            start = time.perf_counter()
            names = [m.name for m in modules.layout.modules]
            served = modules.serve(0, names, question[:1])
            jax.block_until_ready(served.logits)
            seconds.append(time.perf_counter() - start)
            found = blend.question_logits(runtime, question[1:], len(question) - 1)
            counted = {"shared": served.n_shared, "computed": served.n_computed}
            kls.append(mean_kl(exact[1:], found))
        figures = {**counted, "kl": float(np.mean(kls)), "kls": kls, "serve_s": min(seconds)}
        measure.emit("modules", modules=count, **figures)


def layout_of(ids: list[int], count: int, lead: list[int]) -> PlacedSchema:
    """The same tokens as some modules of about one size."""
    parts = np.array_split(np.asarray(ids), count)
    texts = {str(i): part.tolist() for i, part in enumerate(parts)}
    unions = [(Module(name=f"m{i}", parts=(i,)),) for i in texts]
    return lay_out(unions, texts.__getitem__, 0, lead)


if __name__ == "__main__":
    commands.run(run)
