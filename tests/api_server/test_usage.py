"""The space of a store over HTTP."""

from __future__ import annotations

from holdfast.workers.space_census import take_census
from tests.api_server.served_rig import ServedRig, client, create, rig

__all__ = ["client", "rig"]

MODULES = ("holdfast.ops.api.usage",)


def test_figures_of_a_universe_are_selected(rig: ServedRig) -> None:
    for universe in ("east", "west"):
        create(rig.client(rig.serve(default=universe)), "ada")
    take_census(rig.store, "test")
    client = rig.client(rig.serve(default="east"))

    def universes(query: str = "") -> set[str]:
        figures = client.get(f"/v1/store/usage{query}").document["figures"]
        return {figure["universe"] for figure in figures}

    assert universes() == {"", "east", "west"}
    assert universes("?figures_of=west") == {"west"}
    assert universes("?universe=west") == {"", "east", "west"}
