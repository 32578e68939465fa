"""Write everything that is derived from the plans: the kernel's README, the pictures, and tables inside documents.

    python tools/regen.py            writes what is stale
    python tools/regen.py --predict  writes the predicted timelines, too, which takes minutes
    python tools/regen.py --check    writes nothing, names what is stale, exits 1 if anything is
    python tools/regen.py FOLDER     the same for another tree

What is predicted follows from compiled kernels and chip files, not from the plans alone: --check does not look at it.

A document holds a generated part between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is a key of BLOCKS.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from undertow.backward_case import main_case
from undertow.campaign import campaign, picture
from undertow.commands.predicted import predict
from undertow.emulator import Options
from undertow.hazard_figure import sides
from undertow.inputs import Shape
from undertow.kernels.sm90.plan import plan as hopper_plan
from undertow.kernels.sm100.plan import SCHEDULES, plan
from undertow.plan import render_tables as tables
from undertow.plan.attention import Attention
from undertow.plan.render_schedule import schedule
from undertow.plan.render_svg import hazard, same_map, tmem_maps
from undertow.plan.render_tiles import tile_turns
from undertow.plan.schema import Plan
from undertow.plan.tiles import EVERYTHING, Band
from undertow.pool import cores
from undertow.timeline.picture import draw
from undertow.timing.chip import read_chip

PLANS = [plan(name) for name in SCHEDULES]
SPLIT, ALIASED = plan("split"), plan("aliased")
CAPPED = plan("split", attention=Attention(softcap=True))
IN_TURN = plan("split", attention=Attention(deterministic=True))
MASKS = [Attention(left=left, right=right) for left in (False, True) for right in (False, True)]
BANDS = (("dense", EVERYTHING), ("causal", Band(None, 0)), ("left bound", Band(1, None)), ("sliding", Band(1, 0)))
KERNEL_README = Path("undertow/kernels/sm100/README.md")
HOPPER_README = Path("undertow/kernels/sm90/README.md")
DOCUMENTS = (Path("README.md"), Path("docs/sm100-tour.md"), Path("docs/variants.md"))


@functools.cache  # the kernel is compiled and executed for it
def hazard_found() -> str:
    """What `undertow check` finds without the alias guard of P: a warp stores over what the next warpgroup loads."""
    broken = ALIASED.without_guard("P")
    cases = {broken.name: (main_case(broken, Shape(1, 2 * broken.tile_m, broken.tile_n, 1)),)}
    for found in campaign(cases, [Options(schedule=0)]).errors:
        pair = sides(found.finding)
        if pair and pair[1].warp < pair[0].warp:
            return picture(cases, found)
    raise AssertionError("the hazard that the guard prevents is found")


PICTURES: dict[str, Callable[[], str]] = {
    "tmem-maps": lambda: tmem_maps(PLANS),
    "hazard-p": lambda: hazard(ALIASED, "P", "S"),
    "hazard-ds": lambda: hazard(ALIASED, "dS", "dP"),
    "hazard-found": hazard_found,
    "tile-turns": lambda: tile_turns(BANDS),
    **{f"schedule-{p.name}": lambda p=p: schedule(p) for p in PLANS},
}


def timelines() -> str:
    """A steady tile of every schedule on a B200, as `undertow timeline` predicts it with its default draws."""
    told = predict(read_chip("b200"), argparse.Namespace(draws=64, seed=0, jobs=cores()), lambda text: None)
    return draw(told.timelines, predictions=told.tiles, brief=True, hints=False)


PREDICTED: dict[str, Callable[[], str]] = {"timelines": timelines}

BLOCKS: dict[str, Callable[[], str]] = {
    "schedules": lambda: tables.schedules(PLANS),
    "roles": lambda: tables.roles(SPLIT),
    "gemms": lambda: tables.gemms(SPLIT),
    "smem": lambda: tables.shared_memory(SPLIT),
    "pipelines": lambda: tables.pipelines(SPLIT),
    "mma-aliased": lambda: tables.mma_rows(ALIASED),
    "mma-split": lambda: tables.mma_rows(SPLIT),
    "registers": lambda: tables.registers({"without": SPLIT, "with a softcap": CAPPED}),
    "cta-orders": lambda: tables.cta_orders(MASKS),
    "reduce-in-turn": lambda: tables.reduce_steps(IN_TURN),
}

INTRODUCTION = """\
# The SM100 backward kernel: four plans

