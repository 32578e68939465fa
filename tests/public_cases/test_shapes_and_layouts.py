"""Reports about lengths, strides, addresses and groups of heads. Each test names the public thread it comes from."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from tests.kernels.packings import packed_batch
from tests.kernels.problems import complaints, is_zero, run
from tests.public_cases.batches import BF16, F16, packing, randn, reported
from undertow import emulated, emulator
from undertow.inputs import Batch, complete
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import HEAD_DIM, plan
from undertow.kernels.sm100.tensors import Workspaces
from undertow.reference import Scoring

CAUSAL = Scoring(causal=True)


def test_packed_causal_with_one_key_a_sequence():
    """Dao-AILab/flash-attention#443: only the last row of each sequence sees a key; dV is one there, exactly."""

    def change(tensors):
        for name in "qkv":
            tensors[name] *= 3
        tensors["dout"].fill_(1)

    sequences = packing([0, 76, 110, 256], [0, 1, 2, 3])
    batch = reported((256, 3), scoring=Scoring(causal=True, sequences=sequences), dtype=F16, change=change)
    assert (batch.lse == -torch.inf).sum() == 253
    gradients = run(batch).gradients
    assert torch.equal(gradients.dv, torch.ones_like(gradients.dv)) and not complaints(batch, gradients)
    last = torch.tensor([75, 109, 255])
    others = torch.ones(256, dtype=torch.bool).index_fill(0, last, False)
    assert is_zero(gradients.dq[others])


def test_half_of_the_rows_without_keys_is_right_where_there_are_twice_as_many_rows():
    """Dao-AILab/flash-attention#1778, with 256 rows and 128 keys. q = 0 and dO = 1 count the rows that see a key."""

    def change(tensors):
        tensors["q"].zero_()
        tensors["dout"].fill_(1)

    batch = reported((256, 128), scoring=CAUSAL, change=change)
    dv = run(batch).gradients.dv[0, :, 0, 0].double()
    harmonic = torch.tensor([sum(1 / n for n in range(key + 1, 129)) for key in range(128)], dtype=torch.float64)
    assert torch.allclose(dv, harmonic, rtol=2**-7, atol=0), "row i, with i - 127 keys, gives each 1 / (i - 127)"
    assert (batch.lse == -torch.inf).sum() == 128


LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193)


@pytest.mark.parametrize("causal", [False, True])
def test_every_pair_of_lengths_around_tiles(causal):
    """NVIDIA/cutlass#2428."""
    wrong = {}
    for lengths in itertools.product(LENGTHS, LENGTHS):
        batch = reported(lengths, scoring=Scoring(causal=causal))
        wrong[lengths] = complaints(batch, run(batch).gradients)
    assert not {lengths: said for lengths, said in wrong.items() if said}


def test_keys_of_sequences_without_a_query_have_zero_gradients():
    """Dao-AILab/flash-attention#2562, results full of NaN before."""
    cu_q, cu_k = [0, 0, 1208, 2048, 2048], [0, 2538, 4280, 5120, 8192]
    batch = reported((2048, 8192), (4, 1), Scoring(sequences=packing(cu_q, cu_k)))
    gradients = run(batch).gradients
    for grad in (gradients.dk, gradients.dv):
        assert is_zero(grad[:2538]) and is_zero(grad[5120:]) and not is_zero(grad[2538:5120])
    assert not complaints(batch, gradients)


def test_more_sequences_than_tokens_with_grouped_heads():
    """Dao-AILab/flash-attention#1619: one key, so dV is the sum of its three dO."""
    cu = [0, 0, 0, 0, 1]
    batch = reported((1, 1), (21, 7), Scoring(sequences=packing(cu, cu)))
    gradients = run(batch).gradients
    summed = batch.dout.double().unflatten(1, (7, 3)).sum(dim=2)
    assert (gradients.dv.double() - summed).norm() <= 2**-8 * summed.norm()
    assert not complaints(batch, gradients)


