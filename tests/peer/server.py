"""A live llama.cpp inside the test process, on a GGUF file, with a float32 cache.

Requests go through the library, not through HTTP. The server still listens on a free port of the
loopback interface while it lives; there is no switch for that.
"""

import contextlib
import dataclasses
import json
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What llama.cpp generated.

    Attributes:
      tokens: generated token ids, int32. `[n]`
      log_probs: log-probability of the whole vocabulary before each of them, float64; from the raw
        logits, before any sampler. `[n, V]`
      n_reused: tokens of the prompt that were in the cache.
    """

    tokens: np.ndarray
    log_probs: np.ndarray
    n_reused: int


class Peer:
    """A server that lives until its `llama_cpp` context ends."""

    def __init__(self, params: xllamacpp.CommonParams, n_vocab: int):
        self._server: xllamacpp.Server | None = xllamacpp.Server(params)
        self._n_vocab = n_vocab

    def complete(self, prompt: Sequence[int], n_predict: int, **options: Any) -> Completion:
        """Continues a prompt of token ids greedily by exactly n_predict tokens.

        Args:
          prompt: token ids; nothing is added in front.
          n_predict: tokens to generate.
          **options: further fields of the request, e.g. cache_prompt, n_keep, n_discard.

        Raises:
          RuntimeError: the server refused the request, or ended it early.
        """
        assert self._server is not None, "the peer is closed"
        request = {
            "prompt": [int(t) for t in prompt],
            "max_tokens": n_predict,
            "temperature": 0.0,
            "n_probs": self._n_vocab,
            "post_sampling_probs": False,
            "ignore_eos": True,
            "cache_prompt": False,
            **options,
        }
        return _read(self._server.handle_completions(request), n_predict)

    def slot(self, action: str, name: str) -> dict[str, Any]:
        """Saves the slot to a file of the folder `slots`, or restores it: "save" or "restore".

        Raises:
          OSError: the server refused it.
        """
        assert self._server is not None, "the peer is closed"
        request = urllib.request.Request(
            f"{self._server.listening_address}/slots/0?action={action}",
            data=json.dumps({"filename": name}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.loads(answer.read())

    def close(self) -> None:
        """Ends the server's threads; they end with the last reference to it."""
        self._server = None


@contextlib.contextmanager
def llama_cpp(
    path: Path,
    *,
    n_vocab: int,
    n_ctx: int = 512,
    n_ubatch: int = 512,
    ctx_shift: bool = False,
    slots: Path | None = None,
    flash: bool = False,
    quantised: bool = False,
) -> Iterator[Peer]:
    """Runs llama.cpp on a file: one slot, one thread, float32 keys and values.

    Args:
      path: GGUF file.
      n_vocab: tokens of its vocabulary.
      n_ctx: cells; llama.cpp rounds it up to a multiple of 256.
      n_ubatch: tokens of one prefill step.
      ctx_shift: a full context drops the older half of what follows n_keep and goes on.
      slots: folder for `Peer.slot`; keys and values are then f16.
      flash: flash attention, which keeps values a row a cell.
      quantised: keys and values are q8_0; needs flash attention.

    Raises:
      RuntimeError: llama.cpp cannot load the file; it prints why to stderr.
    """
    params = _params(path, n_ctx, n_ubatch, ctx_shift)
    if slots is not None:
        params.slot_save_path = f"{slots}/"
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F16
    if quantised:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_Q8_0
    if flash:
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    peer = Peer(params, n_vocab)
    try:
        yield peer
    finally:
        peer.close()


def _params(path: Path, n_ctx: int, n_ubatch: int, ctx_shift: bool) -> xllamacpp.CommonParams:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_parallel = n_ctx, n_ctx, n_ubatch, 1
    params.ctx_shift = ctx_shift
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers, params.cache_ram_mib = 0, 0
    params.verbosity = 1  # errors alone, on stderr
    params.warmup = params.fit_params = params.ui = False
    return params


def _read(answer: dict[str, Any], n_predict: int) -> Completion:
    if "choices" not in answer:
        raise RuntimeError(f"llama.cpp refused the request: {answer}")
    logprobs = answer["choices"][0]["logprobs"]
    steps = [] if logprobs is None else logprobs["content"]
    if len(steps) != n_predict:
        raise RuntimeError(f"llama.cpp gave {len(steps)} of {n_predict} tokens with probabilities")
    rows = [sorted((top["id"], top["logprob"]) for top in step["top_logprobs"]) for step in steps]
    return Completion(
        tokens=np.array([step["id"] for step in steps], np.int32),
        log_probs=np.array([[value for _, value in row] for row in rows], np.float64),
        n_reused=answer["timings"]["cache_n"],
    )
