"""`undertow verify` with nothing faked: compiled kernels, executed, judged, told."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from undertow import cli, emulated
from undertow.inputs import Batch, Shape, complete, random_batch
from undertow.kernels.sm100.launch import Settings
from undertow.plan.schema import PlanError
from undertow.reference import Scoring

BARRIERS = {"aliased": 5, "slots": 3, "signals": 3, "split": 0}


def verified(capfd, *words: str) -> tuple[int, dict]:
    """Exit code and JSON object of `undertow verify --json`, in this process."""
    code = cli.main(["verify", "--json", *words])
    return code, json.loads(capfd.readouterr().out)


def test_the_newcomers_command_is_right_on_all_schedules(capfd):
    code, report = verified(capfd)
    assert code == 0 and report["ok"]
    runs = {run["schedule"]: run for run in report["runs"]}
    assert {name: run["compute_barriers_per_tile"] for name, run in runs.items()} == BARRIERS
    assert all(run["tile_iterations"] == 2 * 3 * 2 for run in runs.values())
    shape = {"batch": 1, "seqlen_q": 256, "seqlen_k": 384, "heads": 2, "kv_heads": 2}
    assert all(run["shape"] == shape for run in runs.values())
    for run in runs.values():
        assert all(run["errors"][name] <= 1.25 * run["ideal"][name] for name in ("dq", "dk", "dv"))
        assert run["seconds"]["run"] > 0


def test_the_installed_command_prints_json_alone():
    words = ["verify", "--json", "--schedule", "split", "--seqlen-q", "1", "--seqlen-k", "1", "--backend", "numpy"]
    done = subprocess.run(
        [sys.executable, "-m", "undertow", *words], capture_output=True, text=True, timeout=300, check=True
    )
    (run,) = json.loads(done.stdout)["runs"]
    assert run["ok"] and run["backend"] == "numpy" and run["ideal"] == {"dq": 0.0, "dk": 0.0, "dv": 0.0}


def test_a_users_file_is_judged_like_a_random_batch(capfd, tmp_path):
    """The same numbers through a file, with and without its forward, give the same errors."""
    batch = random_batch(Shape(1, 37, 65, 2), seed=3)
    content = {name: getattr(batch, name) for name in ("q", "k", "v", "dout", "out", "lse")}
    save_file(content, tmp_path / "all.safetensors")
    save_file({name: content[name] for name in ("q", "k", "v", "dout")}, tmp_path / "four.safetensors")
    sources = (
        ("--seqlen-q", "37", "--seqlen-k", "65", "--heads", "2", "--seed", "3"),
        ("--input", str(tmp_path / "all.safetensors")),
        ("--input", str(tmp_path / "four.safetensors")),
    )
    errors = []
    for words in sources:
        code, report = verified(capfd, *words, "--schedule", "split")
        assert code == 0
        errors.append(report["runs"][0]["errors"])
    assert errors[0] == errors[1] == errors[2]


def test_a_wrong_kernel_is_exit_code_1(capfd, monkeypatch):
    """The kernels are told a softmax scale that is one percent off; nothing else changes."""
    launches = emulated.launches
    monkeypatch.setattr(
        emulated, "launches", lambda compiled, tensors, _: launches(compiled, tensors, Settings(0.125 * 1.01))
    )
    code, report = verified(capfd, "--seqlen-q", "64", "--seqlen-k", "64", "--heads", "1")
    assert code == 1 and not report["ok"] and not any(run["ok"] for run in report["runs"])


def test_a_batch_that_the_kernels_cannot_address_is_exit_code_2(capfd, tmp_path):
    path = tmp_path / "single.safetensors"
    save_file({name: torch.zeros(1, 4, 1, 64) for name in ("q", "k", "v", "dout")}, path)
    assert cli.main(["verify", "--input", str(path), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"undertow verify: {path}: q has dtype torch.float32: must be " + (
        "torch.bfloat16 or torch.float16\n"
    )


def test_gradients_of_views_are_those_of_copies():
    """Packed q, k, v and a transposed dO, which the kernels read in place."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 70, 2, 3, 64, generator=generator).bfloat16().unbind(dim=3)
    dout = torch.randn(1, 2, 70, 64, generator=generator).bfloat16().transpose(1, 2)
    views = complete({"q": q, "k": k, "v": v, "dout": dout})
    copies = Batch(*(x.contiguous() for x in (views.q, views.k, views.v, views.dout, views.out, views.lse)))
    got, want = (emulated.backward(batch).gradients for batch in (views, copies))
    assert all(torch.equal(g, w) for g, w in zip(got, want))


