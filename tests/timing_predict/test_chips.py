"""The chips of the package say what the engine reads, no more, and where each number comes from."""

from __future__ import annotations

import pytest

from undertow.timing.chip import Chip, ChipError, names, read_chip
from undertow.timing.constants import checked, constants_of
from undertow.timing.grid_time import LAUNCH_CONSTANTS

CHIPS = {name: read_chip(name) for name in names()}


@pytest.fixture(params=CHIPS)
def chip(request) -> Chip:
    return CHIPS[request.param]


def test_there_are_two():
    assert {name: (chip.arch, chip.num_sms) for name, chip in CHIPS.items()} == {
        "b200": ("sm_100a", 148),
        "h200": ("sm_90a", 132),
    }


def test_a_chip_has_exactly_the_constants_that_are_read(chip):
    assert set(chip.constants) == set(constants_of(chip.arch)) | set(LAUNCH_CONSTANTS)


def test_units_are_those_of_the_engine(chip):
    specs = constants_of(chip.arch) | LAUNCH_CONSTANTS
    assert {name: constant.unit for name, constant in chip.constants.items()} == {
        name: specs[name].unit for name in chip.constants
    }


def test_the_engine_takes_the_point_and_every_draw(chip):
    for constants in (chip.point(), *(chip.draw(seed) for seed in range(10))):
        checked(constants, chip.arch)


def test_both_ends_of_every_range_mean_something(chip):
    for end in ("low", "high"):
        checked({name: getattr(constant, end) for name, constant in chip.constants.items()}, chip.arch)


def test_every_constant_has_a_source(chip):
    for constant in chip.constants.values():
        assert len(constant.source) > 10, constant.name


def test_what_nobody_measured_has_a_range(chip):
    for constant in chip.constants.values():
        if constant.confidence == "assumed":
            assert constant.low < constant.high, constant.name


def test_nothing_of_a_b200_is_called_measured():
    assert not [c.name for c in CHIPS["b200"].constants.values() if c.confidence == "measured"]


def test_the_port_is_open_on_one_chip_and_settled_on_the_other():
    ports = {name: chip.constants["mma_shares_port"] for name, chip in CHIPS.items()}
    assert (ports["b200"].low, ports["b200"].high, ports["b200"].confidence) == (0, 1, "assumed")
    assert (ports["h200"].low, ports["h200"].high, ports["h200"].confidence) == (1, 1, "measured")


def test_a_chip_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(ChipError, match="'h300': no such chip and no such file; allowed: b200, h200"):
        read_chip("h300")