@pytest.mark.parametrize(("cu", "rows"), [([0, 144, 432, 944], 946), ([0, 137, 486], 698)])
def test_rows_behind_the_last_sequence_do_not_touch_the_loss(cu, rows):
    """pytorch/pytorch PR 188933."""
    batch = packed_batch(cu, cu, rows=(rows, rows))
    gradients = run(batch).gradients
    assert all(is_zero(grad[cu[-1] :]) for grad in gradients) and not complaints(batch, gradients)


def test_rows_that_a_sequence_does_not_use_hold_nan():
    """Dao-AILab/flash-attention#2163."""
    batch = packed_batch([0, 3, 7, 9], [0, 3, 7, 9], used=([2, 3, 1], [2, 3, 1]))
    gradients = run(batch).gradients
    assert not complaints(batch, gradients)
    assert all(is_zero(grad[[2, 6, 8]]) for grad in gradients)


def test_nobody_has_to_know_the_longest_sequence():
    """Dao-AILab/flash-attention#1773: there is no maximum to get wrong."""
    batch = reported((300, 300), scoring=Scoring(causal=True, sequences=packing([0, 300], [0, 300])))
    assert not complaints(batch, run(batch).gradients)


def test_padding_for_context_parallel_gives_nothing():
    """NVIDIA/TransformerEngine#2186: sequences of 8 or 9 tokens padded to a multiple of 4, one half all padding."""
    lengths, padded = [9, 8, 8, 12, 8, 12], [0, 12, 20, 28, 40, 48, 60]
    batch = packed_batch(padded, padded, used=(lengths, lengths), causal=True)
    assert not complaints(batch, run(batch).gradients)


def test_every_head_equals_its_own_run():
    """flagos-ai/FlagGems PR 898: S not a multiple of 64, the tail of head h in head h + 1."""
    batch = reported((100, 100), (4, 2), CAUSAL)
    together = run(batch).gradients
    for head in range(2):
        of_q, of_k = slice(2 * head, 2 * head + 2), slice(head, head + 1)
        parts = {name: getattr(batch, name)[:, :, of_q] for name in ("q", "dout", "out")}
        parts |= {name: getattr(batch, name)[:, :, of_k] for name in ("k", "v")}
        alone = run(complete({**parts, "lse": batch.lse[:, of_q]}, CAUSAL)).gradients
        assert torch.equal(alone.dq, together.dq[:, :, of_q])
        assert torch.equal(alone.dk, together.dk[:, :, of_k]) and torch.equal(alone.dv, together.dv[:, :, of_k])


