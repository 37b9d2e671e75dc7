"""Files from strangers: whatever is in them, a model or one clear refusal, nothing written and no memory taken."""

import json
import os
import pickle
import resource
import shutil
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.interop.hf import end_ids, load_model, read_config, save_model
from clockhand.model.transformer import Transformer

EXAMPLES, MANY_EXAMPLES = 200, 2000


def fuzzed(test, examples: int):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))(test)


def good_folder(folder: Path, shards: int = 1) -> Path:
    config = ModelConfig(
        vocab_size=29, d_model=8, n_layers=2, n_heads=2, d_ff=12, qk_norm=True, n_experts=2, rope_scaling="yarn",
        rope_factor=4.0, rope_original_max_seq_len=64,
    )  # fmt: skip
    save_model(Transformer(config), folder, generation={"eos_token_id": [1, 4]})
    if shards > 1:
        weights = load_file(folder / "model.safetensors")
        where = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(weights)}
        for file in set(where.values()):
            save_file({name: weights[name] for name in weights if where[name] == file}, folder / file)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return good_folder(tmp_path_factory.mktemp("good") / "m")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return good_folder(tmp_path_factory.mktemp("sharded") / "m", shards=3)


def open_or_refuse(folder: Path) -> None:
    """Opens the model, or is refused in one line; nothing stays without storage, and the folder stays as it was."""
    before = sorted(os.listdir(folder))
    try:
        end_ids(folder)
        said, parameters = "", list(load_model(folder).parameters())
    except ClockhandError as refusal:
        said, parameters = str(refusal), []
    assert "\n" not in said
    assert all(parameter.device.type == "cpu" for parameter in parameters)
    assert sorted(os.listdir(folder)) == before


@st.composite
def damage(draw, content: bytes, where: int) -> bytes:
    """`content` with up to four bytes, or one piece, of its first `where` bytes changed, or with its end cut off."""
    kind = draw(st.sampled_from(["bytes", "piece", "cut"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content)))]
    changed = bytearray(content)
    if kind == "bytes":
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, where - 1))] = draw(st.integers(0, 255))
    else:
        start = draw(st.integers(0, where - 1))
        changed[start : start + draw(st.integers(0, 30))] = draw(st.binary(max_size=30))
    return bytes(changed)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("two\nlines")
    | st.sampled_from([10**9, 2**62, 10**30, -1, 0]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


def places(content: object) -> list[tuple[dict, str]]:
    """Every object inside a JSON value, with each of its keys."""
    if not isinstance(content, dict):
        return []
    return [(content, key) for key in content] + [place for value in content.values() for place in places(value)]


def with_file(good: Path, name: str, content: bytes, check) -> None:
    original = (good / name).read_bytes()
    try:
        (good / name).write_bytes(content)
        check(good)
    finally:
        (good / name).write_bytes(original)


def damaged_weights(good):
    content = (good / "model.safetensors").read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]

    @given(damage(content, header))
    def check(damaged):
        with_file(good, "model.safetensors", damaged, open_or_refuse)

    return check


def damaged_text(good, name):
    content = (good / name).read_bytes()

    @given(damage(content, len(content)))
    def check(damaged):
        with_file(good, name, damaged, open_or_refuse)

    return check


def other_values(good, name):
    @given(st.data())
    def check(data):
        content = json.loads((good / name).read_text())
        for _ in range(data.draw(st.integers(1, 2))):
            place, key = data.draw(st.sampled_from(places(content)))
            place[key] = data.draw(json_values)
        with_file(good, name, json.dumps(content).encode(), open_or_refuse)

    return check


