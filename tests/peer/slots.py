"""A live llama.cpp beside a runtime of ours: its slot files, and the text that follows one."""

import numpy as np

from kvrt.session.interop import llama


def read(runtime, model, path):
    """The snapshot of a file of one sequence, as it is for a runtime of its model."""
    of_model = {"arch": model.spec.arch, "n_vocab": runtime.n_vocab}
    return llama.read(path, runtime.fingerprint, model.spec.groups, **of_model)


def restored(runtime, model, path):
    """Restores such a file; the snapshot that was read."""
    found = read(runtime, model, path)
    runtime.restore(found)
    return found


def followed(runtime, expected, seq_id=0):
    """Logits behind each token of llama.cpp's text but the last."""
    return [runtime.decode({seq_id: int(t)})[seq_id] for t in expected.tokens[:-1]]


def assert_near(logits, expected, limit):
    """Log-probabilities of each token are llama.cpp's, as near as that; ours, in float64."""
    found = np.asarray(logits, np.float64)
    found -= np.logaddexp.reduce(found, axis=1)[:, None]
    worst = float(np.abs(found - expected.log_probs).max())
    print(f"largest difference {worst:.1e}")
    assert worst < limit
    return found


def assert_same_text(logits, expected, limit):
    """So they are, and the greatest of each is the token of llama.cpp's text."""
    found = assert_near(logits, expected, limit)
    assert found.argmax(axis=1).tolist() == expected.tokens.tolist()
