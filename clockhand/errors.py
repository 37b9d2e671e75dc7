"""The one exception that means "the user can fix this".

Every message is a single line that names the field, the value, what is allowed and where the value came from. The
command line prints it without a traceback; everything else that escapes is a fault of clockhand and shows its own.
"""

import shlex
from collections.abc import Iterable
from difflib import get_close_matches


class ClockhandError(ValueError):
    """Input that cannot be honoured. `str(error)` is one line for a person."""


def unknown_name(what: str, name: str, known: Iterable[str], source: str = "") -> ClockhandError:
    """The refusal of a name nobody knows, with the nearest one that exists.

    >>> str(unknown_name("field", "n_layer", ["n_layers", "n_heads"], "--set"))
    "unknown field 'n_layer' (from --set); did you mean 'n_layers'?"
    """
    known = sorted(known)
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(known)}"
    origin = f" (from {source})" if source else ""
    return ClockhandError(f"unknown {what} {name!r}{origin}; {hint}")


def as_command(*words: object) -> str:
    """A command as it can be typed: what has spaces or other signs of the shell's in it is quoted.

    >>> as_command("clockhand", "generate", "runs/my notes")
    "clockhand generate 'runs/my notes'"
    """
    return shlex.join(map(str, words))