Generated from `plan.py` by `tools/regen.py`; do not edit. What the words mean and why each barrier is or is not there:
[the tour](../../../docs/sm100-tour.md).

S, P, dP and dS are kept transposed: a TMEM lane is a key row, a column is a query row. `t` is the query tile of the
trip. Tensors: `s` shared memory, `g` global memory, `r` registers, `t` tensor memory, then the mathematical name.
"""


HOPPER_INTRODUCTION = """\
# The SM90 backward kernel: one plan

Generated from `plan.py` by `tools/regen.py`; do not edit. Why it is as it is, and what was measured on the way:
[the log of designs](../../../docs/hopper.md).

S, P, dP and dS are kept transposed, keys by query rows, in the registers of the warpgroup that owns the keys. Tensors:
`s` shared memory, then the mathematical name; `sRow` holds 16-bit terms of -LSE / softmax_scale and of -D, which a step
of k = 16 adds to S and to dP, `sItems` words that say what a key/value tile of the CTA is. Under a softcap there is
`sLSE` as well, -LSE log2(e) in fp32, which comes with `sRow`. A barrier's number is that of the warpgroup it belongs
to.
"""


def generated(root: Path, predicted: bool = False) -> Iterator[tuple[Path, str]]:
    """Every file that has a generated part, with the text it should have. predicted: those of PREDICTED, too."""
    yield root / KERNEL_README, kernel_readme()
    yield root / HOPPER_README, hopper_readme()
    for name, drawn in (PICTURES | (PREDICTED if predicted else {})).items():
        yield root / "docs" / "images" / f"{name}.svg", drawn()
    for document in DOCUMENTS:
        if (root / document).exists():
            yield root / document, filled(root / document)


def kernel_readme() -> str:
    """The kernel's README: what all plans share, then each map, then each schedule's programs."""
    parts = [
        INTRODUCTION,
        tables.schedules(PLANS),
        "## Roles\n",
        tables.roles(SPLIT),
        "## GEMMs of a tile\n",
        tables.gemms(SPLIT),
        "## Tensor memory\n",
        "![TMEM maps](../../../docs/images/tmem-maps.svg)\n",
    ]
    for group in same_map(PLANS):
        parts += [f"### {_names(group)}\n", tables.tensor_memory(group[0])]
    parts += ["## Named barriers\n", tables.named_barriers(SPLIT)]
    for group in same_map(PLANS):
        parts += [f"## Pipelines and shared memory: {_names(group)}\n", tables.pipelines(group[0])]
        parts += [tables.shared_memory(group[0])]
    for each in PLANS:
        parts += [f"## One tile of {each.name}\n", f"![schedule](../../../docs/images/schedule-{each.name}.svg)\n"]
        parts += ["The MMA warp:\n", tables.mma_rows(each), "A compute warp:\n", tables.compute_steps(each)]
    return "\n".join(parts)


def hopper_readme() -> str:
    """The SM90 kernel's README: who does what, in which memory, and how it is handed over."""
    described = hopper_plan()
    parts = [
        HOPPER_INTRODUCTION,
        "## Roles\n",
        tables.roles(described),
        "## Named barriers\n",
        tables.named_barriers(described),
        "## Pipelines\n",
        tables.pipelines(described),
        "## Shared memory\n",
        tables.shared_memory(described),
    ]
    return "\n".join(parts)


def _names(group: Sequence[Plan]) -> str:
    return ", ".join(p.name for p in group)


def filled(document: Path) -> str:
    """A document with its generated parts up to date. Raises ValueError for a name that BLOCKS does not have."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"{document}: no generated part {name!r}; there are {', '.join(BLOCKS)}")
        return f"<!-- generated: {name} -->\n\n{BLOCKS[name]()}\n<!-- end -->"

    text = document.read_text(encoding="utf-8")
    return re.sub(r"<!-- generated: (?P<name>[\w-]+) -->.*?<!-- end -->", block, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    check = "--check" in arguments
    folders = [argument for argument in arguments if not argument.startswith("--")]
    root = Path(folders[0]) if folders else Path(__file__).resolve().parent.parent
    stale = 0
    for path, text in generated(root, "--predict" in arguments):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(root)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print("run `python tools/regen.py` and commit what it writes")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
