"""Beam search as Hugging Face's `generate` does it, whole arrays at a time, in NumPy.

A transcript of transformers 4.57, `GenerationMixin._beam_search` with do_sample=False and one
prompt; of equal scores the first in the flat order counts, as with a stable sort.
"""

import numpy as np

MASKED = -1.0e9


def top(scores, k):
    return np.argsort(-scores, kind="stable")[:k]


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def beam_search(next_logits, prompt, spec):
    """Scores and sampled tokens of num_beams hypotheses, best first.

    Args:
      next_logits: of lists of tokens, the prompt's included, the logits of each one's next token.
      prompt: tokens.
      spec: num_beams, length_penalty, early_stopping, n_predict, stop_ids.
    """
    n_beams, n_prompt = spec.num_beams, len(prompt)
    max_length, cur_len = n_prompt + spec.n_predict, n_prompt
    beams_to_keep = max(2, 1 + len(spec.stop_ids)) * n_beams
    top_num_beam_mask = np.arange(beams_to_keep) < n_beams
    running = np.full((n_beams, max_length), -1)
    running[:, :n_prompt] = prompt
    sequences = running.copy()
    running_scores = np.full(n_beams, MASKED)
    running_scores[0] = 0.0
    beam_scores = np.full(n_beams, MASKED)
    is_sent_finished = np.zeros(n_beams, bool)
    improvable = True
    lengths = np.zeros(n_beams, int)
    while True:
        logits = next_logits([row[:cur_len].tolist() for row in running])
        log_probs = log_softmax(logits) + running_scores[:, None]
        n_vocab = log_probs.shape[1]
        flat = log_probs.reshape(-1)
        index = top(flat, beams_to_keep)
        topk_log_probs = flat[index]
        topk_sequences = running[index // n_vocab].copy()
        topk_sequences[:, cur_len] = index % n_vocab
        hits = np.isin(index % n_vocab, list(spec.stop_ids)) | (cur_len + 1 >= max_length)
        # The non-finished ones go on.
        masked = topk_log_probs + hits * MASKED
        chosen = top(masked, n_beams)
        running, running_scores = topk_sequences[chosen], masked[chosen]
        # Finished ones, if they are better.
        finished_now = hits & top_num_beam_mask[: len(hits)]
        scores = topk_log_probs / (cur_len + 1 - n_prompt) ** spec.length_penalty
        full = is_sent_finished.all() and spec.early_stopping is True
        scores = scores + full * MASKED + (not improvable) * MASKED + ~finished_now * MASKED
        merged_sequences = np.concatenate([sequences, topk_sequences])
        merged_scores = np.concatenate([beam_scores, scores])
        merged_finished = np.concatenate([is_sent_finished, finished_now])
        merged_lengths = np.concatenate([lengths, np.full(len(hits), cur_len + 1 - n_prompt)])
        best = top(merged_scores, n_beams)
        sequences, beam_scores = merged_sequences[best], merged_scores[best]
        is_sent_finished, lengths = merged_finished[best], merged_lengths[best]
        cur_len += 1
        # Whether to stop.
        if spec.early_stopping == "never" and spec.length_penalty > 0:
            hypothetical = max_length - n_prompt
        else:
            hypothetical = cur_len - n_prompt
        possible = running_scores[0] / hypothetical**spec.length_penalty
        worst = np.where(is_sent_finished, beam_scores.min(), MASKED)
        improvable = bool(improvable and (possible > worst).any())
        open_beam = not (is_sent_finished.all() and spec.early_stopping is True)
        if not (improvable and open_beam and not hits.all()):
            break
    texts = [
        row[n_prompt : n_prompt + n].tolist() for row, n in zip(sequences, lengths, strict=True)
    ]
    return [(score, text) for score, text in zip(beam_scores.tolist(), texts, strict=True)]
