"""The written-down recipes: commands that still exist, with flags that still mean something."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.sh"))


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("length", ["short", "long"])
def test_the_character_recipe_trains_a_model_of_at_most_800_000_parameters(tmp_path, length):
    text = tmp_path / "text.txt"
    text.write_text("To be, or not to be, that is the question.\n" * 200)
    bin = tmp_path / "bin"
    bin.mkdir()
    # The recipe as it is, but for its number of steps: a flag that comes last wins.
    shortened = '"$@" --steps 1 --warmup-steps 0 --compile off'
    (bin / "clockhand").write_text(f"#!/bin/sh\nexec {sys.executable} -m clockhand.cli {shortened}\n")
    (bin / "clockhand").chmod(0o755)
    environment = {**os.environ, "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", str(RECIPES[0]), str(text), length, str(tmp_path / "run")]
    told = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert "validation loss" in told.stdout

    from clockhand.count import total_parameters
    from clockhand.interop.hf import read_config

    assert 700_000 < total_parameters(read_config(tmp_path / "run" / "final")) <= 800_000
