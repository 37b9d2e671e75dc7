"""Builds the step's library, once for each kind of processor: called where clockhand is installed, never later.

    python clockhand/infer/kernels/build.py [folder]

It imports nothing of clockhand or torch, since neither is there while a wheel is built.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("vectors.h", "threads.h", "product.h", "attend.h", "step.h", "step.cpp")

_V4_BF16 = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"]
# The most able first: the first one that can run is taken.
VARIANTS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "amx": [*_V4_BF16, "-mamx-tile", "-mamx-bf16"],
        "v4-bf16": _V4_BF16,
        "v4": ["-march=x86-64-v4"],
        "v3": ["-march=x86-64-v3"],
    },
    "arm64": {"arm64": []},
}
FLAGS = ["-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
FLAGS += ["-fPIC", "-shared", "-pthread"]


def architecture() -> str:
    """x86_64, arm64, or another name for which there is no library."""
    name = platform.machine().lower()
    return {"amd64": "x86_64", "aarch64": "arm64"}.get(name, name)


def variants() -> dict[str, list[str]]:
    """The kinds of processor a library is built for here, the most able first, each with its flags."""
    found = VARIANTS.get(architecture(), {})
    return {name: flags for name, flags in found.items() if name != "amx" or sys.platform == "linux"}


def source_digest() -> str:
    """A digest of the source: a library that was built from another is not loaded."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def library_file(variant: str, folder: Path = HERE) -> Path:
    return folder / f"step-{variant}.so"


def build(variant: str, folder: Path = HERE, extra: list[str] | None = None) -> Path:
    """The library of one variant. Raises `OSError` or `CalledProcessError` where it cannot be built."""
    file = library_file(variant, folder)
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or "c++"]
    command += [*FLAGS, *variants()[variant], *(extra or []), f'-DSOURCE_DIGEST="{source_digest()}"']
    command += [str(HERE / "step.cpp"), "-o", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)
    return file


def build_all(folder: Path = HERE) -> list[str]:
    """Builds what can be built; the variants that were. One that a compiler does not know is left out, and said."""
    folder.mkdir(parents=True, exist_ok=True)

    def one(variant: str) -> str | None:
        try:
            build(variant, folder)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[:1]
            print(f"clockhand: no step library for {variant}: {' '.join(why)}", file=sys.stderr)
            return None
        return variant

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return [variant for variant in pool.map(one, variants()) if variant is not None]


if __name__ == "__main__":
    built = build_all(*(Path(argument) for argument in sys.argv[1:2]))
    print("built:", ", ".join(built) or "none")
