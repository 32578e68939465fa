"""Launch descriptions in files: what they mean, and that what is wrong is named with what is allowed."""

from __future__ import annotations

import json
import pickle
import tomllib

import numpy as np
import pytest

from undertow import emulator
from undertow.cases import CaseError
from undertow.emulator import Ints, Opaque, Pointer, Tensor, TensorMap
from undertow.launch_file import FORMAT, launch_of, read_kernel

SCALE = "docs/examples/scale.ptx"
DESCRIBED = """\
grid = [1]
block = [32]
[arrays.y]
dtype = "f32"
shape = [32]
fill = "nan"
[arrays.x]
dtype = "f32"
shape = [32]
fill = "count"
[[params]]
kind = "pointer"
array = "y"
[[params]]
kind = "pointer"
array = "x"
[[params]]
kind = "float"
value = 0.5
"""
MINIMAL = {"grid": [1], "block": [32]}


def array(**entry):
    launch = launch_of({**MINIMAL, "arrays": {"x": entry}, "params": [{"kind": "pointer", "array": "x"}]})
    return launch.params[0].array


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_a_described_launch_runs(tmp_path, suffix):
    path = tmp_path / f"launch{suffix}"
    path.write_text(DESCRIBED if suffix == ".toml" else json.dumps(tomllib.loads(DESCRIBED)))
    kernel = read_kernel(SCALE, path)
    emulator.launch(kernel.ptx, kernel.launch)
    assert list(kernel.arrays) == ["y", "x"]
    assert np.array_equal(kernel.arrays["y"], 0.5 * np.arange(32, dtype=np.float32))


def test_the_printed_format_is_a_launch_description():
    blocks = FORMAT.split("Kinds of parameters")
    tables = blocks[0] + blocks[1].partition("optional:\n")[2]
    launch = launch_of(tomllib.loads("\n".join(line.strip() for line in tables.splitlines())))
    assert launch.kernel == "scale" and launch.params[1] == 0.5 and launch.params[0].array.shape == (256,)
    assert launch.labels.role(0) == "load" and launch.labels.role(4) == "compute" and launch.labels.role(5) == "warp 5"
    assert launch.labels.smem(0) == "ring.full" and launch.labels.smem(4) == "ring.full+0x4"
    assert launch.labels.smem(8) == "smem+0x8" and launch.labels.barrier_id(1) == "compute"


def test_every_kind_of_parameter():
    x = {"dtype": "u8", "shape": [64]}
    params = [
        {"kind": "tensor", "array": "x", "dims": [8], "strides": [8]},
        {"kind": "tensor_map", "array": "x", "dtype": "u8", "dims": [8, 8], "strides": [8], "box": [8, 4]},
        {"kind": "ints", "values": [1, -2]},
        {"kind": "opaque", "num_bytes": 32},
        {"kind": "pointer", "array": "x", "offset_bytes": 8},
        {"kind": "int", "value": -3},
        {"kind": "float", "value": 2},
    ]
    made = launch_of({**MINIMAL, "arrays": {"x": x}, "params": params}).params
    assert [type(p) for p in made] == [Tensor, TensorMap, Ints, Opaque, Pointer, int, float]
    assert made[0].array is made[1].array is made[4].array and made[0].name == "x"
    assert made[1].box == (8, 4) and made[2] == (1, -2) and made[4].offset_bytes == 8
    copied = pickle.loads(pickle.dumps(made))
    assert copied[2] == (1, -2) and copied[2].num_bytes == 8 and copied[3] == made[3] and copied[5:] == made[5:]
    assert [p.pack(0) for p in copied[:1]] == [p.pack(0) for p in made[:1]]
    assert copied[0].array is copied[1].array, "an array that two parameters share stays one"


