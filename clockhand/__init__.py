"""clockhand: the modern decoder-only Transformer from scratch, small enough to read, complete enough to use.

    lm = clockhand.load("runs/notes")
    print(lm.generate("Once", temperature=0.8))

`load` and `LanguageModel` are in `infer/language_model.py`; torch is imported when one of them is first asked for.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from clockhand.infer.language_model import LanguageModel, load

__version__ = "0.1.0"
__all__ = ["LanguageModel", "__version__", "load"]


def __getattr__(name: str) -> Any:
    if name in ("LanguageModel", "load"):
        from clockhand.infer import language_model

        return getattr(language_model, name)
    raise AttributeError(f"module 'clockhand' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
