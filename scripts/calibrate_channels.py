"""Finds the heavy channels of a model for Double Sparsity, and writes them into a file.

    python -m scripts.calibrate_channels --text docs/concepts.md --out smollm2.channels.json

`kvrt.runtime.heavy_channels.read_channels` reads it. Give other texts than those that are judged
later. The file has the digest of the weights, and is refused with others.
"""

import pathlib

from absl import flags

from kvrt.runtime.heavy_channels import heavy_channels, write_channels
from kvrt_models.load import load
from scripts._lib import commands
from scripts.experiments import texts

_MODEL = flags.DEFINE_string("model", "smollm2-135m", "Known name, file or folder.")
_TEXT = flags.DEFINE_multi_string("text", ["docs/concepts.md"], "Files to calibrate with.")
_N_CHANNELS = flags.DEFINE_integer("n_channels", 16, "Channels a head.", lower_bound=1)
_N_PIECES = flags.DEFINE_integer("pieces", 16, "Pieces of text.", lower_bound=1)
_SIZE = flags.DEFINE_integer("size", 512, "Tokens of a piece.", lower_bound=16)
_OUT = flags.DEFINE_string("out", None, "File to write.", required=True)


def main() -> None:
    model = load(_MODEL.value)
    text = "\n\n".join(pathlib.Path(x).read_text() for x in _TEXT.value)
    pieces = texts.in_pieces(model.tokenizer.encode(text), _SIZE.value)[: _N_PIECES.value]
    channels, weights = heavy_channels(model.decoder, pieces, _N_CHANNELS.value)
    write_channels(_OUT.value, channels, weights)
    print(f"{_OUT.value}: {_N_CHANNELS.value} channels a head, from {len(pieces)} pieces")


if __name__ == "__main__":
    commands.run(main)
