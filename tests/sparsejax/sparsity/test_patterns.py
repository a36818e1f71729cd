import pytest

from sparsejax.sparsity.patterns import NM, TWO_FOUR, VNM


def test_density_is_the_kept_fraction():
    assert NM(2, 4).density == 0.5
    assert VNM(64, 2, 16).density == 0.125


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
