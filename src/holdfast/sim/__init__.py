"""The deterministic simulator: product code under a seeded scheduler, simulated clocks and faults.

`hf.simulate` and `holdfast sim --app` use:

    choice_tape       every random choice of a run: recorded, replayed, shrunk
    scheduler         runs one actor at a time, chosen by the tape
    sim_store         the real commit engine on real rows;  faulting_client: a store client with faults
    postgres_backend  the PostgreSQL engine in the same place;  commit_outcomes: its recent outcomes
    processes         the product's services under the scheduler: world workers, orchestrators,
                      effect workers, timer workers
    effect_stubs      the app's effects in a session;  inline_effects: effects without threads
    history           the recorded events;  row_decoder: the stored rows, decoded independently
    session           a simulation that a user drives;  parity: its replay check
    app_run           random events to any app, with stubbed effects (`holdfast sim --app`)
    value_generator   random values of declared types

The oracle of the project's own simulation is not in the wheel: `tests/simulation` of the checkout.
"""