@pytest.mark.parametrize("head_dim", [48, 56, 128])
def test_other_head_dims_are_refused_by_name(head_dim):
    """tile-ai/tilelang-ascend#1669: padding would change the default scale."""
    tensors = [torch.zeros(1, 8, 1, head_dim, dtype=BF16)] * 5 + [torch.zeros(1, 1, 8)]
    given = launch.BackwardTensors(*tensors, *tensors[:3])
    with pytest.raises(launch.LaunchInputError, match=rf"q has shape \(1, 8, 1, {head_dim}\): must be .*{HEAD_DIM}\)"):
        launch.check_tensors(plan("split"), given)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_dout_in_every_order_of_its_outer_dimensions(order):
    """Dao-AILab/flash-attention#355."""
    batch = reported((32, 40), (4, 1), dtype=F16)
    stored = batch.dout.permute(*order, 3).contiguous().permute(*(order.index(dim) for dim in range(3)), 3)
    assert torch.equal(stored, batch.dout)
    expected, got = (run(given).gradients for given in (batch, dataclasses.replace(batch, dout=stored)))
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_dout_that_is_one_number():
    """Dao-AILab/flash-attention#325: the gradient of a sum is an expanded scalar; every stride but the last is zero."""
    batch = reported((5, 5), (2, 2), CAUSAL)
    ones = torch.ones(64, dtype=BF16).expand(1, 5, 2, 64)
    expected = run(dataclasses.replace(batch, dout=torch.ones_like(batch.dout))).gradients
    got = run(dataclasses.replace(batch, dout=ones)).gradients
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_a_row_stride_beyond_32_bits_in_all(tmp_path: Path):
    """Dao-AILab/flash-attention#2611: dO with rows 9728 elements apart, sequences around row 220753.

    The file is sparse: 4.3 GB of addresses, a few pages of memory.
    """
    stride, total, used = 9728, 220800, 60
    (tmp_path / "sparse").touch()
    with (tmp_path / "sparse").open("r+b") as file:
        file.truncate(2 * stride * total)
    storage = torch.from_file(str(tmp_path / "sparse"), shared=True, size=stride * total, dtype=BF16)
    far = storage.as_strided((total, 1, 64), (stride, 64, 1))
    cu = [0, total - used, total - used // 2, total]
    sequences = packing(cu, [0, 0, 30, 60])
    small = reported((used, 60), scoring=Scoring(sequences=packing([0, 0, used // 2, used], [0, 0, 30, 60])))
    assert (total - used // 2) * stride > 2**31

    def spread(x: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(total, *x.shape[1:], dtype=x.dtype)
        wide[-used:] = x
        return wide

    far[-used:] = small.dout
    lse = torch.full((1, total), -torch.inf)
    lse[:, -used:] = small.lse
    scoring = Scoring(sequences=sequences)
    batch = Batch(spread(small.q), small.k, small.v, far, spread(small.out), lse, scoring=scoring)
    got, expected = run(batch).gradients, run(small).gradients
    assert torch.equal(got.dq[-used:], expected.dq) and is_zero(got.dq[:-used])
    assert torch.equal(got.dk, expected.dk) and torch.equal(got.dv, expected.dv)


def test_a_last_dimension_that_is_not_contiguous_is_refused():
    """Dao-AILab/flash-attention PR 2777."""
    batch = reported((16, 16))
    tensors = dataclasses.replace(emulated.tensors_of(batch), q=batch.q.transpose(1, 3).contiguous().transpose(1, 3))
    with pytest.raises(
        launch.LaunchInputError, match="q has stride 16 in its last dimension: must be contiguous there"
    ):
        launch.check_tensors(plan("split"), tensors)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_fused_projections_are_read_in_place(position):
    """Dao-AILab/flash-attention#2541: views with a row stride of 3 x heads x 64, at each of three offsets."""
    batch = reported((128, 128), (2, 2), CAUSAL)
    fused = torch.full((1, 128, 3, 2, 64), torch.nan, dtype=BF16)
    fused[:, :, position] = batch.v
    expected, got = (run(given).gradients for given in (batch, dataclasses.replace(batch, v=fused[:, :, position])))
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


def test_results_have_the_strides_that_the_caller_chose():
    """Dao-AILab/flash-attention PR 818: q and dO transposed, k contiguous, 513 rows."""
    batch = reported((513, 513), (2, 2), dtype=F16)
    transposed = {name: getattr(batch, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "dout")}
    tensors = emulated.tensors_of(dataclasses.replace(batch, **transposed))
    tensors = dataclasses.replace(tensors, dq=torch.full((1, 2, 513, 64), torch.nan, dtype=F16).transpose(1, 2))
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors):
        emulator.launch(kernel.ptx, described, emulator.Options(backend="auto"))
    expected = run(batch).gradients
    assert torch.equal(tensors.dq, expected.dq) and torch.equal(tensors.dk, expected.dk)


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout"])
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_addresses_that_are_not_aligned_are_refused_before_a_launch(name, offset):
    """facebookresearch/xformers#813. Eight elements are 16 bytes, and fine."""
    batch = reported((16, 16))
    x = getattr(batch, name)
    shifted = torch.cat([torch.zeros(offset, dtype=BF16), x.flatten()])[offset:].view(x.shape)
    tensors = dataclasses.replace(emulated.tensors_of(batch), **{name: shifted})
    if offset == 8:
        launch.check_tensors(plan("split"), tensors)
    else:
        with pytest.raises(launch.LaunchInputError, match=rf"{name} begins at an address that is {2 * offset} mod 16"):
            launch.check_tensors(plan("split"), tensors)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1)])
def test_dk_and_dv_are_summed_over_the_group(heads, kv_heads):
    """marin-community/levanter PR 449."""
    batch = reported((64, 64), (heads, kv_heads))
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (12, 3), (4, 2)])
def test_heads_read_the_key_head_of_their_group(heads, kv_heads):
    """XunhaoLai/native-sparse-attention-triton#27: a constant in each V head makes O tell which one was read."""
    batch = reported((64, 64), (heads, kv_heads))
    dv = run(batch).gradients.dv.double().sum(dim=1)
    own = batch.dout.double().sum(dim=1).unflatten(1, (kv_heads, -1)).sum(dim=2)
    assert (dv - own).norm() <= 0.02 * batch.dout.double().norm()


def test_grouped_heads_have_no_staging_to_collide_with():
    """Dao-AILab/flash-attention PR 2035: 8 query heads on 2, 512 rows; dK and dV never leave tensor memory as parts."""
    batch = reported((512, 512), (8, 2))
    assert not complaints(batch, run(batch).gradients)


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (5, 1), (14, 2), (71, 1)])
def test_groups_of_any_size(heads, kv_heads):
    """AMD-AGI/Primus-Turbo PR 516."""
    batch = reported((40, 70), (heads, kv_heads), CAUSAL)
    assert not complaints(batch, run(batch).gradients)