def test_fills_are_what_they_say():
    assert array(dtype="s32", shape=[2, 3], fill="count").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert array(dtype="f64", shape=[2], fill=-1.5).tolist() == [-1.5, -1.5]
    assert array(dtype="u16", shape=[2]).tolist() == [0, 0]
    assert np.isnan(array(dtype="f16", shape=[4], fill="nan")).all()
    random = [array(dtype="f32", shape=[1000], fill="random", seed=seed) for seed in (0, 0, 1)]
    assert np.array_equal(random[0], random[1]) and not np.array_equal(random[0], random[2])
    assert abs(random[0].mean()) < 0.2 and 0.8 < random[0].std() < 1.2


def test_bf16_is_held_as_bits_rounded_to_even():
    torch = pytest.importorskip("torch")
    for fill in (1.00390625, 1.01171875, -3.3e38, 0.1):
        want = torch.tensor([fill], dtype=torch.float32).bfloat16().view(torch.uint16).item()
        assert array(dtype="bf16", shape=[1], fill=fill).tolist() == [want]
    assert array(dtype="bf16", shape=[1], fill="nan").tolist() == [0x7FC0]


X = {"x": {"dtype": "f32", "shape": [4]}}


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"grid": None}, "grid=None: must be a list of whole numbers"),
        ({"blocks": [1]}, "the file: unknown key 'blocks'; allowed are arrays, barriers, block, cluster"),
        ({"dynamic_smem": -1}, "dynamic_smem=-1: must be a whole number, 0 or more"),
        ({"kernel": 3}, "kernel=3: must be a name"),
        ({"arrays": {"x": {"dtype": "fp32", "shape": [1]}}}, "arrays.x.dtype='fp32': must be one of u8, s8"),
        ({"arrays": {"x": {"dtype": "f32", "shape": [-1]}}}, "arrays.x.shape=[-1]: extents must be 0 or more"),
        ({"arrays": {"x": {"dtype": "f32", "shape": 3}}}, "arrays.x.shape=3: must be a list of whole numbers"),
        ({"arrays": {"x": {"dtype": "f32", "shape": [1], "fill": "ones"}}}, "arrays.x.fill='ones': must be a number"),
        ({"arrays": {"x": {"dtype": "s32", "shape": [1], "fill": "nan"}}}, "s32 holds whole numbers"),
        ({"params": [{"kind": "address"}]}, "params[0].kind='address': must be one of pointer, tensor"),
        ({"params": [{"kind": "pointer"}]}, "params[0].array is missing: a pointer needs array"),
        ({"params": [{"kind": "pointer", "array": "z"}], "arrays": X}, "params[0].array='z': must be one of x"),
        ({"params": [{"kind": "int", "value": 1.5}]}, "params[0].value=1.5: must be a whole number"),
        ({"params": [{"kind": "float", "value": "1"}]}, "params[0].value='1': must be a number"),
        ({"params": [{"kind": "opaque", "num_bytes": 1, "value": 2}]}, "params[0]: unknown key 'value'; allowed are"),
        ({"params": {}}, "params={}: must be a list of tables"),
        ({"roles": {"load": 1}}, "roles.load=1: must be a list of whole numbers"),
        ({"smem": {"x": [1]}}, "smem.x=[1]: must be [offset, bytes]"),
    ],
)
def test_what_is_wrong_is_named(change, complaint):
    with pytest.raises(CaseError) as refused:
        launch_of({**MINIMAL, **change})
    assert complaint in str(refused.value)


def test_a_missing_grid_is_named():
    with pytest.raises(CaseError, match="grid is missing"):
        launch_of({"block": [1]})


def test_files_that_cannot_be_read_are_named(tmp_path):
    launch = tmp_path / "launch.toml"
    launch.write_text("grid = [")
    other = tmp_path / "launch.yaml"
    other.write_text("")
    for ptx, described, named in (
        (tmp_path / "none.ptx", launch, "none.ptx"),
        (SCALE, launch, "launch.toml: cannot be read"),
        (SCALE, other, "launch.yaml: a launch description is a .toml or .json file"),
        (SCALE, tmp_path / "none.json", "none.json: cannot be read"),
    ):
        with pytest.raises(CaseError, match=named):
            read_kernel(ptx, described)
