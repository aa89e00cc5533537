"""A stranger's tokenizer.json: read or refused in one line, within bounds on time and memory."""

import copy
import json
import random
import resource
from pathlib import Path

import pytest
from test_folder_tokenizer import byte_level, spm

from kvrt.errors import BadModelFile, KvrtError, UsageError
from kvrt_models.tokenizer import harmless as tokenizer_rules
from kvrt_models.tokenizer import hf_folder as hf_tokenizer
from kvrt_models.tokenizer import library as library_tokenizer
from kvrt_models.tokenizer.process import ProcessLimits, TokenizerProcess

LIMITS = ProcessLimits(memory_bytes=512 << 20, cpu_s=0.4, encode_char_cpu_s=0.0)
HONEST = {"byte level": json.loads(byte_level().to_str()), "spm": json.loads(spm().to_str())}
TEXTS = ("", "the cat, aab 12", "a" * 60 + "!", "é\n" * 40)


def split(pattern: str) -> dict:
    return dict(type="Split", pattern={"Regex": pattern}, behavior="Isolated", invert=False)


def replace(old: str, new: str) -> dict:
    return dict(type="Replace", pattern={"String": old}, content=new)


def sequence(kind: str, *steps: dict) -> dict:
    return {"type": "Sequence", kind: list(steps)}


def template(n: int, ids: list[int], name: str = "<s>") -> dict:
    return dict(
        type="TemplateProcessing",
        single=[{"SpecialToken": {"id": "<s>", "type_id": 0}}] * n,
        pair=[],
        special_tokens={name: {"id": name, "ids": ids, "tokens": ["x"] * len(ids)}},
    )


def added(*texts: str) -> list[dict]:
    rest = dict(single_word=False, lstrip=False, rstrip=False, normalized=True, special=False)
    return [{"id": 442 + i, "content": text, **rest} for i, text in enumerate(texts)]


def read(folder: Path, rules: dict, limits: ProcessLimits = LIMITS):
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    return hf_tokenizer.read_folder(folder, limits=limits)


def one_line(error: pytest.ExceptionInfo[KvrtError]) -> str:
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    return str(error.value)


