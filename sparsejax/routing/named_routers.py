"""The routers that settings can name: where a new one is registered."""

from collections.abc import Callable
from typing import Any

from sparsejax.routing.learned_energy import LearnedEnergy
from sparsejax.routing.routers import (
    NEAREST_CENTRE,
    ActivationEnergy,
    ActivationEnergyFP8,
    Router,
    SameExperts,
    TokenHash,
)

ROUTERS: tuple[Router, ...] = (
    NEAREST_CENTRE,
    TokenHash(),
    ActivationEnergy(),
    ActivationEnergyFP8(),
    SameExperts(),
    LearnedEnergy(),
)
"""Every router that settings can name; a new one is registered here and nowhere
else."""

FORMER_NAMES = {"true_mass": "activation_energy"}
"""The names of routers in settings of earlier versions, which are still read, and the
present name of each."""


def named_router(name: Any) -> Router:
    """Returns the registered router of a name, which may be a former one.

    Raises:
      ValueError: there is no router of that name; the message lists all names.
    """
    routers = {router.name: router for router in ROUTERS}
    if isinstance(name, str):
        name = FORMER_NAMES.get(name, name)
        if name in routers:
            return routers[name]
    raise ValueError(f"router={name!r} must be one of {', '.join(map(repr, routers))}")


def name_of(router: Router) -> str:
    """Returns the name under which settings find this router again.

    Raises:
      ValueError: the router is not registered, or another one has its name.
    """
    if router not in ROUTERS:
        raise ValueError(
            f"{router} cannot be written into settings, which know routers by name; "
            f"register it in sparsejax.routing.named_routers.ROUTERS"
        )
    if (found := named_router(router.name)) != router:
        raise ValueError(
            f"{router} cannot be written into settings: they would read its name, "
            f"{router.name!r}, as {found}, which is registered under it too; rename one"
        )
    return router.name


def names_where(condition: Callable[[Router], bool]) -> str:
    """Returns the names of the registered routers that meet a condition, as an error
    offers them: "'a', 'b' or 'c'"."""
    *names, last = (repr(router.name) for router in ROUTERS if condition(router))
    return f"{', '.join(names)} or {last}" if names else last