def test_harness_compares_in_logical_order():
    """pytorch/pytorch#133671: tensors of equal elements and other strides are equal."""
    x = randn(0, 2, 2, 49, 64)
    assert torch.equal(x, x.transpose(1, 2).contiguous().transpose(1, 2))


def test_offsets_of_the_dq_accumulator_beyond_32_bits(tmp_path: Path):
    """Dao-AILab/flash-attention PR 2260: batch 16400, one row, 16 heads make 2.15e9 floats of dQ accumulator.

    Only the CTAs of the last batch element run, on a sparse file: 8.6 GB of addresses, a few pages of memory. One key,
    so dV = dO exactly, and dQ = 0 but for float32 noise.
    """
    batches, heads = 16400, 16
    assert batches * heads * 8192 > 2**31
    dout = torch.zeros(batches, 1, heads, 64, dtype=BF16)
    dout[-1] = randn(0, 1, heads, 64).bfloat16()
    ones = torch.ones(64, dtype=BF16).expand(batches, 1, heads, 64)
    lse = torch.full((batches, heads, 1), 8.0)
    results = [torch.full((batches, 1, heads, 64), torch.nan, dtype=BF16) for _ in range(3)]
    tensors = launch.BackwardTensors(ones, ones, ones, ones, dout, lse, *results)
    (tmp_path / "sparse").touch()
    with (tmp_path / "sparse").open("r+b") as file:
        file.truncate(4 * batches * heads * 8192)
    flat = torch.from_file(str(tmp_path / "sparse"), shared=True, size=batches * heads * 8192, dtype=torch.float32)
    rows = torch.zeros(batches, heads, 128)
    work = Workspaces(rows, torch.zeros_like(rows), flat.view(batches, heads, 1, 8192))
    last = list(range((batches - 1) * heads, batches * heads))
    for kernel, described in launch.launches(launch.compile_for("split", tensors), tensors, workspaces=work):
        emulator.launch(kernel.ptx, described, emulator.Options(backend="numpy", cta_order=last))
    dq, dk, dv = (result[-1] for result in results)
    assert torch.equal(dv, dout[-1]) and dq.abs().max() < 1e-4 and dk.abs().max() < 1e-4
    assert all(result[:-1].isnan().all() for result in results)