MODEL = HONEST["byte level"]["model"]
REFUSED = {
    "a normaliser that grows what it puts in front": dict(
        normalizer=sequence(
            "normalizers",
            dict(type="Prepend", prepend="a" * 99),
            *[replace("a", "aa")] * 40,
        )
    ),
    "ten million template tokens": dict(post_processor=template(10_000, [1] * 1000)),
    "a template token outside": dict(post_processor=template(1, [4 * 10**9])),
    "a template token that is missing": dict(post_processor=template(1, [1], name="other")),
    "a separator outside": dict(
        post_processor=dict(
            type="RobertaProcessing",
            sep=["x", 10**9],
            cls=["y", 1],
            trim_offsets=True,
            add_prefix_space=True,
        )
    ),
    "an expression without an end": dict(pre_tokenizer=split("(")),
    "a nested expression": dict(pre_tokenizer=split("(" * 10**5 + ")" * 10**5)),
    "an expression in itself": dict(pre_tokenizer=split(r"(?<=a|bc)x\g<0>")),
    "a prefix longer than tokens": dict(model=MODEL | {"continuing_subword_prefix": "abcdefghi"}),
    "a table of characters": dict(
        normalizer=dict(type="Precompiled", precompiled_charsmap="/////w==")
    ),
    "no vocabulary": dict(model={"type": "Unigram", "unk_id": 5, "vocab": []}),
    "steps in steps": dict(
        pre_tokenizer=json.loads(
            '{"type": "Sequence", "pretokenizers": [' * 300 + "null" + "]}" * 300
        )
    ),
    "an id twice": dict(model=MODEL | {"vocab": MODEL["vocab"] | {"zzz": 7}}),
    "an id far away": dict(model=MODEL | {"vocab": MODEL["vocab"] | {"zzz": 10**9}}),
    "a token of a million characters": dict(added_tokens=added("a" * 10**6)),
    "merges of no tokens": dict(model=MODEL | {"merges": ["zz y"]}),
    "wrong types": dict(normalizer=5, pre_tokenizer=[], decoder="x"),
    "a model that is a list": dict(model=[]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_hostile_files_are_refused_in_one_line(case, tmp_path, capfd):
    with pytest.raises(BadModelFile, match=r"tokenizer|vocabulary") as caught:
        read(tmp_path, HONEST["byte level"] | REFUSED[case])
    one_line(caught)
    assert capfd.readouterr() == ("", "")


TOO_MUCH = {
    "growth": dict(normalizer=sequence("normalizers", *[replace("a", "aa")] * 40)),
    "growth of all": dict(normalizer=sequence("normalizers", *[{"type": "ByteLevel"}] * 40)),
    "backtracking": dict(pre_tokenizer=split(r"(a+)+$")),
}


@pytest.mark.parametrize("case", TOO_MUCH)
def test_a_text_that_takes_too_much_is_refused_and_the_next_one_is_read(case, tmp_path, capfd):
    _, codec = read(tmp_path, HONEST["byte level"] | TOO_MUCH[case])
    plain = dict(add_special=True, parse_special=False)
    with pytest.raises(UsageError, match=r"cannot encode a text of 60 characters: ") as caught:
        codec.encode("a" * 59 + "é", **plain)
    one_line(caught)
    assert codec.encode("", **plain) == []
    assert capfd.readouterr() == ("", "")


def test_the_library_says_what_it_lacks(tmp_path):
    _, codec = read(tmp_path, HONEST["byte level"] | dict(model=MODEL | {"unk_token": "nope"}))
    assert codec.encode("a", add_special=True, parse_special=False)
    alone = dict(model=MODEL | {"unk_token": "nope", "vocab": {"a": 0}, "merges": []})
    _, codec = read(tmp_path, HONEST["byte level"] | alone)
    with pytest.raises(UsageError, match="cannot encode a text of 2 characters: Unk token `nope`"):
        codec.encode("ab", add_special=True, parse_special=False)


@pytest.mark.parametrize("name", HONEST)
def test_files_of_models_in_use_are_run_in_this_process(name):
    assert tokenizer_rules.is_harmless(HONEST[name])
    for pattern in tokenizer_rules.PATTERNS:
        assert tokenizer_rules.is_harmless(HONEST[name] | dict(pre_tokenizer=split(pattern)))
    for change in (*TOO_MUCH.values(), dict(pre_tokenizer=split(r"\w+")), dict(other=1)):
        assert not tokenizer_rules.is_harmless(HONEST[name] | change)
    many = added(*(f"{i:0>250}" for i in range(2000)))
    grow = dict(normalizer=sequence("normalizers", replace(" ", "▁")))
    assert tokenizer_rules.is_harmless(
        HONEST[name] | dict(added_tokens=many) | dict(normalizer=None)
    )
    assert not tokenizer_rules.is_harmless(HONEST[name] | dict(added_tokens=many) | grow)


@pytest.mark.parametrize("name", HONEST)
def test_both_processes_give_the_same(name):
    rules = json.dumps(HONEST[name])
    here, there = (
        library_tokenizer.LibraryTokenizer(rules),
        TokenizerProcess(rules, ProcessLimits()),
    )
    assert (here.rules, here.added) == (there.rules, there.added)
    for text in ("", "Hello the cat 123\n", "<|im_start|>a<s>", "é" * 50):
        for flag in (False, True):
            options = dict(add_special=flag, parse_special=flag)
            assert here.encode(text, **options) == there.encode(text, **options)


def test_an_expression_that_is_not_known_runs_elsewhere_and_in_order(tmp_path):
    rules = HONEST["byte level"] | dict(
        pre_tokenizer=sequence(
            "pretokenizers",
            split(r"[a-z]+|.|\n"),
            dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False),
        )
    )
    vocab, codec = read(tmp_path, rules)
    got = [codec.encode(t, add_special=True, parse_special=False) for t in ("a b", "b", "the cat")]
    assert [b"".join(map(codec.token_bytes, ids)) for ids in got] == [b"a b", b"b", b"the cat"]
    rules["pre_tokenizer"]["pretokenizers"][0] = split(r"\p{N}")
    assert read(tmp_path, rules)[0] == vocab


def test_a_process_that_gives_no_answer(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(BadModelFile, match=r"needs more than 5\.0 s of processor time or 2,048"):
        TokenizerProcess("{}", ProcessLimits())


VALUES = [None, True, -1, 0, 1, 2**31, 2**64, 1e308, "", "a", "\u2581", "a" * 5000, [], {}, [[]]]
VALUES += [{"type": "Sequence"}, {"type": "ByteLevel"}, {"String": ""}, {"Regex": "(a*)*$"}]


def places(value, path=()):
    """Every place of a JSON value; of a vocabulary and of merges only the whole."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in inner if not {"vocab", "merges"} & set(path) else ():
        if isinstance(item, dict | list):
            yield from places(item, (*path, key))
        else:
            yield (*path, key)


def mutant(rng: random.Random, rules: dict) -> dict:
    """One or two places of the file changed."""
    rules = copy.deepcopy(rules)
    for _ in range(rng.randint(1, 2)):
        *path, key = rng.choice([p for p in places(rules) if p])
        at = rules
        for step in path:
            at = at[step]
        value, what = at[key], rng.random()
        if what < 0.1:
            del at[key]
        elif isinstance(at, list) and what < 0.3:
            at.extend(at * rng.choice([1, 50]))
        elif isinstance(value, bool) and what < 0.8:
            at[key] = not value
        elif isinstance(value, int) and what < 0.8:
            at[key] = rng.choice([value + 1, -value, 2**32 - 1, value * 1000])
        elif isinstance(value, str) and what < 0.8:
            at[key] = rng.choice([value * 2, value[1:], "a", value.upper(), "NFC", "Fuse"])
        elif isinstance(value, dict) and key == "vocab":
            value[rng.choice(list(value))] = rng.choice([*range(-1, 300), 10**7, "a"])
        else:
            at[key] = copy.deepcopy(rng.choice(VALUES))
    return rules


def read_or_refuse(folder: Path, n: int, seed: int) -> tuple[int, int]:
    """How many of n mutants were read, and how many refused."""
    rng = random.Random(seed)
    n_read = 0
    for i in range(n):
        rules = mutant(rng, HONEST[rng.choice(list(HONEST))])
        try:
            vocab, codec = read(folder, rules)
            for text in TEXTS:
                for flag in (False, True):
                    ids = codec.encode(text, add_special=flag, parse_special=flag)
                    assert all(0 <= token < len(vocab.texts) for token in ids), i
                    assert b"".join(map(codec.token_bytes, ids)) is not None
            n_read += 1
        except KvrtError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, i
    return n_read, n - n_read


def test_mutants_are_read_or_refused(tmp_path, capfd):
    n_read, n_refused = read_or_refuse(tmp_path, 40, seed=1)
    assert min(n_read, n_refused) > 5 and capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_many_mutants_are_read_or_refused(tmp_path, capfd, budget):
    before, n = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, budget(150, 500)
    n_read, n_refused = read_or_refuse(tmp_path, n, seed=2)
    assert min(n_read, n_refused) > n // 10 and capfd.readouterr() == ("", "")
    # In KiB: the process that reads them is bounded as well.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2 << 20