def all_fuzzers(good: Path, sharded: Path, examples: int) -> None:
    index = "model.safetensors.index.json"
    for check in (damaged_weights(good), other_values(good, "config.json"), other_values(sharded, index)):
        fuzzed(check, examples)()
    for check in (damaged_text(good, "config.json"), other_values(good, "generation_config.json")):
        fuzzed(check, examples // 4)()


def test_a_damaged_folder_opens_or_is_refused(good, sharded):
    all_fuzzers(good, sharded, EXAMPLES)


@pytest.mark.slow
def test_a_damaged_folder_opens_or_is_refused_ten_times_as_often(good, sharded):
    all_fuzzers(good, sharded, MANY_EXAMPLES)


# ---- the attacks one can name ----


def header_of(content: bytes) -> tuple[dict, bytes]:
    size = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def with_header(content: bytes, change) -> bytes:
    header, data = header_of(content)
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def refused(folder: Path, said: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ClockhandError) as refusal:
        load_model(folder)
    assert said in str(refusal.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 50_000  # kB


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[NORM].update(data_offsets=[0, 2**40]),
        lambda header: header[NORM].update(data_offsets=[-8, 24]),
        lambda header: header[NORM].update(shape=[10**9, 10**9]),
        lambda header: header[NORM].update(shape=[2**63, 2]),
        lambda header: header[NORM].update(shape=[1] * 100_000),
        lambda header: header[NORM].update(dtype="Q4_0"),
        lambda header: header[NORM].update(dtype="F64"),
    ],
)
def test_a_header_that_lies_is_refused(good, change):
    content = with_header((good / "model.safetensors").read_bytes(), change)
    with_file(good, "model.safetensors", content, lambda folder: refused(folder, "model.safetensors"))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**40) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 100_000) + b"[" * 100_000,
        pickle.dumps({"lm_head.weight": [1, 2, 3]}),
    ],
    ids=["empty", "a header beyond the file", "no object", "a header that nests without end", "a pickle"],
)
def test_what_is_no_safetensors_file_is_refused(good, content):
    said = "model.safetensors"
    with_file(good, said, content, lambda folder: refused(folder, "no whole safetensors file"))


def test_a_pickle_saved_by_torch_is_refused_and_not_run(good, tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"x": Trap()}, tmp_path / "trap.pt")
    content = (tmp_path / "trap.pt").read_bytes()
    with_file(good, "model.safetensors", content, lambda folder: refused(folder, "no whole safetensors file"))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(num_hidden_layers=10**9), "n_layers = 1000000000 with n_experts = 2, but only"),
        (dict(num_experts=10**9), "n_experts = 1000000000, but only"),
        (dict(hidden_size=10**12), "instead of"),
        (dict(hidden_size=2**40, intermediate_size=2**40, moe_intermediate_size=2**40), "larger than there can be"),
        (dict(vocab_size=10**30), "larger than there can be"),
    ],
)
def test_a_billion_of_anything_is_refused_before_it_is_built(good, changes, said):
    config = {**json.loads((good / "config.json").read_text()), **changes}
    with_file(good, "config.json", json.dumps(config).encode(), lambda folder: refused(folder, said))


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"{", b"\xff\xfe", b"[]", b'{"hidden_size": ' + b"9" * 5000 + b"}"]
)
def test_a_config_that_is_no_object_is_refused(good, content):
    with_file(good, "config.json", content, lambda folder: refused(folder, "config.json"))


def test_a_config_that_nests_just_within_reach_is_refused_too(good):
    for depth in (200, 900, 1000, 5000):
        config = {**json.loads((good / "config.json").read_text()), "rope_theta": None, "rope_scaling": None}
        deep = json.dumps(config)[:-1] + ', "hidden_act": ' + "[" * depth + "]" * depth + "}"
        with_file(good, "config.json", deep.encode(), lambda folder: refused(folder, "config.json"))


def test_a_huge_config_is_not_even_read(good):
    original = (good / "config.json").read_bytes()
    try:
        with open(good / "config.json", "wb") as file:
            file.truncate(2**40)  # a sparse file: a terabyte that takes no disk
        refused(good, "where a few thousand are usual")
    finally:
        (good / "config.json").write_bytes(original)


@pytest.mark.parametrize(
    "name", ["../stolen.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors", "x.bin"]
)
def test_an_index_cannot_lead_out_of_the_folder(sharded, tmp_path, name):
    shutil.copytree(sharded, tmp_path / "m")
    shutil.copyfile(sharded / "model-0.safetensors", tmp_path / "stolen.safetensors")
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"][NORM] = name
    index.write_text(json.dumps(content))
    refused(tmp_path / "m", "only a .safetensors beside it is read")


def test_a_tensor_that_two_files_hold_is_refused(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "m")
    shutil.copyfile(sharded / "model-0.safetensors", tmp_path / "m" / "model-1.safetensors")
    refused(tmp_path / "m", "twice")


def test_a_file_that_the_index_names_must_be_there(sharded, tmp_path):
    shutil.copytree(sharded, tmp_path / "m")
    (tmp_path / "m" / "model-1.safetensors").unlink()
    refused(tmp_path / "m", "model-1.safetensors is missing")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ClockhandError, match=r"config\.json is not readable"):
        read_config(tmp_path)
