"""Kernels compile on a machine without a GPU, say what ptxas says, and come back from the cache unchanged."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kernels.machine_code import EARLY, code, cubin
from undertow.kernels import compile as compiling
from undertow.kernels.compile import (
    OBJECT,
    CompiledKernel,
    CompileError,
    MachineCodeError,
    compile_kernel,
    parse_ptxas_report,
)
from undertow.plan.schema import DType

ROOT = Path(__file__).resolve().parents[2]
EM_CUDA = 190  # e_machine of a cubin's ELF header

CHILD = """
import json, sys
from tests.kernels.small_kernels import build_scale
from undertow.kernels.compile import compile_kernel
kernel = compile_kernel("scale", None, build_scale)
print(json.dumps([kernel.ptx, kernel.cubin.hex()]))
"""


class Made:
    """What the compiler would give back, with an object of given bytes."""

    __ptx__ = "no text"

    def __init__(self, content: bytes):
        self.content = content

    def export_to_c(self, object_file_path: str, function_name: str) -> None:
        Path(object_file_path).write_bytes(self.content)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compile_small(name: str) -> CompiledKernel:
    from tests.kernels import small_kernels

    return compile_kernel(name, None, getattr(small_kernels, f"build_{name}"))


def compile_rows(name: str) -> CompiledKernel:
    from undertow.kernels.sm100 import postprocess, preprocess

    module = {"preprocess": preprocess, "postprocess": postprocess}[name]
    return compile_kernel(name, DType.BF16, lambda: module.build(DType.BF16))


def ptxas_says(ptx: str, tmp_path: Path) -> str:
    """The verbose report of the ptxas in Triton's wheel, an assembler that the DSL does not use."""
    triton = importlib.util.find_spec("triton")
    assert triton is not None and triton.origin, "the development extra brings triton"
    ptxas = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "ptxas"
    source = tmp_path / "kernel.ptx"
    source.write_text(ptx)
    command = [str(ptxas), "-v", "-arch", "sm_100a", str(source), "-o", str(tmp_path / "kernel.cubin")]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stderr


def test_gives_ptx_and_cubin_for_sm_100a():
    kernel = compile_small("scale")
    assert re.search(r"^\.target\s+sm_100a$", kernel.ptx, re.MULTILINE)
    assert f".entry {kernel.entry}(" in kernel.ptx
    assert kernel.cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", kernel.cubin, 18) == (EM_CUDA,)


@pytest.mark.parametrize("name", ["preprocess", "postprocess"])
def test_row_kernels_do_not_spill(name):
    resources = compile_rows(name).resources
    assert (resources.spill_store_bytes, resources.spill_load_bytes, resources.stack_bytes) == (0, 0, 0)


def test_a_kernel_that_must_spill_is_reported():
    resources = compile_small("spilling").resources
    assert resources.registers <= 64
    assert resources.spill_store_bytes > 0 and resources.spill_load_bytes > 0


@pytest.mark.parametrize("name", ["scale", "spilling"])
def test_another_ptxas_accepts_the_text_and_agrees(name, tmp_path):
    kernel = compile_small(name)
    other = parse_ptxas_report(ptxas_says(kernel.ptx, tmp_path))
    assert (other.spill_store_bytes > 0) == (kernel.resources.spill_store_bytes > 0)
    assert abs(other.registers - kernel.resources.registers) <= 4  # releases allocate a little differently


def test_source_paths_do_not_depend_on_the_machine():
    files = re.findall(r'^\s*\.file\s+\d+\s+"([^"]*)"', compile_rows("preprocess").ptx, re.MULTILINE)
    assert "undertow/kernels/sm100/preprocess.py" in files
    assert all(path.startswith(("undertow/", "cutlass/")) for path in files)


def test_line_information_points_into_the_source():
    ptx = compile_rows("preprocess").ptx
    source = (ROOT / "undertow/kernels/sm100/preprocess.py").read_text().splitlines()
    lines = {int(line) for line in re.findall(r"^\s*\.loc\s+1\s+(\d+)", ptx, re.MULTILINE)}
    assert any("warp_reduction_sum" in source[line - 1] for line in lines)


