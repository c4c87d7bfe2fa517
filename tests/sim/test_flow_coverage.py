"""The workload of flows reaches every state of a flow and of an occurrence, and every condition of its coverage."""

from collections import Counter

from holdfast.sim.choice_tape import ChoiceTape
from holdfast.sim.scheduler import SimThreadPool
from holdfast.sim.simulation import Simulation
from tests.simulation.coverage import COVERAGE_POINTS
from tests.simulation.seed_run import check_simulation
from tests.simulation.workload_flows import draw_flow_settings, flow_actors
from tests.simulation.workloads import fault_injectors

# The run ends earlier when nothing is missing.
SEEDS_MAX = 200
POINTS = {name for name in COVERAGE_POINTS if name.startswith(("flow: ", "schedule: "))}


def test_seeds_of_flows_reach_every_state_and_break_no_invariant() -> None:
    seen: Counter[str] = Counter()
    with SimThreadPool() as threads:
        for seed in range(20_000, 20_000 + SEEDS_MAX):
            tape = ChoiceTape(seed)
            settings = draw_flow_settings(tape)
            actors = [*flow_actors(settings), *fault_injectors(settings)]
            simulation = Simulation(tape, settings, actors, threads)
            simulation.run()
            result = check_simulation(simulation)
            assert result.violations == [], f"seed {seed} of the flow workload"
            seen += result.coverage
            if seen.keys() >= POINTS:
                return
    raise AssertionError(f"not reached in {SEEDS_MAX} seeds: {sorted(POINTS - seen.keys())}")
