"""What pyproject.toml cannot say: the step is built with a wheel, and where clockhand is installed in place.

Where there is no compiler they are left out, and installing goes on (clockhand/infer/kernels/build.py).
"""

import runpy
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

KERNELS = Path("clockhand/infer/kernels")


class BuildWithKernels(build_py):
    def run(self) -> None:
        build = runpy.run_path(str(KERNELS / "build.py"))["build_all"]
        build(KERNELS.resolve())
        super().run()


class PlatformWheel(bdist_wheel):
    """For any Python, but one kind of machine: the libraries know nothing of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithLibraries)
