"""The verdict of `undertow verify`, on gradients that are right, wrong, unwritten or never arrive."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file

from undertow.cli import Outcome
from undertow.commands import verify as command
from undertow.emulator.errors import Deadlock
from undertow.inputs import Batch, InputError, Shape, random_batch
from undertow.progress import Progress
from undertow.reference import Gradients, ideal_backward, row_stats
from undertow.verify import complaint, saved_forward_errors, verify

SHAPE = Shape(batch=1, seqlen_q=20, seqlen_k=12, heads=2)
EXTENTS = ("--seqlen-q", "20", "--seqlen-k", "12")


@dataclass
class Executed:
    gradients: Gradients
    dsink: torch.Tensor | None = None
    backend: str = "numpy"
    tile_iterations: int = 2
    compute_barriers_per_tile: float = 5.0
    compile_seconds: float = 1.5
    run_seconds: float = 0.25


def ideal(batch: Batch) -> Gradients:
    return ideal_backward(batch.q, batch.k, batch.v, batch.dout, row_stats(batch.out, batch.dout, batch.lse))


def right(batch: Batch, schedule: str) -> Executed:
    return Executed(ideal(batch))


def five_percent_off_in_dk(batch: Batch, schedule: str) -> Executed:
    dq, dk, dv = ideal(batch)
    return Executed(Gradients(dq, (1.05 * dk.float()).bfloat16(), dv))


def row_of_dv_unwritten(batch: Batch, schedule: str) -> Executed:
    grads = ideal(batch)
    grads.dv[0, 7] = torch.nan
    return Executed(grads)


def deadlock(batch: Batch, schedule: str) -> Executed:
    raise Deadlock("warp 12 (mma) waits for load_mma_q.full[1]")


def run(backward, *words: str) -> Outcome:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.judge(parser.parse_args(words), Progress("test"), backward)


def test_without_options_all_schedules_run_on_the_stated_batch():
    outcome = run(right)
    runs = outcome.report["runs"]
    assert [entry["schedule"] for entry in runs] == ["aliased", "slots", "signals", "split"]
    assert all(
        entry["shape"] == {"batch": 1, "seqlen_q": 256, "seqlen_k": 384, "heads": 2, "kv_heads": 2} for entry in runs
    )
    assert outcome.ok and outcome.report["ok"] is True


def test_the_record_of_a_run_is_the_contract():
    outcome = run(right, *EXTENTS, "--schedule", "split")
    assert set(outcome.report) == {"ok", "runs"}
    (entry,) = outcome.report["runs"]
    measured = {name: entry.pop(name) for name in ("errors", "ideal")}
    assert entry == {
        "schedule": "split",
        "backend": "numpy",
        "shape": {"batch": 1, "seqlen_q": 20, "seqlen_k": 12, "heads": 2, "kv_heads": 2},
        "ok": True,
        "compute_barriers_per_tile": 5,
        "tile_iterations": 2,
        "seconds": {"compile": 1.5, "run": 0.25},
    }
    assert measured["errors"] == measured["ideal"] and set(measured["ideal"]) == {"dq", "dk", "dv"}
    assert all(0 < error < 0.01 for error in measured["ideal"].values())
    assert json.loads(json.dumps(outcome.report, allow_nan=False)) == outcome.report


def test_the_table_has_one_aligned_row_per_run():
    lines = run(right, *EXTENTS, "--schedule", "slots", "--schedule", "split").text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("schedule"))
    rows = lines[head : head + 3]
    assert [row.split()[0] for row in rows] == ["schedule", "slots", "split"]
    assert len({len(row) for row in rows}) == 1
    assert "20x12 b1 h2" in rows[1] and "1.000" in rows[1] and lines[-1].startswith("Right")


def test_a_wrong_gradient_is_named_with_its_worst_element():
    outcome = run(five_percent_off_in_dk, *EXTENTS, "--schedule", "split")
    (entry,) = outcome.report["runs"]
    assert not outcome.ok and not entry["ok"] and entry["errors"]["dk"] == pytest.approx(0.05, rel=0.05)
    verdict = outcome.text.splitlines()[-1]
    assert verdict.startswith("WRONG split: dk has an error of 5.") and "worst element [batch 0, row " in verdict
    assert "dq" not in verdict and "dv" not in verdict


def test_the_worst_element_and_its_tile_are_named():
    batch = random_batch(Shape(batch=1, seqlen_q=300, seqlen_k=12, heads=2))
    measure = next(verify(batch, ["split"], right)).measure
    grads = ideal(batch)
    grads.dq[0, 130, 1, 9] = 1000.0
    said = complaint(measure, grads)
    assert "worst element [batch 0, row 130, head 1, column 9] is 1000, right is " in said
    assert "100% of the squared error is in rows 128 to 255 of batch 0, head 1, one of 6 tiles" in said
    grads = ideal(batch)
    grads.dq[0, 299, 0, 0] = -1000.0
    assert "in rows 256 to 299 of batch 0, head 0" in complaint(measure, grads)


def test_an_unwritten_gradient_is_wrong_and_null_in_json():
    outcome = run(row_of_dv_unwritten, *EXTENTS, "--schedule", "split")
    assert not outcome.ok and outcome.report["runs"][0]["errors"]["dv"] is None
    assert "128 of 1536 elements are not finite, first [batch 0, row 7, head 0, column 0]" in outcome.text


def test_a_machine_that_stops_is_a_wrong_result_and_the_other_schedules_still_run():
    def only_split_stops(batch: Batch, schedule: str) -> Executed:
        return deadlock(batch, schedule) if schedule == "split" else right(batch, schedule)

    outcome = run(only_split_stops, *EXTENTS)
    by_name = {entry["schedule"]: entry for entry in outcome.report["runs"]}
    assert not outcome.ok and [name for name, entry in by_name.items() if not entry["ok"]] == ["split"]
    assert by_name["split"]["errors"] == {"dq": None, "dk": None, "dv": None}
    assert by_name["split"]["tile_iterations"] is None
    assert "WRONG split: Deadlock: warp 12 (mma) waits for load_mma_q.full[1]" in outcome.text
    json.dumps(outcome.report, allow_nan=False)


def test_seeds_change_the_batch():
    errors = [run(right, *EXTENTS, "--schedule", "split", "--seed", seed).report["runs"][0]["ideal"] for seed in "01"]
    assert errors[0] != errors[1]


def test_a_file_brings_the_batch_and_its_forward_is_measured(tmp_path):
    batch = random_batch(Shape(1, 9, 11, 3))
    content = {name: getattr(batch, name) for name in ("q", "k", "v", "dout", "out", "lse")}
    path = str(tmp_path / "batch.safetensors")
    save_file(content, path)
    outcome = run(right, "--input", path, "--schedule", "split")
    assert outcome.report["runs"][0]["shape"] == {"batch": 1, "seqlen_q": 9, "seqlen_k": 11, "heads": 3, "kv_heads": 3}
    assert "out differs by" in outcome.text
    save_file({name: x for name, x in content.items() if name not in ("out", "lse")}, path)
    again = run(right, "--input", path, "--schedule", "split")
    assert again.report["runs"][0]["errors"] == outcome.report["runs"][0]["errors"]
    assert "out and lse by the float64 reference" in again.text


def test_a_wrong_stored_forward_shows_beside_a_right_kernel():
    """LSE in log2 where natural logarithm is meant: the kernel does what it is told, the line above says why."""
    batch = random_batch(SHAPE)
    out, rounded, lse = saved_forward_errors(batch)
    assert out == rounded < 2.0**-8 and lse < 1e-6
    wrong = Batch(batch.q, batch.k, batch.v, batch.dout, batch.out, batch.lse * 1.4427)
    assert saved_forward_errors(wrong)[2] > 0.5
    (judged,) = verify(wrong, ["split"], right)
    assert judged.ok and judged.errors is not None and judged.errors.dv > 0.1


@pytest.mark.parametrize("words", [("--heads", "2"), ("--seqlen-q", "9", "--seed", "1")], ids=" ".join)
def test_a_file_and_random_extents_exclude_each_other(words):
    flags = ", ".join(word for word in words if word.startswith("--"))
    with pytest.raises(InputError, match=f"^{flags}: not allowed beside --input"):
        run(right, "--input", "batch.safetensors", *words)


def test_extents_below_one_are_refused():
    with pytest.raises(InputError, match="seqlen_k=0: must be at least 1"):
        run(right, "--seqlen-k", "0")
