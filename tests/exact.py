"""The defaults that tests compute with."""

import functools


def compute_exactly() -> None:
    """Makes float32 the default of caches and weights in tests: most compare with exact numbers.

    Users' defaults are half precision and int8, "auto". Tests of those say "auto", and those of a
    process of their own have them.
    """
    from kvrt.options.cache import CacheConfig
    from kvrt_models import load

    made = CacheConfig.__init__

    def init(self, **chosen):
        made(self, **{"type_k": "f32", "type_v": "f32", **chosen})

    CacheConfig.__init__ = functools.wraps(made)(init)
    for function in (load.load, load.open_model, load.describe_model):
        function.__kwdefaults__["dtype"] = "f32"
