"""What `undertow doctor` asks of a machine: one function a subject, each answers with findings."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.cache import MANIFEST, CacheError, cache_candidates, cache_folder
from undertow.kernels.compile import BAD_RELEASES, COMPILER, OBJECT, MachineCodeError, refuse_unawaited

GOOD, NOTE, BAD = "ok", "note", "WRONG"
LIBRARIES = ("nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-core")  # of the compiler; all of one release
VARIABLES = ("UNDERTOW_", "CUTE_DSL_", "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Finding:
    """status: GOOD, NOTE (works, but worth knowing) or BAD. advice: what to do, where there is something to do."""

    subject: str
    status: str
    found: str
    advice: str = ""


def packages() -> Iterator[Finding]:
    """Python, and the packages that this one requires, against their floors."""
    yield Finding("python", GOOD, sys.version.split()[0])
    try:
        required = importlib.metadata.requires("undertow") or []
    except importlib.metadata.PackageNotFoundError:
        required = []
        yield Finding("undertow", NOTE, "not installed, imported from a folder", "floors of packages are not checked")
    for requirement in required:
        if "extra ==" not in requirement:
            yield package(requirement)
    yield from compiler()


def package(requirement: str) -> Finding:
    """One requirement of the form name>=release[,...]; only the floor is looked at."""
    name = re.split(r"[^\w.-]", requirement)[0]
    floor = re.search(r">=\s*([\w.]+)", requirement)
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, BAD, "not installed", f"pip install '{requirement}'")
    if floor and release(found) < release(floor.group(1)):
        return Finding(name, BAD, found, f"pip install '{requirement}'")
    return Finding(name, GOOD, found)


def release(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: 2.13.0+cpu is (2, 13, 0). A pre-release counts as its release."""
    matched = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in matched.group().split(".")) if matched else ()


def compiler() -> Iterator[Finding]:
    """The kernel compiler: releases known to hang, wheels of two releases mixed, and whether it can be imported."""
    try:
        version = importlib.metadata.version(COMPILER)
    except importlib.metadata.PackageNotFoundError:
        return  # told by `packages`
    if version in BAD_RELEASES:
        yield Finding(f"{COMPILER} release", BAD, f"{version}: {BAD_RELEASES[version]}", "install another release")
        return
    for library in LIBRARIES:
        try:
            found = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue  # older and newer releases cut their wheels otherwise; the import below decides
        if found != version:
            advice = f"pip install --force-reinstall {COMPILER}=={version}"
            yield Finding(library, BAD, f"{found}, but {COMPILER} is {version}", advice)
    for module in ("cutlass.cute", "tvm_ffi"):
        try:
            importlib.import_module(module)
        except Exception as error:  # loaders of native libraries fail in their own ways
            yield Finding(f"import {module}", BAD, f"{type(error).__name__}: {error}", "reinstall its package")


def devices() -> Iterator[Finding]:
    """GPUs and the driver. A machine without one is no fault: the emulator and the reference run."""
    import torch

    from undertow.runtime.architectures import ARCHITECTURES
    from undertow.runtime.device import properties

    yield Finding("driver", *_driver())
    if not torch.cuda.is_available():
        build = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        if torch.version.cuda is None:
            build = f"torch {torch.__version__} is built without CUDA"
        yield Finding("GPU", NOTE, f"none that torch can use; {build}", "the emulator and the reference run without")
        return
    for index in range(torch.cuda.device_count()):
        device = properties(index)
        ours = [row.name for row in ARCHITECTURES.values() if row.capability == device.capability]
        found = f"{device.name}, compute capability {'.'.join(map(str, device.capability))}"
        kernels = f"kernels: {', '.join(ours)}" if ours else "no kernels of this package"
        yield Finding(f"cuda:{index}", GOOD if ours else NOTE, f"{found}; {kernels}")


def _driver() -> tuple[str, str]:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        error, version = driver.cuDriverGetVersion()
        if error != driver.CUresult.CUDA_SUCCESS:
            return NOTE, f"does not answer: {error}"
        return GOOD, f"for CUDA {version // 1000}.{version % 1000 // 10}"
    except Exception as error:
        return NOTE, f"none ({str(error).splitlines()[0] if str(error) else type(error).__name__})"


def cache() -> Iterator[Finding]:
    """Where compiled things are kept, how much there is, and whether that is where the user wants it."""
    wanted = cache_candidates()[0]
    try:
        folder = cache_folder()
    except CacheError as error:
        yield Finding("cache", BAD, str(error), "set UNDERTOW_CACHE_DIR to a folder that can be written")
        return
    entries = [path.parent for path in folder.glob(f"*/{MANIFEST}")]
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    found = f"{folder}: {len(entries)} kernels and calls, {size / 2**20:.1f} MiB"
    if folder == wanted:
        yield Finding("cache", GOOD, f"{found}, can be written")
    else:
        advice = "it may vanish with the next start of the machine: set UNDERTOW_CACHE_DIR"
        yield Finding("cache", NOTE, f"{found}; {wanted} cannot be written", advice)


def environment() -> Iterator[Finding]:
    """Variables that change what is done."""
    for name, value in sorted(os.environ.items()):
        if name.startswith(VARIABLES):
            yield Finding(name, NOTE if name.startswith("CUTE_DSL_") else GOOD, value)


def typical_call() -> Iterator[Finding]:
    """Who computes a causal bf16 call of 16 heads and 4096 rows; whether its kernels have been compiled, and well."""
    import torch

    from undertow.attention import explain
    from undertow.plan.schema import DType
    from undertow.runtime.architectures import ARCHITECTURES

    places = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
    for place in places:
        q = torch.empty(1, 4096, 16, 64, dtype=torch.bfloat16, device=place)
        found: Any = explain(q, q, q, causal=True)
        yield Finding(f"call on {place}", GOOD, f"backward by {found.backend}: {found.reason}")
    for row in ARCHITECTURES.values():
        variant = row.call.variant_named("causal", DType.BF16)
        yield Finding(f"{row.target} {variant.name}", *_state(row, variant))


def _state(row: Any, variant: Any) -> tuple[str, str]:
    from undertow.runtime import objects

    entry = objects.cached(row, variant)
    if entry is None:
        return GOOD, "not compiled: the first call takes seconds more, and looks whether machine code awaits its fences"
    try:
        refuse_unawaited(variant.name, row.target, entry.files[OBJECT])
    except MachineCodeError as error:
        return BAD, str(error)
    return GOOD, "in the cache; its machine code awaits every fence"


SUBJECTS = (packages, devices, cache, environment, typical_call)


def examine() -> Iterator[Finding]:
    """All findings. A subject that cannot be examined is a finding, too."""
    for subject in SUBJECTS:
        try:
            yield from subject()
        except Exception as error:
            yield Finding(subject.__name__.replace("_", " "), BAD, f"{type(error).__name__}: {error}")


def home() -> Path:
    """Where this package lies."""
    return Path(__file__).resolve().parent
