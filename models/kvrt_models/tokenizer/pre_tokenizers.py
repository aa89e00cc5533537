"""Pre-tokenizers by their GGUF names: how text is cut into words before merges apply.

Source: the names are those of llama.cpp's converter, the expressions those of the models' own
tokenizer.json, which llama.cpp approximates outside ASCII.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvrt.errors import UnsupportedModel
from kvrt_models.header import brief


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words before merges apply.

    Attributes:
      patterns: regular expressions; each cuts the pieces that the one before left.
      whole_words: a word that is a token as it stands is taken without merging.
      add_bos: files that do not say otherwise put bos first.
      spaced: tokens are UTF-8 text with U+2581 for a space, as SentencePiece writes them.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    add_bos: bool = False
    spaced: bool = False


# All expressions take time in proportion to a text.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_SHORT_FORMS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SHORT_OR_WORD = f"{_SHORT_FORMS}|{_WORD}"
_THREES = rf"{_SHORT_OR_WORD}|\p{{N}}{{1,3}}{_TAIL}"
_ONES = rf"{_SHORT_OR_WORD}|\p{{N}}{_TAIL}"


def _cased(behind: str, digits: str, marks: str, but: str = "") -> str:
    """Words cut where a small letter meets a capital; `behind` a word, without characters `but`."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}{upper}*{lower}+{behind}|{before}{upper}+{lower}*{behind}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+{marks}{_SPACES}"


_TEKKEN = _cased("", r"\p{N}", r"[\r\n/]*")
_GPT4O = _cased(f"{_SHORT_FORMS}?", r"\p{N}{1,3}", r"[\r\n/]*")
_KIMI = r"\p{Han}+|" + _cased(
    f"{_SHORT_FORMS}?", r"\p{N}{1,3}", r"[\r\n]*", but=r"&&[^\p{Han}]"
)  # fmt: skip
_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SYMBOL_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK_V3 = _SYMBOL_WORD + _MARKED_WORD + r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# Letters with case, as DeepSeek LLM's tokenizer.json lists them.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b"
    "\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787"
    "\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = r"\s?[!-/:-~" + "\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
_FINNISH = r" ?[^(\s|.,!?" + "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af"
    "\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c"
    f"\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|{_KANA}"
)


def _threes_from_the_right(digit: str, after_first: str) -> str:
    """The groups of a run of digits that end where a multiple of three are left."""
    first = rf"(?<!{digit}){digit}{{1,2}}(?=(?:{digit}{{3}}){after_first}(?!{digit}))"
    return rf"{first}|{digit}{{3}}"


_KINDS = {
    "gpt2": PreTokenizer((_GPT2,)),
    "digits": PreTokenizer((r"\p{N}", _GPT2)),
    "llama3": PreTokenizer((_THREES,), True, True),
    "dbrx": PreTokenizer((_THREES,)),
    "glm4": PreTokenizer((_THREES,), True),
    "qwen2": PreTokenizer((_ONES,)),
    "qwen35": PreTokenizer(
        (
            rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACES,
        )
    ),
    "ufakzeka": PreTokenizer((rf"{_WORD}|\p{{N}}{_TAIL}",)),
    "laguna": PreTokenizer((r"[^\n]+|\n+", _ONES)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", rf"{_SHORT_OR_WORD}|\p{{N}}+{_TAIL}"), True),
    "jais2": PreTokenizer(
        (
            rf"{_SHORT_OR_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{2**i}}}(?!\S)|" for i in range(9, 1, -1))
            + r"\s{1,2}(?!\S)|\s",
        )
    ),
    "seed": PreTokenizer((rf"{_SHORT_OR_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}",)),
    "bailing": PreTokenizer(
        (rf"{_SHORT_OR_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "exaone_moe": PreTokenizer(
        (
            rf"{_SHORT_FORMS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "tekken": PreTokenizer((_TEKKEN,), True, True),
    "gpt4o": PreTokenizer((_GPT4O,)),
    # A run of digits is cut from the right where no letter follows: its first one or two here.
    "tiny_aya": PreTokenizer((r"(?<!\d)\d++\b", r"\A\d{1,2}(?=(?:\d{3})+\z)", _GPT4O)),
    "youtu": PreTokenizer(
        (_YOUTU_SCRIPTS, _cased(f"{_SHORT_FORMS}?", r"\p{N}", r"[\r\n/]*")), True
    ),
    "kimi": PreTokenizer((_KIMI,)),
    "deepseek_llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            _DEEPSEEK_MARKS,
            r"(?<!\s)\s++$",
            _DEEPSEEK_CJK,
            r"\p{N}+",
        )
    ),
    "deepseek_coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")
    ),
    "deepseek_v3": PreTokenizer((r"\p{N}{1,3}", _KANA, _DEEPSEEK_V3)),
    "spark": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _KANA,
            _SYMBOL_WORD + _MARKED_WORD + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+",
            r"\p{N}",
        )
    ),
    "afmoe": PreTokenizer((_threes_from_the_right(r"\p{N}", "*"), _AFMOE_SCRIPTS, _DEEPSEEK_V3)),
    "superbpe": PreTokenizer((r"\p{N}+", _threes_from_the_right(r"\d", "+"))),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "finnish": PreTokenizer((_FINNISH,)),
    "viking": PreTokenizer((_FINNISH, r"\p{N}")),
    "chameleon": PreTokenizer(
        (
            r"<sentinel:[0-9]+>",
            r"(?:IMGIMG)(?:[A-I]{1,4})Z",
            r"(?:[\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    "gemma4": PreTokenizer((r"[^\n]+|\n+",), spaced=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}
# `tokenizer.ggml.pre` -> kind.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    name: _KINDS[kind]
    for kind, names in {
        "gpt2": "gpt-2 phi-2 mpt olmo jais trillion exaone4 a.x-4.0 mellum gigachat "
        "granite-docling",
        "digits": "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        "llama3": "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
        "dbrx": "dbrx smaug-bpe chatglm-bpe",
        "glm4": "glm4 glm5",
        "qwen2": "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2 f2llmv2",
        "qwen35": "qwen35",
        "ufakzeka": "ufakzeka",
        "laguna": "laguna",
        "minicpm5": "minicpm5",
        "jais2": "jais-2",
        "seed": "seed-coder",
        "bailing": "bailingmoe bailingmoe2 llada-moe",
        "exaone_moe": "exaone-moe",
        "tekken": "tekken",
        "gpt4o": "gpt-4o llama4 kanana2 talkie minimax-m2",
        "tiny_aya": "tiny_aya cohere2moe",
        "youtu": "youtu",
        "kimi": "kimi-k2",
        "deepseek_llm": "deepseek-llm",
        "deepseek_coder": "deepseek-coder",
        "deepseek_v3": "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        "spark": "spark2_5",
        "afmoe": "afmoe",
        "superbpe": "superbpe",
        "falcon": "falcon",
        "finnish": "poro-chat bloom gpt3-finnish",
        "viking": "viking",
        "chameleon": "chameleon",
        "gemma4": "gemma4 sarvam-moe",
        "default": "default",
    }.items()
    for name in names.split()
}


def pre_tokenizer(name: Any) -> PreTokenizer:
    """The pre-tokenizer of that GGUF name; an empty one is "default".

    Raises:
      UnsupportedModel: no text, or a name that is not in `PRE_TOKENIZERS`.
    """
    if isinstance(name, str) and not name:
        name = "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"tokenizer.ggml.pre is {brief(name)}, none of the {len(PRE_TOKENIZERS)} that are "
            f"known; use the model as a Hugging Face folder instead"
        )
    return PRE_TOKENIZERS[name]
