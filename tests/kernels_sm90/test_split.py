"""Groups of query heads that are divided between CTAs: right gradients, one order of sums, nothing that is raced."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import FAST, complaints
from tests.kernels_sm90.passes import run
from tests.runtime.calls import settings_for, tensors_for
from tests.runtime.test_device import machine  # noqa: F401
from undertow import emulated, emulator
from undertow.check import check
from undertow.emulator import Options
from undertow.inputs import Batch, Shape, random_batch
from undertow.kernels.backward import compile_backward
from undertow.kernels.sm90 import call, launch
from undertow.kernels.sm90.parts import MOST_ROWS, SHORT, WAVE, parts_of
from undertow.kernels.sm90.tensors import PARTIAL_TILE, Workspaces, allocate_partial, allocate_workspaces
from undertow.kernels.sm100.launch import Settings
from undertow.kernels.sm100.tensors import BackwardTensors
from undertow.plan.attention import Attention
from undertow.plan.schema import DType
from undertow.reference import Gradients, Scoring
from undertow.runtime import device
from undertow.tolerance import relative_error, yardstick

DENSE, CAUSAL, IN_TURN = Attention(), Attention(right=True), Attention(right=True, deterministic=True)
WINDOW = Attention(left=True, right=True)
BF16, F16 = DType.BF16, DType.F16
CASES = {  # batch, parts of a group, whether in deterministic mode; of the packed sequences one has no query rows
    "dense": lambda: (random_batch(Shape(2, 200, 300, 6, 2)), 3, False),
    "causal, fp16": lambda: (causal_half(), 5, False),
    "window, packed, deterministic": lambda: (packed_window(), 2, True),
}
KERNELS = ["preprocess", "backward", "combine", "postprocess"]


def packed_window() -> Batch:
    used = ([150, 0, 130], [150, 140, 100])
    return packed_batch([0, 200, 200, 330], [0, 150, 290, 420], (6, 1), used, (350, 450), window=(100, 40))


def causal_half() -> Batch:
    return random_batch(Shape(1, 130, 400, 5, 1), 0, Scoring(causal=True), dtype=torch.float16)


def described(batch: Batch, parts: int, deterministic: bool) -> tuple[BackwardTensors, Workspaces, list]:
    """The tensors and buffers of a pass whose groups have `parts`, and its launches."""
    tensors, settings = emulated.tensors_of(batch), emulated.settings_of(batch.scoring, deterministic)
    attention = replace(launch.attention_of(settings, tensors), split=True)
    plan = launch.planned(None, launch.dtype_of(tensors), attention)
    compiled = compile_backward("sm90", plan, launch.row_variant_of(settings, tensors))
    partial = allocate_partial(tensors, parts).fill_(torch.nan)
    work = replace(allocate_workspaces(tensors, deterministic), partial=partial)
    return tensors, work, launch.launches(compiled, tensors, settings, work)


def gradients(batch: Batch, parts: int, deterministic: bool = False, seed: int | None = None) -> Gradients:
    """Of a pass; with a seed CTAs, warps and completions come in a random order."""
    tensors, work, launches = described(batch, parts, deterministic)
    for kernel, of in launches:
        options = FAST
        if seed is not None and kernel.name.startswith("backward"):
            order = list(range(of.grid[0]))
            random.Random(seed).shuffle(order)
            options = Options("auto", seed, ("seeded", seed), order)
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), of, options)
    assert work.partial is not None and not work.partial.isnan().any(), "sums that nobody wrote"
    return Gradients(tensors.dq, tensors.dk, tensors.dv)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_right(name):
    batch, parts, deterministic = CASES[name]()
    assert complaints(batch, gradients(batch, parts, deterministic)) == []


def test_whole_groups_differ_by_rounding():
    batch, parts, _ = CASES["dense"]()
    split, whole, budget = gradients(batch, parts), run(batch).gradients, yardstick(batch, batch.scoring).budget
    for one, other, most in zip(split, whole, budget):
        assert relative_error(one, other.double()) <= most
    assert not torch.equal(split.dk, whole.dk), "the same kernel twice"


def test_sums_of_keys_do_not_depend_on_who_comes_first():
    """In any mode: each part has a place of its own, and parts are added up in one order."""
    batch, parts, _ = CASES["dense"]()
    first, other = gradients(batch, parts), gradients(batch, parts, seed=3)
    assert torch.equal(first.dk, other.dk) and torch.equal(first.dv, other.dv)


def test_nothing_is_found():
    """A case as small as can be that has parts, tails of both sides, and items without rows."""
    batch = packed_batch([0, 140, 140], [0, 150, 160], (2, 1), ([135, 0], [140, 10]), (150, 170), window=(90, 40))
    _, _, launches = described(batch, 2, deterministic=True)
    assert [kernel.name.partition("-")[0] for kernel, _ in launches] == KERNELS
    options = Options(schedule=1, completion=("seeded", 1))
    for kernel, of in launches:
        plan = getattr(of.labels, "plan", None)
        checked = check(emulated.program(kernel.ptx, kernel.entry), of, options, plan=plan)
        assert checked.error is None and checked.findings == (), kernel.name


@pytest.mark.parametrize(
    "attention, dtype, group, rows, items, parts",
    [
        (CAUSAL, BF16, 4, 8192, 4096, 1),
        (CAUSAL, BF16, 8, 8192, 2048, 1),
        (CAUSAL, BF16, 32, 512, 512, 4),
        (CAUSAL, BF16, 32, 8192, 512, 4),
        (CAUSAL, BF16, 4, 32768, 4096, 1),
        (CAUSAL, F16, 4, 32768, 4096, 2),
        (CAUSAL, BF16, 32, 32768, 512, 8),  # 4 x 32768 rows
        (CAUSAL, F16, 32, 32768, 512, 16),
        (CAUSAL, BF16, 12, 512, 512, 2),  # 6 heads to an item: parts are equal
        (CAUSAL, BF16, 13, 512, 512, 13),
        (IN_TURN, BF16, 4, 8192, 4096, 1),
        (IN_TURN, BF16, 4, 32768, 4096, 4),
        (IN_TURN, BF16, 32, 4096, 512, 8),
        (IN_TURN, BF16, 32, 8192, 512, 16),
        (IN_TURN, F16, 32, 32768, 512, 32),
        (WINDOW, BF16, 32, 32768, 512, 8),
        (WINDOW, F16, 32, 16384, 512, 8),
        (replace(WINDOW, deterministic=True), BF16, 32, 32768, 512, 8),
        (replace(WINDOW, deterministic=True), F16, 32, 16384, 512, 8),
        (DENSE, F16, 32, 2048, 512, 1),
        (DENSE, F16, 32, 8192, 512, 4),
        (DENSE, BF16, 32, 8192, 512, 1),
        (DENSE, BF16, 32, 32768, 512, 2),
        (DENSE, F16, 4, 32768, 4096, 2),
        (DENSE, F16, 4, 2 * MOST_ROWS[F16], 4096, 4),  # as few rows as there can be
        (DENSE, BF16, 32, 2048, 16, WAVE // 16),
        (CAUSAL, BF16, 32, 2048, 16, 2 * WAVE // 16),
        (CAUSAL, BF16, 4, 2048, 128, 2),
        (DENSE, BF16, 32, 512, 4, 16),  # short items
        (DENSE, BF16, SHORT, 128, 1, 1),
        (DENSE, BF16, 4, 0, 0, 1),
    ],
)
def test_parts(attention, dtype, group, rows, items, parts):
    assert parts_of(attention, dtype, group, rows, items) == parts
    assert group % parts == 0


def of_shape(batch: int, seqlen: int, heads: int, kv_heads: int) -> BackwardTensors:
    q, k = (torch.empty(batch, seqlen, n, 64, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads))
    lse = torch.empty(batch, heads, seqlen, device="meta")
    return BackwardTensors(q, k, k, q, q, lse, q, k, k)


@pytest.mark.parametrize("heads, split", [((32, 1), True), ((32, 4), False)])
def test_a_call_is_split_if_its_groups_are_large(heads, split):
    tensors, settings = of_shape(8, 1024, *heads), Settings(causal=True)
    variant = call.variant_of(None, tensors, settings)
    assert variant.attention.split is split
    assert variant == call.variant_named("causal-split" if split else "causal", DType.BF16)
    numbers = call.numbers_of(variant, tensors, settings, 132)
    assert numbers[launch.CTAS :] == ((132, 64 * 4, 4) if split else (132, 64 * 4))
    whole = replace(variant, attention=replace(variant.attention, split=False))
    more = call.workspace_floats(variant, tensors) - call.workspace_floats(whole, tensors)
    assert more == (64 * 4 * PARTIAL_TILE if split else 0)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_warming_up_wants_the_kernels_of_the_sizes_given(machine):  # noqa: F811
    tensors, settings = tensors_for("causal", (2048, 2048), device="cuda:0"), settings_for("causal")
    device.warm_up("sm90", tensors, settings)
    device.backward("sm90", tensors, settings)
    assert [variant.name for variant, _ in machine.loaded] == ["sm90-bf16-causal-split"]


def test_without_query_rows_gradients_are_zero():
    batch = random_batch(Shape(1, 1, 200, 3, 1))
    tensors, settings = emulated.tensors_of(batch), Settings()
    empty = {name: getattr(tensors, name)[:, :0] for name in ("q", "out", "dout", "dq")}
    tensors = replace(tensors, **empty, lse=tensors.lse[..., :0])
    compiled = compile_backward("sm90", launch.planned(None, DType.BF16, Attention(split=True)))
    work = replace(allocate_workspaces(tensors), partial=allocate_partial(tensors, 3))
    for kernel, of in launch.launches(compiled, tensors, settings, work):
        emulator.launch(emulated.program(kernel.ptx, kernel.entry), of, FAST)
    assert (tensors.dk == 0).all() and (tensors.dv == 0).all()
