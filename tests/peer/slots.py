"""Slot files of a live llama.cpp in a runtime of ours."""

from kvrt.session.interop import llama


def restored(runtime, model, path):
    """Restores a file of one sequence into a runtime of its model; the snapshot that was read."""
    found = llama.read(
        path,
        runtime.fingerprint,
        model.spec.groups,
        arch=model.spec.arch,
        n_vocab=runtime.n_vocab,
    )
    runtime.restore(found)
    return found
