import pytest

from sparsejax.sparsity.patterns import (
    NM,
    TWO_FOUR,
    VNM,
    BlockDiagonal,
    name_of,
    named_pattern,
)


def test_density_is_the_kept_fraction():
    assert NM(2, 4).density == 0.5
    assert VNM(64, 2, 16).density == 0.125
    assert BlockDiagonal(4).density == 0.25


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        (NM(2, 4), "2:4"),
        (VNM(128, 2, 32), "128:2:32"),
        (VNM(128, 4, 32), "128:4:32"),
        (BlockDiagonal(4), "diagonal:4"),
    ],
)
def test_a_pattern_is_found_by_its_name(pattern, name):
    assert (name_of(pattern), named_pattern(name)) == (name, pattern)


@pytest.mark.parametrize("wrong", ["diagonal:", "diagonal:4:2", "4", "diagonal:-4"])
def test_what_names_no_pattern_is_refused(wrong):
    with pytest.raises(ValueError, match=f"'{wrong}' names no pattern.*'diagonal:4'"):
        named_pattern(wrong)


def test_blocks_on_a_diagonal_are_several_and_equal():
    for groups in (0, 1, 257):
        with pytest.raises(ValueError, match=rf"groups={groups} is not in \[2, 256\]"):
            BlockDiagonal(groups)
    BlockDiagonal(4).check_divides(12, "d_hidden")
    with pytest.raises(ValueError, match="d_hidden=10 is not a .* pad to 12, or use"):
        BlockDiagonal(4).check_divides(10, "d_hidden")
    BlockDiagonal(4).check_divides_residual(32, "d_model")
    with pytest.raises(ValueError, match=r"d_model=40 is not a .* 4\^2, .* pad to 48"):
        BlockDiagonal(4).check_divides_residual(40, "d_model")


def test_a_row_that_keeps_all_four_columns_is_dense_inside():
    assert VNM(64, 4, 16).dense_inside and not VNM(64, 2, 16).dense_inside
    assert VNM(64, 4, 16).density == 1 / VNM(64, 4, 16).experts


def test_experts_are_a_quarter_of_m():
    assert VNM(64, 2, 16).experts == 4
    with pytest.raises(ValueError, match=r"m=5 is not a multiple of 4.*m=8"):
        _ = VNM(64, 2, 5).experts


def test_patterns_are_hashable_values():
    assert NM(2, 4) == TWO_FOUR
    assert len({NM(2, 4), NM(2, 4), VNM(1, 2, 4), VNM(1, 2, 4)}) == 2


@pytest.mark.parametrize("n, m", [(0, 4), (5, 4), (-1, 4), (1, 257)])
def test_impossible_nm_is_refused(n, m):
    with pytest.raises(ValueError, match=r"[nm]=-?\d+"):
        NM(n, m)


@pytest.mark.parametrize("v, n, m", [(0, 2, 8), (4, 0, 8), (4, 5, 8), (4, 2, 3)])
def test_impossible_vnm_is_refused(v, n, m):
    with pytest.raises(ValueError, match=r"[vnm]=\d+"):
        VNM(v, n, m)


@pytest.mark.parametrize("wrong", [2.0, "2", True, None])
def test_a_pattern_counts_in_ints(wrong):
    for build in (lambda: NM(wrong, 4), lambda: VNM(8, wrong, 16)):
        with pytest.raises(ValueError, match=f"^n={wrong!r} must be an int$"):
            build()


def test_divisibility_error_names_value_requirement_and_way_out():
    VNM(64, 2, 8).check_divides(1008, "d_in")
    with pytest.raises(ValueError) as error:
        VNM(64, 2, 8).check_divides(1004, "d_in")
    assert str(error.value) == (
        "d_in=1004 is not a multiple of m=8, required by VNM(v=64, n=2, m=8); "
        "pad to 1008 or use NM(2, 4)"
    )
    # 1006 does not fit 2:4 either, so it must not be suggested.
    with pytest.raises(ValueError, match="pad to 1008$"):
        VNM(64, 2, 8).check_divides(1006, "d_in")
