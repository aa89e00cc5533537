"""What a disk may hold when the power goes, at every prefix of a record of `powerloss.py`.

A write that no fsync of its file followed is kept, lost or torn, and a name that was made, moved or
removed since the last fsync of its folder is so or not.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import xxhash
from powerloss import Event, Mark, Recorder, Sync, Tree, Write

# What may become of a write: all of it, nothing, its first half, its second half, its length alone.
OF_A_WRITE = ("kept", "lost", "head", "tail", "length")
OF_ANOTHER = ("kept", "lost")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """What may be on the disk.

    Attributes:
      n_done: events that had been carried out when the power went.
      ended: whether those were all.
      marks: the texts of those marks that are among them.
      tree: what is there then.
      fates: what became of the unsynced ones, for messages.
    """

    n_done: int
    ended: bool
    marks: tuple[str, ...]
    tree: Tree
    fates: tuple[str, ...]


def states(
    recorder: Recorder,
    *,
    matters: Callable[[str], bool],
    most: int,
    seed: int = 0,
) -> Iterator[State]:
    """Different states at every prefix of a record.

    All of them where there are `most` at most; else those where one unsynced event has another fate
    than all others, those where two have, and a random choice.

    Args:
      recorder: of what was done.
      matters: whether a path is looked at; states that differ elsewhere alone count once.
      most: states at one prefix.
      seed: of the choice.
    """
    rng, seen = random.Random(seed), set()
    synced, pending, marks = recorder.before.copy(), [], []
    # Files and folders that are made later are there, without names.
    for number in recorder.disk.files.keys() - synced.files.keys():
        synced.files[number] = bytearray()
    for number in recorder.disk.folders.keys() - synced.folders.keys():
        synced.folders[number] = {}
    for n_done in range(len(recorder.events) + 1):
        if n_done:
            event = recorder.events[n_done - 1]
            if isinstance(event, Mark):
                marks.append(event.text)
            elif isinstance(event, Sync):
                for done in [e for e in pending if e.of == event.of]:
                    synced.apply(done)
                pending = [e for e in pending if e.of != event.of]
            else:
                pending.append(event)
        ended = n_done == len(recorder.events)
        for fates in _fates(pending, most, rng):
            disk = synced.copy()
            for event, fate in zip(pending, fates, strict=True):
                disk.apply(event, fate)
            tree = disk.tree()
            key = (digest(tree, matters), ended, tuple(marks))
            if key not in seen:
                seen.add(key)
                yield State(
                    n_done=n_done, ended=ended, marks=tuple(marks), tree=tree, fates=tuple(fates)
                )


def _fates(pending: Sequence[Event], most: int, rng: random.Random) -> Iterator[Sequence[str]]:
    choices = [OF_A_WRITE if isinstance(e, Write) else OF_ANOTHER for e in pending]
    n_all = 1
    for choice in choices:
        n_all *= len(choice)
    if n_all <= most:
        yield from itertools.product(*choices)
        return
    n = 0
    for base, k in itertools.product(("kept", "lost"), (0, 1, 2)):
        for some in itertools.combinations(range(len(pending)), k):
            for fates in itertools.product(*(choices[i] for i in some)):
                if n >= most // 2 and k == 2:
                    break
                n += 1
                out = [base] * len(pending)
                for i, fate in zip(some, fates, strict=True):
                    out[i] = fate
                yield out
    for _ in range(most - n):
        yield [rng.choice(choice) for choice in choices]


def digest(tree: Tree, matters: Callable[[str], bool]) -> bytes:
    hashed = xxhash.xxh3_128()
    for path, data in sorted(tree.items()):
        if matters(path):
            hashed.update(f"{path}\0{None if data is None else len(data)}\0".encode())
            hashed.update(data or b"")
    return hashed.digest()


def write_tree(root: Path, tree: Tree) -> None:
    """Makes a folder that holds such a state."""
    root.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (root / path).mkdir(mode=0o700)
        else:
            (root / path).write_bytes(data)
