"""Reports about strides, addresses and groups of heads. Each test names the public thread it comes from."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from tests.kernels.problems import complaints, run
from tests.public_cases.batches import BF16, F16, reported
from undertow import emulated, emulator
from undertow.inputs import Shape, random_batch
from undertow.kernels.sm100 import launch
from undertow.kernels.sm100.plan import plan
from undertow.reference import Gradients, Scoring
from undertow.tolerance import yardstick

CAUSAL = Scoring(causal=True)


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=lambda order: "".join(map(str, order)))
def test_dout_in_every_order_of_its_outer_dimensions(order):
    """Dao-AILab/flash-attention#355: all 24. Those whose last dimension is not contiguous are refused by name."""
    plain = random_batch(Shape(2, 32, 32, 4, 1), dtype=F16)
    stored = plain.dout.permute(*order).contiguous().permute(*(order.index(dim) for dim in range(4)))
    assert torch.equal(stored, plain.dout)
    batch = dataclasses.replace(plain, dout=stored)
    if stored.stride(-1) == 1:
        assert all(torch.equal(a, b) for a, b in zip(run(plain).gradients, run(batch).gradients))
    else:
        with pytest.raises(launch.LaunchInputError, match=r"dout has stride \d+ in its last dimension"):
            run(batch)


def test_dout_that_is_one_number():
    """Dao-AILab/flash-attention#325: the gradient of a sum is an expanded scalar; every stride but the last is zero."""
    batch = reported((5, 5), (2, 2), CAUSAL)
    ones = torch.ones(64, dtype=BF16).expand(1, 5, 2, 64)
    expected = run(dataclasses.replace(batch, dout=torch.ones_like(batch.dout))).gradients
    got = run(dataclasses.replace(batch, dout=ones)).gradients
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout", "dq", "dk", "dv"])
def test_a_last_dimension_that_is_not_contiguous_is_refused(name):
    """Dao-AILab/flash-attention PR 2777: x.transpose(-1, -2) views, of inputs as of results."""
    tensors = emulated.tensors_of(reported((16, 16)))
    view = getattr(tensors, name).transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(
        launch.LaunchInputError, match=f"{name} has stride 16 in its last dimension: must be contiguous there"
    ):
        launch.check_tensors(plan("split"), dataclasses.replace(tensors, **{name: view}))


@pytest.mark.parametrize("places", list(itertools.permutations(range(3))), ids=str)
def test_fused_projections_are_read_in_place(places):
    """Dao-AILab/flash-attention#2541: q, k, v as views with a row stride of 3 x heads x 64, at offsets 0, 1 and 2."""
    batch = reported((128, 128), (2, 2), CAUSAL)
    fused = torch.full((1, 128, 3, 2, 64), torch.nan, dtype=BF16)
    views = {name: fused[:, :, place] for name, place in zip("qkv", places)}
    for name, view in views.items():
        view.copy_(getattr(batch, name))
    assert views["q"].stride(1) == 3 * 2 * 64
    expected, got = (run(given).gradients for given in (batch, dataclasses.replace(batch, **views)))
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


@pytest.mark.parametrize("shift", [1, 2, 4])
def test_an_lse_that_is_only_aligned_as_its_numbers_are(shift):
    """facebookresearch/xformers#813: single numbers are read of it, so that 4 bytes are enough."""
    batch = reported((70, 70), (2, 2))
    lse = torch.cat([torch.full((shift,), torch.nan), batch.lse.flatten()])[shift:].view(batch.lse.shape)
    expected, got = (run(given).gradients for given in (batch, dataclasses.replace(batch, lse=lse)))
    assert all(torch.equal(a, b) for a, b in zip(expected, got))


