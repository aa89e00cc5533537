"""`kvrt run -gan -gaw`: further than the model was trained for, inside one context."""

import json

import pytest

from kvrt.cli.flags import parse
from kvrt.cli.setup import config
from kvrt.options.cache import SelfExtend


def options(*words: str):
    found = parse.parse_flags(["-p", "x", *words])
    assert found is not None
    return found


@pytest.mark.slow
def test_both_kinds_write_text_and_only_one_moves_cells(go):
    words = ["--json", "-n", 50, "--ignore_eos", "-gan", 2, "-gaw", 8]
    cache, paper = (json.loads(go(*words, *more).out) for more in ([], PAPER))
    for told in (cache, paper):
        assert (told["cells_used"], told["n_shift"], len(told["tokens"])) == (52, 0, 50)
    assert cache["tokens"] != paper["tokens"]
    err = go("-n", 50, "--ignore_eos", "-gan", 2, "-gaw", 8).err
    assert "0 defrags, 6 rounds of SelfExtend" in err


PAPER = ["--self_extend", "paper"]


@pytest.mark.slow
def test_a_full_context_ends_what_the_cache_kind_writes(go):
    done = go("-n", 100, "--ignore_eos", "-gan", 2, "-gaw", 8)
    assert done.code == 1 and "the context is full: its 64 cells" in done.err
    assert done.err.endswith("shifting is off; raise -c\n")


def test_flags_become_a_configuration():
    assert config.extend_config(options()) is None
    assert config.extend_config(options("--grp_attn_n", "4")) == SelfExtend(ga_n=4, ga_w=512)
    paper = config.extend_config(options("-gan", "4", "-gaw", "1000", *PAPER))
    assert paper == SelfExtend(ga_n=4, ga_w=1000, kind="paper")


def test_the_warning_counts_what_self_extend_reaches(capfd):
    words = ["-c", "1500", "-gan", "4", "-gaw", "128"]
    assert config.cache_config(options(*words), 512).n_ctx == 1500
    assert capfd.readouterr().err == ""
    config.cache_config(options("-c", "2000", *words[2:]), 512)
    err = capfd.readouterr().err
    assert "(1,664 with SelfExtend)" in err and "a greater -gan reads further, -c 1664" in err
