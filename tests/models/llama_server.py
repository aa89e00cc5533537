"""A live llama.cpp, for tests with the marker `model`."""

import json
import urllib.request
from pathlib import Path
from typing import Self

import xllamacpp


class Peer:
    """Serves one GGUF file on a local port for as long as it is open."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx = 64
        params.n_parallel = 1
        params.warmup = False
        params.cpuparams.n_threads = 1
        params.verbosity = 0
        self._server = xllamacpp.Server(params)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        del self._server

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Ids of a text; `special` adds bos and eos and parses control tokens."""
        body = {"content": text, "add_special": special, "parse_special": special}
        return self._post("/tokenize", body)["tokens"]

    def detokenize(self, tokens: list[int]) -> str:
        return self._post("/detokenize", {"tokens": tokens})["content"]

    def _post(self, route: str, body: dict) -> dict:
        request = urllib.request.Request(
            self._server.listening_address + route,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
