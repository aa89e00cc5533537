"""A session in facts: JSON values, taken from what the file says and checked no further."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvrt.cellcache import history as texts
from kvrt.cellcache.history import TokenHistory
from kvrt.cli.report import phrases
from kvrt.cli.report.cell_map import signs
from kvrt.errors import BadSession
from kvrt.session import OpenedSession, manifest
from kvrt.session.kv_file.frame import PAGE
from kvrt.session.library.stored import bytes_on_disk
from kvrt.session.manifest import Blob, GroupEntry, Manifest

_MAX_CELLS = 1 << 24  # of a map


def session_facts(opened: OpenedSession) -> dict[str, Any]:
    """Sizes, model, settings, sequences and groups of a session."""
    found, said = opened.manifest, opened.manifest.fingerprint
    n_file = bytes_on_disk(opened.path)
    n_live = PAGE + _n_bytes(found.blobs) + len(manifest.to_json(found))
    return {
        "path": str(opened.path),
        "kvrt": found.version,
        "n_bytes": n_file,
        "n_row_bytes": sum(_n_bytes(g.blocks) for g in found.groups),
        "n_state_bytes": found.states.n_bytes if found.states else 0,
        # What later saves have replaced, older manifests included.
        "n_waste_bytes": 0 if opened.path.is_dir() else max(n_file - n_live, 0),
        "rope": said.get("rope"),
        "type_k": said.get("type_k"),
        "type_v": said.get("type_v"),
        "self_extend": said.get("self_extend") and str(said.get("self_extend")),
        "policy": found.policy and phrases.named_settings(found.policy),
        "select": found.select and phrases.named_settings(found.select),
        "model": dict(_mapping(said.get("model"))),
        "sequences": [_sequence(s, found, opened.history) for s in sorted(found.n_tokens)],
        "groups": [_group(i, g, said) for i, g in enumerate(found.groups)],
    }


def cell_maps(opened: OpenedSession) -> list[list[str]]:
    """A map of the cells of each group; see `cell_map.signs`.

    Raises:
      BadSession: there are more than anybody would look at.
    """
    out = []
    for i, group in enumerate(opened.groups):
        n_cells, seqs = group.n_cells, group.seqs
        if n_cells > _MAX_CELLS:
            raise BadSession(f"group {i} has {n_cells:,} cells; a map shows {_MAX_CELLS} at most")
        owners = np.zeros((n_cells, max(seqs.shape[1], 1)), np.uint32)
        owners[group.index] = seqs
        out.append(signs(owners))
    return out


def _sequence(s: int, found: Manifest, held: TokenHistory) -> dict[str, Any]:
    pos = texts.positions(held, s)
    draw = found.draws.get(s)
    return {
        "sequence": s,
        "tokens": found.n_tokens[s],
        "exact": found.exact.get(s, found.n_tokens[s]),
        "pos_min": int(pos[0]) if len(pos) else None,
        "pos_max": int(pos[-1]) if len(pos) else None,
        "logits": s in found.logits,
        "drawn": draw.n_drawn if draw else 0,
        "ga_i": found.ga_i.get(s, 0),
        "policy": _policy(found.policies.get(s)),
    }


def _policy(said: Mapping[str, Any] | None) -> str | None:
    """The policy by position that a run of this sequence takes up; n_keep is --keep and BOS."""
    if not said:
        return None
    return phrases.named_settings({k: v for k, v in said.items() if v is not None})


def _group(i: int, entry: GroupEntry, said: Mapping[str, Any]) -> dict[str, Any]:
    groups = said.get("groups")
    group = _mapping(groups[i]) if isinstance(groups, list) and i < len(groups) else {}
    layers, mask, rope = group.get("layers"), _mapping(group.get("mask")), group.get("rope")
    return {
        "group": i,
        "layers": len(layers) if isinstance(layers, list) else None,
        "kv_heads": group.get("n_kv_heads"),
        "head_dim": group.get("head_dim"),
        "mask": f"{mask['kind']} {mask['size']}" if mask.get("kind", "full") != "full" else "full",
        "rope_base": _mapping(rope).get("base") if rope else None,
        "cells": entry.n_cells,
        "used": entry.n_used,
        "lost": sum(b - a for x in entry.lost.values() for a, b in x),
        "bytes": _n_bytes(entry.blocks),
    }


def _n_bytes(blobs: tuple[Blob, ...]) -> int:
    return sum(b.n_bytes for b in set(blobs))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
