"""What a power loss leaves of the last write of results.

A disk may have kept the file's length and not what was written there: then zeros stand in place of
some of it. A line of results has no zeros of its own, so they tell where the write was torn.
"""

BEGIN = b'{"id": '  # of every line of results
_END = b'"n_cached": '  # stands near the end of one
_TEXT = bytes(range(0x20, 0x7F)) + b"\n"  # JSON as it is written here


def is_torn_write(data: bytes, *, n_lines: int, follows_results: bool) -> bool:
    """Whether bytes up to the end of a file are a torn write of ours, and no one else's file.

    Args:
      data: from the first line that is not whole.
      n_lines: that one write may have.
      follows_results: whether whole results stand before it.
    """
    if b"\0" not in data or data.count(b"\n") > n_lines or data.translate(None, _TEXT + b"\0"):
        return False
    text = data.replace(b"\0", b"")
    if not data.startswith(b"\0"):
        return begins_like_a_line(data.partition(b"\0")[0])
    return follows_results or not text or BEGIN in text or _END in text


def begins_like_a_line(data: bytes) -> bool:
    """Whether bytes begin like a line of results, as far as they go."""
    return data.startswith(BEGIN) or BEGIN.startswith(data)
