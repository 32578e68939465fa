"""Batches are refused by name, with the value and what is allowed; what is accepted is what was given."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from undertow.inputs import Batch, InputError, Shape, check_tensors, complete, random_batch, read_batch
from undertow.reference import Scoring, attention_forward, round_to

SHAPE = Shape(batch=2, seqlen_q=3, seqlen_k=5, heads=2, kv_heads=2)


def tensors() -> dict[str, Tensor]:
    batch = random_batch(SHAPE, seed=7)
    return {name: getattr(batch, name) for name in ("q", "k", "v", "dout", "out", "lse")}


def written(tmp_path, content: dict[str, Tensor]):
    path = tmp_path / "batch.safetensors"
    save_file(content, path)
    return path


def test_random_batches_are_decided_by_seed():
    first, again, other = (random_batch(SHAPE, seed) for seed in (1, 1, 2))
    for name in ("q", "k", "v", "dout", "out", "lse"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))
    assert first.shape == SHAPE and first.computed == ("out", "lse")


def test_random_batches_hold_the_rounded_forward():
    batch = random_batch(SHAPE)
    out, lse = attention_forward(batch.q, batch.k, batch.v)
    assert torch.equal(batch.out.double(), round_to(out, torch.bfloat16)) and torch.equal(batch.lse, lse.float())


@pytest.mark.parametrize("name", Shape._fields)
def test_extents_below_one_are_refused(name):
    with pytest.raises(InputError, match=f"^{name}=0: must be at least 1$"):
        random_batch(SHAPE._replace(**{name: 0}))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(InputError, match=f"seed={seed}"):
        random_batch(SHAPE, seed)


def test_a_file_gives_back_its_tensors(tmp_path):
    content = tensors()
    batch = read_batch(written(tmp_path, {**content, "step": torch.tensor(3)}))
    assert batch.computed == ()
    for name, tensor in content.items():
        assert torch.equal(getattr(batch, name), tensor)
        assert getattr(batch, name).data_ptr() % 16 == 0


@pytest.mark.parametrize("absent", [("out",), ("lse",), ("out", "lse")], ids="+".join)
def test_a_file_without_the_forward_gets_the_reference(tmp_path, absent):
    content = tensors()
    batch = read_batch(written(tmp_path, {name: x for name, x in content.items() if name not in absent}))
    assert batch.computed == absent
    assert torch.equal(batch.out, content["out"]) and torch.equal(batch.lse, content["lse"])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_a_missing_tensor_is_named_with_what_is_there(tmp_path, name):
    content = tensors()
    del content[name]
    with pytest.raises(InputError, match=rf"tensor {name} is missing.*the file holds {', '.join(sorted(content))}"):
        read_batch(written(tmp_path, content))


def test_files_that_are_not_safetensors_are_refused(tmp_path):
    garbage = tmp_path / "batch.safetensors"
    garbage.write_bytes(b"\0" * 64)
    for path in (garbage, tmp_path / "absent", tmp_path):
        with pytest.raises(InputError, match="cannot be read as safetensors"):
            read_batch(path)


def with_value(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed[1, 0, 1] = value
    return changed


WRONG = {  # name of the tensor: how it is made wrong, what the message says
    "mixed": ("v", lambda x: x.half(), "v has dtype torch.float16: must be torch.bfloat16, as q has"),
    "fp32": ("v", lambda x: x.float(), "v has dtype torch.float32: must be torch.bfloat16 or torch.float16"),
    "lse-bf16": ("lse", lambda x: x.bfloat16(), "lse has dtype torch.bfloat16: must be torch.float32"),
    "rank": ("dout", lambda x: x[0], r"dout has shape \(3, 2, 64\): must be \(batch, seqlen, heads, head_dim\)"),
    "lse-rank": ("lse", lambda x: x[..., None], r"lse has shape .*: must be \(batch, heads, seqlen_q\)"),
    "head-dim": ("k", lambda x: x[..., :48], "k has head_dim 48: must be 64"),
    "no-keys": ("k", lambda x: x[:, :0], "k has shape .*: seqlen must be at least 1"),
    "no-batch": ("q", lambda x: x[:0], "q has shape .*: batch must be at least 1"),
    "heads": ("k", lambda x: x[:, :, [0, 1, 1]], "k has 3 heads, q has 2: heads of k must divide those of q"),
    "kv-heads": ("v", lambda x: x[:, :, :1], r"v has shape \(2, 5, 1, 64\): must be \(2, 5, 2, 64\)"),
    "batch": ("k", lambda x: x[:1], r"k has shape \(1, 5, 2, 64\): must be \(2, 5, 2, 64\)"),
    "keys": ("v", lambda x: x[:, :4], r"v has shape \(2, 4, 2, 64\): must be \(2, 5, 2, 64\)"),
    "rows": ("out", lambda x: x[:, :2], r"out has shape \(2, 2, 2, 64\): must be \(2, 3, 2, 64\)"),
    "lse-layout": ("lse", lambda x: x.transpose(1, 2), r"lse has shape \(2, 3, 2\): must be \(2, 2, 3\)"),
    "nan": ("q", lambda x: with_value(x, torch.nan), r"q\[1, 0, 1, 0\] is nan, one of 64 such elements"),
    "inf": ("dout", lambda x: with_value(x, -torch.inf), r"dout\[1, 0, 1, 0\] is -inf"),
    "lse-empty": ("lse", lambda x: with_value(x, -torch.inf), r"lse\[1, 0, 1\] is -inf.*a row without keys"),
}


@pytest.mark.parametrize(("name", "spoil", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_tensors_are_refused_by_name(name, spoil, message):
    content = tensors()
    content[name] = spoil(content[name])
    with pytest.raises(InputError, match=message):
        check_tensors(content)
    with pytest.raises(InputError, match=message):
        Batch(*(content[name] for name in ("q", "k", "v", "dout", "out", "lse")))


def test_a_wrong_tensor_in_a_file_is_named_with_the_file(tmp_path):
    path = written(tmp_path, {**tensors(), "q": torch.zeros(2, 3, 2, 64)})
    with pytest.raises(InputError, match=r"batch\.safetensors: q has dtype torch\.float32"):
        read_batch(path)


def test_a_mask_may_leave_rows_without_keys():
    """Three rows and one key under a causal mask: only the last row sees it."""
    batch = random_batch(Shape(1, 3, 1, 1), scoring=Scoring(causal=True))
    assert batch.lse[0, 0, :2].tolist() == [-torch.inf] * 2 and batch.out[0, :2].abs().max() == 0


def test_views_are_accepted_as_they_are():
    """Packed and transposed storage are layouts like any other: nothing is copied."""
    packed = torch.randn(2, 6, 2, 3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    q, k, v = packed.unbind(dim=3)
    dout = torch.randn(2, 2, 6, 64, generator=torch.Generator().manual_seed(1)).bfloat16().transpose(1, 2)
    batch = complete({"q": q, "k": k, "v": v, "dout": dout})
    assert batch.q.data_ptr() == q.data_ptr() and batch.dout.data_ptr() == dout.data_ptr()
    assert not batch.q.is_contiguous() and not batch.dout.is_contiguous()