def test_the_scale_is_the_callers():
    """q * 2 with half the scale is the same problem, and dQ is its own per unit of q."""
    batch = random_batch(Shape(1, 48, 80, 1), scoring=Scoring(softmax_scale=0.25))
    plain = emulated.backward(batch).gradients
    doubled = dataclasses.replace(batch, q=2 * batch.q, scoring=Scoring(softmax_scale=0.125))
    moved = emulated.backward(doubled).gradients
    assert torch.equal(moved.dq * 2, plain.dq) and torch.equal(moved.dk, plain.dk) and torch.equal(moved.dv, plain.dv)


def test_masks_grouped_heads_and_fp16_are_asked_for_by_option(capfd):
    words = ("--schedule", "split", "--causal", "--window", "90", "none", "--heads", "4", "--kv-heads", "2")
    code, report = verified(capfd, *words, "--dtype", "fp16", "--softmax-scale", "-0.2")
    (run,) = report["runs"]
    assert code == 0 and run["shape"]["kv_heads"] == 2
    assert run["tile_iterations"] == 4 * 4, "two of three key tiles are seen by one query tile each, one by both"
    assert max(run["ideal"].values()) < 6e-4, "fp16 has three bits more than bf16"


def test_packed_sequences_sinks_caps_and_order_are_asked_for_by_option(capfd):
    words = ("--cu-seqlens-q", "0,0,130,200", "--cu-seqlens-k", "0,20,180,330", "--seqlen-q", "230", "--heads", "2")
    options = ("--kv-heads", "1", "--sinks", "--dlse", "--softcap", "3", "--deterministic", "--causal")
    code, report = verified(capfd, "--schedule", "split", *words, *options)
    (run,) = report["runs"]
    assert code == 0
    assert run["shape"] == {"batch": 3, "seqlen_q": 230, "seqlen_k": 330, "heads": 2, "kv_heads": 1}


def test_a_wrong_sink_gradient_is_a_wrong_result(capfd, monkeypatch):
    backward = emulated.backward

    def doubled(batch, **options):
        done = backward(batch, **options)
        assert done.dsink is not None
        return dataclasses.replace(done, dsink=2 * done.dsink)

    monkeypatch.setattr(emulated, "backward", doubled)
    code, report = verified(capfd, "--schedule", "split", "--seqlen-q", "20", "--seqlen-k", "20", "--sinks")
    assert code == 1 and not report["ok"]


def test_a_file_says_how_its_sequences_are_packed(capfd, tmp_path):
    path, generator = tmp_path / "packed.safetensors", torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(20, 2, 64, generator=generator).bfloat16() for name in ("q", "k", "v", "dout")}
    offsets = {f"cu_seqlens_{side}": torch.tensor([0, 5, 18], dtype=torch.int32) for side in "qk"}
    extra = {"seqused_k": torch.tensor([5, 9], dtype=torch.int32), "sink": torch.tensor([0.0, 1.0])}
    save_file({**tensors, **offsets, **extra, "dlse": torch.randn(2, 20, generator=generator)}, path)
    code, report = verified(capfd, "--input", str(path), "--causal", "--schedule", "split")
    assert code == 0 and report["runs"][0]["shape"]["batch"] == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--cu-seqlens-k", "0,5"), "--cu-seqlens-k: needs --cu-seqlens-q"),
        (("--cu-seqlens-q", "0,9,5"), "--cu-seqlens-q=0,9,5: must ascend from 0"),
        (("--cu-seqlens-q", "0,5", "--cu-seqlens-k", "0,5,9"), "--cu-seqlens-k has 3 numbers"),
        (("--cu-seqlens-q", "0,5", "--seqlen-q", "4"), "--seqlen-q=4: must be at least 5"),
        (("--softcap", "-1"), "softcap=-1.0: must be positive"),
    ],
)
def test_attention_that_is_none_is_exit_code_2(capfd, words, message):
    assert cli.main(["verify", *words]) == 2
    assert message in capfd.readouterr().err


def test_an_unknown_schedule_is_named():
    with pytest.raises(PlanError, match="schedule 'best' is unknown; allowed: aliased, slots, signals, split"):
        emulated.backward(random_batch(Shape(1, 1, 1, 1)), schedule="best")
