"""Objects made ahead of time hold the kernels that were emulated, and are made once: cases C07, C09, K07, K13."""

from __future__ import annotations

import importlib.metadata
import re
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runtime.calls import EVERYTHING, tensors_for, variant
from undertow import cache
from undertow.commands.precompile import HOT
from undertow.kernels import compile as compiling
from undertow.kernels.compile import OBJECT, OBJECT_PTX, CompileError, MachineCodeError, compile_object
from undertow.kernels.sm100 import call
from undertow.kernels.sm100.launch import DEFAULT, compile_backward
from undertow.plan.schema import DType
from undertow.runtime import objects
from undertow.runtime.ahead import compile_ahead
from undertow.runtime.architectures import ARCHITECTURES, Architecture, ArchitectureError, architecture

SM100 = ARCHITECTURES["sm100"]


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("UNDERTOW_CACHE_DIR", str(tmp_path / "cache"))
    objects.forget()
    return tmp_path / "cache"


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The names of everything that is compiled from here on."""
    names, traced = [], compiling._traced

    def counted(name, target, build, options):
        names.append(name)
        return traced(name, target, build, options)

    monkeypatch.setattr(compiling, "_traced", counted)
    return names


@dataclass(frozen=True)
class Named:
    """A variant of the kernels in a package of the tests."""

    name: str


SMALL = Architecture("small", "sm_100a", (10, 0), "tests.runtime.small_calls")


def kernels_of(ptx: str) -> dict[str, list[str]]:
    """Entry -> its lines, without what depends on the other kernels of a text: numbers in names and in labels."""
    found = {}
    for text in re.split(r"(?=^\.visible \.entry)", ptx, flags=re.MULTILINE)[1:]:
        text = re.sub(r"\b(undertow_\w+?)_\d+(?=\b|_param)", r"\1", text)
        text = re.sub(r"\$L__BB\d+_", "$L__BB_", re.split(r"^\s*\.(?:file|section)", text, flags=re.MULTILINE)[0])
        entry = re.match(r"\.visible \.entry (\w+)", text)
        assert entry
        lines = (line.partition("//")[0].rstrip() for line in text.splitlines())
        found[entry.group(1)] = [line for line in lines if line and not re.match(r"\s*\.loc\b", line)]
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [("dense", DType.BF16), ("causal-dlse", DType.F16), (EVERYTHING, DType.BF16)]
)
def test_an_object_holds_the_very_kernels_that_are_emulated(name, dtype):
    chosen = variant(name, dtype)
    emulated = compile_backward(chosen.plan, chosen.rows)
    expected = {}
    for kernel in (emulated.preprocess, emulated.main, emulated.postprocess):
        expected |= kernels_of(kernel.ptx)
    found = kernels_of(objects.precompile(SM100, chosen).files[OBJECT_PTX].decode())
    assert list(found) == list(expected) and len(found) == 3
    for entry, lines in expected.items():
        assert found[entry] == lines and len(lines) > 100, entry


def test_the_comparison_sees_one_other_instruction():
    ptx = objects.precompile(SM100, variant("dense")).files[OBJECT_PTX].decode()
    changed = ptx.replace("tcgen05.relinquish_alloc_permit", "tcgen05.relinquish", 1)
    assert changed != ptx and kernels_of(changed) != kernels_of(ptx)


def test_what_was_precompiled_is_loaded_without_the_compiler(own_cache, compilations):
    chosen = variant("dense")
    assert not objects.is_compiled(SM100, chosen)
    objects.precompile(SM100, chosen)
    assert compilations == [f"sm_100a-{chosen.name}"] and objects.is_compiled(SM100, chosen)
    assert not objects.is_loaded(SM100, chosen)
    loaded = objects.load(SM100, chosen)
    assert loaded is objects.load(SM100, chosen)
    assert len(compilations) == 1
    with pytest.raises(TypeError, match=r"Expects 4 parameters when calling: `backward_pass\(workspace: Tensor"):
        loaded.function()


def test_a_loaded_call_refuses_tensors_that_no_gpu_holds():
    tensors = tensors_for("dense")
    loaded = objects.load(SM100, variant("dense"))
    numbers = call.numbers_of(variant("dense"), tensors, DEFAULT, 148)
    with pytest.raises(ValueError, match=r"expected device_type=cuda"):
        loaded.function(*call.arguments(tensors, tensors.lse.flatten(), numbers))


@pytest.mark.parametrize("content", [b"", b"\x7fELF, or is it?"])
def test_an_object_that_does_not_load_is_compiled_again(own_cache, compilations, content):
    """Its checksum is right: it was written like that, by another toolchain perhaps."""
    chosen = Named("fine")
    entry = objects.precompile(SMALL, chosen)
    assert entry.folder is not None
    cache.discard(entry)
    assert not objects.is_compiled(SMALL, chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "_object_files", lambda *_: {OBJECT: content, OBJECT_PTX: b""})
        objects.precompile(SMALL, chosen)
    compilations.clear()
    assert objects.load(SMALL, chosen).function is not None
    assert compilations == ["sm_100a-fine"]


def test_an_object_that_the_disk_cannot_keep_is_loaded_from_memory(own_cache, monkeypatch):
    entry = objects.precompile(SMALL, Named("fine"))
    unkept = cache.Entry(entry.files, None)
    monkeypatch.setattr(objects, "precompile", lambda *_: unkept)
    assert objects.load(SMALL, Named("fine")).function is not None


def test_eight_threads_that_come_at_once_get_one_compilation(own_cache, compilations):
    """Public case C07: autograd calls from a thread a device, and none of them has done anything before."""
    together, found = threading.Barrier(8), []

    def come() -> None:
        together.wait(timeout=60)
        found.append(objects.load(SMALL, Named("fine")))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 8 and len(set(map(id, found))) == 1
    assert compilations == ["sm_100a-fine"]


def test_many_compilations_leave_no_thread_behind(own_cache):
    """Public case K13: each compilation left threads behind, and the process died after an hour."""

    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    for number in range(2):  # pools that are made once
        objects.load(SMALL, Named(f"before {number}".replace(" ", "-")))
    before = threads()
    for number in range(12):
        objects.load(SMALL, Named(f"fine-{number}"))
    assert threads() <= before


@pytest.mark.parametrize("release", ["4.6.0", "4.6.1"])
def test_a_release_that_hangs_is_refused_by_name(own_cache, compilations, monkeypatch, release):
    """Public case K07: it would never return."""
    monkeypatch.setattr(compiling, "toolchain_version", lambda package: release)
    with pytest.raises(
        CompileError, match=rf"nvidia-cutlass-dsl {release} is installed: backward passes at head dim 64 never return"
    ):
        objects.precompile(SM100, variant("dense"))
    with pytest.raises(CompileError, match=release):
        compiling.compile_kernel("any", None, lambda: (None, ()))
    assert compilations == []


def test_a_missing_compiler_is_named(monkeypatch):
    def missing(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(CompileError, match="needs the package nvidia-cutlass-dsl, which is not installed"):
        objects.precompile(SM100, variant("dense"))


def test_a_variant_that_hangs_or_crashes_takes_no_other_along(own_cache):
    """Public case K07: compiled in a child process, which is given a time."""
    made = list(
        compile_ahead(SMALL, [Named("hanging"), Named("refused"), Named("crashing"), Named("fine")], seconds=10)
    )
    assert [result.variant.name for result in made] == ["hanging", "refused", "crashing", "fine"]
    complaints = [result.complaint for result in made]
    assert complaints[0] == "not compiled within 10 s"
    assert complaints[1] is not None and "no such kernel" in complaints[1]
    assert complaints[2] == "the compiler took its process down"
    assert complaints[3] is None and made[3].folder is not None and (made[3].folder / OBJECT).stat().st_size > 0


def test_what_was_refused_is_not_compiled_again(own_cache, compilations, monkeypatch):
    """By this process: another variant may have more luck, and so may a fresh start."""

    def refuse(name: str, *_) -> None:
        if name.endswith("-early"):
            raise MachineCodeError("awaits a fence too late")

    monkeypatch.setattr(compiling, "refuse_unawaited", refuse)
    for _ in range(3):
        with pytest.raises(MachineCodeError, match="too late"):
            objects.load(SMALL, Named("early"))
    assert objects.load(SMALL, Named("fine")).function is not None
    assert compilations == ["sm_100a-early", "sm_100a-fine"]
    assert objects.refusal(SMALL, Named("early")) == "awaits a fence too late"
    assert objects.refusal(SMALL, Named("fine")) is None
    objects.forget()
    assert objects.refusal(SMALL, Named("early")) is None


@pytest.mark.slow
def test_every_hot_variant_compiles_in_time():
    """Public cases K07, K10: or else the toolchain must be refused by name."""
    variants = [variant(name, dtype) for name in HOT.split(",") for dtype in (DType.BF16, DType.F16)]
    made = list(compile_ahead(SM100, variants, seconds=120))
    assert [(result.variant.name, result.complaint) for result in made] == [(v.name, None) for v in variants]


def test_architectures_are_found_by_either_name():
    assert architecture("sm100") is architecture("sm_100a") is SM100
    with pytest.raises(ArchitectureError, match=r"arch='sm_80': there are kernels for sm100 \(sm_100a\)"):
        architecture("sm_80")


def test_objects_of_different_targets_and_variants_have_different_keys():
    keys = {
        compiling.object_key("x", target, config, lambda: (None, ()))
        for target in ("sm_100a", "sm_103a")
        for config in (variant("dense"), variant("causal"))
    }
    assert len(keys) == 4


def test_the_same_variant_of_other_kernels_is_another_object(own_cache):
    other = Architecture("other", "sm_100a", (10, 0), "tests.runtime.row_calls")
    objects.precompile(SMALL, Named("fine"))
    assert objects.is_compiled(SMALL, Named("fine")) and not objects.is_compiled(other, Named("fine"))


def test_the_host_function_may_launch_nothing_but_must_compile(own_cache):
    with pytest.raises(CompileError, match="compiling x for sm_100a failed: no such kernel"):
        compile_object("x", "sm_100a", "refused", lambda: SMALL.build(Named("refused")))
