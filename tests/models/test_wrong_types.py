"""Headers whose values have wrong types or sizes: described, or refused in one line."""

import json
import time

import headers
import pytest

from kvrt.errors import BadModelFile, UnsupportedModel
from kvrt_models.families.shared import registry

VALUES = [
    None,
    True,
    -1,
    0,
    2**31 - 1,
    2**63,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    "",
    [[0]],
]
VALUES += ["a" * 5000, [], ["a"], {}, {"a": 1}, [{}], [1] * 10**5, [None] * 4, {"type": [1]}]
VALUES += [{"rope_type": "yarn"}, ["full_attention"] * 10**5]
ABSENT = dict.fromkeys("rope_scaling rope_parameters layer_types sliding_window head_dim".split())


def check(read, good: dict) -> None:
    started = time.process_time()
    for key in good:
        for value in VALUES:
            try:
                read(good | {key: value})
            except (BadModelFile, UnsupportedModel) as error:
                assert "\n" not in str(error) and len(str(error)) < 600, (key, value)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt-oss", "jamba"])
def test_config_json(arch):
    config = json.loads((headers.GOLDEN / arch / "config.json").read_text())
    registry.spec_from_config(config)
    check(registry.spec_from_config, ABSENT | config)


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3"])
def test_gguf_metadata(arch):
    good = headers.metadata(arch, attention__sliding_window=16, rope__scaling__type=None)
    registry.spec_from_gguf(good, headers.TENSORS)
    check(lambda found: registry.spec_from_gguf(found, headers.TENSORS), good)
