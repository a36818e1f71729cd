"""The names of routers in settings, and back."""

from dataclasses import dataclass

import pytest

from sparsejax.routing import named_routers
from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.named_routers import ROUTERS, name_of, named_router, names_where
from sparsejax.routing.routers import ActivationEnergy, TokenHash


def test_settings_find_a_router_by_its_name_and_by_a_former_one():
    for router in ROUTERS:
        assert named_router(router.name) is router
        assert name_of(router) == router.name
    assert named_router("true_mass") == ActivationEnergy()
    names = ", ".join(repr(router.name) for router in ROUTERS)
    for wrong in ("truemass", None, 3, ["token_hash"], TokenHash):
        with pytest.raises(ValueError, match=f"must be one of {names}$"):
            named_router(wrong)


def test_a_router_that_settings_would_not_find_again_is_not_written(monkeypatch):
    @dataclass(frozen=True)
    class Biased(TokenHash):
        bias: float = 0.0

    with pytest.raises(ValueError, match="cannot be written into settings.*ROUTERS"):
        name_of(Biased(bias=1.0))
    # Registered under a name that another one has, it would be read as that one.
    both = (Biased(bias=1.0), *ROUTERS)
    monkeypatch.setattr(named_routers, "ROUTERS", both)
    with pytest.raises(ValueError, match="'token_hash', as .*rename one"):
        name_of(Biased(bias=1.0))
    assert name_of(TokenHash()) == "token_hash"


def test_names_are_offered_in_words(monkeypatch):
    offered = names_where(lambda router: router.scores_are_energies)
    assert offered == "'activation_energy', 'activation_energy_fp8' or 'learned'"
    three = (TokenHash(), ActivationEnergy(), LearnedEnergy())
    monkeypatch.setattr(named_routers, "ROUTERS", three)
    assert names_where(lambda router: True) == (
        "'token_hash', 'activation_energy' or 'learned'"
    )
    assert names_where(lambda router: router.learns) == "'learned'"