def test_parallel_processes_agree_whatever_their_hash_seed(own_cache):
    """Two share one cache and start together, a third has its own: text and cubin are the same bytes."""

    def child(seed: str, cache: Path) -> list[str]:
        env = {**os.environ, "PYTHONHASHSEED": seed, "UNDERTOW_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
        done = subprocess.run([sys.executable, "-c", CHILD], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(child, "123", [own_cache, own_cache, own_cache / "other"]))
    assert results[0] == results[1] == results[2]
    assert len([path for path in own_cache.iterdir() if path.name.startswith("scale-")]) == 1


def test_a_second_call_compiles_nothing():
    first = compile_small("scale")

    def unused():
        raise AssertionError("compiled although cached")

    unused.__code__ = unused.__code__.replace(co_filename=str(Path(__file__).with_name("small_kernels.py")))
    assert compile_kernel("scale", None, unused) == first


def test_a_cached_kernel_is_fetched_without_importing_the_dsl():
    """What makes a second `undertow verify` start at once."""
    from undertow.kernels.sm100.launch import compile_preprocess

    code = "import sys; from undertow.kernels.sm100.launch import compile_preprocess, DType; "
    code += "print(len(compile_preprocess(DType.BF16).cubin), 'cutlass' in sys.modules)"
    expected = [str(len(compile_preprocess(DType.BF16).cubin)), "False"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("file", ["kernel.ptx", "kernel.cubin", "kernel.json", "entry.json"])
def test_a_damaged_cache_entry_is_compiled_again(own_cache, file):
    first = compile_small("scale")
    (entry,) = own_cache.iterdir()
    (entry / file).write_bytes((entry / file).read_bytes()[:-10])
    assert compile_small("scale") == first
    assert compile_small("scale") == first
    assert [path.name for path in own_cache.iterdir()] == [entry.name]


def test_the_key_follows_configuration_environment_and_sources(tmp_path, monkeypatch):
    def build():
        raise AssertionError("only the key is asked for")

    keys = [compiling._key("x", 1, build), compiling._key("x", 2, build), compiling._key("y", 1, build)]
    monkeypatch.setenv("CUTE_DSL_COMPILER_OPT", "warnings")
    keys.append(compiling._key("x", 1, build))
    monkeypatch.delenv("CUTE_DSL_COMPILER_OPT")
    for folder in ("kernels/sm100/roles", "plan"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(compiling, "PACKAGE", tmp_path)
    for changed in ("kernels/sm100/roles/mma.py", "plan/schema.py"):
        for content in ("first", "second"):
            (tmp_path / changed).write_text(content)
            compiling._digest_of_sources.cache_clear()  # as in the next process
            keys.append(compiling._key("x", 1, build))
    assert len(set(keys)) == len(keys)


def test_the_key_follows_the_source_of_what_is_built(tmp_path):
    keys = []
    for content in ("first", "second"):
        (tmp_path / "own.py").write_text(content)
        keys.append(compiling._key("x", 1, eval(compile("lambda: None", tmp_path / "own.py", "eval"))))
    assert keys[0] != keys[1]


def test_a_configuration_without_a_stable_repr_is_refused():
    with pytest.raises(AssertionError, match="memory address"):
        compile_kernel("scale", object(), lambda: (None, ()))


def test_what_the_compiler_refuses_is_named():
    with pytest.raises(CompileError, match="compiling refused for sm_100a failed"):
        compile_small("refused")


def test_more_than_one_kernel_is_refused():
    with pytest.raises(CompileError, match="exactly one kernel"):
        compile_small("two_kernels")


@pytest.mark.parametrize("report", ["", "Used 3 registers\n", "Used 3 registers\nUsed 4 registers\n"])
def test_a_report_that_is_not_of_one_kernel_is_refused(report):
    with pytest.raises(CompileError, match="report of ptxas"):
        parse_ptxas_report(report)


REFUSED = {
    "early": (EARLY, r"early: the FENCE.VIEW.ASYNC.S at 0x20 may be incomplete when the BAR at 0x0 is issued"),
    "unknown": (
        code("FENCE set=1", "BRX", "EXIT"),
        r"it cannot be judged: k: at 0x10, behind a fence, an instr",
    ),
}


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("name", REFUSED)
def test_machine_code_that_may_be_wrong_is_not_kept(name, target, own_cache, monkeypatch):
    """The message says where, by which compiler, and what to do."""
    kernel, said = REFUSED[name]
    content = cubin(kernel) + b"Cuda compilation tools, release 13.4, V13.4.59"
    monkeypatch.setattr(compiling, "_traced", lambda *_: Made(content))
    with pytest.raises(MachineCodeError, match=f"the machine code of x for {target} is refused: {said}") as refusal:
        compiling.compile_object("x", target, 1, lambda: (None, ()))
    version = importlib.metadata.version("nvidia-cutlass-dsl")
    assert f". nvidia-cutlass-dsl {version} with ptxas 13.4.59 made it: install another release" in str(refusal.value)
    assert "UNDERTOW_CACHE_DIR=DIR here" in str(refusal.value)
    assert not [path for path in own_cache.iterdir() if path.is_dir()]


def test_machine_code_that_awaits_its_fences_is_kept(own_cache, monkeypatch):
    content = cubin(code("FENCE set=1", "BAR wait=1", "EXIT"))
    monkeypatch.setattr(compiling, "_traced", lambda *_: Made(content))
    assert compiling.compile_object("x", "sm_90a", 1, lambda: (None, ())).files[OBJECT] == content