@pytest.mark.parametrize("name", ["q", "k", "v", "out", "dout", "dq", "dk", "dv"])
def test_a_row_stride_of_66_is_refused_before_a_launch(name):
    """facebookresearch/xformers#813."""
    tensors = dataclasses.replace(
        emulated.tensors_of(reported((16, 16))), **{name: torch.zeros(1, 16, 1, 66, dtype=BF16)[..., :64]}
    )
    with pytest.raises(
        launch.LaunchInputError, match=f"{name} has a stride of 132 bytes in dimension 1: must be a mul"
    ):
        launch.check_tensors(plan("split"), tensors)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 1)])
def test_dk_and_dv_are_summed_over_the_group(heads, kv_heads):
    """marin-community/levanter PR 449: the fold of a run in which every query head has keys of its own."""
    batch = reported((64, 64), (heads, kv_heads))
    group = heads // kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (batch.k, batch.v))
    gradients, apart = run(batch).gradients, run(dataclasses.replace(batch, k=k, v=v)).gradients
    assert not complaints(batch, gradients) and torch.equal(gradients.dq, apart.dq)
    for name in ("dk", "dv"):
        parts = getattr(apart, name).double().unflatten(2, (kv_heads, group))
        difference = (getattr(gradients, name).double() - parts.sum(dim=3)).norm()
        assert difference <= 2**-9 * (parts.norm() + getattr(gradients, name).double().norm()), "each rounded once"


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (6, 3), (12, 3), (4, 2)])
def test_heads_read_the_key_head_of_their_group(heads, kv_heads):
    """XunhaoLai/native-sparse-attention-triton#27: a constant in each V head, so that O tells which one was read.

    dP is then the same for all keys of a head, and dS is 0 where D was made of the same head; dV adds up to dO.
    """

    def change(tensors):
        tensors["v"][:] = torch.arange(1.0, kv_heads + 1)[:, None]

    batch = reported((64, 64), (heads, kv_heads), change=change)
    gradients = run(batch).gradients
    assert torch.equal(
        batch.out[..., 0], batch.v[:, :1, :, 0].repeat_interleave(heads // kv_heads, 2).expand(1, 64, -1)
    )
    assert gradients.dq.abs().max() < 1e-3 and gradients.dk.abs().max() < 1e-3 and not complaints(batch, gradients)
    dv = gradients.dv.double().sum(dim=1)
    own = batch.dout.double().sum(dim=1).unflatten(1, (kv_heads, -1)).sum(dim=2)
    assert (dv - own).norm() <= 0.02 * batch.dout.double().norm()


def test_grouped_heads_have_no_staging_to_collide_with():
    """Dao-AILab/flash-attention PR 2035: 8 query heads on 2, 512 rows; dK and dV never leave tensor memory as parts."""
    batch = reported((512, 512), (8, 2))
    first = run(batch).gradients
    assert not complaints(batch, first)
    for seed in range(3):
        again = run(batch, options=emulator.Options("auto", seed, ("seeded", seed))).gradients
        assert all(torch.equal(a, b) for a, b in zip(first, again)), f"seed {seed}"


@pytest.mark.parametrize(("heads", "kv_heads"), [(7, 1), (5, 1), (14, 2), (71, 1)])
def test_groups_of_any_size(heads, kv_heads):
    """AMD-AGI/Primus-Turbo PR 516."""
    batch = reported((40, 70), (heads, kv_heads), CAUSAL)
    assert not complaints(batch, run(batch).gradients)


def test_harness_compares_in_logical_order():
    """pytorch/pytorch#133671: gradients of equal elements and other strides have equal errors, whatever dO's are."""
    batch = random_batch(Shape(2, 49, 49, 2))
    other = torch.empty_like(batch.out.transpose(1, 2).contiguous().transpose(1, 2)).copy_(batch.dout)
    assert other.stride() != batch.dout.stride()
    measures = [yardstick(given) for given in (batch, dataclasses.replace(batch, dout=other))]
    gradients = run(batch).gradients
    turned = Gradients(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in gradients))
    first, *others = (measure.errors(given) for measure in measures for given in (gradients, turned))
    assert all(other == pytest.approx(first, rel=1e-9) for other in others), "but for the order of float64 sums"
