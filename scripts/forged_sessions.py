"""Session files that were made on purpose: parts replaced by others, and every digest made anew.

`parted` takes a `.kv` file apart, `joined` puts one together whatever its parts say. Each of
MUTANTS makes one contradiction, which has to be refused; `any_leaf` and `any_array` change
anything, which may be another sound session. Used by `scripts/fuzz_session.py` and by tests.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import xxhash
from safetensors import numpy as library

from kvrt.session.kv_file import frame
from kvrt.session.kv_file.frame import PAGE

Tensors = dict[str, np.ndarray]
VALUES = (None, True, 0, 1, -1, 7, 2**31 - 1, 2**31, 2**63, 0.5, 1e308, "", "x", [], {}, [[0, 1]])


@dataclasses.dataclass
class Parted:
    """A session's manifest as JSON values, and its blobs: keys and values, states, cells.

    Attributes:
      manifest: places and digests in it are made anew by `joined`.
      blobs: arrays of each blob that the manifest names, in its order; bytes are taken as they are.
      again: a blob of this number is named in the place of each one in `again`.
    """

    manifest: dict[str, Any]
    blobs: list[Tensors | bytes]
    again: dict[int, int] = dataclasses.field(default_factory=dict)


def parted(data: bytes) -> Parted:
    """The parts of a sound session."""
    first = frame.newest_frame(data[:PAGE], len(data))
    said = json.loads(data[first.offset : first.end])
    found = [library.load(data[b["offset"] : b["offset"] + b["n_bytes"]]) for b in places(said)]
    return Parted(manifest=said, blobs=list(found))


def joined(parts: Parted) -> bytes:
    """The file that holds such parts, with digests that hold."""
    said, body = copy.deepcopy(parts.manifest), bytearray(PAGE)
    named: list[dict[str, Any]] = []
    for blob in parts.blobs:
        data = blob if isinstance(blob, bytes) else library.save(blob)
        digest = xxhash.xxh3_128_hexdigest(data)
        named.append({"offset": len(body), "n_bytes": len(data), "digest": digest})
        body += data
    for i, place in enumerate(places(said)):
        place.update(named[parts.again.get(i, min(i, len(named) - 1))])
    manifest = json.dumps(said).encode()
    body[:PAGE] = frame.page(frame.of_manifest(manifest, len(body), 1))
    return bytes(body) + manifest


def places(said: dict[str, Any]) -> list[dict[str, Any]]:
    """The entries of a manifest that name a blob, in the order of the blobs."""
    rows = [b for g in said["groups"] for b in g["blocks"]]
    states = [said["states"]] if isinstance(said["states"], dict) else []
    return [*rows, *states, said["meta"]]


def any_leaf(parts: Parted, rng: np.random.Generator) -> None:
    """One value of the manifest becomes another one."""
    left: list[Any] = [parts.manifest]
    leaves = []
    for holder in left:
        for key in holder if isinstance(holder, dict) else range(len(holder)):
            inner = isinstance(holder[key], dict | list) and len(holder[key]) > 0
            if inner:
                left.append(holder[key])
            else:
                leaves.append((holder, key))
    holder, key = leaves[int(rng.integers(len(leaves)))]
    holder[key] = VALUES[int(rng.integers(len(VALUES)))]


def any_array(parts: Parted, rng: np.random.Generator) -> None:
    """Some entries of an array become noise, or its order changes."""
    blob = parts.blobs[int(rng.integers(len(parts.blobs)))]
    assert isinstance(blob, dict)
    name = sorted(blob)[int(rng.integers(len(blob)))]
    data = blob[name].copy()
    if rng.integers(2):
        data = rng.permutation(data, axis=int(rng.integers(data.ndim)))
    else:
        octets = data.reshape(-1).view(np.uint8)
        at, n = int(rng.integers(octets.size)), int(rng.integers(1, 40))
        octets[at : at + n] = rng.integers(0, 256, octets[at : at + n].size, np.uint8)
    blob[name] = np.ascontiguousarray(data)


def named_often(parts: Parted, n: int, rng: np.random.Generator) -> None:
    """One block named n times, with cells and tokens for all of them: a small file, much memory."""
    del rng
    entry, meta = parts.manifest["groups"][0], parts.blobs[-1]
    assert isinstance(meta, dict)
    n_used = 256 * n
    entry |= {"n_used": n_used, "n_cells": n_used, "head": 0}
    entry["blocks"] = [{} for _ in range(n)]
    parts.blobs = [parts.blobs[0], meta]
    parts.again = {**dict.fromkeys(range(n), 0), n: 1}
    number = np.arange(n_used, dtype=np.int32)
    meta |= {"0.index": number, "0.pos": number, "0.seqs": np.ones((n_used, 1), np.uint32)}
    meta["text.0"] = np.stack([number, number % 64, number])
    parts.manifest |= {"n_tokens": {"0": n_used}, "n_marks": n_used, "logits": {}}


def _with_array(name: str, change: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Any:
    def mutate(parts: Parted, rng: np.random.Generator) -> None:
        meta = parts.blobs[-1]
        assert isinstance(meta, dict)
        meta[name] = np.ascontiguousarray(change(meta[name].copy(), rng))

    return mutate


def _permuted(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(x)


def _put(value: int) -> Callable[[np.ndarray, np.random.Generator], np.ndarray]:
    def change(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        x.reshape(-1)[rng.integers(x.size)] = value
        return x

    return change


def _shifted(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return x + x.dtype.type(rng.integers(1, 5))


def _one_less(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    del rng
    return x[..., :-1] if x.shape[0] == 3 else x[:-1]


def _in_group(**fields: Any) -> Any:
    def mutate(parts: Parted, rng: np.random.Generator) -> None:
        del rng
        parts.manifest["groups"][0] |= fields

    return mutate


def _in_manifest(**fields: Any) -> Any:
    def mutate(parts: Parted, rng: np.random.Generator) -> None:
        del rng
        parts.manifest |= fields

    return mutate


def _in_fingerprint(change: Callable[[dict[str, Any]], None]) -> Any:
    def mutate(parts: Parted, rng: np.random.Generator) -> None:
        del rng
        change(parts.manifest["fingerprint"])

    return mutate


def _draw(**sampling: float) -> dict[str, Any]:
    return {"token": 1, "n_drawn": 2, "sampling": sampling}


def _twice(parts: Parted, rng: np.random.Generator) -> None:
    """One blob in the place of another one."""
    i, j = rng.choice(len(parts.blobs), 2, replace=False).tolist()
    parts.again = {i: j}


def _swapped(parts: Parted, rng: np.random.Generator) -> None:
    """The last block, which has fewer cells, in front."""
    del rng
    parts.blobs[0], parts.blobs[1] = parts.blobs[1], parts.blobs[0]


def _longer_rows(parts: Parted, rng: np.random.Generator) -> None:
    """A block of more keys and values than it has cells."""
    rows = parts.blobs[0]
    assert isinstance(rows, dict)
    n = int(rng.integers(2, 9))
    parts.blobs[0] = {k: np.concatenate([x] * n, axis=1) for k, x in rows.items()}


def _more_arrays(parts: Parted, rng: np.random.Generator) -> None:
    """A blob of many arrays that nobody asked for."""
    rows = parts.blobs[0]
    assert isinstance(rows, dict)
    more = {f"x{i}": np.zeros(0, np.float32) for i in range(int(rng.integers(100, 5000)))}
    parts.blobs[0] = rows | more


MUTANTS: dict[str, Callable[[Parted, np.random.Generator], None]] = {
    "one blob named 2 times": _twice,
    "one blob named 200 times": lambda parts, rng: named_often(parts, 200, rng),
    "one blob named 1000 times": lambda parts, rng: named_often(parts, 1000, rng),
    "blocks swapped": _swapped,
    "a block of more rows": _longer_rows,
    "thousands of arrays": _more_arrays,
    "cells permuted": _with_array("0.index", _permuted),
    "positions permuted": _with_array("0.pos", _shifted),
    "a position twice": _with_array("0.pos", _put(0)),
    "a position below 0": _with_array("0.pos", _put(-1)),
    "a cell below 0": _with_array("0.index", _put(-(2**31))),
    "a cell beyond the last": _with_array("0.index", _put(2**31 - 1)),
    "an owner of nothing": _with_array("0.seqs", _put(0)),
    "another owner": _with_array("0.seqs", _put(2)),
    "all owners": _with_array("0.seqs", _put(2**32 - 1)),
    "one cell less": _with_array("0.pos", _one_less),
    "one token less": _with_array("text.0", _one_less),
    "tokens moved": _with_array("text.0", _shifted),
    "a token below 0": _with_array("text.0", _put(-7)),
    "a token beyond all": _with_array("text.0", _put(2**31 - 1)),
    "more cells in use": _in_group(n_used=2**31 - 1, n_cells=2**31 - 1),
    "fewer cells in use": _in_group(n_used=1),
    "no cells at all": _in_group(n_cells=0),
    "no blocks": _in_group(blocks=[]),
    "lost and held": _in_group(lost={"0": [[0, 2**31 - 1]], "7": [[1, 2]]}, n_used=3),
    "lost wraps": _in_group(lost={"0": [[-5, 2**31]]}),
    "more tokens": _in_manifest(n_tokens={"0": 2**31 - 1}),
    "another sequence": _in_manifest(n_tokens={"5": 3}),
    "exact beyond all": _in_manifest(exact={"0": 10**6}),
    "extended who is not there": _in_manifest(ga_i={"9": 1}),
    "logits elsewhere": _in_manifest(logits={"0": 3}),
    "states of nothing": _in_manifest(held={"0": [[0, 0]]}),
    "NaN": _in_manifest(policy={"n_keep": float("nan")}),
    "an infinite temperature": _in_manifest(draws={"0": _draw(temp=float("inf"))}),
    "a temperature beyond all": _in_manifest(draws={"0": _draw(temp=10**400)}),
    "a drawn token beyond all": _in_manifest(draws={"0": _draw() | {"token": 10**6}}),
    "no groups": _in_manifest(groups=[]),
    "base is infinite": _in_fingerprint(lambda f: f["groups"][0]["rope"].update(base=float("inf"))),
    "base is NaN": _in_fingerprint(lambda f: f["groups"][0]["rope"].update(base=float("nan"))),
    "base is 0": _in_fingerprint(lambda f: f["groups"][0]["rope"].update(base=0)),
    "a group without layers": _in_fingerprint(lambda f: f["groups"][0].update(layers=[])),
    "a million heads": _in_fingerprint(lambda f: f["groups"][0].update(n_kv_heads=10**6)),
    "half a head": _in_fingerprint(lambda f: f["groups"][0].update(n_kv_heads=0.5)),
    "channels beyond all": _in_fingerprint(lambda f: f["groups"][0].update(head_dim=2**62)),
    "another type": _in_fingerprint(lambda f: f.update(type_k="bf16")),
    "an unknown type": _in_fingerprint(lambda f: f.update(type_v=["f32", "f32", "f9"])),
    "a vocabulary of none": _in_fingerprint(lambda f: f["model"].update(n_vocab=0)),
    "an endless vocabulary": _in_fingerprint(lambda f: f["model"].update(n_vocab=10**400)),
}
